"""One EnvPool slot as a ``gymnasium.Env``, so that it can be asked what other envs are asked."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np


class PooledEnv(gym.Env[Any, Any]):
    """An EnvPool of one slot. As EnvPool seeds at construction, a seeded reset makes a new pool.

    Raises:
        ModuleNotFoundError: where envpool is not installed.
        ValueError: for an unknown id, and for an env of several players.
    """

    def __init__(self, task_id: str, **options: Any):
        # The backend says what is wrong with an id, and no other words are needed here.
        from tdcollect.envs.envpool_backend import EnvPoolBackend

        EnvPoolBackend(task_id, 1, [0], options).close()
        self._task_id, self._options = task_id, options
        self._pool = self._made(0)
        self.observation_space = self._pool.observation_space
        self.action_space = self._pool.action_space

    def _made(self, seed: int) -> Any:
        import envpool

        with warnings.catch_warnings():
            # EnvPool states its bounds as float64 and gymnasium remarks on the cast.
            warnings.filterwarnings("ignore", message=".*precision lowered by casting")
            pool = envpool.make_gymnasium(self._task_id, num_envs=1, seed=seed, **self._options)
            pool.observation_space, pool.action_space  # noqa: B018  cached in here
        return pool

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool.close()
            self._pool = self._made(seed)
        observation, info = self._pool.reset()
        return _first(observation), _infos(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        given = np.asarray(action, dtype=self.action_space.dtype)[None]
        observation, reward, terminated, truncated, info = self._pool.step(given)
        ended = bool(truncated[0])
        return (
            _first(observation),
            float(reward[0]),
            bool(terminated[0]) and not ended,
            ended,
            _infos(info),
        )

    def close(self) -> None:
        self._pool.close()


def _first(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _first(item) for name, item in value.items()}
    return value[0]


def _infos(info: dict[str, Any]) -> dict[str, Any]:
    return {name: _first(value) for name, value in info.items() if name not in ("players",)}
