"""The ledger is bit-identical for any number of torch threads outside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from tdcollect.evaluation.episodes.collector import EvaluationCollector

from .envs import Walk, pictures
from .ledger import digest


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Seeing(nn.Sequential):
    """A convolution, and behind it the layer that the usual network for pixels has."""

    def __init__(self) -> None:
        layers = nn.Conv2d(3, 64, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512)
        super().__init__(*layers, nn.Linear(512, 3))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().forward(pixels.permute(0, 3, 1, 2) / 255)


def test_threads_outside_change_nothing() -> None:
    torch.manual_seed(0)
    policy = TensorDictModule(Seeing(), ["pixels"], ["action"])
    ledgers = set()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        ledgers.add(digest(partial(pictures, spaces.Box(-1, 1, (3,))), policy, 4))
        assert torch.get_num_threads() == threads
    assert len(ledgers) == 1


@pytest.mark.parametrize("inside", [1, 2])
def test_the_policy_runs_with_the_threads_asked_for_and_they_are_restored(inside: int) -> None:
    torch.set_num_threads(4)
    seen: list[int] = []

    def act(observation: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.eye(2, dtype=torch.int64)[(observation[:, 0] > 0).long()]

    policy = TensorDictModule(act, ["observation"], ["action"])
    with EvaluationCollector(Walk, policy, 30, num_envs=2, inference_threads=inside) as collector:
        for _ in collector:
            assert torch.get_num_threads() == 4
        for _ in collector:
            break
    assert torch.get_num_threads() == 4
    assert set(seen) == {inside}
