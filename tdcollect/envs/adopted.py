"""TorchRL's own gymnasium envs, adopted: the slots inside them, for stepping on arrays.

A ``GymEnv``, a ``GymWrapper``, or a ``SerialEnv`` of these stays the user's, with its methods and
its state. The collector steps the gymnasium envs that are in it, as a :class:`GymnasiumEnv`
would. There is no second set of envs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import gymnasium as gym
import torch
from torchrl.envs import EnvBase, GymWrapper, SerialEnv, TransformedEnv
from torchrl.envs import ParallelEnv as TorchRLParallelEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from tdcollect._upstream.torchrl import (
    converts_actions,
    is_categorical,
    next_seed,
    replaced_methods,
    serial_envs,
    shown_by_resets,
    wrapped_env,
)
from tdcollect.envs.buffers import Bookkeeping
from tdcollect.envs.parallel import SINGLE, ParallelEnv
from tdcollect.envs.serial import SerialBackend
from tdcollect.envs.slots import Can, Stepper
from tdcollect.envs.traits import NotKnown, base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.seeding import slot_seeds

SERIAL = (SerialEnv,)
"""The classes of several envs in this process that are known to the letter."""


class Adopted(NamedTuple):
    """The slots of a TorchRL env.

    Attributes:
        slots: the env on them.
        members: the single envs, with transforms of their own; empty for a single env itself.
        shown: the tensors ``[N, ...]`` in which TorchRL's env keeps what the latest reset of each
            slot gave, by entry; empty for a single env.
    """

    slots: GymnasiumEnv
    members: Sequence[EnvBase]
    shown: dict[Any, torch.Tensor]


def chain(seed: int, count: int, static: bool = False) -> list[int]:
    """The seeds that ``set_seed(seed)`` of TorchRL's batched envs gives their envs, in order."""
    seeds = [seed]
    for _ in range(count - 1):
        seeds.append(seeds[-1] if static else next_seed(seeds[-1]))
    return seeds


def early_seeds(env: EnvBase, seed: int, static: bool = False) -> list[int] | None:
    """The seeds of the episodes that ``set_seed`` starts at once, one per slot.

    ``GymWrapper`` resets its env as it is seeded: the reset that follows begins another episode,
    unless it is given the seed again. None for envs that seed their next reset.
    """
    if isinstance(env, GymWrapper):  # a vector env counts on from the seed
        return slot_seeds(seed, range(env.batch_size.numel()))
    if isinstance(env, ParallelEnv) and env.inner is not None:
        return chain(seed, env.num_workers, static)
    if isinstance(env, SERIAL):
        members = [base_of(member) for member in serial_envs(env) or ()]
        if members and all(isinstance(member, GymWrapper) for member in members):
            return chain(seed, len(members), static)
    return None


def reset_arguments(
    env: EnvBase, seeds: Sequence[int] | None, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The arguments with which the ``reset`` of an env without transforms seeds its slots."""
    given = {"seed": seeds, "options": options}
    if seeds is not None and isinstance(env, BatchedEnvBase):
        rest = {} if options is None else {"options": options}
        return {"list_of_kwargs": [{"seed": seed, **rest} for seed in seeds]}
    if seeds is not None and not env.batch_size:
        given["seed"] = seeds[0]  # type: ignore[assignment]
    return {name: value for name, value in given.items() if value is not None}


class _Repeated(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats each action, as ``GymEnv(frame_skip=)`` does where the env itself cannot."""

    def __init__(self, env: gym.Env[Any, Any], times: int):
        super().__init__(env)
        self.times = times

    def step(self, action: Any) -> Any:
        total: Any = 0
        for _ in range(self.times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total = total + reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class _Borrowed(SerialBackend):
    """gymnasium envs that belong to a TorchRL env."""

    can = Can(step_ended=True)

    def close(self) -> None:
        """Do nothing: their owner closes them."""


_made: WeakKeyDictionary[EnvBase, tuple[Sequence[Any], GymnasiumEnv]] = WeakKeyDictionary()


def take_over(env: EnvBase) -> None:
    """Have a ``ParallelEnv`` of TorchRL's start our workers, if it has started none.

    It stays the user's object, and becomes one of :class:`tdcollect.envs.ParallelEnv`.
    """
    base = base_of(env)
    if type(base) is TorchRLParallelEnv:
        ParallelEnv.adopt(base)


def adopt(env: EnvBase) -> Adopted:
    """The slots of a TorchRL env, without its transforms.

    Types and ``vars`` alone tell what it is: looking up other attributes may start processes.

    Raises:
        NotKnown: for an env whose own code must step it.
    """
    members: Sequence[EnvBase] = ()
    shown: dict[Any, torch.Tensor] = {}
    if type(env) in SERIAL:
        _check_methods(env)
        found, kept = serial_envs(env), shown_by_resets(env)
        if found is None or kept is None:
            raise NotKnown("it is closed, or its envs cannot share a batch")
        members, shown = found, kept
        singles = [_check_single(_member(member)) for member in members]
    elif isinstance(env, BatchedEnvBase):
        why = env.fallback_reason if isinstance(env, ParallelEnv) else None
        raise NotKnown(
            "its envs are in processes of TorchRL's: "
            + (why or "they have started; import ParallelEnv from tdcollect.envs")
        )
    else:
        singles = [_check_single(env)]
    # Kept, since making it costs more than a batch; a user may have put other envs inside.
    parts = [
        part
        for single in singles
        for part in (wrapped_env(single), single.wrapper_frame_skip, is_categorical(single))
    ]
    known = _made.get(env)
    if known is None or list(map(id, known[0])) != list(map(id, parts)):
        known = _made[env] = (parts, _make(env, singles))
    slots = known[1]
    slots.stepper.follow()
    return Adopted(slots, members, shown)


def _check_methods(env: EnvBase) -> None:
    if own := replaced_methods(env):
        raise NotKnown(f"its {type(env).__name__} has a {own[0]} of its own")


def _member(env: EnvBase) -> EnvBase:
    if type(env) is not TransformedEnv:
        return env
    _check_methods(env)
    return env.base_env


def _check_single(env: EnvBase) -> GymWrapper:
    if type(env) not in SINGLE:
        raise NotKnown(
            f"a {type(env).__name__} is no GymEnv; a gymnasium env is faster by make_env or GymEnv"
        )
    _check_methods(env)
    inside = wrapped_env(env)
    if not isinstance(inside, gym.Env):
        raise NotKnown(f"its env is a {type(inside).__name__}, no gymnasium.Env")
    if env.info_dict_reader:
        raise NotKnown("it reads infos; use make_env(info_keys=...)")
    if not converts_actions(env):
        raise NotKnown("it hands tensors to its env")
    return env


def _make(env: EnvBase, singles: Sequence[GymWrapper]) -> GymnasiumEnv:
    categorical = is_categorical(singles[0])
    envs = [
        wrapped_env(single)
        if single.wrapper_frame_skip == 1
        else _Repeated(wrapped_env(single), single.wrapper_frame_skip)
        for single in singles
    ]
    try:
        backend = _Borrowed([partial(_itself, made) for made in envs], categorical)
    except (TypeError, ValueError) as error:
        raise NotKnown(str(error)) from error
    name = str(envs[0].spec.id) if envs[0].spec is not None else type(envs[0]).__name__

    def over(batched: bool) -> GymnasiumEnv:
        stepper = Stepper(backend, Bookkeeping(), name=name)
        return GymnasiumEnv(stepper, batched=batched, device=env.device)

    one = over(batched=False)
    for single in singles:
        for spec in ("output_spec", "input_spec"):
            if getattr(single, spec).to("cpu") != getattr(one, spec).to("cpu"):
                raise NotKnown(f"its {spec} is not that of its gymnasium spaces")
    return over(batched=bool(env.batch_size))


def _itself(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return env
