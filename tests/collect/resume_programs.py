"""Collections saved in one process and resumed in another."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    CatFrames,
    DoubleToFloat,
    EnvBase,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import GRUModule, NormalParamExtractor, ProbabilisticActor, TanhNormal
from torchrl.modules.distributions import OneHotCategorical

from tdcollect import Collector, load_checkpoint, make_env, save_checkpoint
from tdcollect.envs.traits import base_of

SAVED_AFTER, MORE = 4, 6


class Dice(gym.Env[Any, Any]):
    """Draws from a generator of its own, which only its snapshot knows."""

    observation_space = gym.spaces.Box(-10, 10, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self._own = np.random.default_rng(random.randrange(2**32))
        self._sum = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._sum = 0.0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self._sum += self._own.normal() + float(self.np_random.random())
        return self._look(), self._sum, abs(self._sum) > 4, False, {}

    def _look(self) -> Any:
        return np.array([self._sum, self._own.normal()], np.float32)

    def snapshot(self) -> Any:
        return {"own": self._own.bit_generator.state, "sum": self._sum}

    def restore(self, snapshot: Any) -> None:
        self._own.bit_generator.state = snapshot["own"]
        self._sum = snapshot["sum"]


def limited_dice() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(Dice(), 9)


class NoSnapshot(Dice):
    """The same without a snapshot: it cannot be restored."""

    snapshot = None  # type: ignore[assignment]
    restore = None  # type: ignore[assignment]


class Frail(gym.Wrapper[Any, Any, Any, Any]):
    """Raises at random, determined by its seed."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.05:
            raise ValueError("the pole broke")
        return super().step(action)


def discrete_policy(env: EnvBase) -> Any:
    features, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    net = TensorDictModule(nn.Linear(features, actions), ["observation"], ["logits"])
    return ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )


def continuous_policy(env: EnvBase) -> Any:
    features, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    net = nn.Sequential(nn.Linear(features, 2 * actions), NormalParamExtractor())
    module = TensorDictModule(net, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True
    )


def recurrent_policy(env: EnvBase) -> Any:
    features, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    gru = GRUModule(
        input_size=features,
        hidden_size=8,
        in_keys=["observation", "hidden", "is_init"],
        out_keys=["features", ("next", "hidden")],
    )
    head = TensorDictModule(nn.Linear(8, actions), ["features"], ["logits"])
    actor = ProbabilisticActor(head, in_keys=["logits"], distribution_class=OneHotCategorical)
    return TensorDictSequential(gru, actor)


def collector(
    env: Any,
    *transforms: Callable[[], Any],
    num_envs: int | None = 3,
    policy: Callable[[EnvBase], Any] = discrete_policy,
    **options: Any,
) -> Collector:
    made: EnvBase = make_env(env, num_envs, **{"resumable": True, **options})
    for transform in transforms:
        made = (
            TransformedEnv(made, transform())
            if not isinstance(made, TransformedEnv)
            else (made.append_transform(transform()) or made)
        )
    return Collector(made, policy(made), frames_per_batch=30)


normed = partial(VecNormV2, in_keys=["observation"])
stacked = partial(CatFrames, N=3, dim=-1, in_keys=["observation"])
frail = {"seed": 5, "on_env_error": "restart", "max_restarts": 10_000}
books = {"step_count": True, "episode_reward": True, "is_init": True}

CASES: dict[str, Callable[[], Collector]] = {
    "cartpole": partial(collector, "CartPole-v1"),
    "cartpole seeded": partial(collector, "CartPole-v1", seed=3),
    "cartpole unbatched": partial(collector, "CartPole-v1", num_envs=None),
    "cartpole in workers": partial(collector, "CartPole-v1", backend="process", num_workers=2),
    "bookkeeping": partial(collector, "CartPole-v1", max_episode_steps=7, **books),
    "mujoco": partial(
        collector,
        "HalfCheetah-v5",
        DoubleToFloat,
        num_envs=2,
        policy=continuous_policy,
        max_episode_steps=40,
    ),
    "box2d": partial(collector, "LunarLander-v3"),
    "box2d whose episodes leak": partial(
        collector,
        "BipedalWalker-v3",
        policy=continuous_policy,
        resumable="history",
        max_episode_steps=13,
    ),
    "leaks in workers": partial(
        collector,
        "BipedalWalker-v3",
        policy=continuous_policy,
        resumable="history",
        max_episode_steps=13,
        backend="process",
    ),
    "recurrent": partial(collector, "CartPole-v1", policy=recurrent_policy),
    "transforms": partial(
        collector, "CartPole-v1", StepCounter, RewardSum, InitTracker, normed, stacked
    ),
    "transforms on arrays": partial(collector, "CartPole-v1", StepCounter, RewardSum, InitTracker),
    "restarts": partial(collector, Frail, **frail),
    "restarts in workers": partial(
        collector, Frail, backend="process", start_method="fork", **frail
    ),
    "snapshots": partial(collector, limited_dice),
    "snapshots in workers": partial(
        collector, limited_dice, backend="process", start_method="fork"
    ),
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def make(case: str) -> tuple[Collector, TensorDictReplayBuffer]:
    return CASES[case](), TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=5)


def collected(made: Collector, buffer: TensorDictReplayBuffer, count: int) -> dict[str, Any]:
    """Batches, samples of the buffer, statistics, and the next random numbers."""
    batches, samples = [], []
    iterator = iter(made)
    for _ in range(count):
        batches.append(next(iterator).to_dict())
        buffer.extend(_flat(batches[-1]))
        samples.append(buffer.sample().to_dict())
    life, window = made.stats.lifetime, made.stats.window
    said = {
        "counters": made.stats(),
        "restarts": _restarts(made),
        "returns": torch.tensor(window.returns),
        "lengths": torch.tensor(window.lengths),
        "life": [life.collections, life.steps, life.episodes, str(life.return_stats)],
        "drawn": [torch.rand(3), torch.tensor(np.random.rand(3)), random.random()],  # noqa: NPY002
    }
    return {"batches": batches, "samples": samples, "said": said}


def _restarts(made: Collector) -> int | None:
    return base_of(made.env).restarts


def _flat(batch: dict[str, Any]) -> Any:
    from tensordict import TensorDict

    done = batch["next"]["done"]
    return TensorDict(batch, batch_size=done.shape[:-1]).reshape(-1)


def first_half(case: str, folder: Path) -> dict[str, Any]:
    """Collect and save, then continue: the data that the other process should see."""
    seed_all(1)
    made, buffer = make(case)
    try:
        collected(made, buffer, SAVED_AFTER)
        save_checkpoint(folder / f"{case}.pt", collector=made, buffer=buffer)
        return collected(made, buffer, MORE)
    finally:
        made.shutdown()


def second_half(case: str, folder: Path) -> dict[str, Any]:
    """Resume from the checkpoint; everything outside it differs."""
    seed_all(2)
    made, buffer = make(case)
    try:
        load_checkpoint(folder / f"{case}.pt", collector=made, buffer=buffer)
        return collected(made, buffer, MORE)
    finally:
        made.shutdown()


def second_halves(folder: Path) -> None:
    """Run all cases from their checkpoints; write what each gives beside."""
    torch.set_num_threads(1)
    for case in CASES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = second_half(case, folder)
        result["lost"] = [str(w.message) for w in caught if "resumed" in str(w.message)]
        torch.save(result, folder / f"{case}.after.pt")
