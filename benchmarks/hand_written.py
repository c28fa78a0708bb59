"""Hand-written collection loops in CleanRL's style: no TensorDict, no collector.

They use the vector env, the network, a torch distribution, and tensors allocated beforehand. Each
is an endless generator of batches ``[T, N]``; the next batch reuses the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

Sample = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Observations ``[N, *obs]`` to actions and their log-probabilities."""


def vector_env(env_id: str, num_envs: int, mode: AutoresetMode) -> SyncVectorEnv:
    """gymnasium's vector env in this process."""
    return SyncVectorEnv([lambda: gym.make(env_id)] * num_envs, autoreset_mode=mode)


def categorical(net: nn.Module) -> Sample:
    """Sample integers from the network's logits."""

    def sample(observation: Tensor) -> tuple[Tensor, Tensor]:
        distribution = Categorical(logits=net(observation))
        action = distribution.sample()
        return action, distribution.log_prob(action)

    return sample


def multinomial(net: nn.Module) -> Sample:
    """The same without a distribution object: the quickest way in torch."""

    def sample(observation: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.log_softmax(net(observation), -1)
        action = torch.multinomial(scores.exp(), 1)
        return action[:, 0], scores.gather(-1, action)[:, 0]

    return sample


def tanh_normal(net: nn.Module) -> Sample:
    """Sample from a normal distribution and squash; actions lie in [-1, 1]."""

    def sample(observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = net(observation)
        distribution = Normal(loc, scale)
        drawn = distribution.sample()
        action = torch.tanh(drawn)
        log_prob = distribution.log_prob(drawn) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(-1)

    return sample


def every_row_real(envs: SyncVectorEnv, sample: Sample, steps: int) -> Iterator[Any]:
    """The loop that a correct PPO needs, on a vector env in SAME_STEP mode.

    Every row is a transition. Termination and truncation are stored separately. Final observations
    are kept, since a truncated episode bootstraps from its own.
    """
    n = envs.num_envs
    storage = _Storage(steps, n, envs.single_observation_space, envs.single_action_space)
    terminations, truncations = (torch.zeros((steps, n), dtype=torch.bool) for _ in range(2))
    following = _tensor(envs.reset(seed=0)[0])
    while True:
        finals = []
        for step in range(steps):
            storage.observations[step] = following
            with torch.no_grad():
                action, log_prob = sample(following)
            storage.actions[step] = action
            storage.log_probs[step] = log_prob
            observation, reward, terminated, truncated, info = envs.step(action.numpy())
            storage.rewards[step] = torch.as_tensor(reward)
            terminations[step] = torch.as_tensor(terminated)
            truncations[step] = torch.as_tensor(truncated)
            ended = np.logical_or(terminated, truncated)
            if ended.any():
                for slot in np.flatnonzero(ended):
                    finals.append((step, slot, info["final_obs"][slot]))
            following = _tensor(observation)
        yield storage, terminations, truncations, finals


def default_autoreset(
    envs: Any, observation_space: gym.Space, action_space: gym.Space, sample: Sample, steps: int
) -> Iterator[Any]:
    """The most common loop, on an env in NEXT_STEP mode: gymnasium's default, and EnvPool's.

    After an episode's last row comes one whose action is ignored and whose next observation is the
    next episode's first: one row per episode is no transition.
    """
    n = envs.num_envs
    storage = _Storage(steps, n, observation_space, action_space)
    dones = torch.zeros((steps, n))
    following, done = _tensor(envs.reset()[0]), torch.zeros(n)
    while True:
        for step in range(steps):
            storage.observations[step] = following
            dones[step] = done
            with torch.no_grad():
                action, log_prob = sample(following)
            storage.actions[step] = action
            storage.log_probs[step] = log_prob
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            storage.rewards[step] = torch.as_tensor(reward)
            following = _tensor(observation)
            done = torch.as_tensor(np.logical_or(terminated, truncated))
        yield storage, dones


def restarted_in_pool(pool: Any, ended: np.ndarray, observation: np.ndarray) -> np.ndarray:
    """EnvPool's observations after a second call, which restarts the slots that have ended."""
    slots = np.flatnonzero(ended).astype(np.int32)
    observation[slots] = pool.reset(slots)[0]
    return observation


def restarted_by_mask(envs: Any, ended: np.ndarray, observation: np.ndarray) -> np.ndarray:
    """The observations after a reset of the slots that a mask names, as gymnasium has it."""
    return envs.reset(options={"reset_mask": ended})[0]


def slots_reset_singly(
    envs: Any,
    observation_space: gym.Space,
    action_space: gym.Space,
    sample: Sample,
    steps: int,
    restarted: Callable[[Any, np.ndarray, np.ndarray], np.ndarray] = restarted_in_pool,
    keeps_next: bool = False,
) -> Iterator[Any]:
    """The loop with every row a transition: a second call restarts slots that have ended.

    Next observations are kept of all rows (``keeps_next``), or of those that end an episode.
    """
    n = envs.num_envs
    storage = _Storage(steps, n, observation_space, action_space)
    terminations, truncations = (torch.zeros((steps, n), dtype=torch.bool) for _ in range(2))
    nexts = torch.zeros_like(storage.observations) if keeps_next else None
    following = _tensor(envs.reset()[0])
    while True:
        finals = []
        for step in range(steps):
            storage.observations[step] = following
            with torch.no_grad():
                action, log_prob = sample(following)
            storage.actions[step] = action
            storage.log_probs[step] = log_prob
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            storage.rewards[step] = torch.as_tensor(reward)
            terminations[step] = torch.as_tensor(terminated)
            truncations[step] = torch.as_tensor(truncated)
            ended = np.logical_or(terminated, truncated)
            if nexts is not None:
                nexts[step] = torch.as_tensor(observation)
            if ended.any():
                if nexts is None:
                    finals.append((step, ended, observation[ended]))
                observation = restarted(envs, ended, observation)
            following = _tensor(observation)
        yield storage, terminations, truncations, nexts, finals


class _Storage:
    def __init__(self, steps: int, num_envs: int, observation: gym.Space, action: gym.Space):
        pixels = observation.dtype == np.uint8
        kind = torch.uint8 if pixels else torch.float32
        integers = isinstance(action, gym.spaces.Discrete)
        self.observations = torch.zeros((steps, num_envs, *observation.shape), dtype=kind)
        self.actions = torch.zeros(
            (steps, num_envs, *action.shape), dtype=torch.int64 if integers else torch.float32
        )
        self.log_probs = torch.zeros((steps, num_envs))
        self.rewards = torch.zeros((steps, num_envs))


def _tensor(observation: np.ndarray) -> Tensor:
    """A tensor: pixels unchanged, other observations in the network's precision."""
    pixels = observation.dtype == np.uint8
    return torch.as_tensor(observation, dtype=torch.uint8 if pixels else torch.float32)
