"""The policy's action, and the action that the env receives."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import (
    ActionScaling,
    ClipTransform,
    Compose,
    Transform,
    TransformedEnv,
    check_env_specs,
)

from tdcollect import Collector, make_env
from tdcollect.envs import EnvAction

KEPT = ("next", "env_action")


class Recorder(gym.Env[Any, Any]):
    """Records its actions, in ``[-2, 2]``; episodes of four steps."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(-2, 2, (1,))

    def __init__(self) -> None:
        self.given: list[np.ndarray[Any, Any]] = []
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.given.append(action.copy())
        self.count += 1
        return np.zeros(1, np.float32), 1.0, self.count == 4, False, {}


@pytest.fixture
def made() -> list[Recorder]:
    return []


def recorders(made: list[Recorder], transforms: list[Transform], slots: int | None = 3) -> Any:
    def make() -> Recorder:
        made.append(Recorder())
        return made[-1]

    return TransformedEnv(make_env(make, slots), Compose(*transforms))


def given(made: list[Recorder], slots: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([recorder.given for recorder in made[-slots:]]))


class Wide(nn.Module):
    """Random actions beyond every bound."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.randn(observation.shape) * 3


def wide() -> TensorDictModule:
    return TensorDictModule(Wide(), in_keys=["observation"], out_keys=["action"])


CHANGES = {
    "scaled": ([ActionScaling], lambda action: action * 2),
    "clipped, then scaled": (
        [ActionScaling, lambda: ClipTransform(in_keys_inv=["action"], low=-1.0, high=1.0)],
        lambda action: action.clamp(-1, 1) * 2,
    ),
}


@pytest.mark.behaviour(6)
@pytest.mark.parametrize("change", CHANGES)
def test_the_policys_action_and_the_envs_are_both_kept(change: str, made: list[Recorder]) -> None:
    transforms, expected = CHANGES[change]
    env = recorders(made, [EnvAction(), *(make() for make in transforms)])
    collector = Collector(env, wide(), frames_per_batch=30)
    assert "as TorchRL does" not in str(collector.explain())
    batch = next(iter(collector))
    assert (batch["action"].abs() > 2).any()
    torch.testing.assert_close(batch[KEPT], expected(batch["action"]))
    assert torch.equal(batch[KEPT], given(made, 3))


def test_an_episode_begins_without_one(made: list[Recorder]) -> None:
    env = recorders(made, [EnvAction()], slots=2)
    stream = iter(Collector(env, wide(), frames_per_batch=12))
    batch = torch.cat([next(stream), next(stream)], -1)
    first = batch["next", "done"][:, :-1]
    expected = batch[KEPT][:, :-1].masked_fill(first, 0)
    assert torch.equal(batch["env_action"][:, 1:], expected)
    assert not batch["env_action"][:, 0].any()


def test_its_specs_hold(made: list[Recorder]) -> None:
    check_env_specs(recorders(made, [EnvAction(), ActionScaling()]))
    check_env_specs(TransformedEnv(make_env("CartPole-v1"), EnvAction()))


def test_it_asks_for_an_env_and_is_there_once(made: list[Recorder]) -> None:
    with pytest.raises(RuntimeError, match="expected an env around this transform"):
        _ = EnvAction().pairs
    with pytest.raises(ValueError, match="expected no entry 'env_action' in the env"):
        _ = recorders(made, [EnvAction(), EnvAction()]).observation_spec
