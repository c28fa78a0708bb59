"""Advantages as part of collection: TorchRL's value estimators as ``postproc``."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import ObservationNorm, TransformedEnv
from torchrl.modules import GRUModule, LSTMModule, ValueOperator, set_recurrent_mode
from torchrl.objectives.value import GAE

from tdcollect import Collector, make_env

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


# --------------------------------------------------------------------------- recurrent critics


def recurrent_pair(kind: str, env: Any) -> tuple[TensorDictSequential, TensorDictSequential]:
    """A policy and a critic on one memory."""
    options = {"input_size": 4, "hidden_size": 5, "in_key": "observation", "out_key": "features"}
    memory = LSTMModule(**options) if kind == "lstm" else GRUModule(**options)
    head = nn.Linear(5, 2)
    act = TensorDictModule(
        lambda features: nn.functional.one_hot(head(features).argmax(-1), 2),
        in_keys=["features"],
        out_keys=["action"],
    )
    value = ValueOperator(nn.Linear(5, 1), in_keys=["features"])
    return TensorDictSequential(memory, act), TensorDictSequential(memory, value)


@torch.no_grad()
def values_step_by_step(
    critic: TensorDictSequential, batch: TensorDictBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of each observation and of the one after it, by a loop over the steps of each slot."""
    states = [key for key in critic.in_keys if "recurrent_state" in key]
    value, next_value = torch.zeros(batch.shape), torch.zeros(batch.shape)
    for slot in range(batch.shape[0]):
        state = {key: batch[key][slot, :1] for key in states}
        for t in range(batch.shape[1]):
            if batch["is_init"][slot, t]:
                state = {key: torch.zeros_like(state[key]) for key in states}
            row = batch[slot, t : t + 1]
            given = row.select("observation", "is_init").update(state)
            seen = critic(given)
            state = {key: seen["next", key] for key in states}
            value[slot, t] = seen["state_value"]
            following = row["next"].select("observation").update(state)
            following["is_init"] = torch.zeros(1, 1, dtype=torch.bool)
            next_value[slot, t] = critic(following)["state_value"]
    return value, next_value


@pytest.mark.behaviour(16, 19)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_recurrent_critic_along_time_agrees_with_a_plain_loop(kind: str) -> None:
    env = make_env("CartPole-v1", 3)
    torch.manual_seed(0)
    policy, critic = recurrent_pair(kind, env)
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic, deactivate_vmap=True)

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        with set_recurrent_mode(True):
            return gae(batch)

    for batch in islice(Collector(env, policy, frames_per_batch=75, postproc=postproc), 2):
        value, next_value = values_step_by_step(critic, batch)
        torch.testing.assert_close(batch["state_value"].squeeze(-1), value)
        torch.testing.assert_close(batch["next", "state_value"].squeeze(-1), next_value)
        expected = advantages(batch, value, next_value, 0.9, 0.8)
        torch.testing.assert_close(batch["advantage"].squeeze(-1), expected, rtol=1e-4, atol=1e-4)
    assert batch["is_init"][:, 1:].any()


# ------------------------------------------------------------------------------- preprocessing


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
