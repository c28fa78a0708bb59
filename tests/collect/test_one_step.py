"""The way of one step, from the collector's iteration to the env: few frames and few files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import tdcollect
from tdcollect import Collector, make_env

from ..sizes import limits

PACKAGE = str(Path(tdcollect.__file__).parent)
LOOP = "synchronous"

LIMITS = limits()
MOST_FRAMES = LIMITS["frames from iteration to the env"]  # ours
MOST_BELOW_THE_LOOP = LIMITS["frames below the loop"]  # of these
MOST_FILES = LIMITS["files that run in one batch"]  # ours; without _upstream, plain names alone


class Noting(gym.Env[Any, Any]):
    """Notes which of our functions are on the stack at each step, innermost first."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    stacks: ClassVar[list[list[str]]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 7
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self.stacks.append([])
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                self.stacks[-1].append(frame.f_code.co_name)
            frame = frame.f_back
        self.left -= 1
        return np.zeros(4, np.float32), 1.0, self.left == 0, False, {}


@pytest.fixture
def batches() -> Iterator[Any]:
    """The batches of a collector, from the second on."""
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    policy = ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )
    found = iter(Collector(make_env(Noting, 2), policy, frames_per_batch=40))
    next(found)
    Noting.stacks.clear()
    return found


def test_frames_from_iteration_to_the_env(batches: Iterator[Any]) -> None:
    next(batches)
    for stack in Noting.stacks:
        assert len(stack) <= MOST_FRAMES, stack
        assert stack.index(LOOP) <= MOST_BELOW_THE_LOOP, stack


def test_files_that_run_in_one_batch(batches: Iterator[Any]) -> None:
    files: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and "_upstream" not in name:
            files.add(name)

    sys.setprofile(note)
    try:
        next(batches)
    finally:
        sys.setprofile(None)
    assert len(files) <= MOST_FILES, sorted(files)
