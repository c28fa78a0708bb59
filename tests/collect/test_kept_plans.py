"""A plan and a lowered policy are kept from batch to batch, until what they depend on changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.envs import RewardScaling, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType

from tdcollect import Collector, make_env

from .policies import actor


def collector() -> Any:
    torch.manual_seed(0)
    env = TransformedEnv(make_env("CartPole-v1", 4), StepCounter())
    found = Collector(env, actor(env), frames_per_batch=32, total_frames=-1)
    found.set_seed(0)
    return found


def by_mode(changed: Any) -> None:
    changed.exploration_type = ExplorationType.DETERMINISTIC


def by_hook(changed: Any) -> None:
    changed.policy.register_forward_hook(lambda module, args, out: None)


def by_transform(changed: Any) -> None:
    changed.env.append_transform(RewardScaling(0.0, 2.0))


@pytest.mark.parametrize("change", [by_mode, nn.Module.eval, by_hook, by_transform])
def test_what_changes_between_batches_counts_from_the_next(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = {}
    for arrays in (True, False):
        monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", arrays)
        stream = iter(changed := collector())
        before = next(stream), next(stream)
        runner = changed._runner
        plan, lowered = runner._plan, runner._lowered
        unchanged = next(stream)
        assert (runner._plan, runner._lowered) == (plan, lowered)
        change(changed.policy if change is nn.Module.eval else changed)
        batches[arrays] = [*before, unchanged, next(stream), next(stream)]
        assert not arrays or (runner._plan, runner._lowered) != (plan, lowered)
    for ours, theirs in zip(batches[True], batches[False], strict=True):
        assert (ours == theirs).all()


def test_a_bound_that_is_changed_in_place_counts_from_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = {}
    for arrays in (True, False):
        monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", arrays)
        torch.manual_seed(0)
        low = torch.full((1,), -2.0)
        env = make_env("Pendulum-v1", 2)
        policy = actor(env, distribution_kwargs={"low": low, "high": torch.full((1,), 2.0)})
        changed = Collector(env, policy, frames_per_batch=8, total_frames=-1)
        changed.set_seed(0)
        stream = iter(changed)
        next(stream)
        low.fill_(-1.0)
        batches[arrays] = next(stream)
    assert (batches[True] == batches[False]).all()


@pytest.mark.parametrize("steps", [1, 3])
def test_the_buffer_of_the_parent_is_made_small_once(steps: int) -> None:
    short = Collector(make_env("CartPole-v1", 2), None, frames_per_batch=2 * steps, total_frames=-1)
    stream = iter(short)
    next(stream)
    buffer = short._runner.parent.preallocated
    next(stream)
    assert short._runner.parent.preallocated is buffer
    assert buffer["observation"].untyped_storage().nbytes() == 2 * 4 * 4
