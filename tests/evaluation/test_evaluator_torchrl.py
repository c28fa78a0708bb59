"""TorchRL's evaluator differs: no seed, short episodes favoured, and old weights at work."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl import collectors
from torchrl.envs import GymWrapper, SerialEnv

import tdcollect

from ..forkserver import run
from .envs import TenOrTwoHundred

PASTS = 10


class Choice(nn.Module):
    """Always takes the action that its only weight says."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        chosen = self.chosen.detach().long().expand(observation.shape[:-1])
        return nn.functional.one_hot(chosen, 2)


class Actions(gym.Env[Any, Any]):
    """Ten steps of which each is rewarded by its action; all episodes of one policy are alike."""

    observation_space = spaces.Box(0, PASTS, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        seen = np.array([self.steps], np.float32)
        return seen, float(action), self.steps == PASTS, False, {}


def policy(env: Any = None) -> TensorDictModule:
    return TensorDictModule(Choice(), ["observation"], ["action"])


def actions() -> Any:
    return GymWrapper(Actions())


def lengths() -> Any:
    return SerialEnv(32, lambda: GymWrapper(TenOrTwoHundred()))


@pytest.mark.usefixtures("quick_children")
@pytest.mark.filterwarnings("ignore")
def test_torchrls_has_no_seed_and_favours_short_episodes() -> None:
    """The true mean length is 105."""
    # Of its 32 slots, half end an episode at step 10, and half of those that follow at step 20.
    theirs = collectors.Evaluator(lengths(), policy(), num_trajectories=16)
    assert theirs.evaluate()["eval/episode_length"] < 60
    theirs.shutdown()
    assert "seed" not in inspect.signature(collectors.Evaluator).parameters
    with tdcollect.Evaluator(TenOrTwoHundred, policy(), num_trajectories=32) as ours:
        found = [ours.evaluate()["eval/episode_length"] for _ in range(2)]
    assert 80 < found[0] == found[1] < 130  # the same each time, whatever the load


def returns_of(evaluator: Any) -> list[float]:
    """The mean returns of policies with all rewards 0, 1 and 0."""
    trained, found = policy(), []
    for chosen in (0.0, 1.0, 0.0):
        trained.module.chosen.data.fill_(chosen)
        found.append(evaluator.evaluate(trained)["eval/reward"])
    evaluator.shutdown()
    return found


def torchrls_process_backend() -> None:
    """Evaluate in a process of its own."""
    how = {"num_trajectories": 2, "frames_per_batch": 7, "backend": "process"}
    print(*returns_of(collectors.Evaluator(actions, policy_factory=policy, **how)), flush=True)


@pytest.mark.usefixtures("quick_children")
def test_torchrls_process_counts_episodes_begun_under_old_weights() -> None:
    """A policy's return is 0 or 10; in between lie episodes that two policies have played."""
    done = run(torchrls_process_backend)
    theirs = [float(number) for number in done.stdout.split()]
    assert len(theirs) == 3, done.stderr
    assert any(0 < value < 10 for value in theirs)
    ours = tdcollect.Evaluator(actions, policy_factory=policy, num_trajectories=2)
    assert returns_of(ours) == [0.0, 10.0, 0.0]
