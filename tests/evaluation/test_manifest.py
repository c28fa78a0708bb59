"""The manifest says the same of the same env, whatever runs it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from tdcollect import EvaluationCollector, make_env
from tdcollect.evaluation.manifest import describe


def halved(reward: Any) -> float:
    return float(reward) / 2


def wrapped() -> Any:
    env = gym.make("CartPole-v1", max_episode_steps=50)
    return gym.wrappers.TransformReward(env, halved)


def manifest(env: Any, **options: Any) -> dict[str, Any]:
    with EvaluationCollector(env, None, 3, **options) as collector:
        return describe(collector, {})


def test_wrappers_and_limits_are_named_from_the_outside_in() -> None:
    limit, made = manifest(wrapped)["env"]["wrappers"][1:]
    assert limit == "TimeLimit(50)"
    assert made == "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    assert "halved" in manifest(wrapped)["env"]["wrappers"][0]


@pytest.mark.parametrize("backend", ["process", SyncVectorEnv, AsyncVectorEnv])
def test_backends_and_numbers_of_slots_have_one_manifest(backend: Any) -> None:
    one = manifest(wrapped)
    if backend == "process":
        other = manifest(wrapped, backend=backend, num_envs=2)
    else:
        made = backend([wrapped] * 2, autoreset_mode=AutoresetMode.DISABLED)
        env = make_env(made)
        other = manifest(env)
        env.close()
        other["env"]["id"] = one["env"]["id"]  # a function's name here, the spec's there
    assert other == one


def test_arguments_are_told_without_addresses() -> None:
    told = describe_with({"reward": halved, "limits": (1, 2.5), "name": "x", "none": None})
    assert told["limits"] == "(1, 2.5)"
    assert "0x" not in str(told)


def describe_with(env_kwargs: dict[str, Any]) -> Any:
    with EvaluationCollector("CartPole-v1", None, 1) as collector:
        return describe(collector, env_kwargs)["env"]["kwargs"]
