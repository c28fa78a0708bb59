"""Records, data and results equal those of a plain loop over single episodes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torchrl.modules import LSTMModule

from tdcollect import evaluate
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.seeding import env_seed, policy_seed

from .envs import Walk
from .ledger import RANDOM, episodes_of, records
from .policies import categorical, deterministic, recurrent, tanh_normal

pytestmark = pytest.mark.usefixtures("small_reports")

push = partial(Walk, spaces.Box(-1, 1, (1,)))
cartpole = partial(gym.make, "CartPole-v1")


class Played(NamedTuple):
    """One episode of the plain loop."""

    observations: list[torch.Tensor]
    actions: list[torch.Tensor]
    rewards: list[float]
    terminated: bool
    truncated: bool


Act = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@torch.no_grad()
def play(
    make: Any, act: Act, index: int, root: int = 0, most: int = 10**6, seed: Any = None
) -> Played:
    """Episode ``index``, in a new gymnasium env; ``act`` is given a batch of 16 like rows."""
    env = make()
    generator = torch.Generator().manual_seed(policy_seed(root, index))
    shown, _ = env.reset(seed=env_seed(root, index) if seed is None else seed)
    played = Played([torch.as_tensor(shown)], [], [], False, False)
    while True:
        action = act(played.observations[-1].expand(16, -1).clone(), generator)
        choice = int(action.argmax()) if isinstance(env.action_space, spaces.Discrete) else action
        choice = choice if isinstance(choice, int) else choice.numpy()
        shown, reward, terminated, truncated, _ = env.step(choice)
        played.observations.append(torch.as_tensor(shown))
        played.actions.append(action)
        played.rewards.append(float(reward))
        truncated = truncated or len(played.rewards) == most
        if terminated or truncated:
            return played._replace(terminated=terminated, truncated=truncated)


def greedy(policy: Any) -> Act:
    network = policy.module
    return lambda rows, generator: network(rows)[0]


def sampled(policy: Any) -> Act:
    network: nn.Module = policy[0].module

    def act(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        logits = network(rows)
        logits = logits - logits.logsumexp(-1, keepdim=True)
        drawn = torch.multinomial(logits.softmax(-1)[:1], 1, generator=generator)
        return nn.functional.one_hot(drawn[0, 0], logits.shape[-1])

    return act


def squashed(policy: Any) -> Act:
    network: nn.Module = policy[0].module

    def act(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        loc, scale = network(rows)
        drawn = loc[:1] + torch.randn(1, loc.shape[-1], generator=generator) * scale[:1]
        most = 1 - torch.finfo(drawn.dtype).resolution
        return drawn[0].tanh().clamp(-most, most)

    return act


def remembering(policy: Any) -> Act:
    """Of one episode, which starts from nothing."""
    lstm, network = policy[0].lstm, policy[1][0].module
    hidden = None

    def act(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        nonlocal hidden
        out, hidden = lstm(rows.unsqueeze(1), hidden)
        logits = network(out.squeeze(1))
        return nn.functional.one_hot(logits.argmax(-1), 2)[0]

    return act


CASES: dict[str, tuple[Any, Any, Callable[[Any], Act], int | None, dict[str, Any]]] = {
    "deterministic": (Walk, deterministic(), greedy, 5, {}),
    "categorical": (Walk, categorical(), sampled, None, RANDOM),
    "tanh-normal": (push, tanh_normal(), squashed, None, RANDOM),
    "cartpole": (cartpole, categorical(4), sampled, 5, RANDOM),
    "recurrent": (Walk, recurrent(LSTMModule), remembering, None, {}),
}


@pytest.mark.behaviour(32)
@pytest.mark.parametrize("name", CASES)
def test_an_episode_is_that_of_a_plain_loop(name: str) -> None:
    make, policy, loop, most, settings = CASES[name]
    settings = {"num_envs": 5, "max_episode_steps": most, **settings}
    with EvaluationCollector(make, policy, 12, 3, **settings) as collector:
        ended = list(collector.run(keep_trajectories=True))
    assert len(ended) == 12
    for record, data, *_ in ended:
        assert data is not None
        expected = play(make, loop(policy), record.index, 3, most or 10**6)
        shown = torch.stack(expected.observations)
        assert torch.equal(data["observation"], shown[:-1])
        assert torch.equal(data["next", "observation"], shown[1:])
        assert torch.equal(data["action"], torch.stack(expected.actions))
        stored = np.array(expected.rewards, np.float32)
        assert data["next", "reward"].squeeze(-1).tolist() == stored.tolist()
        assert data["next", "terminated"].sum() == data["next", "terminated"][-1]
        assert bool(data["next", "terminated"][-1]) is record.terminated is expected.terminated
        assert bool(data["next", "truncated"][-1]) is record.truncated is expected.truncated
        assert data["next", "done"].flatten().tolist() == [False] * (len(data) - 1) + [True]
        assert data.names == ["time"]
        assert data["collector", "traj_ids"].unique().tolist() == [record.index]
        if name == "cartpole" or most is None:  # else cut off before the env says
            assert record.success is (None if most else expected.terminated)
        assert record.length == len(expected.rewards) == len(data)
        assert record.episode_return == math.fsum(expected.rewards)
        seeds = (env_seed(3, record.index), policy_seed(3, record.index))
        assert (record.env_seed, record.policy_seed) == seeds


def test_seeds_can_be_given() -> None:
    for seeds in ([7, 8, 123, 0], lambda i: 5 * (i + 1), np.arange(4)):
        given = [int(seeds(i) if callable(seeds) else seeds[i]) for i in range(4)]
        found = records(Walk, deterministic(), 4, env_seeds=seeds)
        found.sort(key=lambda record: record.index)
        assert [record.env_seed for record in found] == given
        expected = [play(Walk, greedy(deterministic()), 0, seed=seed) for seed in given]
        assert [r.episode_return for r in found] == [math.fsum(one.rewards) for one in expected]


@pytest.mark.behaviour(32)
def test_zero_episodes_give_an_empty_result(tmp_path: Path) -> None:
    result = evaluate(Walk, deterministic(), 0, output_dir=tmp_path / "run", progress=False)
    assert result.episodes == []
    assert len(result.returns) == len(result.lengths) == 0
    assert EvaluationResult.load(tmp_path / "run").digest == result.digest
    with EvaluationCollector(Walk, None, 0) as collector:
        assert len(collector) == 0
        assert list(collector) == []


def test_the_result_holds_what_was_asked_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_envs": 4, "progress": False, **RANDOM}
    data = episodes_of(Walk, categorical(), 5, num_envs=3, **RANDOM)
    expected = [math.fsum(data[i]["next", "reward"].flatten().tolist()) for i in range(5)]
    for out in (None, tmp_path / "run"):
        result = evaluate(
            Walk, categorical(), 5, keep_trajectories=True, output_dir=out, **settings
        )
        assert result.returns.dtype == np.float64
        assert result.lengths.tolist() == [len(data[index]) for index in range(5)]
        # The data hold float32 rewards; returns are sums of what the env gave.
        np.testing.assert_allclose(result.returns, expected, rtol=1e-5, atol=1e-6)
        for index in range(5):
            assert (result.trajectory(index) == data[index]).all()
            assert (result.replay(index) == data[index]).all()
    loaded = EvaluationResult.load(tmp_path / "run")
    assert (loaded.digest, loaded.episodes) == (result.digest, result.episodes)
    ledger = (tmp_path / "run" / "episodes.jsonl").read_bytes()
    assert result.digest == hashlib.sha256(ledger).hexdigest()
    assert (loaded.trajectory(3) == data[3]).all()
    without = evaluate(Walk, deterministic(), 3, progress=False)
    with pytest.raises(KeyError, match=r"the data of episode 1 were not kept: evaluate with keep"):
        without.trajectory(1)
