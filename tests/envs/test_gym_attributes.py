"""Attributes of gymnasium envs that envs of ``make_env`` give, and their readers of infos."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv
from torchrl.envs.transforms import EndOfLifeTransform, StepCounter

import tdcollect

from ..zoo.process_envs import Unsendable
from ..zoo.torchrl_envs import Lives

NAMES = ("metadata", "render_mode")


def test_one_slot_gives_the_attributes_of_its_env() -> None:
    env, theirs = tdcollect.make_env("CartPole-v1"), GymEnv("CartPole-v1")
    assert env.spec.id == theirs.spec.id
    for name in NAMES:
        assert getattr(env, name) == getattr(theirs, name)
    assert env.unwrapped is env.slot_envs[0].unwrapped


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_several_slots_give_a_list(backend: str) -> None:
    options = {"start_method": "fork", "num_workers": 2} if backend == "process" else {}
    env = tdcollect.make_env("CartPole-v1", 3, backend=backend, **options)
    theirs = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    theirs.start()
    for name in NAMES:
        assert getattr(env, name) == getattr(theirs, name), name
    assert [spec.id for spec in env.spec] == [spec.id for spec in theirs.spec]
    env.reset(seed=0)
    states = [one.state for one in env.unwrapped]
    assert len({state.tobytes() for state in map(np.asarray, states)}) == 3
    found = env.get_wrapper_attr("gravity")
    assert found == theirs.get_wrapper_attr("gravity") == [9.8] * 3
    assert env.has_wrapper_attr(name="gravity") == [True] * 3
    env.close()
    theirs.close()


def test_a_vector_env_gives_its_own() -> None:
    vector = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    env = tdcollect.make_env(vector)
    assert env.spec is vector.spec
    assert env.get_attr("gravity") == (9.8, 9.8)


def of_vector(name: str, count: int) -> Any:
    return tdcollect.make_env(gym.make_vec(name, count, vectorization_mode="sync"))


@pytest.mark.parametrize("make", [tdcollect.make_env, of_vector], ids=["slots", "vector"])
def test_other_names_raise(make: Any) -> None:
    env = make("CartPole-v1", 2)
    for name in ("no_such_name", "_env"):
        for one in (env, TransformedEnv(env, StepCounter())):
            with pytest.raises(AttributeError, match=name):
                getattr(one, name)
    env.close()
    with pytest.raises(AttributeError, match="spec"):
        _ = env.spec


def test_values_that_cannot_be_sent_raise() -> None:
    env = tdcollect.make_env(Unsendable, 2, backend="process", start_method="fork")
    with pytest.raises(AttributeError, match="unwrapped"):
        _ = env.unwrapped
    assert env.reset().batch_size == (2,)
    env.close()


def test_end_of_life_reads_lives() -> None:
    env = TransformedEnv(tdcollect.make_env(Lives, 3, seed=0), EndOfLifeTransform())
    with pytest.warns(UserWarning, match="not a gym env"):
        rollout = env.rollout(30, break_when_any_done=False)
    lost = rollout["lives"] > rollout["next", "lives"]
    assert lost.any()
    ended = lost | rollout["next", "done"].squeeze(-1)
    assert torch.equal(rollout["next", "end-of-life"].squeeze(-1), ended)
