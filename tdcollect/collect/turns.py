"""One turn: the policy acts, slots step, ended episodes begin again. Collecting by frames.

Batches ``[N, T]`` are to the bit TorchRL's; with slots that step asynchronously, rows can also be
collected in the order of their arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect import keys
from tdcollect.collect.arrays import ArrayEnv, Arrived, SteppedEnv
from tdcollect.collect.hooks import Watch
from tdcollect.collect.policy import LoweredPolicy
from tdcollect.collect.step_dict import (
    NotReset,
    NotTensors,
    StepDict,
    check_tensors,
    flat,
    like_rows,
    next_step,
    numbered,
    sent,
    zero_rows,
)
from tdcollect.collect.store import Captured, Placement, Store, kept_graph
from tdcollect.envs.process.values import Array
from tdcollect.envs.spaces import nested, told
from tdcollect.keys import Key, is_next, under_next

Lower = Callable[[StepDict], LoweredPolicy]
"""Gives a policy on StepDicts, for the entries that it first finds."""

Act = Callable[[StepDict, list[int]], Sequence[Key]]
"""Runs a policy: writes its outputs into the step, of which the rows of the slots given matter.

It returns the entries to zero where an episode begins.
"""

NewIds = Callable[[int], Array]
"""Gives so many new trajectory ids."""


@dataclass
class Acting:
    """A policy that acts for slots; ``version`` gives that of its weights, for steps with one."""

    env: SteppedEnv
    lower: Lower
    place: Placement
    version: Callable[[], Any] | None = None
    policy: LoweredPolicy | None = None
    _remembered: list[Key] | None = None

    def __call__(self, step: StepDict, slots: list[int]) -> Sequence[Key]:
        if self.version is not None and keys.POLICY_VERSION in step:
            present = step[keys.POLICY_VERSION]
            step[keys.POLICY_VERSION] = torch.full_like(present, self.version())
        policy, texts = self.policy, self.env.texts
        if policy is None:
            self.policy = policy = self.lower(step.exclude(*texts) if texts else step)
        if policy.straight or not texts:
            if self.place.moves:
                self.place.run(policy, step)
            else:
                policy(step)
        else:
            device = self.place.policy if self.place.moves else None
            shown = StepDict(told(texts, step, device))
            self.place.run(policy, shown)
            step.update((key, value) for key, value in shown.items() if key not in texts)
        if self._remembered is None:
            self._remembered = policy.forgets(step, self.env.carried)
        return self._remembered

    def reads(self, key: Key) -> bool:
        """Return whether the policy may read an entry of the env or the collector."""
        return self.policy is None or key in self.policy.reads_first

    def check(self) -> None:
        """Raise if a draw had parameters that its distribution refuses."""
        if self.policy is not None:
            self.policy.check()

    def score(self, entries: dict[Key, torch.Tensor], last: StepDict) -> None:
        """Add what the policy has left out of the steps of a batch, and of its last one."""
        if self.policy is not None and self.policy.score is not None:
            self.policy.score(entries, last)
            if (storing := self.place.storing) is not None:
                entries.update((key, value.to(storing)) for key, value in entries.items())


class Turns:
    """The slots of an env between two steps, and the policy that acts for them.

    Attributes:
        present: the step that each slot is at.
        ready: the slots that wait to act.
        next_keys: the policy's outputs that belong to the following step.
        zeroed: the entries that are zeroed where an episode begins.
    """

    def __init__(self, env: SteppedEnv, act: Act, place: Placement, present: StepDict):
        self._env = env
        self._act = act
        self._place = place
        self._count = env.batch_size.numel()
        self._has_acted = False
        self.present = present
        self.ready = list(range(self._count))
        self.next_keys: list[Key] = []
        self.zeroed: Sequence[Key] = ()

    def act(self, step: StepDict, slots: list[int]) -> None:
        """Have the policy act for ``slots``.

        Raises:
            NotTensors: if its first outputs are something else, which the step then has.
        """
        remembered = self._act(step, slots)
        if not self._has_acted:
            check_tensors(step)
            self.next_keys = [*filter(is_next, step)]
            self.zeroed = remembered
            self._has_acted = True

    def able(self, running: Iterable[int]) -> list[int]:
        """Of slots with an episode, those that can act now."""
        return list(running)

    def exchange(self, acting: list[int], buffers: Any) -> Arrived:
        """Have slots act, and wait for those that come back: here all of them."""
        self._env.attend(acting)
        self.act(self.present, acting)
        # Others wait where the env lets them; else they run on, unseen.
        slots = acting if self._env.can.pause and len(acting) < self._count else None
        placed = self._place.for_env(self.present)
        following, error = self._env.advance(placed, self.next_keys, buffers, slots)
        self._place.keep_apart(following)
        return Arrived(following, acting, [], error)

    def rows(self, stepped: list[int]) -> Any:
        """The slots of which a step has rows, as an index."""
        return slice(None)

    def take(self, came: Arrived) -> None:
        """Take the slots that have come back to where they are."""
        self.present = next_step(self.present, came.following, self._env.carried, self.next_keys)


class AsynchronousTurns(Turns):
    """The slots where they step asynchronously; ``present`` has the outputs for those in flight.

    The policy is still called on the rows of all, and its outputs are taken over in those that act:
    a row's bits are those of a step of all slots.
    """

    _env: ArrayEnv

    def __init__(self, env: ArrayEnv, act: Act, place: Placement, present: StepDict):
        super().__init__(env, act, place, present)
        self.ready = env.stepper.idle(self.ready)

    def resume(self, before: AsynchronousTurns) -> None:
        """Go on where other turns, of the same env, are."""
        self.present, self.ready, self._has_acted = before.present, before.ready, before._has_acted
        self.next_keys, self.zeroed = before.next_keys, before.zeroed

    def able(self, running: Iterable[int]) -> list[int]:
        self.ready = [slot for slot in self.ready if slot in running]
        return self._env.stepper.idle(self.ready)

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
        if self._has_acted:
            self._env.send(self.present, acting)
        self.ready = [slot for slot in self.ready if slot not in acting]
        return self._env.receive(self.next_keys, buffers)

    def rows(self, stepped: list[int]) -> Any:
        return stepped

    def take(self, came: Arrived) -> None:
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


def turns_of(env: Any, act: Act, place: Placement, present: StepDict) -> Any:
    """The turns of an env's slots, as these step."""
    kind = AsynchronousTurns if env.can.asynchronous else Turns
    return kind(env, act, place, present)


def _where(mask: torch.Tensor, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The rows of ``value`` that a mask ``[N]`` marks, and the others of ``other``.

    The result is on the device of ``value``: a hidden state that begins on the CPU goes on where
    the policy is.
    """
    shaped = sent(mask, value.device).view(-1, *(1,) * (value.ndim - 1))
    return torch.where(shaped, value, other.to(value.device))


class Ends:
    """Resets the slots whose episodes ended in the latest step (``ended``), by their numbers.

    Args:
        read: returns whether somebody may read trajectory ids before the batch is whole. They are
            written then.
    """

    def __init__(self, env: ArrayEnv, new_ids: NewIds | None, read: Callable[[], bool]):
        self._env = env
        self._new_ids = new_ids
        self._read = read
        self._count = env.batch_size.numel()
        self._renewed: list[int] = []
        self._taken = 0
        # The trajectories whose ids are not written yet: their slots, and the steps before them.
        self._late_slots: list[int] = []
        self._late_steps: list[int] = []
        self._ids: Array | None = None  # theirs, once they are asked for
        self.ended: list[int] = []

    def begin(self, following: StepDict) -> StepDict:
        """The entries that begin the next step, given those that the latest step led to."""
        self._taken += 1
        self.ended, self._renewed = self._env.ends(following)
        if not self.ended:
            return following
        return self._env.begin(following, following[keys.DONE], self.ended)

    def renew(self, upcoming: StepDict, forgotten: Sequence[Key]) -> None:
        """Write new trajectory ids into the next step, and zero what the policy forgets."""
        if not self._renewed:
            return
        if self._new_ids is not None:
            if self._read():
                set_ids(upcoming, self._renewed, self._new_ids(len(self._renewed)))
            else:
                self._late_slots += self._renewed
                self._late_steps += [self._taken] * len(self._renewed)
        if 0 < len(self.ended) < self._count:
            zero_rows(upcoming, forgotten, self._env.batch_size, self.ended)

    def number(self, entries: dict[Key, torch.Tensor]) -> None:
        """Write the ids that are not written yet: into a batch ``[*N, T]``, or its last step."""
        if not self._late_slots or self._new_ids is None or keys.TRAJ_IDS not in entries:
            return
        if self._ids is None:
            self._ids = self._new_ids(len(self._late_slots))
        ids = entries[keys.TRAJ_IDS]
        if ids.ndim == len(self._env.batch_size):
            set_ids(entries, self._late_slots, self._ids)
            return
        grid = ids.numpy().reshape(self._count, -1)
        count = bisect_left(self._late_steps, grid.shape[1])
        grid[self._late_slots[:count], self._late_steps[:count]] = self._ids[:count]
        np.maximum.accumulate(grid, axis=1, out=grid)  # ids go up
        entries[keys.TRAJ_IDS] = torch.from_numpy(grid).view(ids.shape)


class MaskedEnds(Ends):
    """Resets by the flags of all slots, at every step, without reading them.

    Where envs are on a GPU, to ask which slots have ended is to wait for it. Trajectories are
    counted on the env's device, below zero, and get their ids once the batch is whole.

    Args:
        ids_on: the device of trajectory ids in the batch.
        asks: whether to read the flags after all, for hooks.
    """

    def __init__(
        self, env: ArrayEnv, new_ids: NewIds | None, ids_on: torch.device | None, asks: bool
    ):
        super().__init__(env, new_ids, lambda: True)
        self._ids_on = ids_on or torch.device("cpu")
        self._asks = asks
        # The number of the latest trajectory: -1 of the first that begins in this batch.
        self.latest = torch.zeros((), dtype=torch.int64, device=env.home)

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
            new = self.latest - over.cumsum(0)
            self.latest = new[-1]
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
            count = -int(self.latest)
            self._ids = self._new_ids(count) if count else np.empty(0, np.int64)
        ids = entries[keys.TRAJ_IDS].to(self._ids_on)
        entries[keys.TRAJ_IDS] = numbered(ids, torch.from_numpy(self._ids))


class TurnGraph(Captured):
    """A whole turn as a CUDA graph: the policy, the env's step, resets by mask, and the stores."""

    def __init__(
        self, policy: LoweredPolicy, env: ArrayEnv, present: StepDict, ends: MaskedEnds, *facts: Any
    ):
        self._env, self._ends = env, ends
        self._present = StepDict((k, v.clone()) for k, v in present.items() if k not in policy.own)
        self._latest = torch.zeros_like(ends.latest)
        kept = [*self._present.values(), self._latest]
        super().__init__(policy, self._turn, env.home, *facts, kept=kept)

    def _turn(self) -> StepDict:
        env, ends, step = self._env, self._ends, StepDict(self._present)
        self._policy(step)
        self._policy.fold()
        self.next_keys = [key for key in step if is_next(key)]
        following, error = env.advance(step, self.next_keys, None)
        if error is not None:
            raise error
        ends.latest = self._latest
        self._upcoming = next_step(step, ends.begin(following), env.carried, self.next_keys)
        ends.renew(self._upcoming, self._policy.forgets(step, env.carried))
        found = StepDict((key, value) for key, value in step.items() if not is_next(key))
        found.update((under_next(key), value) for key, value in following.items())
        return found

    def _go_on(self) -> None:
        own = {value.untyped_storage().data_ptr() for value in self._present.values()}
        changed = [
            # Apart from what is written over before it is read.
            (there, value.clone() if value.untyped_storage().data_ptr() in own else value)
            for key, there in self._present.items()
            if (value := self._upcoming[key]) is not there
        ]
        for there, value in [*changed, (self._latest, self._ends.latest)]:
            there.copy_(value)

    def begin(self, present: StepDict) -> None:
        """Begin a batch with a step."""
        self.restart(StepDict())
        self._latest.zero_()
        for key, there in self._present.items():
            there.copy_(present[key])

    def reached(self) -> tuple[StepDict, list[Key], torch.Tensor]:
        """The step that the latest turn has led to, the ``next_keys``, the latest trajectory."""
        step = {**self._upcoming, **self._present}
        copies = StepDict((key, value.clone()) for key, value in step.items())
        return copies, self.next_keys, self._latest.clone()


def set_ids(step: dict[Key, torch.Tensor], slots: list[int], ids: Sequence[int] | Array) -> None:
    """Write the trajectory ids of some slots, in a copy of the entry; of several, the last."""
    if keys.TRAJ_IDS in step:
        entry = step[keys.TRAJ_IDS].numpy().copy()
        entry.reshape(-1)[slots] = ids
        step[keys.TRAJ_IDS] = torch.from_numpy(entry)


# ------------------------------------------------------------------------------------- by frames

Rows = dict[Key, torch.Tensor]


@dataclass
class Arrivals:
    """The part of a collection by arrival that stays from one batch to the next.

    Attributes:
        surplus: rows that came together with the last of the latest batch.
        surplus_slots: their slots.
        turns: the slots, some of them in flight; None if all wait at the collector's step.
        left: the step that the latest batch left the collector with.
    """

    surplus: Rows = field(default_factory=dict)
    surplus_slots: list[int] = field(default_factory=list)
    turns: AsynchronousTurns | None = None
    left: TensorDictBase | None = None

    def leave_out(self, slots: Collection[int]) -> None:
        """Drop the rows of some slots, whose trajectories are cut short."""
        rows = [row for row, slot in enumerate(self.surplus_slots) if slot not in slots]
        self.surplus = {key: value[rows] for key, value in self.surplus.items()}
        self.surplus_slots = [self.surplus_slots[row] for row in rows]


@dataclass
class Frames:
    """One batch of a collection by frames.

    Attributes:
        carrier: the step to begin with, as TorchRL's collector keeps it.
        new_ids: None if trajectory ids are not tracked.
        left_out: entries that the batch does without.
        keep: is given the step to go on with, and whether the envs are elsewhere: the next loop
            goes on from the last whole step, also if the policy or an env has raised.
        in_one_piece: stack all steps at once, which gradients pass through.
        version: gives the version of the policy's weights, for rows by arrival; None if it is not
            tracked.
    """

    env: ArrayEnv
    lower: Lower
    carrier: TensorDictBase
    new_ids: NewIds | None
    left_out: frozenset[Key]
    place: Placement
    keep: Callable[[TensorDict, bool], None]
    in_one_piece: bool
    watch: Watch | None
    version: Callable[[], Any] | None

    def __post_init__(self) -> None:
        step = flat(self.carrier, self.env.texts)
        self.place.enter(step, (*self.env.carried, *keys.FLAGS))
        self._acting = Acting(self.env, self.lower, self.place, self.version)
        self._turns = turns_of(self.env, self._acting, self.place, step)
        self._moved = False  # whether the envs have gone on from the present step

    def _store(self, steps: int | None) -> Store:
        return Store(self.env, self.left_out, self.place, self.in_one_piece, steps)

    # ------------------------------------------------------------------------------- synchronous

    def synchronous(self, steps: int) -> Rows:
        """Collect ``steps`` steps of every slot: entries ``[N, steps, ...]``.

        Raises:
            NotTensors: if the policy writes something else; nothing has been stepped, and the step
                that is kept has its outputs.
        """
        env, turns, place = self.env, self._turns, self.place
        store = self._store(steps)
        place.ring = min(store.chunk, steps)
        slots = turns.ready
        known = not place.moves and self.watch is None and env.hands_through(keys.TRAJ_IDS)
        ends = Ends(env, self.new_ids, lambda: not known or self._acting.reads(keys.TRAJ_IDS))
        if env.resets_by_mask:
            ends = MaskedEnds(env, self.new_ids, place.storing, asks=self.watch is not None)
            if keys.TRAJ_IDS in turns.present:
                turns.present[keys.TRAJ_IDS] = sent(turns.present[keys.TRAJ_IDS], env.home)
            if env.steps_as_graph and place.graphs and place.policy == env.home:
                self._acting.policy = policy = self.lower(turns.present)
                facts = steps, env.transformed, self.new_ids is None
                make = partial(TurnGraph, policy, env, turns.present, ends, *facts)
                if (turn := kept_graph(policy, "turn", make, *facts)) is not None:
                    return self._replayed(turn, ends, steps)
                if policy.graphs["turn"] is None:
                    place.ring = 0  # the next batch has a graph of whole turns
        if self.watch is not None:
            self.watch.begin(self.carrier)
        with self._leaving(ends.number):
            for buffers in store.allocate():
                step = turns.present
                turns.act(step, slots)
                self._moved = True
                placed = place.for_env(step)
                following, error = env.advance(placed, turns.next_keys, buffers)
                if error is not None:
                    raise error
                place.keep_apart(following)
                begun = ends.begin(following)
                if begun is not following:
                    place.keep_apart(begun, of_reset=True)
                self._moved = False
                store.append(step, following, slots)
                turns.present = next_step(step, begun, env.carried, turns.next_keys)
                ends.renew(turns.present, turns.zeroed)
                if self.watch is not None:
                    self.watch.step_taken(step, following, ends.ended)
                    self.watch.began(ends.ended, turns.present)
            self._acting.check()
            entries = store.grid()
            self._acting.score(entries, turns.present)
            ends.number(entries)
        return entries

    def _replayed(self, turn: TurnGraph, ends: MaskedEnds, steps: int) -> Rows:
        turns, dims = self._turns, len(self.env.batch_size)
        with self._leaving(ends.number):
            turn.begin(turns.present)
            self._moved = True
            for _ in range(steps):
                turn.replay()
            turns.present, turns.next_keys, ends.latest = turn.reached()
            self._moved = False
            self._acting.check()
            storing, contiguous = self.place.storing or self.env.home, torch.contiguous_format
            entries = {
                key: ring[:steps].movedim(0, dims).to(storing, copy=True, memory_format=contiguous)
                for key, ring in turn.rings.items()
                if key not in self.left_out
            }
            ends.number(entries)
        return entries

    # ------------------------------------------------------------------------------ asynchronous

    def asynchronous(self, steps: int) -> Rows:
        """Collect ``steps`` steps of every slot; one that has taken them waits for the others.

        Returns:
            The entries, ``[N, steps, ...]`` each: to the bit those of synchronous collection, if
            the policy draws nothing.
        """
        turns, stepper, count = self._turns, self.env.stepper, self.env.batch_size.numel()
        store = self._store(None)
        taken = np.zeros(count, np.int64)
        begun: list[tuple[int, int]] = []  # trajectories as they begin: steps before, and slot

        def act() -> list[int] | None:
            acting = stepper.idle(slot for slot in turns.ready if taken[slot] < steps)
            taken[acting] += 1
            return acting if acting or stepper.away else None

        def renew(ended: list[int]) -> Array:
            # Their places in this order, below zero: ids follow once all have begun.
            first = -1 - len(begun)
            begun.extend((int(taken[slot]), slot) for slot in ended)
            return np.arange(first, first - len(ended), -1)

        if self.watch is not None:
            self.watch.begin(self.carrier)
        with self._leaving():
            self._take_turns(store, act, renew)
            entries = store.grid()
            if begun and self.new_ids is not None:
                order = sorted(range(len(begun)), key=begun.__getitem__)
                ids = torch.empty(len(begun), dtype=torch.int64)
                ids[order] = torch.from_numpy(self.new_ids(len(begun)))
                for step in (entries, turns.present):
                    if keys.TRAJ_IDS in step:
                        step[keys.TRAJ_IDS] = numbered(step[keys.TRAJ_IDS], ids)
        return entries

    def arriving(self, count: int, held: Arrivals) -> tuple[Rows, list[int]]:
        """Collect ``count`` rows as they arrive, and their slots; no slot waits at the end."""
        idle, missing = self.env.stepper.idle, count - len(held.surplus_slots)
        rows, slots = self._rows(
            held, lambda store: idle(self._turns.ready) if len(store.slots) < missing else None
        )
        held.surplus = {key: value[count:].clone() for key, value in rows.items()}
        held.surplus_slots = slots[count:]
        return {key: value[:count] for key, value in rows.items()}, slots[:count]

    def settle(self, held: Arrivals) -> None:
        """Take in the slots in flight, which wait from now on; their rows join the next batch."""
        if held.turns is not None:
            # Episodes that only begin in a step of the others begin in the next batch.
            waits = not self.env.can.only_by_arrival
            stepper = self.env.stepper
            held.surplus, held.surplus_slots = self._rows(
                held, lambda store: [] if waits and stepper.away else None
            )
            held.turns = None

    def _rows(
        self, held: Arrivals, act: Callable[[Store], list[int] | None]
    ) -> tuple[Rows, list[int]]:
        """The rows held from before, and those of turns until ``act`` gives None; their slots."""
        store = self._store(None)
        if held.left is not self.carrier:  # the collector is not where the latest batch left it
            held.turns = None
        if held.turns is not None:
            self._turns.resume(held.turns)
        elif self.watch is not None:
            self.watch.begin(self.carrier)

        def renew(ended: list[int]) -> Array:
            assert self.new_ids is not None
            return self.new_ids(len(ended))

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
        renew: Callable[[list[int]], Array],
    ) -> None:
        """Have slots act, take in those that come back, and reset those that have ended.

        ``act`` gives the slots that act next, None at the end; ``renew`` the ids of trajectories
        that follow in some slots.
        """
        turns, env, watch = self._turns, self.env, self.watch
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
            if self.version is not None and keys.POLICY_VERSION in step:
                # The env has written the present version; some acted before weights changed.
                following[keys.POLICY_VERSION] = step[keys.POLICY_VERSION]
            done = following[keys.DONE].numpy(force=True).reshape(-1)
            ended = [slot for slot in came.stepped if done[slot]]
            store.append(step, following, came.stepped)
            turns.take(came)
            if ended:
                turns.ready = [slot for slot in turns.ready if slot not in ended]
                if self.new_ids is not None:
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
            self._acting.score({}, turns.present)
            raise
        except NotReset:  # no batch may begin with what a step has left
            turns.present, self._moved = flat(self.carrier, self.env.texts), True
            raise
        finally:
            if number is not None:
                number(turns.present)
            step = self.place.leave(turns.present.exclude(*turns.next_keys))
            if texts := self.env.texts:
                step = told(texts, step, self.carrier.device)
            left = nested(step.items(), self.env.batch_size, self.carrier.device)
            if held is not None:
                held.left = left
            self.keep(left, self._moved)


def _joined(before: Rows, after: Rows) -> Rows:
    """The rows of both; an entry that one of them lacks (of the policy, say) is zero there."""
    joined = {}
    for key, like in {**before, **after}.items():
        joined[key] = torch.cat(
            [
                rows[key]
                if key in rows
                else like.new_zeros((len(rows[keys.NEXT_DONE]), *like.shape[1:]))
                for rows in (before, after)
            ]
        )
    return joined
