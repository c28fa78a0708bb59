"""One turn: the policy acts, slots step, and those whose episodes end begin new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tdcollect import keys
from tdcollect.collect.arrays import ArrayEnv, Arrived, SteppedEnv
from tdcollect.collect.policy import Policy
from tdcollect.collect.step_dict import (
    StepDict,
    check_tensors,
    forgotten_entries,
    like_rows,
    numbered,
    sent,
    zero_rows,
)
from tdcollect.collect.store import Placement
from tdcollect.keys import Key, is_next

Lower = Callable[[StepDict], Policy]
"""Gives a policy on StepDicts, for the entries that it first finds."""

Act = Callable[[StepDict, list[int]], None]
"""Runs a policy: writes its outputs into the step, of which the rows of the slots given matter."""

NewIds = Callable[[int], torch.Tensor]
"""Gives so many new trajectory ids."""


class Acting:
    """A policy that acts for slots.

    Args:
        env: the env.
        lower: gives the policy.
        place: moves tensors between devices.

    Attributes:
        policy: None before its first call.
    """

    policy: Policy | None = None

    def __init__(self, env: SteppedEnv, lower: Lower, place: Placement):
        self._env, self._lower, self._place = env, lower, place

    def __call__(self, step: StepDict, slots: list[int]) -> None:
        if self.policy is None:
            self.policy = self._lower(step)
        self._place.run(self.policy, step)

    def remembered(self, step: StepDict) -> list[Key]:
        """The entries that the policy takes from one step of an episode to the next."""
        assert self.policy is not None
        known = self.policy.reads_first, self.policy.writes
        return forgotten_entries(step, self._env.carried, *known)

    def check(self) -> None:
        """Raise if a draw had parameters that its distribution refuses."""
        if self.policy is not None:
            self.policy.check()


class Turns:
    """The slots of an env between two steps, and the policy that acts for them.

    Where slots step asynchronously, the policy is still called on the rows of all, and its outputs
    are taken over in those that act: a row's bits are those of a step of all slots.

    Args:
        env: the env.
        act: runs the policy.
        remembered: gives the entries to zero where an episode begins, from the first step with the
            policy's outputs.
        place: moves tensors between devices.
        present: the step that each slot is at.

    Attributes:
        present: with the policy's outputs for the slots in flight.
        ready: asynchronously, the slots that wait to act.
        next_keys: the policy's outputs that belong to the following step.
        zeroed: the entries that are zeroed where an episode begins.
    """

    _env: ArrayEnv  # where slots step asynchronously

    def __init__(
        self,
        env: SteppedEnv,
        act: Act,
        remembered: Callable[[StepDict], list[Key]],
        place: Placement,
        present: StepDict,
    ):
        self._env = env  # type: ignore[assignment]
        self._act = act
        self._remembered = remembered
        self._place = place
        self._count = env.batch_size.numel()
        self._actions = env.transformed.action_keys
        self._has_acted = False
        self.present = present
        self.ready = list(range(self._count))
        self.next_keys: list[Key] = []
        self.zeroed: list[Key] = []

    def act(self, step: StepDict, slots: list[int]) -> None:
        """Have the policy act for ``slots``.

        Raises:
            NotTensors: if its first outputs are something else, which the step then has.
        """
        self._act(step, slots)
        if not self._has_acted:
            check_tensors(step)
            self.next_keys = [key for key in step if is_next(key)]
            self.zeroed = self._remembered(step)
            self._has_acted = True

    def all_together(self, active: list[int], buffers: Any) -> Arrived:
        """Have all slots act and step; the rows of ``active`` matter.

        Raises:
            SlotError: if the step is lost in every slot.
        """
        self.act(self.present, active)
        # Others wait where the env lets them; else they run on, unseen.
        slots = active if self._env.can.pause and len(active) < self._count else None
        given = self._place.for_env(self.present, self._actions)
        following, error = self._env.advance(given, self.next_keys, buffers, slots)
        self._place.keep_apart(following)
        return Arrived(following, active, [], error)

    # ------------------------------------------------------------------------------ asynchronous

    def resume(self, before: Turns) -> None:
        """Go on where other turns, of the same env, are."""
        self.present, self.ready, self._has_acted = before.present, before.ready, before._has_acted
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
        return self._env.stepper.idle(slots)

    def exchange(self, acting: list[int], buffers: Any) -> Arrived:
        """Have slots act (ascending, idle), and wait for some of those in flight."""
        if acting:
            before, self.present = self.present, StepDict(self.present)
            self.act(self.present, acting)
            if len(acting) < self._count:
                mask = self._mask(acting)
                for key, value in self.present.items():
                    old = before.get(key)
                    if old is not None and old is not value:
                        self.present[key] = _where(mask, value, old)
        self._env.send(self.present, acting)
        self.ready = [slot for slot in self.ready if slot not in acting]
        return self._env.receive(self.next_keys, buffers)

    def take(self, came: Arrived) -> None:
        """Take the slots that have come back to where they are."""
        upcoming = StepDict(self.present)
        for source, slots in ((came.following, came.stepped), (came.begun, came.began)):
            if not slots:
                continue
            mask = self._mask(slots)
            for key in self._env.carried:
                value = source.get(key)
                if value is None:
                    continue
                # The rows of others are the present ones in entries that the env has written.
                whole = len(slots) == self._count or value is came.written.get(key)
                upcoming[key] = value if whole else _where(mask, value, upcoming[key])
        if came.began:
            zeroed = [key for key in self.zeroed if key in upcoming]
            zero_rows(upcoming, zeroed, self._env.batch_size, came.began)
        self.present = upcoming
        self.ready += [*came.stepped, *came.began]

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


class Ends:
    """Resets the slots whose episodes have ended, by their numbers.

    Args:
        env: the env on arrays.
        new_ids: gives new trajectory ids; None if they are not tracked.

    Attributes:
        ended: the slots whose episodes ended in the latest step.
    """

    def __init__(self, env: ArrayEnv, new_ids: NewIds | None):
        self._env = env
        self._new_ids = new_ids
        self._renewed: list[int] = []
        self.ended: list[int] = []

    def begin(self, following: StepDict) -> StepDict:
        """The entries that begin the next step, given those that the latest step led to."""
        self.ended, self._renewed = self._env.ends(following)
        if not self.ended:
            return following
        return self._env.begin(following, following[keys.DONE], self.ended)

    def renew(self, upcoming: StepDict, forgotten: Sequence[Key]) -> None:
        """Write new trajectory ids into the next step, and zero what the policy forgets."""
        if not self._renewed:
            return
        if self._new_ids is not None:
            set_ids(upcoming, self._renewed, self._new_ids(len(self._renewed)))
        if 0 < len(self.ended) < self._env.batch_size.numel():
            zero_rows(upcoming, forgotten, self._env.batch_size, self.ended)

    def number(self, entries: dict[Key, torch.Tensor]) -> None:
        """Give trajectories their ids, where these are known at the end of a batch only."""


class MaskedEnds(Ends):
    """Resets by the flags of all slots, at every step, without reading them.

    Where envs are on a GPU, to ask which slots have ended is to wait for it. Trajectories are
    counted on the env's device, below zero, and get their ids once the batch is whole.

    Args:
        env: the env on arrays, whose ``resets_by_mask`` is true.
        new_ids: gives new trajectory ids; None if they are not tracked.
        ids_on: the device of trajectory ids in the batch.
        asks: whether to read the flags after all, for hooks.
    """

    def __init__(
        self, env: ArrayEnv, new_ids: NewIds | None, ids_on: torch.device | None, asks: bool
    ):
        super().__init__(env, new_ids)
        self._ids_on = ids_on or torch.device("cpu")
        self._asks = asks
        # The number of the latest trajectory: -1 of the first that begins in this batch.
        self._latest = torch.zeros((), dtype=torch.int64, device=env.home)
        self._ids: torch.Tensor | None = None

    def begin(self, following: StepDict) -> StepDict:
        self._done = done = following[keys.DONE]
        self._over = self._env.over(following)
        if self._asks:
            self.ended = done.reshape(-1).nonzero()[:, 0].tolist()
        return self._env.begin(following, done, None)

    def renew(self, upcoming: StepDict, forgotten: Sequence[Key]) -> None:
        if self._new_ids is not None:
            over = self._over.reshape(-1)
            ids = upcoming[keys.TRAJ_IDS]
            new = self._latest - over.cumsum(0)
            self._latest = new[-1]
            upcoming[keys.TRAJ_IDS] = torch.where(over, new, ids.reshape(-1)).view_as(ids)
        if not forgotten:
            return
        some = self._done & ~self._done.all()  # where all end, TorchRL zeroes nothing
        for key in forgotten:
            value = upcoming[key]
            upcoming[key] = value.masked_fill(like_rows(some, value), 0)

    def number(self, entries: dict[Key, torch.Tensor]) -> None:
        if self._new_ids is None or keys.TRAJ_IDS not in entries:
            return
        if self._ids is None:  # the one wait for the env's device in a batch
            count = -int(self._latest)
            self._ids = self._new_ids(count).cpu() if count else torch.empty(0, dtype=torch.int64)
        entries[keys.TRAJ_IDS] = numbered(entries[keys.TRAJ_IDS].to(self._ids_on), self._ids)


def set_ids(step: StepDict, slots: Sequence[int], ids: Any) -> None:
    """Write the trajectory ids of some slots, in a copy of the entry."""
    if keys.TRAJ_IDS in step:
        entry = step[keys.TRAJ_IDS] = step[keys.TRAJ_IDS].clone()
        entry.numpy().reshape(-1)[slots] = torch.as_tensor(ids).cpu().numpy()
