"""The slots of a ``ParallelEnv``: the env that runs them, and a channel to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torchrl.data import Composite
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect.envs.backend import Backend
from tdcollect.envs.process import ProcessBackend
from tdcollect.envs.slot_env import SlotSettings, make_slot
from tdcollect.envs.slot_plan import NotUnderstood, Parts, described, parts_of_made
from tdcollect.envs.stepper import Stepper
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.states import equal


class Channel:
    """The channel to one slot, for the commands of TorchRL's ``ParallelEnv``.

    Args:
        slots: the slots of the env.
        slot: that of this channel.
        lifted: the transforms that run once for all slots.
        digest: identifies them.
    """

    def __init__(self, slots: Backend, slot: int, lifted: Sequence[T.Transform], digest: str):
        self._slots = slots
        self._slot = slot
        self._lifted = lifted
        self._digest = digest
        self._answer: Any = None

    def send(self, message: tuple[Any, Any]) -> None:
        """Have the slot carry out a command."""
        name, data = message
        (self._answer,) = self._slots.call("command", name, data, slots=[self._slot])
        if self._lifted and self._slot == self._slots.num_envs - 1:
            self._follow()

    def _follow(self) -> None:
        """Give the lifted transforms the state that a command has given to those of the slots."""
        digests = self._slots.call("digest")
        if all(digest == self._digest for digest in digests):
            return
        (states,) = self._slots.call("lifted_state", slots=[0])
        same = all(
            equal(dict(transform.state_dict()), state)
            for transform, state in zip(self._lifted, states, strict=True)
        )
        if len(set(digests)) > 1 or same:
            raise RuntimeError(
                "expected the same transforms in all slots, which run once for all of them, got "
                "others; use torchrl.envs.ParallelEnv for slots with settings of their own"
            )
        for transform, state in zip(self._lifted, states, strict=True):
            transform.load_state_dict(state)
        self._digest = digests[0]

    def recv(self) -> Any:
        """The answer to the latest command."""
        return self._answer

    def close(self) -> None:
        """Do nothing: the workers are closed together."""


def env_of_slots(
    factories: Sequence[Callable[[], Any]],
    parts: Parts,
    *,
    device: torch.device | None,
    **options: Any,
) -> GymnasiumEnv:
    """An env ``[N]`` over slots of :func:`make_slot`, with the specs that TorchRL gives them.

    Args:
        factories: one per slot.
        parts: of the env of one.
        device: of the entries.
        **options: of :class:`ProcessBackend`.
    """
    backend = ProcessBackend(factories, parts.categorical, **options)
    try:
        if parts.plan.entries:
            backend.read_info({e.key: np.zeros(e.shape, e.dtype) for e in parts.plan.entries})
        stepper = Stepper(backend, name=parts.name)
        env = GymnasiumEnv(stepper, batched=True, device=device)
        count = len(factories)
        env.observation_spec = _on(parts.observation_spec, env.device).expand(count)
        env.full_action_spec = _on(parts.action_spec, env.device).expand(count)
    except BaseException:
        backend.close()
        raise
    return env


def _on(spec: Composite, device: torch.device | None) -> Composite:
    on_device: Composite = spec.clone().clear_device_() if device is None else spec.to(device)
    return on_device


def vector_env(num_envs: int, create: Callable[[], EnvBase]) -> GymnasiumEnv:
    """An env of ``num_envs`` slots of an env, on worker processes.

    Raises:
        ValueError: if the env cannot be a slot.
    """
    try:
        parts = parts_of_made(create, {})
    except NotUnderstood as reason:
        raise ValueError(
            f"expected an env that can be one of several slots, but {reason}; use ParallelEnv"
        ) from reason
    make: Callable[[], Any]
    if parts.spec is not None:  # its worker needs no torch, and starts at once
        make = partial(gym.make, parts.spec)
    else:
        make = partial(make_slot, create, {}, SlotSettings(parts.plan, None, True, 1))
    factories = [make] * num_envs
    return env_of_slots(factories, parts, device=parts.observation_spec.device)


def with_lifted(base: GymnasiumEnv, lifted: Sequence[T.Transform]) -> EnvBase:
    """The env with transforms that were made for one of its slots."""
    if not lifted:
        return base
    clones = [transform.clone() for transform in lifted]
    for clone in clones:
        if isinstance(clone, T.TensorDictPrimer):
            clone.expand_specs = True
    return TransformedEnv(base, T.Compose(*clones))


def difference(env: EnvBase, inner: EnvBase) -> Any:
    """The first entry whose spec is not the same in both envs; None if there is none."""
    theirs, ours = described(env.specs), described(inner.specs)
    for key in {**theirs, **ours}:
        if theirs.get(key) != ours.get(key):
            return key
    return None
