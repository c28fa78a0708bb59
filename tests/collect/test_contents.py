"""The entries of a step, the cuts of episodes, and the episodes of a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from torchrl.envs import StepCounter, TransformedEnv

from tdcollect import Collector, make_env
from tdcollect.trajectories import TrajectoryIndex, flatten_time, lengths, returns

from ..counting import (
    CountingEnv,
    CountingRules,
    StatelessCountingPolicy,
    counting_env,
)
from .oracle import UPSTREAM

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]


# --------------------------------------------------------------------- how long an episode may be


ENDLESS = CountingRules(1_000_000)


def endless(slots: int | None, **options: Any) -> Any:
    return make_env(partial(CountingEnv, 0, ENDLESS), slots, **options)


LIMITS = {
    "make_env": lambda n: (endless(n, max_episode_steps=7), {}),
    "collector": lambda n: (endless(n), {"max_frames_per_traj": 7}),
    "transform": lambda n: (TransformedEnv(endless(n), StepCounter(max_steps=7)), {}),
}


@pytest.mark.behaviour(10)
@pytest.mark.parametrize(
    ("limit", "slots"), [("make_env", None), ("collector", 2), ("transform", 2)]
)
def test_an_env_that_never_ends_is_cut_at_the_limit(limit: str, slots: int | None) -> None:
    env, options = LIMITS[limit](slots)
    policy = StatelessCountingPolicy(ENDLESS)
    collector = Collector(env, policy, frames_per_batch=20 * (slots or 1), **options)
    stream = iter(collector)
    batch = torch.cat([next(stream) for _ in range(2)], -1)
    step = batch["observation"][..., 0]
    assert torch.equal(step, (torch.arange(40) % 7).float().expand_as(step))
    assert torch.equal(batch["next", "truncated"].squeeze(-1), step == 6)
    assert torch.equal(batch["next", "done"].squeeze(-1), step == 6)
    assert not batch["next", "terminated"].any()


@pytest.mark.behaviour(10)
def test_a_limit_beyond_the_envs_own_changes_nothing() -> None:
    make = partial(gym.make, "CartPole-v1", max_episode_steps=5)
    batch = next(
        iter(Collector(make_env(make, 2, max_episode_steps=1_000_000), frames_per_batch=40))
    )
    index = TrajectoryIndex.of(batch)
    assert lengths(batch, index)[index.complete].max() <= 5


# ---------------------------------------------------------------------- flat batches, and episodes


@pytest.mark.behaviour(20)
def test_a_flat_batch_keeps_each_slots_steps_together() -> None:
    rules = CountingRules()
    collector = Collector(
        counting_env(3, rules=rules),
        StatelessCountingPolicy(rules),
        frames_per_batch=30,
        postproc=flatten_time,
    )
    flat = next(iter(collector))
    assert flat.batch_size == (30,)
    assert flat["observation"][:, 2].tolist() == [0] * 10 + [1] * 10 + [2] * 10
    inside = ~flat["next", "done"][:9].squeeze(-1)
    assert torch.equal(flat["next", "observation"][:9][inside], flat["observation"][1:10][inside])


@pytest.mark.behaviour(33)
def test_returns_of_episodes_leave_a_trailing_unfinished_one_out() -> None:
    """From a flat batch, as a list of rewards and done flags would have it."""
    rules = CountingRules(lengths=(4, 3, 6))
    collector = Collector(
        counting_env(rules=rules), StatelessCountingPolicy(rules), frames_per_batch=32
    )
    flat = next(iter(collector))
    assert not flat["next", "done"][-1]
    index = TrajectoryIndex.of(flat)
    expected, total = [], 0.0
    for reward, done in zip(flat["next", "reward"], flat["next", "done"], strict=True):
        total += reward.item()
        if done:
            expected.append(total)
            total = 0.0
    assert returns(flat, index)[index.complete].squeeze(-1).tolist() == expected
    assert len(index) == len(expected) + 1
