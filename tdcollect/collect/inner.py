"""Envs without their transforms, on StepDicts: gymnasium slots, or any TorchRL env."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

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
from tdcollect.collect.step_dict import StepDict, chunk_steps, flat, sent, with_index
from tdcollect.collect.transforms import StepTransform, inverted
from tdcollect.envs.adopted import reset_arguments
from tdcollect.envs.beside import HonouredStarts
from tdcollect.envs.slots import SlotError
from tdcollect.envs.spaces import StepBuffers, nested
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.keys import Key

_CPU = torch.device("cpu")
_RESETS = 8  # whose buffers are allocated together at first, unless they are large

Seeds: TypeAlias = list[int] | None
Options: TypeAlias = dict[str, Any] | None
Stepped: TypeAlias = tuple[StepDict, SlotError | None]
"""The following step's entries; the error of slots whose envs raised, whose rows mean nothing."""


class InnerEnv:
    """An env without its transforms.

    Attributes:
        slots: the env on gymnasium slots; None where it has none.
        step_bytes: the size of one step's observations, over all slots.
        whole: whether a reset gives entries of slots that go on, too, which mean nothing.
        follows_specs: as of :class:`StepTransform`.
        transforms: those that run inside of it, innermost first.
        home: the device of its entries.
        resets_by_mask: whether resets may be asked for at every step, by marks alone.
        steps_as_graph: whether steps and such resets may be captured in a CUDA graph.
        how: the way in which it is stepped, in words.
        cost: about what that costs where it leaves the arrays; empty on them.
    """

    slots: GymnasiumEnv | None = None
    step_bytes: int
    whole: bool = False
    follows_specs: bool = True
    transforms: Sequence[StepTransform] = ()
    home: torch.device = _CPU
    resets_by_mask: bool = False
    steps_as_graph: bool = False
    how: str = "steps on arrays"
    cost: str = ""
    rewards: Sequence[Key] = (keys.REWARD,)  # the entries that no reset gives

    def on_host(self, flag: torch.Tensor) -> torch.Tensor | None:
        """The flag's copy on the CPU, if there is one already."""
        return None

    def allocate(self, count: int, pinned: bool, exact: bool) -> list[Any]:
        """Buffers for ``count`` steps; see :meth:`GymnasiumEnv.allocate`."""
        return [None] * count

    def step(self, step: StepDict, slots: list[int] | None, buffers: Any) -> Stepped:
        """Step ``slots`` (None for all); see :meth:`SteppedEnv.advance`."""
        raise NotImplementedError

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        """Start an episode in ``slots``, those marked; the entries of all slots, with flags."""
        raise NotImplementedError


class SlotArrays(InnerEnv):
    """gymnasium slots, which write into arrays."""

    slots: GymnasiumEnv

    def __init__(self, slots: GymnasiumEnv):
        self.slots = slots
        self.step_bytes = _bytes_of(slots)
        self.rewards = slots.reward_keys
        self._pinned = False
        self._spare: list[StepBuffers] = []  # for resets
        self._resets = _RESETS
        self._done: tuple[torch.Tensor, torch.Tensor] | None = None  # at home, and on the CPU

    def allocate(self, count: int, pinned: bool, exact: bool) -> list[StepBuffers]:
        self._pinned = pinned
        return self.slots.allocate(count, pinned, exact)

    def step(self, step: StepDict, slots: list[int] | None, buffers: StepBuffers) -> Stepped:
        error = None
        try:
            self.slots.stepper.step(self.slots.read_actions(step), slots, buffers)
        except SlotError as raised:
            error = raised
        return self.entries(buffers), error

    def entries(self, buffers: StepBuffers) -> StepDict:
        """The entries of a step or reset, at home."""
        entries = StepDict(zip(self.slots.writes, buffers.tensors, strict=True))
        if self.slots.stepper.group_map:
            del entries[keys.REWARD]  # the sum of the agents'
        if self.home == _CPU:
            return entries
        at_home = StepDict((key, sent(value, self.home)) for key, value in entries.items())
        self._done = at_home[keys.DONE], entries[keys.DONE]
        return at_home

    def on_host(self, flag: torch.Tensor) -> torch.Tensor | None:
        # No transform that is known to follow the specs writes into the flag itself.
        return self._done[1] if self._done is not None and flag is self._done[0] else None

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        if not self._spare:
            count = min(self._resets, chunk_steps(self.step_bytes))
            self._spare = self.allocate(count, self._pinned, False)
            self._resets = 2 * count  # where there are many, few are left over
        buffers = self._spare.pop()
        self.slots.stepper.reset(slots, buffers, seeds, options)
        begun = self.entries(buffers)
        for key in self.rewards:
            del begun[key]
        return begun


class MemberSlots(SlotArrays):
    """The slots of envs that begin their episodes by their own resets, transforms included."""

    whole = True

    def __init__(
        self,
        slots: GymnasiumEnv,
        members: Sequence[EnvBase],
        transforms: Sequence[StepTransform],
        shown: Mapping[Key, torch.Tensor],
    ):
        super().__init__(slots)
        self.transforms = transforms
        self._members, self._shown = members, shown
        self._specified: set[Key] | None = None
        if not all(transform.follows_specs for transform in transforms):
            specs = members[0].output_spec.values()
            self._specified = {key for spec in specs for key in spec.keys(True, True)}

    def step(self, step: StepDict, slots: list[int] | None, buffers: StepBuffers) -> Stepped:
        step = inverted(self.transforms, step)
        following, error = super().step(step, slots, buffers)
        for transform in self.transforms:
            transform.step(step, following)
        if self._specified is not None:  # the SerialEnv has room for no other entries
            for key in [key for key in following if key not in self._specified]:
                del following[key]
        # Its buffers are zero where an env writes nothing, in steps and in resets.
        for key in self._shown.keys() - following.keys():
            following[key] = torch.zeros_like(self._shown[key])
        return following, error

    def entries(self, buffers: StepBuffers) -> StepDict:
        # Its transforms run on the CPU, wherever home is.
        return StepDict(zip(self.slots.writes, buffers.tensors, strict=True))

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        starting = torch.ones(1, dtype=torch.bool)
        for i, slot in enumerate(slots):
            member = self._members[slot]
            packed = nested([(keys.RESET, starting)], member.batch_size, member.device)
            seed = None if seeds is None else [seeds[i]]
            row = flat(member.reset(packed, **reset_arguments(member, seed, options)))
            for key, shown in self._shown.items():
                if key in row:
                    shown[slot] = row[key]
        self.slots.stepper.follow()
        begun = StepDict((key, shown.clone()) for key, shown in self._shown.items())
        flags = torch.zeros_like(marks[keys.RESET])
        begun.update((key, flags) for key in keys.FLAGS)
        return begun


class TorchRLEnv(InnerEnv):
    """Any TorchRL env without its transforms, stepped by its own code on TensorDicts."""

    whole = True
    follows_specs = False
    cost = "its own step, and 30 to 60 us"

    def __init__(self, env: EnvBase, reason: str):
        self.how = f"steps by its own code, on TensorDicts: {reason}"
        self.step_bytes = _bytes_of(env)
        self._env = env
        for name in ("resets_by_mask", "steps_as_graph"):
            # Statically at first: wrappers would ask the env inside.
            has_it = inspect.getattr_static(env, name, False)
            setattr(self, name, bool(has_it and getattr(env, name)))
        self.home = with_index(env.device) if env.device else _CPU
        self._flags = [(key, spec.shape) for key, spec in env.full_done_spec.items(True, True)]
        self._step, self._reset = env_step_of(env), env_reset_of(env)
        self._arguments = arguments_of_resets(env)
        self._starts = HonouredStarts(env)

    def step(self, step: StepDict, slots: list[int] | None, buffers: None) -> Stepped:
        with self._starts:
            return self._completed(self._step(self._packed(step))), None

    def _packed(self, entries: StepDict) -> TensorDict:
        env = self._env
        return nested(entries.items(), env.batch_size, env.device and self.home)

    def _completed(self, answer: TensorDictBase) -> StepDict:
        entries = flat(answer)
        if all(key in entries and entries[key].shape == shape for key, shape in self._flags):
            return entries
        complete_done(self._env, answer)
        return flat(answer)

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        arguments = {**self._arguments, **reset_arguments(self._env, seeds, options)}
        with self._starts:  # transforms may step in resets
            return self._completed(self._reset(self._packed(marks), **arguments))


class WholeEnv(InnerEnv):
    """Any TorchRL env with its transforms, by its own ``step``."""

    def __init__(self, env: EnvBase, exact: bool):
        base = base_of(env)
        self.slots = base if isinstance(base, GymnasiumEnv) else None
        self.step_bytes = _bytes_of(env)
        self.home = with_index(env.device) if env.device else _CPU
        self._env, self._exact, self._starts = env, exact, HonouredStarts(env)

    def step(self, step: StepDict, slots: list[int] | None, buffers: None) -> Stepped:
        packed = nested(step.items(), self._env.batch_size, self._env.device)
        exact = self.slots.exact_rewards() if self._exact and self.slots else nullcontext()
        with exact, self._starts:
            return flat(self._env.step(packed).get(keys.NEXT)), None

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        packed = nested(marks.items(), self._env.batch_size, self._env.device)
        arguments = reset_arguments(base_of(self._env), seeds, options)
        with self._starts:
            return flat(self._env.reset(packed, select_reset_only=True, **arguments))


def _bytes_of(env: EnvBase) -> int:
    leaves = env.observation_spec.values(True, True)
    return sum(leaf.shape.numel() * (leaf.dtype or torch.int64).itemsize for leaf in leaves)
