"""Collecting by frames: batches ``[N, T]``, to the bit as TorchRL's, or rows by arrival."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect import keys
from tdcollect.collect.arrays import ArrayEnv
from tdcollect.collect.hooks import Watch
from tdcollect.collect.step_dict import NotTensors, StepDict, flat, next_step, numbered, sent
from tdcollect.collect.store import Placement, Store
from tdcollect.collect.turns import Acting, Ends, Lower, MaskedEnds, NewIds, Turns, set_ids
from tdcollect.envs.spaces import nested
from tdcollect.keys import Key

Rows = dict[Key, torch.Tensor]


@dataclass
class Arrivals:
    """What stays of a collection by arrival from one batch to the next.

    Attributes:
        surplus: rows that came together with the last of the latest batch.
        surplus_slots: their slots.
        turns: the slots, some in flight; None if all wait at the collector's step.
        left: the step that the latest batch left the collector with.
    """

    surplus: Rows = field(default_factory=dict)
    surplus_slots: list[int] = field(default_factory=list)
    turns: Turns | None = None
    left: TensorDictBase | None = None

    @property
    def lost(self) -> bool:
        """True if slots that were in flight are not any more: somebody else has moved the env."""
        return self.turns is not None and self.turns.lost

    def leave_out(self, slots: Collection[int]) -> None:
        """Drop the rows of some slots, whose trajectories are cut short."""
        kept = [row for row, slot in enumerate(self.surplus_slots) if slot not in slots]
        self.surplus = {key: value[kept] for key, value in self.surplus.items()}
        self.surplus_slots = [self.surplus_slots[row] for row in kept]


class Frames:
    """One batch of a collection by frames.

    Args:
        env: the env on arrays.
        lower: gives the policy on StepDicts, for the entries that it first finds.
        carrier: the step to begin with, as TorchRL's collector keeps it.
        new_ids: gives so many new trajectory ids; None if they are not tracked.
        left_out: entries that the batch does without.
        place: moves tensors between devices.
        keep: is given the step to go on with, and whether the envs are elsewhere: the next loop
            goes on from the last whole step, also if the policy or an env has raised.
        in_one_piece: stack all steps at once, which gradients pass through.
        watch: called with each step; None for no hooks.
        version: gives the version of the policy's weights, for rows by arrival; None if it is not
            tracked.
    """

    def __init__(
        self,
        env: ArrayEnv,
        lower: Lower,
        carrier: TensorDictBase,
        new_ids: NewIds | None,
        left_out: frozenset[Key],
        place: Placement,
        keep: Callable[[TensorDict, bool], None],
        in_one_piece: bool = False,
        watch: Watch | None = None,
        version: Callable[[], Any] | None = None,
    ):
        self._env = env
        self._carrier = carrier
        self._new_ids = new_ids
        self._store_options = left_out, place, in_one_piece
        self._place = place
        self._keep = keep
        self._watch = watch
        self._version = version
        step = flat(carrier)
        place.enter(step, (*env.carried, *keys.FLAGS))
        self._acting = Acting(env, lower, place)
        act = self._acting if version is None else self._act_noting_version
        self._turns = Turns(env, act, self._acting.remembered, place, step)
        self._moved = False  # whether the envs have gone on from the present step

    # ------------------------------------------------------------------------------- synchronous

    def synchronous(self, steps: int) -> Rows:
        """Collect ``steps`` steps of every slot: entries ``[N, steps, ...]``.

        Raises:
            NotTensors: if the policy writes something else; nothing has been stepped, and the step
                that is kept has its outputs.
        """
        env, turns, place = self._env, self._turns, self._place
        store = Store(env, *self._store_options, steps)
        actions, slots = env.transformed.action_keys, turns.ready
        ends = Ends(env, self._new_ids)
        if env.resets_by_mask:
            ends = MaskedEnds(env, self._new_ids, place.storing, asks=self._watch is not None)
            if keys.TRAJ_IDS in turns.present:
                turns.present[keys.TRAJ_IDS] = sent(turns.present[keys.TRAJ_IDS], env.home)
        if self._watch is not None:
            self._watch.begin(self._carrier)
        with self._leaving(ends.number):
            for buffers in store.allocate():
                step = turns.present
                turns.act(step, slots)
                self._moved = True
                given = place.for_env(step, actions)
                following, error = env.advance(given, turns.next_keys, buffers)
                if error is not None:
                    raise error
                place.keep_apart(following)
                begun = ends.begin(following)
                if begun is not following:
                    place.keep_apart(begun, of_reset=True)
                self._moved = False
                store.append(step, following)
                turns.present = next_step(step, begun, env.carried, turns.next_keys)
                ends.renew(turns.present, turns.zeroed)
                if self._watch is not None:
                    self._watch.step_taken(step, following, ends.ended)
                    self._watch.began(ends.ended, turns.present)
            self._acting.check()
            entries = store.grid()
            ends.number(entries)
        return entries

    # ------------------------------------------------------------------------------ asynchronous

    def asynchronous(self, steps: int) -> Rows:
        """Collect ``steps`` steps of every slot; one that has taken them waits for the others.

        Returns:
            The entries, ``[N, steps, ...]`` each: to the bit those of synchronous collection, if
            the policy draws nothing.
        """
        turns, count = self._turns, self._env.batch_size.numel()
        store = Store(self._env, *self._store_options, None)
        taken = np.zeros(count, np.int64)
        begun: list[tuple[int, int]] = []  # trajectories as they begin: steps before, and slot

        def act() -> list[int] | None:
            acting = turns.idle(slot for slot in turns.ready if taken[slot] < steps)
            taken[acting] += 1
            return acting if acting or turns.in_flight else None

        def renew(ended: list[int]) -> torch.Tensor:
            # Their places in this order, below zero: ids follow once all have begun.
            first = -1 - len(begun)
            begun.extend((int(taken[slot]), slot) for slot in ended)
            return torch.arange(first, first - len(ended), -1)

        if self._watch is not None:
            self._watch.begin(self._carrier)
        with self._leaving():
            self._take_turns(store, act, renew)
            entries = store.grid()
            if begun and self._new_ids is not None:
                order = sorted(range(len(begun)), key=begun.__getitem__)
                ids = torch.empty(len(begun), dtype=torch.int64)
                ids[order] = self._new_ids(len(begun)).cpu()
                for step in (entries, turns.present):
                    if keys.TRAJ_IDS in step:
                        step[keys.TRAJ_IDS] = numbered(step[keys.TRAJ_IDS], ids)
        return entries

    def arriving(self, count: int, held: Arrivals) -> tuple[Rows, list[int]]:
        """Collect ``count`` rows in the order of their arrival; no slot waits at the end.

        Args:
            count: the number of rows.
            held: what stays from one batch to the next.

        Returns:
            The entries, ``[count, ...]`` each, and the slot of each row.
        """
        turns, missing = self._turns, count - len(held.surplus_slots)
        rows, slots = self._rows(
            held, lambda store: turns.idle(turns.ready) if len(store.slots) < missing else None
        )
        held.surplus = {key: value[count:].clone() for key, value in rows.items()}
        held.surplus_slots = slots[count:]
        return {key: value[:count] for key, value in rows.items()}, slots[:count]

    def settle(self, held: Arrivals) -> None:
        """Take in the slots in flight, which wait from now on; their rows join the next batch."""
        if held.turns is not None:
            turns = self._turns
            held.surplus, held.surplus_slots = self._rows(
                held, lambda store: [] if turns.in_flight else None
            )
            held.turns = None

    def _rows(
        self, held: Arrivals, act: Callable[[Store], list[int] | None]
    ) -> tuple[Rows, list[int]]:
        """The rows held from before, and those of turns until ``act`` gives None; their slots."""
        store = Store(self._env, *self._store_options, None)
        if held.left is not self._carrier:  # the collector is not where the latest batch left it
            held.turns = None
        if held.turns is not None:
            self._turns.resume(held.turns)
        elif self._watch is not None:
            self._watch.begin(self._carrier)

        def renew(ended: list[int]) -> torch.Tensor:
            assert self._new_ids is not None
            return self._new_ids(len(ended))

        held.turns = self._turns
        with self._leaving(held=held):
            self._take_turns(store, lambda: act(store), renew)
        rows = store.rows()
        if held.surplus_slots:
            rows = _joined(held.surplus, rows) if rows else held.surplus
        return rows, [*held.surplus_slots, *store.slots]

    def _take_turns(
        self,
        store: Store,
        act: Callable[[], list[int] | None],
        renew: Callable[[list[int]], torch.Tensor],
    ) -> None:
        """Have slots act, take in those that come back, and reset those that have ended.

        Args:
            store: takes the rows.
            act: gives the slots that act next; None at the end.
            renew: gives the trajectory ids that follow in some slots.
        """
        turns, env, watch = self._turns, self._env, self._watch
        self._moved = True
        for buffers in store.allocate():
            acting = act()
            if acting is None:
                break
            came = turns.exchange(acting, buffers)
            for error in (came.failed, came.failed_begins):
                if error is not None:
                    raise error
            step, following = turns.present, came.following
            if self._version is not None and keys.POLICY_VERSION in step:
                # The env has written the present version; some acted before weights changed.
                following[keys.POLICY_VERSION] = step[keys.POLICY_VERSION]
            done = following[keys.DONE].numpy(force=True).reshape(-1)
            ended = [slot for slot in came.stepped if done[slot]]
            store.append(step, following, came.stepped)
            turns.take(came)
            if ended:
                turns.ready = [slot for slot in turns.ready if slot not in ended]
                if self._new_ids is not None:
                    set_ids(turns.present, ended, renew(ended))
                env.send_reset(ended, None, None)
            if watch is not None:
                if came.stepped:
                    watch.step_taken(step, following, ended, came.stepped)
                watch.began(came.began, turns.present)
        self._acting.check()
        self._moved = False

    @contextmanager
    def _leaving(
        self, number: Callable[[StepDict], None] | None = None, held: Arrivals | None = None
    ) -> Iterator[None]:
        """Keep the step to go on with, also if the policy or an env raises."""
        turns = self._turns
        try:
            yield
        except NotTensors:  # nothing was sent, and the step has the policy's outputs
            self._moved = False
            raise
        finally:
            if number is not None:
                number(turns.present)
            step = StepDict((k, v) for k, v in turns.present.items() if k not in turns.next_keys)
            step = self._place.leave(step, self._env.carried)
            left = nested(step.items(), self._env.batch_size, self._carrier.device)
            if held is not None:
                held.left = left
            self._keep(left, self._moved)

    def _act_noting_version(self, step: StepDict, slots: list[int]) -> None:
        if keys.POLICY_VERSION in step:
            assert self._version is not None
            present = step[keys.POLICY_VERSION]
            step[keys.POLICY_VERSION] = torch.full_like(present, self._version())
        self._acting(step, slots)


def _joined(before: Rows, after: Rows) -> Rows:
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
