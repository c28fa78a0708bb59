"""An env whose step is a fixed amount of work; workers import this module."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Burn(gym.Env):
    """Counts at each step. Observations are zeros, and no episode ends.

    Args:
        rounds: the number to count to.
    """

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, rounds: int):
        self.rounds = rounds
        self._nothing = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Return zeros."""
        return self._nothing, {}

    def step(self, action: Any) -> Any:
        """Do a fixed amount of work rather than wait: two that share a core take twice as long."""
        for _ in range(self.rounds):
            pass
        return self._nothing, 0.0, False, False, {}


def rounds_of(seconds: float) -> int:
    """The ``rounds`` that take this long on a core of their own."""
    env, took = Burn(20_000), []
    for _ in range(50):
        start = time.perf_counter()
        env.step(0)
        took.append(time.perf_counter() - start)
    return round(seconds * env.rounds / min(took))
