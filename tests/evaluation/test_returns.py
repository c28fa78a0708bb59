"""Returns in the ledger: float64 sums of the reward after transforms, whatever a batch stores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.envs import (
    BinarizeReward,
    CatFrames,
    ClipTransform,
    Compose,
    DTypeCastTransform,
    EnvBase,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    StepCounter,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNormV2,
)

from tdcollect import (
    Collector,
    EvaluationCollector,
    NotReproducibleError,
    env_seed,
    evaluate,
    make_env,
)
from tdcollect.envs.slots import SlotError
from tdcollect.evaluation.episodes.data import exact_sum

from .envs import Walk

EPISODES = 6


def policy() -> TensorDictModule:
    """A policy that always takes the second of two actions."""
    return TensorDictModule(
        lambda observation: torch.eye(2, dtype=torch.int64)[1].expand(len(observation), 2),
        ["observation"],
        ["action"],
    )


def rewards_of(env: gym.Env[Any, Any]) -> list[list[float]]:
    """Each episode's rewards, by a plain loop."""
    episodes = []
    for number in range(EPISODES):
        env.reset(seed=env_seed(0, number))
        rewards, ended = [], False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(1)
            rewards.append(float(reward))
            ended = terminated or truncated
        episodes.append(rewards)
    return episodes


def plain_returns(change: Callable[[torch.Tensor], torch.Tensor] = lambda reward: reward) -> Any:
    """Exact sums of the walk's rewards, changed as float64 ``[1]``."""
    return [
        math.fsum(change(torch.tensor([reward], dtype=torch.float64)).item() for reward in rewards)
        for rewards in rewards_of(Walk())
    ]


def stored_returns(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same of the rewards as a batch stores them, in float32."""
    return [
        math.fsum(change(torch.tensor([reward])).item() for reward in rewards)
        for rewards in rewards_of(Walk())
    ]


def returns(env: Any, **options: Any) -> list[float]:
    found = EvaluationCollector(env, policy(), EPISODES, **options)
    list(found)
    records = sorted(found.episodes, key=lambda episode: episode.index)
    return [record.episode_return for record in records]  # type: ignore[misc]


def under(transform: Transform, num_envs: int | None = 3) -> EnvBase:
    return TransformedEnv(make_env(Walk, num_envs), transform)


WAYS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "one slot": lambda: (Walk, {"num_envs": 1}),
    "4 slots": lambda: (Walk, {"num_envs": 4}),
    "unbatched": lambda: (make_env(Walk), {}),
    "process": lambda: (make_env(Walk, 3, backend="process", start_method="fork"), {}),
    "sync": lambda: (make_env(SyncVectorEnv([Walk] * 2)), {}),
    "async": lambda: (make_env(AsyncVectorEnv([Walk] * 2, context="fork")), {}),
    "same step": lambda: (
        make_env(SyncVectorEnv([Walk] * 2, autoreset_mode=AutoresetMode.SAME_STEP)),
        {},
    ),
    "new envs": lambda: (Walk, {"fresh_envs": True}),
    "TensorDicts": lambda: (under(VecNormV2(["observation"], reduce_batch_dims=True)), {}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_return_is_the_float64_sum_of_the_envs_rewards(way: Any) -> None:
    env, options = way()
    found = returns(env, **options)
    assert found == plain_returns()
    assert found != stored_returns(lambda reward: reward)
    if isinstance(env, EnvBase):
        env.close()


def scaled(reward: torch.Tensor) -> torch.Tensor:
    """With constants as the transform holds them, in float32."""
    return reward * torch.tensor(0.1) + torch.tensor(3.0)


def clamped(reward: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return reward.clamp(torch.tensor(low), torch.tensor(high))


CHANGES = {
    "scaled": (lambda: RewardScaling(3.0, 0.1), scaled),
    "clipped": (lambda: RewardClipping(-0.7, 0.7), lambda r: clamped(r, -0.7, 0.7)),
    "sign": (lambda: SignTransform(in_keys=["reward"]), torch.sign),
    "binary": (BinarizeReward, lambda r: (r > 0).to(torch.int8)),
    "clamped": (
        lambda: ClipTransform(in_keys=["reward"], low=-0.5, high=0.5),
        lambda r: clamped(r, -0.5, 0.5),
    ),
    "normed": (lambda: ObservationNorm(3.0, 0.1, in_keys=["reward"]), scaled),
    "scaled, then clipped": (
        lambda: Compose(RewardScaling(3.0, 0.1), RewardClipping(-0.7, 3.1)),
        lambda r: clamped(scaled(r), -0.7, 3.1),
    ),
    "counted": (lambda: Compose(StepCounter(), RewardSum()), lambda r: r),
    "stacked": (
        lambda: Compose(
            UnsqueezeTransform(-1, in_keys=["observation"]),
            CatFrames(2, -1, in_keys=["observation"], out_keys=["both"]),
            RewardScaling(3.0, 0.1),
        ),
        scaled,
    ),
}


@pytest.mark.parametrize(("transform", "change"), CHANGES.values(), ids=CHANGES)
def test_known_transforms_are_carried_in_float64(transform: Any, change: Any) -> None:
    assert returns(under(transform())) == plain_returns(change)


def test_known_transforms_of_one_env_without_batch_dims() -> None:
    assert returns(under(RewardScaling(3.0, 0.1), None)) == plain_returns(scaled)


class Halved(Transform):
    """A user's transform."""

    def __init__(self) -> None:
        super().__init__(in_keys=["reward"], out_keys=["reward"])

    def _apply_transform(self, reward: torch.Tensor) -> torch.Tensor:
        return reward / 2


class Hidden(Transform):
    """A transform that does not declare that it changes the reward."""

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if "reward" in next_tensordict.keys():  # noqa: SIM118
            next_tensordict["reward"] = next_tensordict["reward"] / 2
        return next_tensordict

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset


OWN = {
    "unknown": (Halved, lambda r: r / 2),
    "unsaid": (Hidden, lambda r: r / 2),
    "cast": (
        lambda: DTypeCastTransform(torch.float32, torch.float16, in_keys=["reward"]),
        lambda r: r.half(),
    ),
    "cast after": (
        lambda: Compose(
            RewardScaling(3.0, 0.1),
            DTypeCastTransform(torch.float32, torch.float64, in_keys=["reward"]),
        ),
        lambda r: scaled(r).double(),
    ),
}


@pytest.mark.parametrize(("transform", "change"), OWN.values(), ids=OWN)
def test_of_other_transforms_their_own_output_is_summed(transform: Any, change: Any) -> None:
    assert returns(under(transform())) == stored_returns(change)


class Pays(gym.Env[Any, Any]):
    """An env that returns the given rewards, then ends."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, rewards: tuple[float, ...], **info: Any):
        self.rewards, self.info = rewards, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        reward = self.rewards[self.steps]
        self.steps += 1
        ended = self.steps == len(self.rewards)
        return np.zeros(1, np.float32), reward, ended, False, self.info


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((123456789,) * 3, 370370367.0),
        ((0.1,) * 10, 1.0),
        ((1e308, 1e308, -1e308), 1e308),
        ((1e308, 1e308), math.inf),
        ((math.inf, 1.0), math.inf),
    ],
    ids=str,
)
def test_a_return_is_rounded_once(rewards: tuple[float, ...], expected: float) -> None:
    with np.errstate(over="ignore"):
        result = evaluate(lambda: Pays(rewards), policy(), 2)
    assert result.returns.tolist() == [expected] * 2


def test_a_return_beyond_float32_is_finite_and_its_data_are_not() -> None:
    with np.errstate(over="ignore"):
        collector = EvaluationCollector(lambda: Pays((1e39,) * 3), policy(), 1)
        (data,) = collector
    assert collector.episodes[0].episode_return == 3e39
    assert data["next", "reward"].isinf().all()
    assert data["next", "reward"].dtype == torch.float32


def test_finite_rewards_are_finite_as_they_are_stored() -> None:
    def env() -> EnvBase:
        return make_env(lambda: Pays((1e39,) * 3), 2, check_finite=True)

    for run in (
        lambda: list(Collector(env(), policy(), frames_per_batch=2, total_frames=2)),
        lambda: list(EvaluationCollector(env(), policy(), 1, on_env_error="raise")),
    ):
        told = pytest.raises((SlotError, NotReproducibleError), match=r"got inf at .*'reward'")
        with np.errstate(over="ignore"), told:
            run()


def test_batches_and_episodes_hold_float32_rewards_alone() -> None:
    env = make_env(Walk, 3)
    (episode, *_) = EvaluationCollector(env, policy(), EPISODES)
    (batch,) = Collector(env, policy(), frames_per_batch=9, total_frames=9)
    wholly = EvaluationCollector(
        under(VecNormV2(["observation"], reduce_batch_dims=True)), policy(), 1
    )
    for data in (episode, batch, next(iter(wholly))):
        assert data["next", "reward"].dtype == torch.float32
        assert not [key for key in data.keys(True, True) if "exact" in str(key)]


def test_sums_of_numbers_that_are_none() -> None:
    for values in ([math.inf, 1.0], [math.nan, 1.0], [math.inf, -math.inf], [-math.inf] * 2):
        assert np.array_equal(exact_sum(np.array(values)), sum(values), equal_nan=True)
    assert exact_sum(np.array([1e308, 1e308, -math.inf])) == -math.inf


# --- success -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (True, True),
        (0, False),
        (np.float32(1), True),
        (np.array([True, False]), False),
        (None, None),
    ],
    ids=repr,
)
def test_success_is_what_says_true_or_false(told: Any, expected: bool | None) -> None:
    result = evaluate(lambda: Pays((1.0,), is_success=told), policy(), 1)
    assert result.episodes[0].success is expected


@pytest.mark.parametrize("told", ["no", 2, 0.5, np.nan, {"a": True}, []], ids=repr)
def test_success_that_says_neither_is_refused(told: Any) -> None:
    match = r"expected the info 'success' at the end of episode 0 \(seed \d+\) to be True or False"
    with pytest.raises(ValueError, match=match):
        evaluate(lambda: Pays((1.0,), success=told), policy(), 1)
