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
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    EnvBase,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)

from tdcollect import Collector, load_checkpoint, make_env, save_checkpoint
from tdcollect.envs.traits import base_of

from .policies import actor, recurrent

SAVED_AFTER, MORE = 3, 4


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


def collector(
    env: Any,
    *transforms: Callable[[], Any],
    num_envs: int | None = 3,
    policy: Callable[[EnvBase], Any] = actor,
    **options: Any,
) -> Collector:
    made: EnvBase = make_env(env, num_envs, **{"resumable": True, **options})
    if transforms:
        made = TransformedEnv(made, Compose(*(transform() for transform in transforms)))
    return Collector(made, policy(made), frames_per_batch=30)


normed = partial(VecNormV2, in_keys=["observation"])
stacked = partial(CatFrames, N=3, dim=-1, in_keys=["observation"])
frail = {"seed": 5, "on_env_error": "restart", "max_restarts": 10_000}
books = {"step_count": True, "episode_reward": True, "is_init": True}

workers = {"backend": "process", "start_method": "fork"}

CASES: dict[str, Callable[[], Collector]] = {
    "seeded": partial(collector, "CartPole-v1", seed=3),
    "unbatched": partial(collector, "CartPole-v1", num_envs=None),
    "bookkeeping in workers": partial(
        collector, "CartPole-v1", max_episode_steps=7, num_workers=2, **workers, **books
    ),
    "mujoco": partial(
        collector,
        "HalfCheetah-v5",
        DoubleToFloat,
        num_envs=2,
        max_episode_steps=25,
    ),
    "leaks in workers": partial(
        collector,
        "BipedalWalker-v3",
        **{"resumable": "history", "max_episode_steps": 13, **workers},
    ),
    "recurrent": partial(collector, "CartPole-v1", policy=partial(recurrent, "gru")),
    "transforms": partial(
        collector, "CartPole-v1", StepCounter, RewardSum, InitTracker, normed, stacked
    ),
    "restarts": partial(collector, Frail, **frail),
    "snapshots in workers": partial(collector, limited_dice, **workers),
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
        batch = next(iterator)
        batches.append(batch.to_dict())
        buffer.extend(batch.reshape(-1).clone())
        samples.append(buffer.sample().to_dict())
    life, window = made.stats.lifetime, made.stats.window
    said = {
        "counters": made.stats(),
        "restarts": base_of(made.env).restarts,
        "returns": torch.tensor(window.returns),
        "lengths": torch.tensor(window.lengths),
        "life": [life.collections, life.steps, life.episodes, str(life.return_stats)],
        "drawn": [torch.rand(3), torch.tensor(np.random.rand(3)), random.random()],  # noqa: NPY002
    }
    return {"batches": batches, "samples": samples, "said": said}


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


def second_halves(folder: Path) -> None:
    """Resume all cases from their checkpoints, where all else differs; write what follows."""
    torch.set_num_threads(1)
    for case in CASES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seed_all(2)
            made, buffer = make(case)
            load_checkpoint(folder / f"{case}.pt", collector=made, buffer=buffer)
            result = collected(made, buffer, MORE)
            made.shutdown()
        result["lost"] = [str(w.message) for w in caught if "resumed" in str(w.message)]
        torch.save(result, folder / f"{case}.after.pt")
