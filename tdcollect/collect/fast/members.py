"""The envs of a ``SerialEnv`` that have transforms of their own, stepped together on arrays.

Transforms that treat each row by itself, and are alike in all envs, are lifted to the batch. The
others run env by env. An env with such a transform begins its episodes by its own ``reset``: it
may take no-op steps there, draw numbers, or update statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream.torchrl import does_nothing_in_steps, settings_of
from tdcollect.collect.fast.inner import InnerEnv, SlotArrays
from tdcollect.collect.fast.islands import Island, NotOnArrays, StepTransform
from tdcollect.collect.fast.transforms import lower_transforms
from tdcollect.collect.step_dict import Key, StepDict, flat
from tdcollect.envs.adopted import reset_arguments
from tdcollect.envs.errors import SlotError
from tdcollect.envs.spaces import nested
from tdcollect.envs.transforms import is_lifted, transforms_of
from tdcollect.states import equal


class Shown(StepTransform):
    """Notes what resets give in the tensors where TorchRL's ``SerialEnv`` keeps it.

    Args:
        shown: these tensors ``[N, ...]``, by entry.
        mixes: whether transforms follow that mix rows: these must find there what they find under
            TorchRL, for slots that go on the entries of their latest reset.
    """

    def __init__(self, shown: Mapping[Key, torch.Tensor], mixes: bool):
        self._shown = shown
        self._mixes = mixes

    def step(self, step: StepDict, following: StepDict) -> None:
        pass

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        starting = marks[keys.RESET].view(-1)
        for key, shown in self._shown.items():
            value, there = (
                begun[key],
                shown.device,
            )  # which the env names; its envs may be elsewhere
            marked = starting.to(there)
            shown[marked] = value.to(there)[marked]
            if self._mixes:
                begun[key] = shown.to(value.device, copy=True)


class _EnvByEnv(StepTransform):
    """One transform per env, each on the row of its slot.

    Args:
        transforms: one per slot.
    """

    by_row = False

    def __init__(self, transforms: Sequence[StepTransform]):
        self._transforms = transforms
        self.how = f"env by env, {transforms[0].how}"
        self.label = transforms[0].label
        self.follows_specs = transforms[0].follows_specs
        self.cost = transforms[0].cost and f"{transforms[0].cost} and env"

    def inv(self, step: StepDict) -> None:
        rows = self._rows(step)
        found = [dict(row) for row in rows]
        for transform, row in zip(self._transforms, rows, strict=True):
            transform.inv(row)
        _join(step, rows, found)

    def step(self, step: StepDict, following: StepDict) -> None:
        taken, rows = self._rows(step), self._rows(following)
        found = [dict(row) for row in rows]
        for transform, given, row in zip(self._transforms, taken, rows, strict=True):
            transform.step(given, row)
        _join(following, rows, found)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        raise NotImplementedError("envs with such a transform begin episodes by their own reset")

    def _rows(self, step: StepDict) -> list[StepDict]:
        unbound = [(key, value.unbind(0)) for key, value in step.items()]
        slots = range(len(self._transforms))
        return [StepDict((key, values[slot]) for key, values in unbound) for slot in slots]


def _join(
    step: StepDict, rows: Sequence[StepDict], found: Sequence[dict[Key, torch.Tensor]]
) -> None:
    """Take over what has changed in some rows since they were found so."""
    for key in [key for key in step if key not in rows[0]]:
        del step[key]
    for key in rows[0]:
        if any(row[key] is not old.get(key) for row, old in zip(rows, found, strict=True)):
            step[key] = torch.stack([torch.as_tensor(row[key]) for row in rows])


class MemberSlots(InnerEnv):
    """The slots of envs that begin their episodes by their own resets.

    Args:
        arrays: the slots, without the transforms.
        members: the envs with their transforms, one per slot.
        transforms: on the rows of all slots.
        shown: the tensors in which the ``SerialEnv`` keeps what its resets gave.
    """

    whole = True

    def __init__(
        self,
        arrays: SlotArrays,
        members: Sequence[EnvBase],
        transforms: Sequence[StepTransform],
        shown: Mapping[Key, torch.Tensor],
    ):
        self.slots = arrays.slots
        self.step_bytes = arrays.step_bytes
        self.transforms = transforms
        self._arrays = arrays
        self._members = members
        self._shown = shown
        self._written: set[Key] | None = None
        if not all(transform.follows_specs for transform in transforms):
            specs = members[0].output_spec.values()
            self._written = {key for spec in specs for key in spec.keys(True, True)}

    def allocate(self, count: int, pinned: bool, exact: bool) -> list[Any]:
        return self._arrays.allocate(count, pinned, exact)

    def step(
        self, given: StepDict, slots: list[int] | None, buffers: Any
    ) -> tuple[StepDict, SlotError | None]:
        given = StepDict(given)
        for transform in reversed(self.transforms):
            transform.inv(given)
        following, error = self._arrays.step(given, slots, buffers)
        for transform in self.transforms:
            transform.step(given, following)
        if self._written is not None:  # the SerialEnv has room for no other entries
            for key in [key for key in following if key not in self._written]:
                del following[key]
        return following, error

    def reset(
        self,
        marks: StepDict,
        slots: list[int],
        seeds: list[int] | None,
        options: dict[str, Any] | None,
    ) -> StepDict:
        starting = torch.ones(1, dtype=torch.bool)
        for i, slot in enumerate(slots):
            member = self._members[slot]
            given = nested([(keys.RESET, starting)], member.batch_size, member.device)
            seed = None if seeds is None else [seeds[i]]
            row = flat(member.reset(given, **reset_arguments(member, seed, options)))
            for key, shown in self._shown.items():
                shown[slot] = row[key]
        self._arrays.slots.stepper.follow()
        begun = StepDict((key, shown.clone()) for key, shown in self._shown.items())
        flags = torch.zeros_like(marks[keys.RESET])
        begun.update((key, flags) for key in keys.FLAGS)
        return begun


def member_slots(
    arrays: SlotArrays, members: Sequence[EnvBase], shown: Mapping[Key, torch.Tensor], mixes: bool
) -> tuple[InnerEnv, list[StepTransform]]:
    """The slots of a ``SerialEnv``, and the transforms to run on them.

    Args:
        arrays: the slots, without transforms.
        members: the envs, each with its own transforms.
        shown: the tensors in which the ``SerialEnv`` keeps what its resets gave.
        mixes: whether transforms around the ``SerialEnv`` mix rows.

    Raises:
        NotOnArrays: for envs with transforms unlike each other's.
    """
    stacks = [transforms_of(member) for member in members]
    if len({tuple(map(type, stack)) for stack in stacks}) > 1:
        raise NotOnArrays("its envs have transforms unlike each other's")
    lowered = [_lowered(stack, env) for stack, env in zip(stacks, members, strict=True)]
    together: list[StepTransform] = []
    lifted = True
    for ones, made in zip(zip(*stacks, strict=True), zip(*lowered, strict=True), strict=True):
        if _can_be_lifted(ones):
            together.append(made[0])
        else:
            lifted = False
            if not does_nothing_in_steps(ones[0]):
                together.append(_EnvByEnv(made))
    if lifted:
        return arrays, [*together, Shown(shown, mixes)]
    return MemberSlots(arrays, members, together, shown), []


def _lowered(stack: Sequence[T.Transform], env: EnvBase) -> list[StepTransform]:
    """The transforms of one env; one that steps the env again does so by its own code."""
    lowered = lower_transforms(stack, env)
    for i, transform in enumerate(stack):
        if not lowered[i].steps_singly:
            own = Island(transform, env, "steps its env again")
            own.label, lowered[i] = lowered[i].label, own
    return lowered


def _can_be_lifted(transforms: Sequence[T.Transform]) -> bool:
    if not is_lifted(transforms[0]):
        return False
    settings = settings_of(transforms[0])
    return all(equal(settings_of(other), settings) for other in transforms[1:])
