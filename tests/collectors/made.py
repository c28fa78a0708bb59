"""Policies and envs of the tests of collectors with workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from tdcollect import make_env

cartpole = partial(make_env, "CartPole-v1")
two_slots = partial(make_env, "CartPole-v1", 2)


def drawing() -> ProbabilisticActor:
    """A policy that draws its actions."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        logits = nn.Linear(4, 2)
    return ProbabilisticActor(
        TensorDictModule(logits, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )


class Noisy(nn.Module):
    """Prefers an action by the sign of the pole's angle; its noise, a weight, has it draw."""

    def __init__(self, noise: float):
        super().__init__()
        self.noise = nn.Parameter(torch.tensor(noise))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(observation.shape[:-1]) - 0.5
        return nn.functional.one_hot((observation[..., 2] + self.noise * drawn > 0).long(), 2)


def noisy(noise: float = 0.0) -> TensorDictModule:
    return TensorDictModule(Noisy(noise), ["observation"], ["action"])


def batches(collector: Any, count: int) -> list[TensorDictBase]:
    """So many batches of a collector that goes on."""
    stream = iter(collector)
    return [next(stream).clone() for _ in range(count)]


def assert_same(one: TensorDictBase, other: TensorDictBase, *, ids: bool = True) -> None:
    """Compare all entries to the bit, trajectory ids on request."""
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        if ids or key != ("collector", "traj_ids"):
            assert torch.equal(one[key], other[key]), key


@contextmanager
def ending(collector: Any) -> Iterator[Any]:
    """A collector that is shut down in the end."""
    try:
        yield collector
    finally:
        collector.shutdown()


def kill(pid: int) -> None:
    """Kill a process as the kernel does when memory is short."""
    os.kill(pid, signal.SIGKILL)


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Look now and then."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never was"
        time.sleep(0.02)
