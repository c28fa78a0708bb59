"""Envs without their transforms, on StepDicts: slots on arrays, and any other TorchRL env."""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect._upstream.torchrl import (
    arguments_of_resets,
    complete_done,
    env_reset_of,
    env_step_of,
)
from tdcollect.collect.fast.islands import StepTransform
from tdcollect.collect.step_dict import Key, StepDict, flat, sent, with_index
from tdcollect.envs.adopted import reset_arguments
from tdcollect.envs.buffers import StepBuffers
from tdcollect.envs.errors import SlotError
from tdcollect.envs.ready_stepper import ReadyStepper, Received
from tdcollect.envs.spaces import key_of, nested, nested_unchecked
from tdcollect.envs.wrapper import GymnasiumEnv

_CPU = torch.device("cpu")

_SPARE_BYTES = 2**16
"""Buffers for resets are allocated in advance where an observation takes no more than this."""


class InnerEnv(abc.ABC):
    """An env without its transforms.

    Attributes:
        slots: the env on gymnasium slots; None where it has none.
        step_bytes: the size of one step's observations, over all slots.
        whole: whether a reset gives entries of slots that go on, too, which mean nothing.
        follows_specs: as of :class:`StepTransform`.
        transforms: those that run inside of it, innermost first.
        home: the device of its entries.
        resets_by_mask: whether it says that resets may be asked for at every step, by marks alone.
        how: the way in which it is stepped, in words.
        cost: about what that costs where it leaves the arrays; empty on them.
    """

    slots: GymnasiumEnv | None = None
    step_bytes: int
    whole = False
    follows_specs = True
    transforms: Sequence[StepTransform] = ()
    home = _CPU
    resets_by_mask = False
    how = "steps on arrays"
    cost = ""

    def on_host(self, flag: torch.Tensor) -> torch.Tensor | None:
        """A flag of another device on the CPU, where it is known without a wait for that device."""
        return None

    @abc.abstractmethod
    def allocate(self, count: int, pinned: bool, exact: bool) -> list[Any]:
        """Buffers for ``count`` steps; see :meth:`GymnasiumEnv.allocate`."""

    @abc.abstractmethod
    def step(
        self, given: StepDict, slots: list[int] | None, buffers: Any
    ) -> tuple[StepDict, SlotError | None]:
        """Step ``slots`` (None for all); see :meth:`SteppedEnv.advance`."""

    @abc.abstractmethod
    def reset(
        self,
        marks: StepDict,
        slots: list[int],
        seeds: list[int] | None,
        options: dict[str, Any] | None,
    ) -> StepDict:
        """Start an episode in ``slots``.

        Args:
            marks: has ``"_reset"``, true for these slots.
            slots: ascending.
            seeds: one per slot in ``slots``.
            options: gymnasium's reset options.

        Returns:
            The entries of all slots, flags included.
        """


class SlotArrays(InnerEnv):
    """gymnasium slots, which write into arrays.

    Args:
        slots: the env.
    """

    slots: GymnasiumEnv

    def __init__(self, slots: GymnasiumEnv):
        entries = slots.stepper.entries
        sizes = (entry.dtype.itemsize * math.prod(entry.shape) for entry in entries)
        self.slots = slots
        self.step_bytes = slots.num_envs * sum(sizes)
        flags = (keys.TERMINATED, keys.TRUNCATED, keys.DONE)
        self._written: list[Key] = [*(key_of(e.path) for e in entries), keys.REWARD, *flags]
        self._spare: list[StepBuffers] = []
        self._pinned = False
        self._done: tuple[torch.Tensor, torch.Tensor] | None = None  # at home, and on the CPU

    def allocate(self, count: int, pinned: bool, exact: bool) -> list[StepBuffers]:
        self._pinned = pinned
        return self.slots.allocate(count, pinned, exact)

    def step(
        self, given: StepDict, slots: list[int] | None, buffers: StepBuffers
    ) -> tuple[StepDict, SlotError | None]:
        error = None
        try:
            self.slots.stepper.step(self.slots.read_actions(given), slots, buffers)
        except SlotError as raised:
            error = raised
        return self._entries(buffers), error

    def _entries(self, buffers: StepBuffers) -> StepDict:
        entries = StepDict(zip(self._written, buffers.tensors, strict=True))
        if self.home == _CPU:
            return entries
        at_home = StepDict((key, sent(value, self.home)) for key, value in entries.items())
        self._done = at_home[keys.DONE], entries[keys.DONE]
        return at_home

    def on_host(self, flag: torch.Tensor) -> torch.Tensor | None:
        # No transform that is known to follow the specs writes into the flag itself.
        known = self._done is not None and flag is self._done[0]
        return self._done[1] if known else None  # type: ignore[index]

    def receive(self, buffers: StepBuffers) -> tuple[StepDict, Received]:
        """Wait for slots that were sent; the entries that they came to, of all slots."""
        assert isinstance(self.slots.stepper, ReadyStepper)
        received = self.slots.stepper.receive(buffers)
        return self._entries(buffers), received

    def reset(
        self,
        marks: StepDict,
        slots: list[int],
        seeds: list[int] | None,
        options: dict[str, Any] | None,
    ) -> StepDict:
        if not self._spare:
            # Several at once cost little more than one; large ones would take memory for nothing.
            count = 1 if self.step_bytes > _SPARE_BYTES else 32
            self._spare = self.slots.allocate(count, self._pinned)
        buffers = self._spare.pop()
        self.slots.stepper.reset(slots, buffers, seeds, options)
        begun = self._entries(buffers)
        del begun[keys.REWARD]
        return begun


class TorchRLEnv(InnerEnv):
    """Any TorchRL env, stepped by its own code on TensorDicts.

    Args:
        env: the env, without its transforms.
        reason: why it is not on arrays.
    """

    whole = True
    follows_specs = False
    cost = "its own step, and 30 to 60 us"

    def __init__(self, env: EnvBase, reason: str):
        self.how = f"steps by its own code, on TensorDicts: {reason}"
        leaves = env.observation_spec.values(True, True)
        self.step_bytes = sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves)
        self._env = env
        # Statically at first: wrappers would ask the env inside.
        has_it = inspect.getattr_static(env, "resets_by_mask", False)
        self.resets_by_mask = bool(has_it and env.resets_by_mask)
        self.home = with_index(env.device) if env.device else _CPU
        self._flags = [(key, spec.shape) for key, spec in env.full_done_spec.items(True, True)]
        self._step, self._reset = env_step_of(env), env_reset_of(env)
        self._arguments = arguments_of_resets(env)

    def allocate(self, count: int, pinned: bool, exact: bool) -> list[None]:
        return [None] * count  # it allocates its own output

    def step(
        self, given: StepDict, slots: list[int] | None, buffers: None
    ) -> tuple[StepDict, SlotError | None]:
        return self._completed(self._step(self._packed(given))), None

    def _packed(self, entries: StepDict) -> TensorDict:
        env = self._env
        if env.device is None or all(value.device == self.home for value in entries.values()):
            return nested_unchecked(entries.items(), env.batch_size, env.device and self.home)
        return nested(entries.items(), env.batch_size, env.device)

    def _completed(self, made: TensorDictBase) -> StepDict:
        entries = flat(made)
        if all(key in entries and entries[key].shape == shape for key, shape in self._flags):
            return entries
        complete_done(self._env, made)
        return flat(made)

    def reset(
        self,
        marks: StepDict,
        slots: list[int],
        seeds: list[int] | None,
        options: dict[str, Any] | None,
    ) -> StepDict:
        env = self._env
        arguments = {**self._arguments, **reset_arguments(env, seeds, options)}
        return self._completed(self._reset(self._packed(marks), **arguments))


class RewardShape(StepTransform):
    """Gives rewards the shape of their spec, as ``EnvBase.step`` does last."""

    anywhere = True

    def __init__(self, env: EnvBase):
        self._shapes = {key: env.full_reward_spec[key].shape for key in env.reward_keys}

    def step(self, step: StepDict, following: StepDict) -> None:
        for key, shape in self._shapes.items():
            if following[key].shape != shape:
                following[key] = following[key].view(shape)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        pass
