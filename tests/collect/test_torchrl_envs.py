"""TorchRL's own envs on arrays: the bits are the parent's, and the env stays the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from torchrl import envs as E

from tdcollect import Collector

from . import policies
from .oracle import check_same


class Lives(gym.Env[Any, Any]):
    """Episodes of three lives; a life is lost at random, from the env's own generator."""

    observation_space = gym.spaces.Box(0, 255, (3, 4, 3), np.uint8)
    action_space = gym.spaces.Discrete(3)

    class _Ale:
        left = 3

        def lives(self) -> int:
            return self.left

    def __init__(self) -> None:
        self.ale = self._Ale()

    def _image(self) -> Any:
        return self.np_random.integers(0, 255, (3, 4, 3), np.uint8, endpoint=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.ale.left = 3
        return self._image(), {}

    def step(self, action: Any) -> Any:
        self.ale.left -= self.np_random.random() < 0.2
        return self._image(), float(action) - 1, self.ale.left == 0, False, {}


def cartpole(**kwargs: Any) -> Any:
    return E.GymEnv("CartPole-v1", max_episode_steps=12, **kwargs)


def cheetah() -> Any:
    return E.GymEnv("HalfCheetah-v5", max_episode_steps=7)


def under(env: Any, *transforms: E.Transform) -> Any:
    return E.TransformedEnv(env, E.Compose(*transforms))


def norm() -> E.Transform:
    return E.ObservationNorm(0.1, 2.0, in_keys=["observation"])


def atari() -> Any:
    return under(
        E.GymWrapper(Lives(), categorical_action_encoding=True),
        E.NoopResetEnv(4, random=True),
        E.EndOfLifeTransform(),
    )


def atari_stack() -> list[E.Transform]:
    return [
        E.ToTensorImage(),
        E.GrayScale(),
        E.CatFrames(4, dim=-3),
        E.RewardSum(),
        E.StepCounter(),
        E.DoubleToFloat(),
        E.VecNorm(in_keys=["pixels"]),
        E.SignTransform(in_keys=["reward"]),
    ]


LEVEL_1: dict[str, Callable[[], Any]] = {
    "gym": cartpole,
    "gym-device": lambda: cartpole(device="cpu"),
    "gym-categorical": lambda: cartpole(categorical_action_encoding=True),
    "gym-frame-skip": lambda: cartpole(frame_skip=3),
    "wrapper": lambda: E.GymWrapper(gym.make("CartPole-v1", max_episode_steps=12)),
    "gym-transforms": lambda: under(
        cheetah(), E.DoubleToFloat(), norm(), E.RewardSum(), E.StepCounter(5)
    ),
    "gym-vecnorm": lambda: under(cheetah(), E.VecNormV2(in_keys=["observation", "reward"])),
    "gym-catframes": lambda: under(cartpole(), E.CatFrames(3, dim=-1, in_keys=["observation"])),
    "gym-noops": lambda: under(atari(), *atari_stack()),
    "serial": lambda: E.SerialEnv(3, cartpole),
    "serial-one": lambda: E.SerialEnv(1, cartpole),
    "serial-device": lambda: E.SerialEnv(3, cartpole, device="cpu"),
    "serial-list": lambda: E.SerialEnv(2, [cartpole, cartpole]),
    "serial-creator": lambda: E.SerialEnv(2, E.EnvCreator(cartpole)),
    "serial-kwargs": lambda: E.SerialEnv(
        2, cartpole, create_env_kwargs=[{"frame_skip": 1}, {"frame_skip": 2}]
    ),
    "parallel-for-single": lambda: E.ParallelEnv(1, cartpole, serial_for_single=True),
    "serial-outside": lambda: under(E.SerialEnv(3, cartpole), norm(), E.RewardSum()),
    "serial-vecnorm": lambda: under(
        E.SerialEnv(3, cartpole), E.StepCounter(), E.VecNorm(in_keys=["observation"])
    ),
    "serial-vecnorm-2": lambda: under(
        E.SerialEnv(3, cartpole), E.VecNormV2(in_keys=["observation"]), E.RewardSum()
    ),
    "serial-catframes": lambda: under(
        E.SerialEnv(3, cartpole), E.CatFrames(3, dim=-1, in_keys=["observation"])
    ),
    "serial-inside": lambda: E.SerialEnv(3, lambda: under(cartpole(), norm(), E.StepCounter())),
    "serial-inside-outside": lambda: under(
        E.SerialEnv(3, lambda: under(cartpole(), norm(), E.StepCounter(9), E.InitTracker())),
        E.RewardSum(),
        E.VecNorm(in_keys=["observation"]),
    ),
    "serial-inside-axes": lambda: E.SerialEnv(
        3,
        lambda: under(
            cartpole(),
            E.UnsqueezeTransform(0, in_keys=["observation"], allow_positive_dim=True),
        ),
    ),
    "serial-inside-catframes": lambda: E.SerialEnv(
        3, lambda: under(cartpole(), E.CatFrames(2, dim=-1, in_keys=["observation"]))
    ),
    "serial-inside-vecnorm": lambda: under(
        E.SerialEnv(2, lambda: under(cartpole(), E.VecNorm(in_keys=["observation"]))),
        E.RewardSum(),
    ),
    "serial-atari": lambda: under(E.SerialEnv(3, atari), *atari_stack()),
}


@pytest.mark.parametrize("name", LEVEL_1)
def test_batches_are_the_parents(name: str) -> None:
    check_same(LEVEL_1[name], policies.actor)


@pytest.mark.parametrize("name", LEVEL_1)
def test_nothing_stands_in_the_way(name: str) -> None:
    env = LEVEL_1[name]()
    collector = Collector(env, policies.actor(env), frames_per_batch=12)
    assert "as TorchRL does" not in str(collector.explain())
