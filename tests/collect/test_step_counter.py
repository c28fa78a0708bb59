"""StepCounter on an env that has no truncated flag of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrl.collectors import Collector as ParentCollector
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.modules import RandomPolicy
from torchrl.testing.mocking_classes import CountingEnv

from tdcollect import Collector

from .oracle import UPSTREAM

pytestmark = pytest.mark.filterwarnings(UPSTREAM)


@pytest.mark.parametrize(("most", "update_done"), [(3, True), (3, False), (7, True), (None, True)])
def test_the_batch_is_the_parents(most: int | None, update_done: bool) -> None:
    def collected(cls: Any) -> list[Any]:
        env = TransformedEnv(CountingEnv(max_steps=5), StepCounter(most, update_done=update_done))
        collector = cls(env, RandomPolicy(env.action_spec), frames_per_batch=11)
        torch.manual_seed(0)
        stream = iter(collector)
        return [next(stream).clone() for _ in range(3)]

    for ours, theirs in zip(collected(Collector), collected(ParentCollector), strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key
