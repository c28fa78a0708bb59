"""Named makers of envs. They take no seed: the caller seeds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import EnvBase, GymEnv, GymWrapper, PendulumEnv, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.testing import mocking_classes as mocks

from tdcollect import make_env

from ..zoo.masked import Masked


class Toy(gym.Env[Any, Any]):
    """Samples everything from its own generator: any spaces, episodes of 1 to ``longest`` steps.

    Episodes end now by termination, now by truncation, now by both. Rewards depend on the action.
    """

    def __init__(self, observation_space: Any, action_space: Any, longest: int = 6):
        self.observation_space = observation_space
        self.action_space = action_space
        self.longest = longest

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = int(self.np_random.integers(1, self.longest + 1))
        return self.observation_space.sample(), self._info()

    def step(self, action: Any) -> Any:
        self.left -= 1
        ending = int(self.np_random.integers(3))
        terminated, truncated = self.left == 0 and ending != 1, self.left == 0 and ending != 0
        flat = np.asarray(spaces.flatten(self.action_space, action), dtype=np.float64)
        reward = float(self.np_random.normal() + flat.sum())
        return self.observation_space.sample(), reward, terminated, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {"left": self.left, "noise": self.np_random.normal(size=2)}


def masked(slots: int | None) -> EnvBase:
    """An env whose masks reach the action spec by TorchRL's transform alone."""
    env = make_env(partial(Masked, name="legal", raises=False), slots)
    to_bool = T.DTypeCastTransform(torch.int8, torch.bool, in_keys=["legal"])
    return TransformedEnv(env, T.Compose(to_bool, T.ActionMask(mask_key="legal")))


def box(*shape: int, dtype: Any = np.float32) -> spaces.Box:
    high = 255 if np.dtype(dtype).kind in "iu" else 2
    return spaces.Box(0 if high == 255 else -2, high, shape, dtype)


def make_toy(longest: int = 6) -> Toy:
    return Toy(box(3), spaces.Discrete(2), longest)


def make_nested_toy() -> Toy:
    inner = spaces.Dict({"flag": spaces.Discrete(3), "grid": box(2, 2, dtype=np.uint8)})
    return Toy(spaces.Dict({"position": box(3), "inner": inner}), spaces.Discrete(2))


def make_pixel_toy() -> Toy:
    return Toy(box(8, 8, 3, dtype=np.uint8), spaces.Discrete(3))


def make_scalar_toy() -> Toy:
    return Toy(box(), spaces.Discrete(2, start=1))


def make_many_actions_toy() -> Toy:
    return Toy(box(2, dtype=np.float64), spaces.MultiDiscrete([2, 3]))


def make_dict_action_toy() -> Toy:
    actions = spaces.Dict({"turn": spaces.Discrete(3), "push": spaces.Box(-1, 1, (2,))})
    return Toy(box(2), actions)


def make_binary_toy() -> Toy:
    return Toy(spaces.MultiBinary(4), spaces.MultiBinary(2))


def cartpole(num_envs: int | None = 3, **options: Any) -> EnvBase:
    return make_env("CartPole-v1", num_envs, **options)


def vector(
    make: Callable[[], Any], slots: int, mode: AutoresetMode, categorical: bool = True
) -> EnvBase:
    envs = SyncVectorEnv([make] * slots, autoreset_mode=mode)
    return make_env(envs, categorical_action_encoding=categorical)


BACKENDS: dict[str, Callable[[Callable[[], Any], int], EnvBase]] = {
    "serial": partial(make_env, categorical_action_encoding=True),
    "process": partial(
        make_env,
        backend="process",
        num_workers=2,
        start_method="fork",
        categorical_action_encoding=True,
    ),
    **{mode.value: partial(vector, mode=mode) for mode in AutoresetMode},
}
"""Envs of several slots, with integers as actions."""

cartpole_vector = partial(
    vector, partial(gym.make, "CartPole-v1", max_episode_steps=17), 3, categorical=False
)


def cartpole_envpool(num_envs: int | None = 3) -> EnvBase:
    pytest.importorskip("envpool")
    return make_env("CartPole-v1", num_envs, backend="envpool", env_kwargs={"max_episode_steps": 9})


def half_cheetah() -> EnvBase:
    pytest.importorskip("mujoco")
    return make_env("HalfCheetah-v5", 2, max_episode_steps=8)


def gym_env(env_id: str = "CartPole-v1", **kwargs: Any) -> EnvBase:
    return GymEnv(env_id, **kwargs)


def wrapped_vector() -> EnvBase:
    """TorchRL's batched env in its fastest correct configuration."""
    make = partial(gym.make, "CartPole-v1", max_episode_steps=17)
    return GymWrapper(SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode.DISABLED))


ENVS: dict[str, Callable[[], EnvBase]] = {
    "cartpole": lambda: make_env("CartPole-v1", 3),
    "cartpole-one-slot": lambda: make_env("CartPole-v1", 1),
    "cartpole-unbatched": lambda: make_env("CartPole-v1"),
    "cartpole-categorical": lambda: make_env("CartPole-v1", 3, categorical_action_encoding=True),
    "cartpole-device": lambda: make_env("CartPole-v1", 3, device="cpu"),
    "cartpole-disabled": partial(cartpole_vector, AutoresetMode.DISABLED),
    "cartpole-next-step": partial(cartpole_vector, AutoresetMode.NEXT_STEP),
    "cartpole-same-step": partial(cartpole_vector, AutoresetMode.SAME_STEP),
    "cartpole-envpool": cartpole_envpool,
    "cartpole-envpool-unbatched": lambda: cartpole_envpool(None),
    "cartpole-process": lambda: make_env("CartPole-v1", 3, backend="process", num_workers=2),
    "cartpole-books": lambda: make_env(
        "CartPole-v1", 3, step_count=True, episode_reward=True, is_init=True, max_episode_steps=9
    ),
    "cartpole-init": lambda: make_env("CartPole-v1", 3, is_init=True),
    "pendulum": lambda: make_env("Pendulum-v1", 2, max_episode_steps=7),
    "pendulum-init": lambda: make_env("Pendulum-v1", 2, max_episode_steps=7, is_init=True),
    "pendulum-unbatched": lambda: make_env("Pendulum-v1", max_episode_steps=7),
    "frozen-lake": lambda: make_env("FrozenLake-v1", 3),
    "frozen-lake-unbatched": lambda: make_env("FrozenLake-v1"),
    "half-cheetah": half_cheetah,
    "toy": lambda: make_env(make_toy, 3),
    "toy-unbatched": lambda: make_env(make_toy),
    "toy-one-step-episodes": lambda: make_env(partial(make_toy, 1), 3),
    "toy-infos": lambda: make_env(make_toy, 3, info_keys=["left", "noise"]),
    "toy-infos-unbatched": lambda: make_env(
        make_toy, info_keys=["left"], is_init=True, step_count=True, episode_reward=True
    ),
    "toy-nested": lambda: make_env(make_nested_toy, 3),
    "toy-pixels": lambda: make_env(make_pixel_toy, 2),
    "toy-scalar": lambda: make_env(make_scalar_toy, 3),
    "toy-scalar-unbatched": lambda: make_env(make_scalar_toy),
    "toy-many-actions": lambda: make_env(make_many_actions_toy, 3),
    "toy-dict-action": lambda: make_env(make_dict_action_toy, 3),
    "toy-binary": lambda: make_env(make_binary_toy, 3),
    "torchrl-gym": gym_env,
    "torchrl-gym-pendulum": lambda: gym_env("Pendulum-v1"),
    "torchrl-vector": wrapped_vector,
    "torchrl-serial": lambda: SerialEnv(2, gym_env),
    "torchrl-serial-of-ours": lambda: SerialEnv(2, lambda: make_env("CartPole-v1")),
    "torchrl-pendulum": PendulumEnv,
    "mock-continuous": mocks.ContinuousActionVecMockEnv,
    "mock-counting": lambda: mocks.CountingEnv(max_steps=4),
    "mock-counting-batched": lambda: mocks.CountingBatchedEnv(
        max_steps=torch.tensor([2, 4]), batch_size=[2]
    ),
    "mock-nested": lambda: mocks.NestedCountingEnv(max_steps=4),
    "mock-nested-flags": lambda: mocks.NestedCountingEnv(
        max_steps=4, nest_done=True, has_root_done=False
    ),
    "mock-many-keys": lambda: mocks.MultiKeyCountingEnv(max_steps=4),
    "mock-agents": lambda: mocks.MultiAgentCountingEnv(n_agents=2, max_steps=4),
    "mock-strings": lambda: mocks.CountingEnvWithString(max_steps=4),
    "mock-unlike": lambda: mocks.HeterogeneousCountingEnv(max_steps=4),
    "mock-dynamic": mocks.EnvWithDynamicSpec,
}
