"""Batches of frames where slots that are ready go on: ``[N, T]``, or by arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect import keys
from tdcollect.collect.policies import Policy
from tdcollect.collect.ready.rows import Rows
from tdcollect.collect.ready.slots import ReadySlots
from tdcollect.collect.step_dict import (
    Key,
    NotTensors,
    StepDict,
    flat,
    forgotten_entries,
    numbered,
)
from tdcollect.collect.watch import Watch
from tdcollect.envs.spaces import nested

if TYPE_CHECKING:
    from tdcollect.collect.fast.array_env import ArrayEnv
    from tdcollect.collect.fast.devices import Placement

Renew = Callable[[list[int]], torch.Tensor]
"""Gives the trajectory ids that follow in some slots, whose latest step ended an episode."""


class Arrivals:
    """The part of a collection by arrival that stays from one batch to the next.

    Attributes:
        slots: the slots, some in flight; None where all wait at the collector's step.
        left: the step that the latest batch left the collector with.
        surplus: rows that came together with the last of the latest batch.
        surplus_slots: their slots.
    """

    def __init__(self) -> None:
        self.slots: ReadySlots | None = None
        self.left: TensorDictBase | None = None
        self.surplus: dict[Key, torch.Tensor] = {}
        self.surplus_slots: list[int] = []


class FrameLoop:
    """Steps slots, each at its own pace.

    Args:
        env: the env on arrays; its slots that are ready go on.
        lower: gives the policy on StepDicts, for the entries that it first finds.
        carrier: the step to begin with, as TorchRL's collector keeps it.
        new_ids: gives so many new trajectory ids; None where they are not tracked.
        left_out: entries that the batch does without.
        place: moves tensors between devices; None where all is on the CPU.
        keep: is given the step to go on with, and whether the envs are elsewhere.
        in_one_piece: stack all rows at once, which gradients pass through.
        watch: called with each step; None for no hooks.
        version: gives the version of the policy's weights, for rows by arrival; None where it is
            not tracked.
    """

    def __init__(
        self,
        env: ArrayEnv,
        lower: Callable[[StepDict], Policy],
        carrier: TensorDictBase,
        new_ids: Callable[[int], torch.Tensor] | None,
        left_out: frozenset[Key],
        place: Placement | None,
        keep: Callable[[TensorDict, bool], None],
        in_one_piece: bool = False,
        watch: Watch | None = None,
        version: Callable[[], Any] | None = None,
    ):
        self._env = env
        self._carrier = carrier
        self._new_ids = new_ids
        self._place = place
        self._keep = keep
        self._watch = watch
        self._version = version
        step = flat(carrier) if place is None else place.enter(carrier, env.carried)
        self._policy = lower(step)
        self._slots = ReadySlots(env, self._act, step, self._remembered)
        self._slots.ready = list(range(env.batch_size.numel()))
        self._rows = Rows(env, left_out, place, in_one_piece)

    def grid(self, steps: int) -> dict[Key, torch.Tensor]:
        """Collect ``steps`` steps of every slot; one that has taken them waits for the others.

        Returns:
            The entries, ``[N, steps, ...]`` each: to the bit those of a loop in step, where the
            policy draws nothing.
        """
        slots, count = self._slots, self._env.batch_size.numel()
        sent = np.zeros(count, np.int64)
        begun: list[tuple[int, int]] = []  # trajectories as they begin: steps before, and slot

        def renew(ended: list[int]) -> torch.Tensor:
            # Their places in this order, below zero: ids follow once all have begun.
            first = -1 - len(begun)
            begun.extend((int(sent[slot]), slot) for slot in ended)
            return torch.arange(first, first - len(ended), -1)

        if self._watch is not None:
            self._watch.begin(self._carrier)
        with self._leaving():
            for buffers in self._rows.allocate():
                acting = slots.idle(slot for slot in slots.ready if sent[slot] < steps)
                if not acting and not slots.in_flight:
                    break
                sent[acting] += 1
                self._turn(acting, buffers, renew)
            self._policy.check()
            entries = self._rows.grid(steps)
            if begun and self._new_ids is not None:
                order = sorted(range(len(begun)), key=begun.__getitem__)
                ids = torch.empty(len(begun), dtype=torch.int64)
                ids[order] = self._new_ids(len(begun)).cpu()
                for step in (entries, slots.present):
                    if keys.TRAJ_IDS in step:
                        step[keys.TRAJ_IDS] = numbered(step[keys.TRAJ_IDS], ids)
        return entries

    def arriving(self, count: int, held: Arrivals) -> tuple[dict[Key, torch.Tensor], list[int]]:
        """Collect ``count`` rows in the order of their arrival; no slot waits at the end.

        Args:
            count: how many rows.
            held: what stays from one batch to the next.

        Returns:
            The entries, ``[count, ...]`` each, and the slot of each row.
        """
        self._resume(held)
        slots = self._slots
        with self._leaving(held):
            for buffers in self._rows.allocate():
                if len(held.surplus_slots) + len(self._rows) >= count:
                    break
                self._turn(slots.idle(slots.ready), buffers, self._renew_at_once)
            self._policy.check()
        entries, of = self._with_surplus(held)
        held.surplus = {key: value[count:].clone() for key, value in entries.items()}
        held.surplus_slots = of[count:]
        return {key: value[:count] for key, value in entries.items()}, of[:count]

    def settle(self, held: Arrivals) -> None:
        """Take in the slots in flight, which wait from now on; their rows join the next batch."""
        if held.slots is None:
            return
        self._resume(held)
        with self._leaving(held):
            for buffers in self._rows.allocate():
                if not self._slots.in_flight:
                    break
                self._turn([], buffers, self._renew_at_once)
        held.surplus, held.surplus_slots = self._with_surplus(held)
        held.slots = None

    def _renew_at_once(self, ended: list[int]) -> torch.Tensor:
        assert self._new_ids is not None
        return self._new_ids(len(ended)).cpu()

    def _resume(self, held: Arrivals) -> None:
        """Go on with slots in flight, if the collector is where the latest batch left it."""
        if held.left is not self._carrier:
            held.slots = None
        if held.slots is not None:
            self._slots.resume(held.slots)
        elif self._watch is not None:
            self._watch.begin(self._carrier)

    def _with_surplus(self, held: Arrivals) -> tuple[dict[Key, torch.Tensor], list[int]]:
        """The rows held from before, and those of now."""
        entries = self._rows.entries() if len(self._rows) else {}
        if held.surplus_slots:
            entries = _joined(held.surplus, entries) if entries else held.surplus
        return entries, [*held.surplus_slots, *self._rows.slots]

    @contextmanager
    def _leaving(self, held: Arrivals | None = None) -> Iterator[None]:
        """Keep the step to go on with, also where the policy or an env raises."""
        stale = True
        try:
            yield
            stale = False
        except NotTensors:  # nothing was sent, and the step has the policy's outputs
            stale = False
            raise
        finally:
            step = self._slots.leave()
            if self._place is not None:
                step = self._place.leave(step, self._env.carried)
            left = nested(step.items(), self._env.batch_size, self._carrier.device)
            if held is not None:
                held.slots, held.left = self._slots, left
            self._keep(left, stale)

    def _act(self, step: StepDict, slots: list[int]) -> None:
        if self._version is not None and keys.POLICY_VERSION in step:
            present = step[keys.POLICY_VERSION]
            step[keys.POLICY_VERSION] = torch.full_like(present, self._version())
        if self._place is None:
            self._policy(step)
        else:
            self._place.run(self._policy, step)

    def _remembered(self, step: StepDict) -> list[Key]:
        policy = self._policy
        return forgotten_entries(step, self._env.carried, policy.reads_first, policy.writes)

    def _turn(self, acting: list[int], buffers: Any, renew: Renew) -> None:
        """Have slots act, take in those that come back, and reset those that have ended."""
        slots, env = self._slots, self._env
        arrived = slots.turn(acting, buffers)
        received = arrived.received
        for error in (received.failed, received.failed_resets):
            if error is not None:
                raise error
        step, stepped = slots.present, received.stepped
        if self._version is not None and keys.POLICY_VERSION in step:
            # The env has written the present version; some acted before weights changed.
            arrived.following[keys.POLICY_VERSION] = step[keys.POLICY_VERSION]
        done = arrived.following[keys.DONE].numpy(force=True).reshape(-1)
        ended = [slot for slot in stepped if done[slot]]
        self._rows.append(step, arrived.following, stepped)
        slots.move_on(arrived)
        if ended:
            slots.ready = [slot for slot in slots.ready if slot not in ended]
            if self._new_ids is not None:
                slots.set_rows(slots.present, [keys.TRAJ_IDS], ended, renew(ended))
            env.send_reset(ended, None, None)
        if self._watch is not None:
            if stepped:
                self._watch.step_taken(step, arrived.following, slots.present, ended, stepped, [])
            if received.begun:
                present = slots.present
                self._watch.started(received.begun, lambda: nested(present.items(), env.batch_size))


def _joined(
    before: dict[Key, torch.Tensor], after: dict[Key, torch.Tensor]
) -> dict[Key, torch.Tensor]:
    """The rows of both; an entry that one of them lacks (of the policy, say) is zero there."""
    joined = {}
    for key in {**after, **before}:
        like = after.get(key, before.get(key))
        assert like is not None
        joined[key] = torch.cat(
            [
                rows[key]
                if key in rows
                else like.new_zeros((len(rows[keys.NEXT_DONE]), *like.shape[1:]))
                for rows in (before, after)
            ]
        )
    return joined
