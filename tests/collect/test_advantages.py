"""Advantages as part of collection: TorchRL's value estimators as ``postproc``; returns."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import ObservationNorm, TransformedEnv
from torchrl.modules import ValueOperator
from torchrl.objectives.value import GAE

from tdcollect import Collector
from tdcollect.trajectories import TrajectoryIndex, returns

from ..counting import CountingRules, StatelessCountingPolicy, counting_env
from .envs import ENVS
from .oracle import UPSTREAM

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]


def advantages(
    batch: TensorDictBase,
    value: torch.Tensor,
    next_value: torch.Tensor,
    gamma: float,
    lmbda: float,
) -> torch.Tensor:
    """GAE (Schulman et al. 2016, equation 16) as a loop over slots and, backwards, steps."""
    reward = batch["next", "reward"].squeeze(-1)
    terminated = batch["next", "terminated"].squeeze(-1)
    done = batch["next", "done"].squeeze(-1)
    out = torch.zeros_like(value)
    for slot in range(value.shape[0]):
        later = 0.0
        for t in reversed(range(value.shape[1])):
            bootstrap = 0.0 if terminated[slot, t] else gamma * next_value[slot, t]
            delta = reward[slot, t] + bootstrap - value[slot, t]
            later = delta + (0.0 if done[slot, t] else gamma * lmbda * later)
            out[slot, t] = later
    return out


@pytest.mark.behaviour(19)
@pytest.mark.parametrize(
    ("gamma", "lmbda", "steps", "vectorized"),
    [(0.99, 0.7, 30, True), (0.5, 1.0, 1, False), (1.0, 0.1, 13, True), (0.1, 0.7, 30, False)],
)
def test_any_batch_agrees_with_a_plain_loop(
    gamma: float, lmbda: float, steps: int, vectorized: bool
) -> None:
    """The toy's episodes terminate, are truncated, or both at once."""
    torch.manual_seed(0)
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    gae = GAE(gamma=gamma, lmbda=lmbda, value_network=critic, vectorized=vectorized)
    collector = Collector(ENVS["toy"](), frames_per_batch=3 * steps, postproc=gae)
    collector.set_seed(0)
    for batch in islice(collector, 2):
        with torch.no_grad():
            value = critic.module(batch["observation"]).squeeze(-1)
            next_value = critic.module(batch["next", "observation"]).squeeze(-1)
        expected = advantages(batch, value, next_value, gamma, lmbda)
        torch.testing.assert_close(batch["advantage"].squeeze(-1), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(batch["value_target"], batch["advantage"] + batch["state_value"])
        assert batch.names[-1] == "time"
        assert not batch["advantage"].requires_grad


@pytest.mark.behaviour(18)
def test_preprocessing_runs_once_an_observation_and_serves_the_bootstrap_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.Tensor] = []
    apply = ObservationNorm._apply_transform

    def counted(self: Any, observation: torch.Tensor) -> torch.Tensor:
        calls.append(observation)
        return apply(self, observation)

    monkeypatch.setattr(ObservationNorm, "_apply_transform", counted)
    norm = ObservationNorm(0.5, 3.0, in_keys=["observation"], out_keys=["normed"])
    env = TransformedEnv(ENVS["toy"](), norm)
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["normed"])
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic)
    collector = Collector(env, frames_per_batch=60, postproc=gae)
    calls.clear()
    collector.reset()
    batch = next(iter(collector))
    ends = batch["next", "done"].squeeze(-1)
    assert len(calls) == 21 + ends.any(0).sum()  # of 20 steps and of all resets
    for part in (batch, batch["next"]):
        torch.testing.assert_close(part["normed"], part["observation"] * 3.0 + 0.5)
        torch.testing.assert_close(part["state_value"], critic.module(part["normed"]).detach())
    goes_on = ~ends[:, :-1]
    assert torch.equal(batch["normed"][:, 1:][goes_on], batch["next", "normed"][:, :-1][goes_on])


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
