"""An env that forbids some of its actions at each step."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Masked(gym.Env[Any, Any]):
    """Raises for an action that its latest mask, in observations or infos, forbids."""

    def __init__(
        self,
        actions: Any = None,
        told: bool = False,
        name: str = "action_mask",
        raises: bool = True,
    ):
        self.action_space = actions = actions or spaces.Discrete(3, start=2)
        self.sizes = np.ravel(actions.n if isinstance(actions, spaces.Discrete) else actions.nvec)
        self.told, self.name, self.raises = told, name, raises
        x, mask = spaces.Box(-1, 1, (2,)), spaces.MultiBinary(int(self.sizes.sum()))
        self.observation_space = x if told else spaces.Dict({"x": x, name: mask})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 6))
        return self._shown()

    def step(self, action: Any) -> Any:
        rows = np.ravel(action - self.action_space.start)
        taken = [np.eye(n)[row] for n, row in zip(self.sizes, rows, strict=True)]
        if self.raises and (np.concatenate(taken) > self.mask).any():
            raise ValueError("an illegal action")
        self.left -= 1
        observation, info = self._shown()
        return observation, float(rows.sum()), self.left == 0, False, info

    def _shown(self) -> Any:
        some = [self.np_random.permutation(np.arange(n) % 2) for n in self.sizes]
        self.mask = np.concatenate(some).astype(np.int8)
        shown = {self.name: self.mask * (self.left > 0)}  # nothing is legal at the end
        x = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return (x, shown) if self.told else ({"x": x, **shown}, {})
