"""Slots that act when they are ready; the others stay in flight meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tdcollect.collect.step_dict import Key, StepDict, check_tensors, is_next, sent, zero_rows

if TYPE_CHECKING:
    from tdcollect.collect.fast.array_env import ArrayEnv, Arrived

Act = Callable[[StepDict, list[int]], None]


class ReadySlots:
    """The slots of an env, each at its own step.

    The policy is called on the rows of all slots, as in step; its outputs are taken over in the
    slots that act. So a row's bits are those of a step of all slots.

    Args:
        env: the env on arrays; its slots that are ready go on.
        act: runs the policy: writes its outputs into the step, of which the rows of the slots given
            matter.
        present: the step that each slot is at.
        remembered: gives the entries to zero where an episode begins, from the first step with its
            outputs.

    Attributes:
        present: with the policy's outputs for the slots in flight.
        ready: the slots that wait to act.
        next_keys: the policy's outputs that belong to the following step; None before its first
            call.
        zeroed: the entries that are zeroed where an episode begins.
    """

    def __init__(
        self,
        env: ArrayEnv,
        act: Act,
        present: StepDict,
        remembered: Callable[[StepDict], list[Key]],
    ):
        self._env = env
        self._act = act
        self._remembered = remembered
        self._count = env.batch_size.numel()
        self.present = present
        self.ready: list[int] = []
        self.next_keys: list[Key] | None = None
        self.zeroed: list[Key] = []

    def resume(self, before: ReadySlots) -> None:
        """Go on where other slots, of the same env, are."""
        self.present, self.ready = before.present, before.ready
        self.next_keys, self.zeroed = before.next_keys, before.zeroed

    @property
    def in_flight(self) -> bool:
        """True if slots were sent that have not come back."""
        return bool(self._env.stepper.away)

    @property
    def lost(self) -> bool:
        """True if slots that were in flight are not any more: somebody else has moved the env."""
        return len({*self.ready, *self._env.stepper.away}) < self._count

    def idle(self, slots: Iterable[int]) -> list[int]:
        """Those of ``slots`` that can be sent, ascending; others share a worker that is busy."""
        is_idle = self._env.stepper.backend.is_idle
        return sorted(slot for slot in slots if is_idle(slot))

    def turn(self, acting: list[int], buffers: Any) -> Arrived:
        """Have slots act, and wait for slots that are ready.

        Args:
            acting: ascending, of those that are ready and idle.
            buffers: are written.

        Returns:
            The slots that have come back; :meth:`move_on` takes them there.
        """
        self.send(acting)
        return self._env.receive(self.next_keys or [], buffers)

    def send(self, acting: list[int]) -> None:
        """Have slots act, and go on."""
        if acting:
            step = StepDict(self.present)
            self._act(step, acting)
            self._take_over(step, acting)
            if self.next_keys is None:
                check_tensors(step)
                self.next_keys = [key for key in step if is_next(key)]
                self.zeroed = self._remembered(step)
        self._env.send(self.present, acting)
        self.ready = [slot for slot in self.ready if slot not in acting]

    def _take_over(self, step: StepDict, acting: list[int]) -> None:
        """Take the policy's outputs over, in the slots that act."""
        if len(acting) < self._count:
            mask = self._mask(acting)
            for key, value in step.items():
                before = self.present.get(key)
                if before is not None and before is not value:
                    step[key] = _where(mask, value, before)
        self.present = step

    def move_on(self, arrived: Arrived) -> None:
        """Take the slots that have come back to where they are."""
        received = arrived.received
        upcoming = StepDict(self.present)
        sources = [(arrived.following, received.stepped), (arrived.begun, received.begun)]
        for source, slots in sources:
            if source is None or not slots:
                continue
            mask = None
            for key in self._env.carried:
                value = source.get(key)
                if value is None:
                    continue
                if value is arrived.written.get(key) or len(slots) == self._count:
                    upcoming[key] = value  # its other rows are the present ones
                    continue
                mask = self._mask(slots) if mask is None else mask
                upcoming[key] = _where(mask, value, upcoming[key])
        if received.begun:
            zeroed = [key for key in self.zeroed if key in upcoming]
            zero_rows(upcoming, zeroed, self._env.batch_size, received.begun)
        self.present = upcoming
        self.ready += [*received.stepped, *received.begun]

    def set_rows(
        self, step: StepDict, entries: Iterable[Key], slots: Sequence[int], value: Any
    ) -> None:
        """Write the rows of some slots, in copies of the entries."""
        for key in entries:
            if key in step:
                step[key] = step[key].clone(memory_format=torch.contiguous_format)
                step[key][list(slots)] = value

    def leave(self) -> StepDict:
        """The present step without the policy's outputs that belong to the following one."""
        return StepDict((key, value) for key, value in self.present.items() if not is_next(key))

    def _mask(self, slots: Sequence[int]) -> torch.Tensor:
        mask = torch.zeros(self._count, dtype=torch.bool)
        mask[list(slots)] = True
        return mask


def _where(mask: torch.Tensor, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The rows of ``value`` that a mask ``[N]`` marks, and the others of ``other``.

    The result is on the device of ``value``: a hidden state that begins on the CPU goes on where
    the policy is.
    """
    shaped = sent(mask, value.device).view(-1, *(1,) * (value.ndim - 1))
    return torch.where(shaped, value, other.to(value.device))
