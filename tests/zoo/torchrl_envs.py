"""Functions that make envs of TorchRL's classes, for ``ParallelEnv`` and its worker processes."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EndOfLifeTransform,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    NoopResetEnv,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
)


class Ale:
    """The part of an Atari env that knows how many lives are left."""

    def __init__(self, left: int = 3) -> None:
        self.left = left

    def lives(self) -> int:
        return self.left


class Lives(gym.Env):
    """Three lives, of which a step may cost one; pictures and a state; a new game at each reset.

    Args:
        longest: steps after which an episode is truncated.
    """

    def __init__(self, longest: int = 40) -> None:
        picture = spaces.Box(0, 255, (4, 5, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {"pixels": picture, "state": spaces.Box(-np.inf, np.inf, (2,), np.float64)}
        )
        self.action_space = spaces.Discrete(3)
        self.ale = Ale()
        self.longest = longest
        self.taken = 0

    def _observe(self) -> dict[str, Any]:
        picture = self.np_random.integers(0, 256, (4, 5, 3)).astype(np.uint8)
        return {"pixels": picture, "state": np.array([self.taken, self.np_random.normal()])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.ale, self.taken = Ale((options or {}).get("lives", 3)), 0
        return self._observe(), {"lives": self.ale.left}

    def step(self, action: Any) -> Any:
        self.taken += 1
        self.ale.left -= int(self.np_random.random() < 0.15)
        reward = self.np_random.normal() + float(action)
        over = self.ale.left <= 0
        return self._observe(), reward, over, self.taken >= self.longest, {"lives": self.ale.left}


def plain(name: str = "CartPole-v1", **kwargs: Any) -> EnvBase:
    return GymEnv(name, **kwargs)


def lifted() -> EnvBase:
    """Transforms that treat every row by itself, and counters."""
    return TransformedEnv(
        GymEnv("Pendulum-v1", frame_skip=2),
        Compose(
            ObservationNorm(0.5, 2.0, in_keys=["observation"]),
            DoubleToFloat(),
            RewardSum(),
            StepCounter(25),
            InitTracker(),
            TensorDictPrimer(hidden=Unbounded((4,)), default_value=0.25),
        ),
    )


def atari_like() -> EnvBase:
    """Random actions at each start, and lives."""
    env = GymWrapper(Lives(), frame_skip=2, categorical_action_encoding=True)
    return TransformedEnv(env, Compose(NoopResetEnv(6), EndOfLifeTransform(), RewardSum()))


def breakout() -> EnvBase:
    env = GymEnv(
        "ALE/Breakout-v5",
        frame_skip=4,
        from_pixels=True,
        pixels_only=False,
        categorical_action_encoding=True,
    )
    return TransformedEnv(env, Compose(NoopResetEnv(30), EndOfLifeTransform()))


MAKERS = {"plain": plain, "lifted": lifted, "atari-like": atari_like}


def normed_by_process() -> EnvBase:
    """Settings that differ between processes."""
    loc = float(os.getpid())
    return TransformedEnv(GymEnv("Pendulum-v1"), ObservationNorm(loc, 2.0, in_keys=["observation"]))


class Unknown(GymWrapper):
    """A class of a user's own."""


def unknown() -> EnvBase:
    return Unknown(gym.make("CartPole-v1"))


class Draws(gym.Env):
    """Shows a number from torch's global generator."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.taken = 0
        return torch.rand(1).numpy(), {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        return torch.rand(1).numpy(), 0.0, False, False, {}


def draws() -> EnvBase:
    return TransformedEnv(GymWrapper(Draws()), NoopResetEnv(3))


class Fails(Draws):
    """Raises at its third step."""

    def step(self, action: Any) -> Any:
        if self.taken == 2:
            raise ZeroDivisionError("three")
        return super().step(action)


def fails() -> EnvBase:
    return GymWrapper(Fails())


class Slow(Fails):
    """Takes a minute to step, or to close.

    Args:
        what: ``"step"`` or ``"close"``.
    """

    def __init__(self, what: str) -> None:
        self.what, self.taken = what, 0

    def step(self, action: Any) -> Any:
        time.sleep(60 if self.what == "step" else 0)
        return super().step(action)

    def close(self) -> None:
        time.sleep(60 if self.what == "close" and self.taken else 0)


def slow(what: str) -> EnvBase:
    return GymWrapper(Slow(what))
