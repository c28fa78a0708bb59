"""Cost of a step without env and policy: both do nothing here."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import hand_written
import numpy as np
import torch
import workloads
from bench import Effort, Program, alternate, spread
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict.nn import TensorDictModule
from torchrl.envs import GymWrapper

import tdcollect

SLOTS = (1, 8, 64)


class NullVectorEnv(VectorEnv):
    """Returns the same arrays at every step; no episode ends."""

    autoreset_mode = AutoresetMode.DISABLED
    metadata = {"autoreset_mode": autoreset_mode}  # noqa: RUF012

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._observation = np.zeros((num_envs, 4), np.float32)
        self._rest = np.zeros(num_envs), np.zeros(num_envs, bool), np.zeros(num_envs, bool), {}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Return the constant observation."""
        return self._observation, {}

    def step(self, actions: Any) -> Any:
        """Return the constant observation, no reward, no end."""
        return self._observation, *self._rest


def hot_loop(effort: Effort) -> list[dict[str, Any]]:
    """Microseconds per step of N slots, for each program and each N."""
    rows = []
    for n in SLOTS:
        programs = _programs(n, effort.steps)
        times = alternate(programs, effort)
        row: dict[str, Any] = {"N": n}
        for name, values in times.items():
            row[name] = spread([value * n * 1e6 for value in values])._asdict()
        rows.append(row)
        for program in programs.values():
            program.close()
    return rows


def _programs(n: int, steps: int) -> dict[str, Program]:
    action, log_prob = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    policy = TensorDictModule(
        lambda _: (action, log_prob), ["observation"], ["action", "action_log_prob"]
    )
    env = NullVectorEnv(n)
    spaces = env.single_observation_space, env.single_action_space
    loop = hand_written.default_autoreset(env, *spaces, lambda _: (action, log_prob), steps)
    return {
        workloads.OURS: workloads.ours(
            tdcollect.make_env(NullVectorEnv(n), categorical_action_encoding=True), policy, steps
        ),
        workloads.HAND: Program(lambda: next(loop), n * steps),
        workloads.TORCHRL: workloads.torchrl(
            GymWrapper(NullVectorEnv(n), categorical_action_encoding=True), policy, steps
        ),
    }
