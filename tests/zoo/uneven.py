"""Envs whose calls take unlike times, in step and with slots that are ready."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tdcollect import GymnasiumEnv, make_env

MakeEnv = Callable[[], gym.Env[Any, Any]]


class Naps(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps before some calls; the data of the env do not depend on it.

    Args:
        env: the env.
        seconds: the mean length of a nap; one call in four takes one.
    """

    def __init__(self, env: gym.Env[Any, Any], seconds: float = 0.002):
        super().__init__(env)
        self.seconds = seconds
        self.clock = random.Random(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:  # slots nap at unlike times, the same ones in each run
            self.clock.seed(seed)
        self._nap()
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._nap()
        return self.env.step(action)

    def _nap(self) -> None:
        if self.clock.random() < 0.25:
            time.sleep(2 * self.clock.random() * self.seconds)


class Gated(gym.Env[Any, Any]):
    """Counts its steps; an episode with one seed waits at its first one until a file exists.

    Observations are float32 ``[1]``: the steps of the episode. Episodes last three steps.

    Args:
        gate: the file.
        seed: of the episode.
    """

    observation_space = spaces.Box(0, 3, (1,))
    action_space = spaces.Discrete(2)
    patience = 10.0  # so that a wrong collector fails rather than hangs

    def __init__(self, gate: Path, seed: int = 0):
        self.gate, self.seed, self.waits = gate, seed, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.waits |= seed == self.seed
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        deadline = time.monotonic() + self.patience
        while self.waits and not self.gate.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody opened the gate")
            time.sleep(0.001)
        self.waits = False
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, self.count == 3, False, {}


class Pace(NamedTuple):
    """The pace at which the slots of an env go on."""

    num_envs: int
    num_workers: int
    wait_num: int
    wait_timeout: float | None

    def ready(self, make: MakeEnv, **options: Any) -> GymnasiumEnv:
        """An env whose calls take unlike times, of slots that go on as they are ready."""
        return ready_env(lambda: Naps(make()), **self._asdict(), **options)

    def in_step(self, make: MakeEnv, **options: Any) -> GymnasiumEnv:
        """An env with the same data, in step."""
        return make_env(make, self.num_envs, **options)


def ready_env(
    make: MakeEnv, num_envs: int, *, num_workers: int | None = None, **options: Any
) -> GymnasiumEnv:
    """An env with a process per slot, unless there are to be fewer."""
    num_workers = num_envs if num_workers is None else num_workers
    options = {"wait_num": 1, "start_method": "fork", **options}
    return make_env(make, num_envs, backend="process", num_workers=num_workers, **options)
