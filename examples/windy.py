"""An env with two faults that `tdcollect doctor examples/windy.py:Windy` finds."""

import gymnasium as gym
import numpy as np


class Windy(gym.Env):
    """A walk in a wind that rises at each step."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    wind = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=2).astype(np.float32)
        return self.position, {}  # the env's own array, rather than a copy

    def step(self, action):
        self.wind += 0.01  # reset does not set it back
        self.position += np.float32(self.wind + (0.1 if action else -0.1))
        return self.position, 1.0, bool(abs(self.position[0]) > 4), False, {}
