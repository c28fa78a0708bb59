"""Private names of TorchRL's envs: of ``ParallelEnv``, ``GymWrapper`` and ``EnvCreator``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl import _utils
from torchrl._utils import _get_default_mp_start_method
from torchrl.envs import EnvBase, EnvCreator, GymEnv, GymWrapper, ParallelEnv
from torchrl.envs.batched_envs import _recursively_strip_locks_from_state_dict as without_locks

_PIPE_TIMEOUT = 10_000.0

ParallelEnvMeta: Any = type(ParallelEnv)
"""The metaclass that gives a ``SerialEnv`` for ``serial_for_single``."""

GymEnvMeta: Any = type(GymEnv)
"""The metaclass that gives a ``ParallelEnv`` for ``num_workers``."""

READING_METHODS = (
    "_step",
    "_reset",
    "step",
    "reset",
    "read_action",
    "read_done",
    "read_obs",
    "read_reward",
)
"""The methods of a ``GymWrapper`` that make its steps and resets."""


TRANSIENT_ATTRIBUTES = {"_container", "_parent", "_reset_key", "_reset_keys", "_validated"}
"""Attributes of transforms that are set when their env runs."""


def step_inside(env: EnvBase, tensordict: TensorDictBase) -> TensorDictBase:
    """Step an env within the step of another; returns the entries of ``"next"``."""
    return env._step(tensordict)


def reset_inside(env: EnvBase, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
    """Reset an env within the reset of another."""
    return env._reset(tensordict, **kwargs)


def start_method(env: ParallelEnv) -> str:
    """The multiprocessing start method of a ``ParallelEnv``."""
    return str(env._mp_start_method or _get_default_mp_start_method())


def uses_buffers(env: ParallelEnv) -> bool:
    """Tell whether workers write into memory that they share, as they do by default."""
    return bool(env._use_buffers)


def seeds_torch(env: ParallelEnv) -> bool:
    """Tell whether ``set_seed`` seeds torch in the workers, as those with shared buffers do."""
    return bool(env._use_buffers)


def has_metadata_from_workers(env: ParallelEnv) -> bool:
    """Tell whether the workers of a ``ParallelEnv`` start with it, and give its specs."""
    return bool(env._metadata_from_workers)


def shares_memory(env: ParallelEnv) -> bool:
    """Tell whether tensors travel in shared memory rather than in memory-mapped files."""
    return bool(env._share_memory) and not env._memmap


def is_view(env: ParallelEnv) -> bool:
    """Tell whether a ``ParallelEnv`` is an index into another."""
    return not env._owns_workers


def chain_of_seeds(env: ParallelEnv) -> list[int] | None:
    """The seeds of the latest ``set_seed``, one per slot; None before it."""
    seeds: list[int] | None = env._seeds
    return seeds


class _Done:
    """An event that has happened: calls of slots return when they are done."""

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def clear(self) -> None:
        pass


def set_channels(env: ParallelEnv, channels: Sequence[Any]) -> None:
    """Give a ``ParallelEnv`` channels to its slots in place of processes of its own."""
    env.parent_channels = list(channels)
    env._workers = []
    env._events = [_Done() for _ in channels]


def drop_channels(env: ParallelEnv) -> None:
    """Take away what :func:`set_channels` gave."""
    for name in ("parent_channels", "_workers", "_events"):
        env.__dict__.pop(name, None)


def pipe_timeout() -> float | None:
    """The seconds that workers may take; None for TorchRL's default, which is hours."""
    timeout = float(_utils.BATCHED_PIPE_TIMEOUT)
    return None if timeout == _PIPE_TIMEOUT else timeout


def limit_threads(env: ParallelEnv) -> None:
    """Give this process as many of torch's threads as TorchRL does beside its workers."""
    if env.num_threads is None:
        env.num_threads = max(1, torch.get_num_threads() - env.num_workers)
    if env.num_threads != torch.get_num_threads():
        torch.set_num_threads(env.num_threads)


def shared_values(creator: EnvCreator) -> bool:
    """Tell whether the envs of a creator share values between processes."""
    return bool(creator._mp_values) or bool(creator.state_dict())


def converts_actions(env: GymWrapper) -> bool:
    """Tell whether a ``GymWrapper`` gives its env NumPy actions."""
    return bool(env._convert_actions_to_numpy)


def is_categorical(env: GymWrapper) -> bool:
    """Tell whether a ``GymWrapper`` encodes discrete spaces as integers."""
    return bool(env._categorical_action_encoding)


def is_vectorised(env: GymWrapper) -> bool:
    """Tell whether the env inside a ``GymWrapper`` is a vector env."""
    return bool(env._is_batched)


def stands_for_env(argument: Any) -> bool:
    """Tell whether an argument of a call by name stands for the ``ParallelEnv`` itself."""
    return isinstance(argument, str) and argument == "_self"


def set_wrapped_env(env: GymWrapper, wrapped: Any) -> None:
    """Put another env inside a ``GymWrapper``."""
    env._env = wrapped


__all__ = [
    "READING_METHODS",
    "TRANSIENT_ATTRIBUTES",
    "GymEnvMeta",
    "ParallelEnvMeta",
    "chain_of_seeds",
    "converts_actions",
    "drop_channels",
    "has_metadata_from_workers",
    "is_categorical",
    "is_vectorised",
    "is_view",
    "limit_threads",
    "pipe_timeout",
    "reset_inside",
    "seeds_torch",
    "set_channels",
    "set_wrapped_env",
    "shared_values",
    "shares_memory",
    "stands_for_env",
    "start_method",
    "step_inside",
    "uses_buffers",
    "without_locks",
]
