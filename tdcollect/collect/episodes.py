"""Collecting by episodes: indexed episodes on free slots, each from its start to its end.

The order in which episodes start decides which ones run, never the order in which they end: a slot
whose episode ends takes the next one, and waits once none is left. ``collect(episodes=...)`` and
evaluation both run this loop.
"""

from __future__ import annotations

import copy
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from tdcollect import keys
from tdcollect.collect.arrays import Options, Seeds
from tdcollect.collect.hooks import Watch
from tdcollect.collect.step_dict import StepDict, by_slot, next_step, zero_rows
from tdcollect.collect.store import Placement, Store
from tdcollect.collect.turns import Act, set_ids, turns_of
from tdcollect.envs.process.values import EachOptions
from tdcollect.envs.slots import SlotError
from tdcollect.keys import Key


@dataclass(frozen=True)
class Start:
    """An episode to run; its seed is None to go on with the env's own generator.

    ``rebuild``: build the slot's env again for it.
    """

    index: int
    seed: int | None
    traj_id: int
    options: dict[str, Any] | None = None
    rebuild: bool = False


class Piece(NamedTuple):
    """The part of an episode that lies in one block: the steps from ``begin`` to before ``stop``.

    ``info`` is gymnasium's, of the last step. After an error, the episode has no further piece.
    """

    start: Start
    slot: int
    begin: int
    stop: int
    ended: bool = False
    error: Exception | None = None
    info: Mapping[str, Any] = MappingProxyType({})


class Block(NamedTuple):
    """Consecutive steps of all slots, ``[N, t, ...]``; those outside of the pieces mean nothing."""

    entries: dict[Key, torch.Tensor]
    pieces: list[Piece]


@dataclass
class Episodes:
    """Runs episodes; iterate to get blocks of steps.

    Attributes:
        starts: the episodes, all of them with a seed, or none. Asked at each step while slots are
            free: it may have more after it had none.
        steps: the most steps of a block.
        seconds: a block ends with the step at which it has taken so long.
        max_episode_steps: episodes are truncated at this length.
        left_out: entries that blocks do without.
        in_one_piece: stack each block at once, which gradients pass through.
        first_seeds: one per slot, for the first reset of episodes that have no seed.
        options: gymnasium's reset options, of all episodes.
        own_options: each episode has reset options of its own instead.
        resets: int64 ``[N]``: the resets of each slot's env since it was made, counted here.
        on_start: called with the slot and the episode of each start.
        on_step: called after each step with the episodes that took it, by slot.
        on_error: is given an episode whose env raised, and the error; returns the episode to run in
            its place, or None for none. Without it, errors are raised.
        watch: called with steps, and with episodes that start.
        turns: has the step that each slot is at, ``present``.

    Raises:
        ValueError: for ``max_episode_steps`` or ``options`` if slots cannot be reset singly.
    """

    env: Any  # a SteppedEnv; an ArrayEnv where slots step asynchronously
    act: Act
    starts: Iterator[Start] | SlotStarts
    place: Placement
    _: KW_ONLY
    steps: int
    seconds: float = math.inf
    max_episode_steps: int | None = None
    left_out: frozenset[Key] = frozenset()
    in_one_piece: bool = False
    first_seeds: Seeds = None
    options: Options = None
    own_options: bool = False
    resets: Any = None
    on_start: Callable[[int, Start], None] | None = None
    on_step: Callable[[Mapping[int, Start]], None] | None = None
    on_error: Callable[[Start, Exception], Start | None] | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        for name in ("max_episode_steps", "options"):
            if getattr(self, name) is not None and not self.env.can.reset_singly:
                raise ValueError(
                    f"expected no {name}: this vector env cannot reset single slots, which {name} "
                    "by episodes ask for; make the env itself so, or use backend='serial'"
                )
        if self.max_episode_steps is not None and not self.env.marks_truncation:
            raise ValueError(
                f"expected no max_episode_steps: the env has no {keys.TRUNCATED!r} flag to mark "
                "the limit with; put it under TorchRL's StepCounter(max_steps=...)"
            )
        self.turns = turns_of(self.env, self.act, self.place, StepDict())
        self._slots = list(range(self.env.batch_size.numel()))
        if self.resets is None:
            self.resets = np.zeros(len(self._slots), np.int64)
        self._singly = True
        self._again: deque[Start] = deque()  # episodes to start once more
        self._running: dict[int, Start] = {}
        self._latest: Options = None
        self._beginning: dict[int, Start] = {}  # episodes whose resets are in flight
        self._pieces: list[Piece] = []
        # By slot: rows in the block, steps since the first start, rows before its episode, the
        # step of its time limit.
        self._counts = np.zeros((4, len(self._slots)), np.int64)
        self._at, self._taken, self._from, self._due = self._counts

    def __iter__(self) -> Iterator[Block]:
        while True:
            self._drop_late()
            if not (self._running or self._beginning or self._start_all()):
                return
            asynchronous = self.env.can.asynchronous
            steps = None if asynchronous else self.steps
            store = Store(self.env, self.left_out, self.place, self.in_one_piece, steps)
            pieces = self._pieces = []
            self._at[:] = self._from[:] = 0
            began = time.monotonic()
            for buffers in store.allocate():
                self._turn(store, buffers)
                full = asynchronous and self._at.max() >= self.steps
                over = full or time.monotonic() - began > self.seconds
                if over or not (self._running or self._beginning):
                    break
            for slot, start in self._running.items():
                if self._at[slot] > self._from[slot]:
                    self._cut(slot, start)
            grid, size = store.grid(), self.env.batch_size
            yield Block({key: by_slot(entry, size) for key, entry in grid.items()}, pieces)

    def _start_all(self) -> bool:
        """Start an episode in every slot; False if none is left to start."""
        turns, env = self.turns, self.env
        while True:
            starts = self._next_starts(self._slots)
            if not starts:
                return False
            seeds, self.first_seeds = self.first_seeds, None
            first = next(iter(starts.values()))
            if first.seed is not None:
                # A slot without an episode is reset too, and then waits: any seed does.
                seeds = [starts.get(slot, first).seed for slot in self._slots]  # type: ignore[misc]
            self._rebuild(starts)
            self.resets += 1
            try:
                step = env.reset_all(seeds, self._options(self._slots, starts))
            except SlotError as error:
                self._give_up(error, starts)
                self._again.extendleft(reversed(starts.values()))
                continue
            self.place.enter(step, list(step))
            for key in turns.zeroed:
                step[key] = torch.zeros_like(turns.present[key])
            step[keys.TRAJ_IDS] = torch.zeros(env.batch_size, dtype=torch.int64)
            turns.present, turns.ready = step, list(starts)
            # Where seeds cannot be given singly, episodes with seeds start all at once, in waves.
            self._singly = first.seed is None or env.can.seed_singly
            self._at[:] = 0
            self._note(starts)
            if self.watch is not None:
                self.watch.began(list(starts), turns.present)
            return True

    def _rebuild(self, starts: Mapping[int, Start]) -> None:
        """Build the envs again of slots whose episodes ask for it."""
        if slots := [slot for slot, start in starts.items() if start.rebuild]:
            self.env.rebuild_slots(slots)
            self.resets[slots] = 0

    def _next_starts(self, free: Sequence[int]) -> dict[int, Start]:
        """The episodes to start in slots that are free, up to the first that has none."""
        starts: dict[int, Start] = {}
        for slot in free:
            if self._again:
                start: Start | None = self._again.popleft()
            elif isinstance(self.starts, SlotStarts):
                start = self.starts.start(slot, int(self._taken[slot]))
            else:
                start = next(self.starts, None)
            if start is not None:
                starts[slot] = start
            elif not isinstance(self.starts, SlotStarts):
                break
        return starts

    def _note(self, starts: dict[int, Start]) -> None:
        """Have episodes run from the present step on."""
        if not starts:
            return
        slots = list(starts)
        set_ids(self.turns.present, slots, [start.traj_id for start in starts.values()])
        self._running.update(starts)
        self._from[slots] = self._at[slots]
        if self.max_episode_steps is not None:
            self._due[slots] = self._taken[slots] + self.max_episode_steps
        if self.on_start is not None:
            for slot, start in starts.items():
                self.on_start(slot, start)

    def _cut(self, slot: int, start: Start, *rest: Any) -> None:
        """Note the steps of an episode that the block has."""
        self._pieces.append(Piece(start, slot, int(self._from[slot]), int(self._at[slot]), *rest))

    def _turn(self, store: Store, buffers: Any) -> None:
        """Have slots act, take in those that come back, and start episodes in those that are free.

        A step that is lost in every slot gives no rows: all episodes start again.
        """
        turns, env, running = self.turns, self.env, self._running
        try:
            came = turns.exchange(turns.able(running), buffers)
        except SlotError as error:
            self._break_off(error, list(running))
            return
        step, following, failed = turns.present, came.following, came.failed
        if came.stepped and failed is None and env.broken_episodes:
            failed = SlotError("step", env.broken_episodes)
        gone = () if failed is None else failed.causes
        stepped = [slot for slot in came.stepped if slot in running and slot not in gone]
        ended = self._ended(following, stepped)
        store.append(step, following, stepped)
        if failed is not None:
            self._break_off(failed, [slot for slot in gone if slot in running], came.failed is None)
        self._counts[:2, turns.rows(stepped)] += 1
        if self.on_step is not None:
            self.on_step({slot: running[slot] for slot in stepped})
        for slot in ended:
            self._cut(slot, running.pop(slot), True, None, env.latest_info(slot))
        turns.take(came)
        if came.began:
            self._note({s: self._beginning.pop(s) for s in came.began if s in self._beginning})
        if (refused := came.failed_begins) is not None:
            lost = [slot for slot in refused.causes if slot in self._beginning]
            self._give_up(refused, {slot: self._beginning.pop(slot) for slot in lost})
        began = [*came.began, *self._begin_free(step, following)]
        if self.watch is not None:
            if stepped:
                self.watch.step_taken(step, following, ended, stepped)
            self.watch.began(began, turns.present)

    def _ended(self, following: StepDict, stepped: list[int]) -> list[int]:
        """The slots whose episodes have ended; marks those at the step limit as truncated."""
        if self.max_episode_steps is not None:
            over = self._taken + 1 >= self._due
            if late := [slot for slot in stepped if over[slot]] if over.any() else []:
                for key in (keys.TRUNCATED, keys.DONE):
                    following[key] = following[key].clone()
                    following[key].view(-1)[late] = True
        done = following[keys.DONE].numpy(force=True).reshape(-1)
        return [slot for slot in stepped if done[slot]] if 1 in done.tobytes() else []

    def _begin_free(self, step: StepDict, following: StepDict) -> list[int]:
        """Start episodes in the slots that are free; those where they have begun at once."""
        turns, env = self.turns, self.env
        if len(self._running) + len(self._beginning) == len(self._slots):
            return []
        free = [s for s in self._slots if s not in self._running and s not in self._beginning]
        unseen: set[int] = set()
        if env.can.asynchronous:
            free = env.stepper.idle(free)  # others share a worker that is busy
        elif free and not env.can.pause:
            # Slots that run on unseen are reset where they end, as their env asks for.
            done = following[keys.DONE].numpy(force=True).reshape(-1)
            unseen = {slot for slot in free if done[slot]}
        starts: dict[int, Start] = {}
        while True:
            if self._singly:
                starts.update(self._next_starts([slot for slot in free if slot not in starts]))
            self._drop_late()
            reset = sorted({*starts, *unseen})
            if not reset:
                return []
            seeds = None
            if starts and next(iter(starts.values())).seed is not None:
                seeds = [starts[slot].seed if slot in starts else 0 for slot in reset]
            self._rebuild(starts)
            self.resets[reset] += 1
            if env.can.asynchronous:
                self._beginning.update(starts)
                env.send_reset(reset, seeds, self._options(reset, starts))
                return []
            every = len(self._running) + len(starts) == len(self._slots)
            env.attend(self._slots if every else list(starts))
            starting = torch.zeros(len(self._slots), dtype=torch.bool)
            starting[reset] = True
            starting = starting.view(following[keys.DONE].shape)
            try:
                options = self._options(reset, starts)
                begun = env.begin(following, starting, reset, seeds, options)
            except SlotError as error:
                self._give_up(error, starts)
                continue
            self.place.keep_apart(begun, of_reset=True)
            turns.present = next_step(step, begun, env.carried, turns.next_keys)
            zero_rows(turns.present, turns.zeroed, env.batch_size, list(starts))
            self._note(starts)
            return list(starts)

    def _options(self, slots: Sequence[int], starts: Mapping[int, Start]) -> Options:
        """The reset options of slots; one without an episode is reset as the latest was."""
        if not self.own_options:
            return self.options
        if starts:
            self._latest = next(iter(starts.values())).options
        own = {slot: starts[slot].options if slot in starts else self._latest for slot in slots}
        # A copy for each: envs may change theirs.
        return EachOptions((slot, copy.deepcopy(options)) for slot, options in own.items())

    def _drop_late(self) -> None:
        """Let go of episodes that are not among the first to start."""
        late = self.starts.left_out if isinstance(self.starts, SlotStarts) else ()
        for episodes in (self._running, self._beginning) if late else ():
            for slot in [slot for slot, start in episodes.items() if start.traj_id in late]:
                del episodes[slot]

    def _break_off(self, error: SlotError, slots: list[int], built: bool = False) -> None:
        """End the episodes of ``slots`` before their time; those without a fault start again."""
        starts = {slot: self._running.pop(slot) for slot in slots}
        for slot, start in starts.items():
            self._cut(slot, start, False, error)
            if slot not in error.causes:
                self._again.append(start)
        self._give_up(error, starts, built)

    def _give_up(self, error: SlotError, starts: dict[int, Start], built: bool = False) -> None:
        """Build the envs that raised again, unless built; take their episodes out of ``starts``."""
        if not error.causes:  # the policy's, as it acted: the envs are sound
            return
        if self.on_error is None or not self.env.can.rebuild:
            raise error
        if not built:
            self.env.rebuild_slots([*error.causes])
        self.resets[[*error.causes]] = 0
        for slot, cause in error.causes.items():
            start = starts.pop(slot, None)
            again = None if start is None else self.on_error(start, cause)
            if again is not None:
                self._again.append(again)


class SlotStarts:
    """Episodes that depend on the slot that is free.

    Attributes:
        left_out: the ids of those to let go of, though they run.
    """

    left_out: set[int] = set()  # noqa: RUF012

    def start(self, slot: int, steps: int) -> Start | None:
        """The next episode of a slot that has taken so many steps; None if it gets none."""
        raise NotImplementedError


class FirstToStart(SlotStarts):
    """Selects the K episodes that synchronous collection would have started first.

    Slots that step asynchronously cannot know how many episodes the others begin before them, in
    steps of their own. So each runs on; an episode that turns out not to be among the first is left
    out.

    Attributes:
        kept: the first to start so far, in order: the slot's steps before, the slot, the id.
    """

    def __init__(self, count: int):
        self._count = count
        self._ids = 0
        self.kept: list[tuple[int, int, int]] = []
        self.left_out: set[int] = set()

    def start(self, slot: int, steps: int) -> Start | None:
        if len(self.kept) == self._count and (steps, slot) > self.kept[-1][:2]:
            return None
        number = self.new_id()
        insort(self.kept, (steps, slot, number))
        if len(self.kept) > self._count:
            self.left_out.add(self.kept.pop()[2])
        return Start(number, None, number)

    def new_id(self) -> int:
        """An id that no episode has yet."""
        self._ids += 1
        return self._ids - 1

    def only_kept(self, blocks: list[Block], ids: torch.Tensor) -> list[Block]:
        """The kept episodes' blocks, renumbered as synchronous collection would number them."""
        ranks = {number: rank for rank, (_, _, number) in enumerate(self.kept)}
        final = torch.zeros(self._ids, dtype=torch.int64)
        chosen = []
        for entries, pieces in blocks:
            renumbered = []
            for piece in pieces:
                start, rank = piece.start, ranks.get(piece.start.index)
                if rank is not None:
                    final[start.traj_id] = ids[rank]
                    renumbered.append(piece._replace(start=Start(rank, None, start.traj_id)))
            chosen.append(Block(entries, renumbered))
        for entries, _ in chosen:
            if keys.TRAJ_IDS in entries:
                entries[keys.TRAJ_IDS] = final[entries[keys.TRAJ_IDS].cpu()]
        return chosen


def join_episodes(blocks: Iterable[Block]) -> dict[Key, torch.Tensor]:
    """Join the pieces of all episodes, each contiguous, in the order of their indices.

    Pieces of an episode whose env failed, and which started again under its index, are left out.
    """
    parts: list[dict[Key, torch.Tensor]] = []
    indices: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    failed: list[int] = []
    for entries, pieces in blocks:
        if not pieces:
            continue
        lengths = torch.tensor([piece.stop - piece.begin for piece in pieces])
        steps = torch.cat([torch.arange(piece.begin, piece.stop) for piece in pieces])
        slots, of_index, of_id = (
            torch.tensor([(piece.slot, piece.start.index, piece.start.traj_id) for piece in pieces])
            .repeat_interleave(lengths, 0)
            .T
        )
        indices.append(of_index)
        ids.append(of_id)
        failed += [piece.start.traj_id for piece in pieces if piece.error is not None]
        part = {}
        for key, rows in entries.items():
            part[key] = rows[slots.to(rows.device), steps.to(rows.device)]
        parts.append(part)
    order = torch.cat(indices).argsort(stable=True)
    if failed:
        order = order[~torch.isin(torch.cat(ids)[order], torch.tensor(failed))]
    joined = {}
    for key in parts[0]:
        together = torch.cat([part[key] for part in parts])
        joined[key] = together[order.to(together.device)]
    return joined
