"""The arguments of an evaluation, checked before an env is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torchrl.envs import EnvBase
from torchrl.envs.transforms import VecNormV2

from tdcollect.collect.env_parts import transforms_of
from tdcollect.envs.make import BACKENDS, make_env
from tdcollect.evaluation.errors import NotReproducibleError
from tdcollect.seeding import env_seed, policy_seed

Seeds = Sequence[int] | Callable[[int], int]


def indices_of(episodes: int | Sequence[int]) -> Sequence[int]:
    """The numbers of the episodes to run, from how many or which they are."""
    if is_count(episodes) and int(episodes) <= sys.maxsize:  # type: ignore[arg-type]
        return range(int(episodes))  # type: ignore[arg-type]
    if isinstance(episodes, (Sequence, np.ndarray)) and all(map(is_count, episodes)):
        numbers = [int(number) for number in episodes]
        if len(set(numbers)) == len(numbers) and max(numbers, default=0) <= sys.maxsize:
            return numbers
    raise ValueError(
        "expected episodes to be a count, or numbers that are not negative, below 2**63 and do not "
        f"recur, got {episodes!r}"
    )


def is_count(value: Any) -> bool:
    """Whether a value is an int, and not negative."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def check_seed(seed: int) -> None:
    if not is_count(seed):
        raise ValueError(f"expected a root seed that is an int and not negative, got {seed!r}")


def check_positive(name: str, value: Any) -> None:
    if not is_count(value) or value < 1:
        raise ValueError(f"expected {name} to be a positive int, got {value!r}")


def seed_schedule(
    root: int, env_seeds: Seeds | None, numbers: Sequence[int]
) -> Callable[[int], tuple[int, int]]:
    """The seed of the env and of the policy in each episode."""
    if env_seeds is None:
        return _recent(lambda number: (env_seed(root, number), policy_seed(root, number)))
    if not callable(env_seeds) and not isinstance(env_seeds, (Sequence, np.ndarray)):
        raise TypeError(
            "expected env_seeds to be one int per episode, or a function of the episode's index, "
            f"got {env_seeds!r}"
        )
    given = env_seeds if callable(env_seeds) else list(env_seeds).__getitem__
    if not callable(env_seeds) and len(env_seeds) <= max(numbers, default=-1):
        raise ValueError(
            f"expected a seed for each of the episodes up to number {max(numbers)}, got "
            f"{len(env_seeds)} seeds"
        )
    chosen = {number: given(number) for number in numbers}
    for number, value in chosen.items():
        if not is_count(value):
            raise ValueError(
                f"expected env_seeds that are ints and not negative, got {value!r} for episode "
                f"{number}"
            )
    first: dict[int, int] = {}
    for number, value in chosen.items():
        before = first.setdefault(int(value), number)
        if before != number:
            raise ValueError(
                f"expected a seed of its own for each episode, got {value} for episodes {before} "
                f"and {number}: one would count twice, and intervals would be too narrow; give "
                "seeds that do not recur"
            )
    return _recent(lambda number: (int(chosen[number]), policy_seed(root, number)))


# An episode's seeds are asked for when it starts and when it ends; of a million, few run at once.
_recent = lru_cache(maxsize=2**14)


def made_env(
    env: Any,
    num_envs: int | None,
    backend: str | None,
    env_kwargs: dict[str, Any] | None,
    episodes: int,
) -> EnvBase:
    """The env; of slots that are made here, there are no more than episodes."""
    given = {"num_envs": num_envs, "backend": backend, "env_kwargs": env_kwargs}
    given = {name: value for name, value in given.items() if value is not None}
    if backend not in (None, *BACKENDS):
        raise ValueError(f"expected a backend of {', '.join(BACKENDS)}, got {backend!r}")
    if isinstance(env, EnvBase):
        if given:
            raise ValueError(f"the env {env} is made already: expected no {', '.join(given)}")
        return env
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)) or not (
        isinstance(env, str) or callable(env)
    ):
        raise TypeError(
            "expected a gymnasium id, a callable that makes an env, or an env of "
            f"tdcollect.make_env, got {env!r}; a gymnasium env that is made already goes through "
            "tdcollect.make_env(env)"
        )
    if not isinstance(env, str):
        made = env(**(env_kwargs or {}))
        if isinstance(made, EnvBase):
            given.pop("env_kwargs", None)
            if given:
                made.close()
                raise ValueError(
                    f"the callable makes an env whose slots are settled, {made}: expected no "
                    f"{', '.join(given)}"
                )
            return made
        if hasattr(made, "close"):
            made.close()  # it was to see what is made
    slots = min(16 if num_envs is None else num_envs, max(episodes, 1))
    return make_env(env, num_envs=slots, backend=backend, env_kwargs=env_kwargs)


def check_transforms(env: EnvBase) -> None:
    """Raise for a transform that makes an episode's data depend on its slot or its neighbours."""
    for transform in transforms_of(env):
        by_slot = isinstance(transform, VecNormV2) and not transform.reduce_batch_dims
        if by_slot and env.batch_size:
            raise NotReproducibleError(
                "the transform VecNormV2 keeps statistics of each slot apart, so that an episode "
                "would depend on where it runs; make it with reduce_batch_dims=True"
            )
        if next(transform.parameters(), None) is not None:
            raise NotReproducibleError(
                f"the transform {type(transform).__name__} runs a network, at a batch size that is "
                "the number of slots: it would round otherwise with another one. Move the network "
                "into the policy"
            )


def device_of(policy: Any, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
