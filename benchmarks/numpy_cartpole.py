"""CartPole for N slots as one NumPy program: a vector env that steps all slots at once.

gymnasium's own one resets a slot in the step after its end, and no slot when asked to. Here, slots
that have ended wait for ``reset(options={"reset_mask": ...})``, as `AutoresetMode.DISABLED` has it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch_cartpole import CART, FARTHEST, FORCE, GRAVITY, HALF_LENGTH, POLE, STEEPEST, STEPS, TAU

MASS = CART + POLE


class NumPyCartPole(gym.vector.VectorEnv):
    """gymnasium's CartPole-v1 in float64, all slots at once."""

    autoreset_mode = AutoresetMode.DISABLED
    metadata: ClassVar = {"autoreset_mode": autoreset_mode}

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._state = np.zeros((4, num_envs))
        self._steps = np.zeros(num_envs, np.int64)
        self._random = np.random.default_rng()

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self._state[:, mask] = self._random.uniform(-0.05, 0.05, (4, int(mask.sum())))
        self._steps[mask] = 0
        return self._state.T.astype(np.float32), {}

    def step(self, actions: Any) -> Any:
        _, speed, angle, turning = self._state
        cosine, sine = np.cos(angle), np.sin(angle)
        push = np.where(actions == 1, FORCE, -FORCE)
        drift = (push + POLE * HALF_LENGTH * turning**2 * sine) / MASS
        lever = HALF_LENGTH * (4 / 3 - POLE * cosine**2 / MASS)
        spin = (GRAVITY * sine - cosine * drift) / lever
        gain = drift - POLE * HALF_LENGTH * spin * cosine / MASS
        rates = (speed, gain, turning, spin)
        self._state = self._state + TAU * np.stack(rates)
        self._steps += 1
        ended = (np.abs(self._state[0]) > FARTHEST) | (np.abs(self._state[2]) > STEEPEST)
        rewards = np.ones(self.num_envs)
        return self._state.T.astype(np.float32), rewards, ended, self._steps >= STEPS, {}
