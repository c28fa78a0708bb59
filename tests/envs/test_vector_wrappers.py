"""gymnasium's wrappers of vector envs: the data equal a plain loop's, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers as single
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorObservationWrapper
from gymnasium.vector import VectorWrapper as Wrapper
from gymnasium.wrappers import vector as many

from tdcollect import Collector, make_env

from .test_backends import SEEDS, N, assert_plays_as, cartpole, plain_loop, play

MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
SINGLY = [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]


def pendulum() -> gym.Env:
    return gym.make("Pendulum-v1", max_episode_steps=13)


def twice(value: Any) -> Any:
    return value * 2


def doubled(wrapper: Any) -> Callable[[Any], Any]:
    return lambda env: wrapper(env, twice, None)


# Each as it is around the vector env, and around a single one.
OBSERVATIONS: dict[str, tuple[Any, Any]] = {
    "TransformObservation": (
        doubled(many.TransformObservation),
        doubled(single.TransformObservation),
    ),
    "VectorizeTransformObservation": (
        lambda env: many.VectorizeTransformObservation(
            env, single.TransformObservation, func=twice, observation_space=None
        ),
        doubled(single.TransformObservation),
    ),
    "FlattenObservation": (many.FlattenObservation, single.FlattenObservation),
    "DtypeObservation": (
        lambda env: many.DtypeObservation(env, np.float64),
        lambda env: single.DtypeObservation(env, np.float64),
    ),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "TransformReward": (
        lambda env: many.TransformReward(env, twice),
        lambda env: single.TransformReward(env, twice),
    ),
    "RescaleAction": (
        lambda env: many.RescaleAction(env, -1, 1),
        lambda env: single.RescaleAction(env, np.float32(-1), np.float32(1)),
    ),
    "RecordEpisodeStatistics": (many.RecordEpisodeStatistics, single.RecordEpisodeStatistics),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in OBSERVATIONS for mode in ("SAME_STEP", "DISABLED")),
        *((name, "SAME_STEP") for name in OTHERS),
        ("RecordEpisodeStatistics", "NEXT_STEP"),
    ],
)
def test_a_wrapper_does_what_it_does_around_each_env(name: str, mode: str) -> None:
    around_all, around_each = {**OBSERVATIONS, **OTHERS}[name]
    vector = SyncVectorEnv([pendulum] * N, autoreset_mode=AutoresetMode[mode])
    if name in OBSERVATIONS and mode == "SAME_STEP":
        with pytest.raises((ValueError, AssertionError)):  # an assertion before gymnasium 1.4
            around_all(vector)
        return
    actions = np.random.default_rng(0).uniform(-1, 1, (N, 60, 1)).astype(np.float32)
    plain = plain_loop([around_each(pendulum()) for _ in range(N)], actions, SEEDS)
    assert plain.truncated.sum() == 4 * N
    assert_plays_as(play(make_env(around_all(vector)), actions, SEEDS), plain)


REFUSED = [
    (many.DictInfoToList, AutoresetMode.DISABLED, "expected no DictInfoToList .* leave it out"),
    (many.NormalizeObservation, AutoresetMode.NEXT_STEP, "expected no NormalizeObservation"),
    *((many.NormalizeReward, m, "expected no NormalizeReward .*Mode.SAME_STEP") for m in SINGLY),
]


@pytest.mark.parametrize(("wrapper", "mode", "told"), REFUSED)
def test_a_wrapper_that_cannot_be_served_is_refused_when_made(
    wrapper: Any, mode: AutoresetMode, told: str
) -> None:
    vector = wrapper(SyncVectorEnv([cartpole] * N, autoreset_mode=mode))
    for made in (vector, Wrapper(vector)):
        with pytest.raises(ValueError, match=told):
            make_env(made)


@pytest.mark.parametrize("name", ["NumpyToTorch", "JaxToTorch"])
def test_wrappers_that_give_tensors_are_refused(name: str) -> None:
    pytest.importorskip("array_api_compat")
    pytest.importorskip({"NumpyToTorch": "torch", "JaxToTorch": "jax"}[name])
    vector = getattr(many, name)(SyncVectorEnv([cartpole] * N))
    with pytest.raises(ValueError, match=f"expected no {name}"):
        make_env(vector)


class Doubled(VectorObservationWrapper):
    """A user's wrapper, unknown to gymnasium."""

    def __init__(self, env: VectorEnv) -> None:
        Wrapper.__init__(self, env)

    def observations(self, observations: Any) -> Any:
        return twice(observations)


def test_final_observations_left_unchanged_are_refused() -> None:
    for mode in SINGLY:
        make_env(Doubled(SyncVectorEnv([cartpole], autoreset_mode=mode)))
    with pytest.raises(
        ValueError, match=r"expected no Doubled in .*SAME_STEP.*info\['final_obs'\]"
    ):
        make_env(Doubled(SyncVectorEnv([cartpole], autoreset_mode=AutoresetMode.SAME_STEP)))


def test_normalized_rewards_are_those_of_gymnasium_where_slots_reset_themselves() -> None:
    def made() -> VectorEnv:
        same_step = AutoresetMode.SAME_STEP
        return many.NormalizeReward(SyncVectorEnv([cartpole] * N, autoreset_mode=same_step))

    vector = made()
    env = make_env(made(), categorical_action_encoding=True)
    actions = np.random.default_rng(0).integers(2, size=(N, 80))
    batch = play(env, actions, SEEDS)
    vector.reset(seed=SEEDS)  # type: ignore[arg-type]
    rewards = np.stack([vector.step(actions[:, step])[1] for step in range(80)], 1)
    assert batch["next", "done"].any()
    np.testing.assert_array_equal(batch["next", "reward"][..., 0], rewards.astype(np.float32))
    with pytest.raises(ValueError, match="cannot reset slots"):
        env.reset(
            batch[:, -1].select().set("_reset", torch.eye(N, dtype=torch.bool)[:, :1]), seed=0
        )
    with pytest.raises(ValueError, match="expected no max_episode_steps"):
        make_env(made(), max_episode_steps=5)


@MODES
def test_episode_statistics_of_a_wrapper_are_right(mode: AutoresetMode) -> None:
    inner = SyncVectorEnv([cartpole] * N, autoreset_mode=mode)
    vector = many.RecordEpisodeStatistics(many.RecordEpisodeStatistics(inner, stats_key="inner"))
    if mode == AutoresetMode.SAME_STEP and gym.__version__ < "1.4":
        pytest.skip("before gymnasium 1.4, the wrapper counts one step too few in SAME_STEP")
    env = make_env(vector, step_count=True)
    for batch in Collector(env, None, frames_per_batch=300, total_frames=300):
        ended = batch["next", "done"].squeeze(-1)
        lengths = sorted(batch["next", "step_count"][ended].flatten().tolist())
    assert len(lengths) > N
    assert sorted(vector.length_queue) == lengths
    make_env(vector)  # again: nothing is put in twice
    assert vector.env.env.env.env is inner


class Untold(Wrapper):
    """Changes the infos of a vector env."""

    def __init__(self, env: VectorEnv, change: Callable[[Any], Any]) -> None:
        super().__init__(env)
        self.change = change

    def reset(self, **given: Any) -> Any:
        observation, info = self.env.reset(**given)
        return observation, self.change(info)

    def step(self, actions: Any) -> Any:
        *rest, info = self.env.step(actions)
        return *rest, self.change(info)


def without(name: str, info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key not in (name, f"_{name}")}


@pytest.mark.parametrize("name", ["final_obs", "final_info"])
def test_same_step_without_what_ended_says_what_was_expected(name: str) -> None:
    inner = SyncVectorEnv([pendulum] * N, autoreset_mode=AutoresetMode.SAME_STEP)
    env = make_env(Untold(inner, partial(without, name)), info_keys={"any": 0.0})
    with pytest.raises(
        ValueError, match=rf"expected info\['{name}'\] of .* with another autoreset"
    ):
        env.rollout(20, break_when_any_done=False)


def test_final_observations_of_ended_slots_alone_are_told() -> None:
    def alone(info: dict[str, Any]) -> dict[str, Any]:
        if "final_obs" in info:
            info = {**info, "final_obs": info["final_obs"][:1]}
        return info

    inner = SyncVectorEnv([pendulum] * N, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match=rf"info\['final_obs'\] of .* per slot, {N}, .* got 1"):
        make_env(Untold(inner, alone)).rollout(20, break_when_any_done=False)


def test_final_observations_in_a_batched_dict_are_read() -> None:
    class Named(gym.ObservationWrapper):
        def __init__(self) -> None:
            super().__init__(pendulum())
            self.observation_space = gym.spaces.Dict(place=self.env.observation_space)

        def observation(self, observation: Any) -> Any:
            return {"place": observation}

    def batched(info: dict[str, Any]) -> dict[str, Any]:
        if "final_obs" in info:
            info["final_obs"] = {"place": np.stack([one["place"] for one in info["final_obs"]])}
        return info

    inner = SyncVectorEnv([Named] * N, autoreset_mode=AutoresetMode.SAME_STEP)
    actions = np.random.default_rng(0).uniform(-1, 1, (N, 20, 1)).astype(np.float32)
    batch = play(make_env(Untold(inner, batched)), actions, SEEDS)
    plain = plain_loop([pendulum() for _ in range(N)], actions, SEEDS)
    np.testing.assert_array_equal(batch["next", "place"], plain.next_observation)


def test_infos_that_are_no_dict_are_told_at_the_first_reset() -> None:
    env = make_env(Untold(SyncVectorEnv([pendulum]), lambda info: [info]))
    with pytest.raises(TypeError, match=r"expected the infos of .* to be a dict.* got list"):
        env.reset()
