"""Returns in the ledger: float64 sums of the reward after transforms, whatever a batch stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl import envs

from tdcollect import (
    Collector,
    EvaluationCollector,
    NotReproducibleError,
    env_seed,
    evaluate,
    make_env,
)
from tdcollect.envs.slots import SlotError

from .envs import Walk

EPISODES = 6


def policy() -> TensorDictModule:
    """A policy that always takes the second of two actions."""
    return TensorDictModule(
        lambda observation: torch.eye(2, dtype=torch.int64)[1].expand(len(observation), 2),
        ["observation"],
        ["action"],
    )


def expected(change: Any = lambda reward: reward, dtype: Any = torch.float64) -> list[float]:
    """Exact sums of a plain loop's rewards, changed as ``[1]``; float32 is what a batch stores."""
    env, sums = Walk(), []
    for number in range(EPISODES):
        env.reset(seed=env_seed(0, number))
        rewards, ended = [], False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(1)
            rewards.append(change(torch.tensor([reward], dtype=dtype)).item())
            ended = terminated or truncated
        sums.append(math.fsum(rewards))
    return sums


def returns(env: Any, **options: Any) -> list[float]:
    found = EvaluationCollector(env, policy(), EPISODES, **options)
    list(found)
    records = sorted(found.episodes, key=lambda episode: episode.index)
    return [record.episode_return for record in records]  # type: ignore[misc]


def under(transform: envs.Transform, num_envs: int | None = 3) -> envs.EnvBase:
    return envs.TransformedEnv(make_env(Walk, num_envs), transform)


WAYS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "one slot": lambda: (Walk, {"num_envs": 1}),
    "unbatched": lambda: (make_env(Walk), {}),
    "process": lambda: (make_env(Walk, 3, backend="process", start_method="fork"), {}),
    "vector env": lambda: (make_env(SyncVectorEnv([Walk] * 2)), {}),
    "TensorDicts": lambda: (under(envs.VecNormV2(["observation"], reduce_batch_dims=True)), {}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_return_is_the_float64_sum_of_the_envs_rewards(way: Any) -> None:
    env, options = way()
    found = returns(env, **options)
    assert found == expected()
    assert found != expected(dtype=torch.float32)
    if isinstance(env, envs.EnvBase):
        env.close()


def scaled(reward: torch.Tensor) -> torch.Tensor:
    """With constants as the transform holds them, in float32."""
    return reward * torch.tensor(0.1) + torch.tensor(3.0)


def clamped(reward: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return reward.clamp(torch.tensor(low), torch.tensor(high))


class Halved(envs.Transform):
    """A user's transform."""

    def __init__(self) -> None:
        super().__init__(in_keys=["reward"], out_keys=["reward"])

    def _apply_transform(self, reward: torch.Tensor) -> torch.Tensor:
        return reward / 2


class Hidden(envs.Transform):
    """A transform that does not declare that it changes the reward."""

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if "reward" in next_tensordict.keys():  # noqa: SIM118
            next_tensordict["reward"] = next_tensordict["reward"] / 2
        return next_tensordict

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset


REWARD: dict[str, Any] = {"in_keys": ["reward"]}
SCALE = partial(envs.RewardScaling, 3.0, 0.1)
KNOWN = {
    "scaled": (SCALE, scaled),
    "clipped": (lambda: envs.RewardClipping(-0.7, 0.7), lambda r: clamped(r, -0.7, 0.7)),
    "sign": (lambda: envs.SignTransform(**REWARD), torch.sign),
    "binary": (envs.BinarizeReward, lambda r: (r > 0).to(torch.int8)),
    "clamped": (
        lambda: envs.ClipTransform(low=-0.5, high=0.5, **REWARD),
        lambda r: clamped(r, -0.5, 0.5),
    ),
    "normed": (lambda: envs.ObservationNorm(3.0, 0.1, **REWARD), scaled),
    "scaled, then clipped": (
        lambda: envs.Compose(SCALE(), envs.RewardClipping(-0.7, 3.1)),
        lambda r: clamped(scaled(r), -0.7, 3.1),
    ),
    "counted": (lambda: envs.Compose(envs.StepCounter(), envs.RewardSum()), lambda r: r),
    "stacked": (
        lambda: envs.Compose(
            envs.UnsqueezeTransform(-1, in_keys=["observation"]),
            envs.CatFrames(2, -1, in_keys=["observation"], out_keys=["both"]),
            SCALE(),
        ),
        scaled,
    ),
}
OTHER = {
    "unknown": (Halved, lambda r: r / 2),
    "unsaid": (Hidden, lambda r: r / 2),
    "cast": (
        lambda: envs.DTypeCastTransform(torch.float32, torch.float16, **REWARD),
        lambda r: r.half(),
    ),
    "cast after": (
        lambda: envs.Compose(
            SCALE(), envs.DTypeCastTransform(torch.float32, torch.float64, **REWARD)
        ),
        lambda r: scaled(r).double(),
    ),
}


@pytest.mark.parametrize("name", [*KNOWN, *OTHER])
def test_known_transforms_are_carried_in_float64_and_the_output_of_others_is_summed(
    name: str,
) -> None:
    transform, change = {**KNOWN, **OTHER}[name]
    sums = expected(change, torch.float64 if name in KNOWN else torch.float32)
    assert returns(under(transform())) == sums
    if name == "scaled":  # and without batch dimensions
        assert returns(under(transform(), None)) == sums


class Pays(gym.Env[Any, Any]):
    """An env that returns the rewards given for each episode, by index, then ends."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, *episodes: tuple[float, ...], infos: Sequence[dict[str, Any]] = ()):
        infos = infos or [{}] * len(episodes)
        seeds = [env_seed(0, index) for index in range(len(episodes))]
        self.episodes = dict(zip(seeds, zip(episodes, infos, strict=True), strict=True))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.rewards, self.info = self.episodes.get(seed or 0, next(iter(self.episodes.values())))
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        reward = self.rewards[self.steps]
        self.steps += 1
        ended = self.steps == len(self.rewards)
        return np.zeros(1, np.float32), reward, ended, False, self.info


def test_a_return_is_rounded_once() -> None:
    inf, nan = math.inf, math.nan
    sums = {
        (123456789.0,) * 3: 370370367.0,
        (0.1,) * 10: 1.0,
        (1e308, 1e308, -1e308): 1e308,
        (1e308, 1e308): inf,
        (1e308, 1e308, -inf): -inf,
        (inf, 1.0): inf,
        (-inf, -inf): -inf,
        (nan, 1.0): nan,
        (inf, -inf): nan,
    }
    with np.errstate(over="ignore"):
        result = evaluate(lambda: Pays(*sums), policy(), len(sums))
    np.testing.assert_array_equal(result.returns, [*sums.values()])


def test_a_return_beyond_float32_is_finite_and_its_data_are_not() -> None:
    def env(**how: Any) -> envs.EnvBase:
        return make_env(lambda: Pays((1e39,) * 3), 2, **how)

    with np.errstate(over="ignore"):
        collector = EvaluationCollector(env(), policy(), 1)
        (data,) = collector
    assert collector.episodes[0].episode_return == 3e39
    assert data["next", "reward"].isinf().all()
    checked = partial(env, check_finite=True)
    for run in (
        lambda: list(Collector(checked(), policy(), frames_per_batch=2, total_frames=2)),
        lambda: list(EvaluationCollector(checked(), policy(), 1, on_env_error="raise")),
    ):
        told = pytest.raises((SlotError, NotReproducibleError), match=r"got inf at .*'reward'")
        with np.errstate(over="ignore"), told:
            run()


def test_batches_and_episodes_hold_float32_rewards_alone() -> None:
    env = make_env(Walk, 3)
    (episode, *_) = EvaluationCollector(env, policy(), EPISODES)
    (batch,) = Collector(env, policy(), frames_per_batch=9, total_frames=9)
    wholly = EvaluationCollector(
        under(envs.VecNormV2(["observation"], reduce_batch_dims=True)), policy(), 1
    )
    for data in (episode, batch, next(iter(wholly))):
        assert data["next", "reward"].dtype == torch.float32
        assert not [key for key in data.keys(True, True) if "exact" in str(key)]


def test_success_is_what_says_true_or_false() -> None:
    told = [True, 0, np.float32(1), np.array([True, False]), None]
    infos = [{"is_success": value} for value in told]
    result = evaluate(lambda: Pays(*[(1.0,)] * 5, infos=infos), policy(), 5, num_envs=1)
    assert [record.success for record in result.episodes] == [True, False, True, False, None]
    match = r"expected the info 'success' at the end of episode 0 \(seed \d+\) to be True or False"
    for value in ("no", 2, 0.5, np.nan, {"a": True}, []):
        pays = partial(Pays, (1.0,), infos=[{"success": value}])
        with pytest.raises(ValueError, match=match):
            list(EvaluationCollector(pays, policy(), 1, num_envs=1))
