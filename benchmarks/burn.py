"""An env whose step is so much work, and nothing else; workers import this module."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Burn(gym.Env):
    """Counts at each step. Its observation is nothing, and no episode ends.

    Args:
        rounds: how far.
    """

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, rounds: int):
        self.rounds = rounds
        self._nothing = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Nothing happens."""
        return self._nothing, {}

    def step(self, action: Any) -> Any:
        """Work, rather than time: two that share a core take twice as long."""
        for _ in range(self.rounds):
            pass
        return self._nothing, 0.0, False, False, {}


def rounds_of(seconds: float) -> int:
    """How far to count for so long, on a core of its own."""
    env, took = Burn(20_000), []
    for _ in range(50):
        start = time.perf_counter()
        env.step(0)
        took.append(time.perf_counter() - start)
    return round(seconds * env.rounds / min(took))
