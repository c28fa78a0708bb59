"""The loop by episodes: numbered episodes on free slots, each from its start to its end.

Which episodes run is decided by the order in which they start, never by the order in which they
end: a slot whose episode ends takes the next number, and waits once none is left. Collecting by
episodes and evaluating both run it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase

from tdcollect import keys
from tdcollect.collect.fast.devices import Placement
from tdcollect.collect.fast.loop import ArrayEnv, Batch, next_row
from tdcollect.collect.fast.transforms import base_of
from tdcollect.collect.step_dict import Key, StepDict, by_slot, check_tensors, is_next
from tdcollect.collect.tensordict_env import TensorDictEnv, reset_all
from tdcollect.envs.errors import SlotError
from tdcollect.envs.wrapper import GymnasiumEnv, nested


class Start(NamedTuple):
    """An episode to run.

    Attributes:
        number: its number, in the order of starting.
        seed: what its env is reset with; None to go on with the env's own generator.
        traj_id: its trajectory id.
    """

    number: int
    seed: int | None
    traj_id: int


class Piece(NamedTuple):
    """The part of an episode that lies in one block.

    Attributes:
        start: the episode.
        slot: where it runs.
        first: its first column in the block.
        stop: the column after its last.
        ended: whether this is its last piece.
        error: what the env raised; the episode has no further piece then.
        info: what the env told beside the last step.
    """

    start: Start
    slot: int
    first: int
    stop: int
    ended: bool
    error: Exception | None = None
    info: Mapping[str, Any] = MappingProxyType({})


class Block(NamedTuple):
    """Consecutive steps of all slots.

    Attributes:
        columns: the entries ``[N, t, ...]``; what is in no piece means nothing.
        pieces: the parts of episodes in it.
    """

    columns: dict[Key, torch.Tensor]
    pieces: list[Piece]


@dataclass
class _Running:
    start: Start
    first: int


Act = Callable[[StepDict, list[int]], None]


class EpisodeWatch(Protocol):
    """Is told of steps and of episodes."""

    def started(self, slots: list[int], row: Callable[[], TensorDictBase]) -> None:
        """Episodes start in these slots, with the row given."""

    def stepped_rows(
        self,
        rows: StepDict,
        following: StepDict,
        advanced: StepDict,
        ended: list[int],
        slots: list[int] | None = None,
        begun: list[int] | None = None,
    ) -> None:
        """Slots took a step; in some an episode ended, in some one starts."""


class EpisodeLoop:
    """Runs episodes; iterate to get blocks of steps.

    Args:
        env: the env on rows.
        act: runs the policy: writes its outputs into the rows, of which those of the slots given
            matter.
        remembered: tells from the first row with the policy's outputs which entries the policy
            takes from one step to the next; they are zero where an episode starts.
        starts: the episodes; all of them with a seed, or none.
        steps: a block's most.
        seconds: a block ends with the step at which it has taken so long; None for no limit.
        max_episode_steps: episodes are truncated at this length.
        left_out: entries that blocks do without.
        place: moves tensors between devices; None where all is on the CPU.
        whole: stack each block in one go, which gradients pass through.
        first_seeds: one a slot, for the first reset of episodes that have no seed.
        options: gymnasium's reset options.
        rebuild: build a slot's env anew for each episode.
        started: is told of each episode that starts, and where.
        failed: is told of an episode whose env raised, and says what to run in its place; None for
            errors to pass.

    Raises:
        ValueError: for ``max_episode_steps`` on slots that cannot be reset singly.
    """

    def __init__(
        self,
        env: ArrayEnv | TensorDictEnv,
        act: Act,
        remembered: Callable[[StepDict], list[Key]],
        starts: Iterator[Start],
        *,
        steps: int,
        seconds: float | None = None,
        max_episode_steps: int | None = None,
        left_out: frozenset[Key] = frozenset(),
        place: Placement | None = None,
        whole: bool = False,
        first_seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
        rebuild: bool = False,
        started: Callable[[int, Start], None] | None = None,
        failed: Callable[[Start, Exception], Start | None] | None = None,
        watch: EpisodeWatch | None = None,
    ):
        self._env = env
        self._act = act
        self._remembered = remembered
        self._starts = starts
        self._again: deque[Start] = deque()
        self._steps = steps
        self._seconds = math.inf if seconds is None else seconds
        self._max_episode_steps = max_episode_steps
        self._left_out = left_out
        self._place = place
        self._whole = whole
        self._first_seeds = first_seeds
        self._options = options
        self._rebuild = rebuild
        self._started = started
        self._failed = failed
        self._watch = watch
        base = base_of(env.whole)
        self._stepper = base.stepper if isinstance(base, GymnasiumEnv) else None
        backend = None if self._stepper is None else self._stepper.backend
        # Where seeds cannot be given singly, episodes with seeds start all at once, in waves.
        self._seeds_singly = backend is None or backend.seeds_subset
        # Slots without an episode wait where the env lets them; else they run on, unseen.
        self._waits = isinstance(env, ArrayEnv) and env.env.steps_singly
        resets_singly = backend is None or backend.resets_subset
        for name, value in (("max_episode_steps", max_episode_steps), ("options", options)):
            if value is not None and not resets_singly:
                raise ValueError(
                    f"expected no {name}: this vector env cannot reset single slots, which {name} "
                    "by episodes ask for; make the env itself so, or use backend='serial'"
                )
        if max_episode_steps is not None and keys.TRUNCATED not in env.whole.done_keys:
            raise ValueError(
                f"expected no max_episode_steps: the env has no {keys.TRUNCATED!r} flag to mark "
                "the limit with; put it under TorchRL's StepCounter(max_steps=...)"
            )
        self._slots = list(range(env.batch_size.numel()))
        self._lengths = np.zeros(len(self._slots), np.int64)
        self._singly = True
        self._running: dict[int, _Running] = {}
        self._rows = StepDict()
        self._next_keys: list[Key] | None = None
        self._zeroed: list[Key] = []

    def __iter__(self) -> Iterator[Block]:
        while self._running or self._start_all():
            batch = Batch(self._env, self._steps, self._left_out, self._place, self._whole)
            pieces: list[Piece] = []
            taken = 0
            for running in self._running.values():
                running.first = 0
            began = time.monotonic()
            for buffers in batch.allocate():
                taken += self._step(batch, buffers, pieces, taken)
                if not self._running or time.monotonic() - began > self._seconds:
                    break
            for slot, running in self._running.items():
                pieces.append(Piece(running.start, slot, running.first, taken, False))
            yield Block(batch.cut(), pieces)

    def _next(self) -> Start | None:
        return self._again.popleft() if self._again else next(self._starts, None)

    def _start_all(self) -> bool:
        """Start an episode in every slot; False where none is left to start."""
        while True:
            starts = {slot: s for slot in self._slots if (s := self._next()) is not None}
            if not starts:
                return False
            seeds, self._first_seeds = self._first_seeds, None
            if starts[0].seed is not None:
                # A slot without an episode is reset too, and then waits: any seed does.
                seeds = [starts.get(slot, starts[0]).seed for slot in self._slots]  # type: ignore[misc]
            if self._rebuild:
                self._build(self._slots)
            try:
                rows = reset_all(self._env.whole, seeds, self._options)
            except SlotError as error:
                self._give_up(error, starts)
                self._again.extendleft(reversed(starts.values()))
                continue
            if self._place is not None:
                rows = StepDict((key, value.cpu()) for key, value in rows.items())
            for key in self._zeroed:
                rows[key] = torch.zeros_like(self._rows[key])
            rows[keys.TRAJ_IDS] = torch.zeros(self._env.batch_size, dtype=torch.int64)
            self._rows = rows
            self._singly = starts[0].seed is None or self._seeds_singly
            self._note(starts, 0)
            if self._watch is not None:
                self._watch.started(
                    list(starts), lambda: nested(self._rows.items(), self._env.batch_size)
                )
            return True

    def _note(self, starts: dict[int, Start], column: int) -> None:
        """Have episodes run from a column on."""
        ids = self._rows[keys.TRAJ_IDS] = self._rows[keys.TRAJ_IDS].clone()
        for slot, start in starts.items():
            self._running[slot] = _Running(start, column)
            ids.view(-1)[slot] = start.traj_id
            if self._started is not None:
                self._started(slot, start)
        self._lengths[list(starts)] = 0

    def _step(self, batch: Batch, buffers: Any, pieces: list[Piece], column: int) -> int:
        """Step once; returns how many steps the batch has grown by."""
        rows, running = self._rows, self._running
        active = list(running)
        self._act(rows, active)
        if self._next_keys is None:
            check_tensors(rows)
            self._next_keys = [key for key in rows if is_next(key)]
            self._zeroed = self._remembered(rows)
        slots = active if self._waits and len(active) < len(self._slots) else None
        try:
            following, error = self._env.advance(rows, self._next_keys, buffers, slots)
        except SlotError as raised:
            # The step is lost in every slot: all episodes start again, these for a reason.
            self._stop(active, raised, pieces, column)
            return 0
        batch.append(rows, following)
        if error is not None:
            self._stop([slot for slot in error.causes if slot in running], error, pieces, column)
        elif self._stepper is not None and self._stepper.broken:
            error = SlotError("step", self._stepper.broken)
            lost = [slot for slot in error.causes if slot in running]
            self._stop(lost, error, pieces, column, built=True)
        column += 1
        done = self._ends(following)
        if not done and error is None:  # nothing to start or to reset
            self._rows = next_row(rows, following, self._env, self._next_keys)
            if self._watch is not None:
                self._watch.stepped_rows(rows, following, self._rows, [], active)
            return 1
        whole = [slot for slot in active if slot in running]
        ended = [slot for slot in done if slot in running]
        for slot in ended:
            lane = running.pop(slot)
            info = {} if self._stepper is None else self._stepper.backend.latest_info(slot)
            pieces.append(Piece(lane.start, slot, lane.first, column, True, info=info))
        begun, starts = self._start_free(following, done)
        self._rows = next_row(rows, begun or following, self._env, self._next_keys)
        if starts:
            started = list(starts)
            for key in self._zeroed:
                value = self._rows[key] = self._rows[key].clone(
                    memory_format=torch.contiguous_format
                )
                by_slot(value, self._env.batch_size)[started] = 0
            self._note(starts, column)
        if self._watch is not None:
            self._watch.stepped_rows(rows, following, self._rows, ended, whole, list(starts))
        return 1

    def _ends(self, following: StepDict) -> list[int]:
        """The slots whose flags say that they have ended; those at the limit are marked so."""
        if self._max_episode_steps is not None:
            self._lengths += 1
            reached = np.flatnonzero(self._lengths >= self._max_episode_steps).tolist()
            late = [slot for slot in reached if slot in self._running]
            if late:
                for key in (keys.TRUNCATED, keys.DONE):
                    following[key] = following[key].clone()
                    following[key].view(-1)[late] = True
        done = following[keys.DONE].numpy(force=True)
        ended: list[int] = np.flatnonzero(done).tolist() if np.count_nonzero(done) else []
        return ended

    def _start_free(
        self, following: StepDict, ended: list[int]
    ) -> tuple[StepDict | None, dict[int, Start]]:
        """Start episodes in the slots that are free.

        Returns:
            The entries that begin the next row, None where no slot was reset; and the episodes.
        """
        free = [slot for slot in self._slots if slot not in self._running]
        # Slots that run on unseen are reset where they end, as their env asks for.
        unseen = set() if self._waits else set(free).intersection(ended)
        starts: dict[int, Start] = {}
        while True:
            for slot in free if self._singly else ():
                if slot not in starts and (start := self._next()) is not None:
                    starts[slot] = start
            reset = sorted({*starts, *unseen})
            if not reset:
                return None, {}
            first = torch.zeros(len(self._slots), dtype=torch.bool)
            first[reset] = True
            first = first.view(following[keys.DONE].shape)
            seeds = None
            if starts and next(iter(starts.values())).seed is not None:
                seeds = [starts[slot].seed if slot in starts else 0 for slot in reset]
            if self._rebuild:
                self._build(list(starts))
            try:
                begun = self._env.begin(following, first, reset, seeds, self._options)  # type: ignore[arg-type]
            except SlotError as error:
                self._give_up(error, starts)
                continue
            return begun, starts

    def _stop(
        self,
        slots: list[int],
        error: SlotError,
        pieces: list[Piece],
        column: int,
        built: bool = False,
    ) -> None:
        """End the episodes of ``slots`` before their time; all of them start again."""
        lanes = {slot: self._running.pop(slot) for slot in slots}
        for slot, lane in lanes.items():
            pieces.append(Piece(lane.start, slot, lane.first, column, False, error))
            if slot not in error.causes:
                self._again.append(lane.start)
        self._give_up(error, {slot: lane.start for slot, lane in lanes.items()}, built)

    def _give_up(self, error: SlotError, starts: dict[int, Start], built: bool = False) -> None:
        """Build the envs that raised anew, unless built; take their episodes out of ``starts``."""
        if self._failed is None or self._stepper is None or not self._stepper.backend.rebuilds:
            raise error
        if not built:
            self._build(list(error.causes))
        for slot, cause in error.causes.items():
            start = starts.pop(slot, None)
            again = None if start is None else self._failed(start, cause)
            if again is not None:
                self._again.append(again)

    def _build(self, slots: list[int]) -> None:
        assert self._stepper is not None
        self._stepper.rebuild(slots)
