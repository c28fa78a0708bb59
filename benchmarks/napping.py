"""An env whose steps sleep for unlike times; worker processes import it without torch."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np


class Napping(gym.Env[Any, Any]):
    """Episodes of a fixed length, whose steps sleep: for 1 ms, but for a share of 20 ms.

    Args:
        share: of the steps that take 20 ms.
        length: of episodes.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, share: float, length: int = 50):
        self.share, self.length = share, length

    def _observation(self) -> Any:
        return self.np_random.normal(size=4).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = self.length
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        time.sleep(0.02 if self.np_random.random() < self.share else 0.001)
        self.left -= 1
        return self._observation(), 1.0, self.left == 0, False, {}
