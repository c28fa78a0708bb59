"""The loop by episodes where slots that are ready go on."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tdcollect import keys
from tdcollect.collect.episodes import Block, EpisodeLoop, Piece, Start
from tdcollect.collect.ready.rows import Rows
from tdcollect.collect.ready.slots import ReadySlots
from tdcollect.collect.step_dict import StepDict
from tdcollect.collect.tensordict_env import SteppedEnv
from tdcollect.envs.errors import SlotError
from tdcollect.envs.spaces import nested

if TYPE_CHECKING:
    from tdcollect.collect.fast.array_env import ArrayEnv


class FirstToStart:
    """The first episodes to start, as slots in step start them.

    Slots at their own pace cannot know how many episodes the others begin before them, in steps of
    their own. So each runs on; an episode that turns out not to be among the first is left out.

    Args:
        count: the number of episodes.

    Attributes:
        kept: the first to start so far, in order: the slot's steps before, the slot, the id.
        left_out: the ids of those that turned out not to be among them.
    """

    def __init__(self, count: int):
        self._count = count
        self._ids = 0
        self.kept: list[tuple[int, int, int]] = []
        self.left_out: set[int] = set()

    def start(self, slot: int, steps: int) -> Start | None:
        """The next episode of a slot that has taken so many steps; None where it gets none."""
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

    def ranks(self) -> dict[int, int]:
        """The place of each episode that is kept, by its index."""
        return {number: rank for rank, (_, _, number) in enumerate(self.kept)}

    def only_kept(self, blocks: list[Block], ids: torch.Tensor) -> list[Block]:
        """Blocks without the other episodes, under the indices and trajectory ids of in step.

        Args:
            blocks: of the whole collection.
            ids: the trajectory ids, in the order of starting.
        """
        ranks, ids = self.ranks(), ids.cpu()
        final = torch.zeros(self._ids, dtype=torch.int64)
        chosen = []
        for entries, pieces in blocks:
            kept = []
            for piece in pieces:
                start = piece.start
                if start.index in ranks:
                    rank = ranks[start.index]
                    final[start.traj_id] = ids[rank]
                    kept.append(piece._replace(start=Start(rank, None, start.traj_id)))
            chosen.append(Block(entries, kept))
        for entries, _ in chosen:
            if keys.TRAJ_IDS in entries:
                entries[keys.TRAJ_IDS] = final[entries[keys.TRAJ_IDS].cpu()]
        return chosen


class ReadyEpisodeLoop(EpisodeLoop):
    """Runs episodes, each slot at its own pace; an :class:`EpisodeLoop` beside.

    Args:
        *args: as of :class:`EpisodeLoop`.
        order: decides which episodes run; None to take them from ``starts``.
        **kwargs: likewise.
    """

    _env: ArrayEnv

    def __init__(self, *args: Any, order: FirstToStart | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._order = order
        self._beginning: dict[int, Start] = {}  # episodes whose resets are in flight
        self._steps_of = np.zeros(len(self._slots), np.int64)  # since all slots were reset
        self._rows: Rows
        self._at = np.zeros(len(self._slots), np.int64)  # each slot's rows in the block
        self._pieces: list[Piece] = []

    def _next_of(self, slot: int) -> Start | None:
        if self._order is None or self._again:
            return self._next()
        return self._order.start(slot, int(self._steps_of[slot]))

    def __iter__(self) -> Iterator[Block]:
        while self._running or self._beginning or self._start_all():
            self._rows = Rows(self._env, self._left_out, self._place, self._in_one_piece)
            self._pieces, self._at[:] = [], 0
            for running in self._running.values():
                running.begin = 0
            began = time.monotonic()
            for buffers in self._rows.allocate():
                self._turn(buffers)
                over = time.monotonic() - began > self._seconds
                if over or not (self._running or self._beginning) or self._at.max() >= self._steps:
                    break
            for slot, running in self._running.items():
                if self._at[slot] > running.begin:
                    stop = int(self._at[slot])
                    self._pieces.append(Piece(running.start, slot, running.begin, stop, False))
            yield Block(self._rows.grid(int(self._at.max())), self._pieces)

    def _start_all(self) -> bool:
        started = super()._start_all()
        if started:
            self._slots_ready = ReadySlots(self._env, self._act, self._present, self._remembered)
            self._slots_ready.ready = list(self._running)
        return started

    def _turn(self, buffers: Any) -> None:
        """Have the slots that are ready act, and take in those that come back."""
        slots = self._slots_ready
        slots.ready = [slot for slot in slots.ready if slot in self._running]
        acting = slots.idle(slots.ready)
        if not acting and not slots.in_flight:
            return
        arrived = slots.turn(acting, buffers)
        received = arrived.received
        lost: dict[int, Exception] = dict(self._env.broken_episodes) if received.stepped else {}
        stepped = [slot for slot in received.stepped if slot in self._running and slot not in lost]
        ended = self._ends_of(stepped, arrived.following)
        step = slots.present
        self._rows.append(step, arrived.following, stepped)
        self._at[stepped] += 1
        self._steps_of[stepped] += 1
        slots.move_on(arrived)
        self._present = slots.present
        for slot in ended:
            run = self._running.pop(slot)
            info, at = self._env.latest_info(slot), int(self._at[slot])
            self._pieces.append(Piece(run.start, slot, run.begin, at, True, info=info))
        for slot in received.begun:
            if slot in self._beginning:
                self._note({slot: self._beginning.pop(slot)}, int(self._at[slot]))
        slots.present = self._present
        if self._watch is not None:
            self._tell(step, arrived.following, stepped, ended, received.begun)
        if lost:
            self._fail(SlotError("step", lost), built=True)
        if received.failed is not None:
            self._fail(received.failed)
        if received.failed_resets is not None:
            starts = {
                slot: self._beginning.pop(slot)
                for slot in received.failed_resets.causes
                if slot in self._beginning
            }
            self._give_up(received.failed_resets, starts)
        self._begin_free()
        self._zeroed = slots.zeroed

    def _tell(
        self,
        step: StepDict,
        following: StepDict,
        stepped: list[int],
        ended: list[int],
        begun: list[int],
    ) -> None:
        assert self._watch is not None
        present, size = self._slots_ready.present, self._env.batch_size
        if stepped:
            self._watch.step_taken(step, following, present, ended, stepped, [])
        if begun:
            self._watch.started(begun, lambda: nested(present.items(), size))

    def _ends_of(self, stepped: list[int], following: StepDict) -> list[int]:
        """Those of the slots that have stepped whose episodes have ended."""
        if self._max_episode_steps is not None:
            late = [s for s in stepped if self._steps_of[s] + 1 >= self._due[s]]
            if late:
                for key in (keys.TRUNCATED, keys.DONE):
                    following[key] = following[key].clone()
                    following[key].view(-1)[late] = True
        done = following[keys.DONE].numpy(force=True).reshape(-1)
        return [slot for slot in stepped if done[slot]]

    def _note(self, starts: dict[int, Start], at: int) -> None:
        super()._note(starts, at)
        if self._max_episode_steps is not None:
            for slot in starts:
                self._due[slot] = self._steps_of[slot] + self._max_episode_steps

    def _begin_free(self) -> None:
        """Start episodes in the slots that are free."""
        free = [s for s in self._slots if s not in self._running and s not in self._beginning]
        starts: dict[int, Start] = {}
        for slot in self._slots_ready.idle(free):
            start = self._next_of(slot)
            if start is None and self._arrived is not None and self._arrived():
                start = self._next()
            if start is not None:
                starts[slot] = start
        if self._order is not None:
            self._drop_late()
        if not starts:
            return
        if self._rebuild:
            self._env.rebuild_slots(list(starts))
        self._beginning.update(starts)
        seeds = None
        if next(iter(starts.values())).seed is not None:
            seeds = [start.seed for start in starts.values()]
        self._env.send_reset(list(starts), seeds, self._options)  # type: ignore[arg-type]

    def _drop_late(self) -> None:
        """Let go of episodes that are not among the first to start."""
        assert self._order is not None
        late = self._order.left_out
        for slot, run in list(self._running.items()):
            if run.start.index in late:
                del self._running[slot]
        for slot, start in list(self._beginning.items()):
            if start.index in late:
                del self._beginning[slot]

    def _fail(self, error: SlotError, built: bool = False) -> None:
        """End the episodes of slots whose envs raised, before their time."""
        runs = {s: self._running.pop(s) for s in error.causes if s in self._running}
        for slot, run in runs.items():
            at = int(self._at[slot])
            self._pieces.append(Piece(run.start, slot, run.begin, at, False, error))
        self._give_up(error, {slot: run.start for slot, run in runs.items()}, built)


def episode_loop(
    env: SteppedEnv, *args: Any, order: FirstToStart | None = None, **kwargs: Any
) -> EpisodeLoop:
    """The loop for an env: its slots at their own pace where it allows that, else in step.

    Args:
        env: the env on StepDicts.
        *args: as of :class:`EpisodeLoop`.
        order: as of :class:`ReadyEpisodeLoop`.
        **kwargs: as of :class:`EpisodeLoop`.
    """
    if env.own_pace:
        return ReadyEpisodeLoop(env, *args, order=order, **kwargs)
    return EpisodeLoop(env, *args, **kwargs)
