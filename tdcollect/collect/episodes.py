"""The loop by episodes: indexed episodes on free slots, each from its start to its end.

The order in which episodes start decides which ones run, never the order in which they end: a slot
whose episode ends takes the next one, and waits once none is left. Collecting by episodes and
evaluating both run it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase

from tdcollect import keys
from tdcollect.collect.batch_builder import BatchBuilder
from tdcollect.collect.step_dict import (
    Key,
    StepDict,
    check_tensors,
    is_next,
    next_step,
    zero_rows,
)
from tdcollect.collect.tensordict_env import SteppedEnv
from tdcollect.envs.errors import SlotError
from tdcollect.envs.spaces import nested

if TYPE_CHECKING:
    from tdcollect.collect.fast.devices import Placement


@dataclass(frozen=True)
class Start:
    """An episode to run.

    Attributes:
        index: of the episode, in the order of starting.
        seed: of its env's reset; None to go on with the env's own generator.
        traj_id: its trajectory id.
    """

    index: int
    seed: int | None
    traj_id: int


class Piece(NamedTuple):
    """The part of an episode that lies in one block.

    Attributes:
        start: the episode.
        slot: the slot that runs it.
        begin: its first step in the block.
        stop: the step after its last.
        ended: whether this is its last piece.
        error: the env's error; the episode has no further piece then.
        info: gymnasium's info of the last step.
    """

    start: Start
    slot: int
    begin: int
    stop: int
    ended: bool
    error: Exception | None = None
    info: Mapping[str, Any] = MappingProxyType({})


class Block(NamedTuple):
    """Consecutive steps of all slots.

    Attributes:
        entries: ``[N, t, ...]`` each; steps outside of the pieces mean nothing.
        pieces: the parts of episodes in it.
    """

    entries: dict[Key, torch.Tensor]
    pieces: list[Piece]


@dataclass
class _Running:
    start: Start
    begin: int  # its first step in the block


Act = Callable[[StepDict, list[int]], None]


class EpisodeWatch(Protocol):
    """Called with steps and with episodes that start."""

    def started(self, slots: list[int], step: Callable[[], TensorDictBase]) -> None:
        """Episodes start in these slots, with the step given."""

    def step_taken(
        self,
        step: StepDict,
        following: StepDict,
        upcoming: StepDict,
        ended: list[int],
        slots: list[int] | None = None,
        begun: list[int] | None = None,
    ) -> None:
        """Slots took a step; in some an episode ended, in some one starts."""


class EpisodeLoop:
    """Runs episodes; iterate to get blocks of steps.

    Args:
        env: the env on StepDicts.
        act: runs the policy: writes its outputs into the step, of which the rows of the slots given
            matter.
        remembered: gives the entries that the policy takes from one step to the next, from the
            first step with its outputs; they are zeroed where an episode starts.
        starts: the episodes; all of them with a seed, or none.
        steps: the most steps of a block.
        seconds: a block ends with the step at which it has taken so long; None for no limit.
        max_episode_steps: episodes are truncated at this length.
        left_out: entries that blocks do without.
        place: moves tensors between devices; None where all is on the CPU.
        in_one_piece: stack each block at once, which gradients pass through.
        first_seeds: one per slot, for the first reset of episodes that have no seed.
        options: gymnasium's reset options.
        rebuild: build a slot's env anew for each episode.
        started: called with the slot and the episode of each start.
        arrived: tells whether ``starts``, which had no more, has more by now; asked at each step
            while slots are free. None if that cannot be.
        replace: is given an episode whose env raised, and the error; returns the episode to run in
            its place, or None for none. Without it, errors are raised.

    Raises:
        ValueError: for ``max_episode_steps`` on slots that cannot be reset singly.
    """

    def __init__(
        self,
        env: SteppedEnv,
        act: Act,
        remembered: Callable[[StepDict], list[Key]],
        starts: Iterator[Start],
        *,
        steps: int,
        seconds: float | None = None,
        max_episode_steps: int | None = None,
        left_out: frozenset[Key] = frozenset(),
        place: Placement | None = None,
        in_one_piece: bool = False,
        first_seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
        rebuild: bool = False,
        started: Callable[[int, Start], None] | None = None,
        arrived: Callable[[], bool] | None = None,
        replace: Callable[[Start, Exception], Start | None] | None = None,
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
        self._in_one_piece = in_one_piece
        self._first_seeds = first_seeds
        self._options = options
        self._rebuild = rebuild
        self._started = started
        self._arrived = arrived
        self._replace = replace
        self._watch = watch
        for name, value in (("max_episode_steps", max_episode_steps), ("options", options)):
            if value is not None and not env.resets_singly:
                raise ValueError(
                    f"expected no {name}: this vector env cannot reset single slots, which {name} "
                    "by episodes ask for; make the env itself so, or use backend='serial'"
                )
        if max_episode_steps is not None and not env.marks_truncation:
            raise ValueError(
                f"expected no max_episode_steps: the env has no {keys.TRUNCATED!r} flag to mark "
                "the limit with; put it under TorchRL's StepCounter(max_steps=...)"
            )
        self._actions = env.transformed.action_keys
        self._slots = list(range(env.batch_size.numel()))
        self._taken = 0  # steps of the loop
        # By slot, the step of the loop at which its episode is truncated.
        self._due = np.zeros(len(self._slots), np.int64)
        self._singly = True
        self._running: dict[int, _Running] = {}
        self._present = StepDict()
        self._next_keys: list[Key] | None = None
        self._zeroed: list[Key] = []

    def __iter__(self) -> Iterator[Block]:
        while self._running or self._start_all():
            batch = BatchBuilder(
                self._env, self._steps, self._left_out, self._place, self._in_one_piece
            )
            pieces: list[Piece] = []
            taken = 0
            for running in self._running.values():
                running.begin = 0
            began = time.monotonic()
            for buffers in batch.allocate():
                taken += self._step(batch, buffers, pieces, taken)
                if not self._running or time.monotonic() - began > self._seconds:
                    break
            for slot, running in self._running.items():
                pieces.append(Piece(running.start, slot, running.begin, taken, False))
            yield Block(batch.cut(), pieces)

    def _next(self) -> Start | None:
        return self._again.popleft() if self._again else next(self._starts, None)

    def _more_arrived(self) -> bool:
        free = self._arrived is not None and len(self._running) < len(self._slots)
        return free and self._arrived()  # type: ignore[misc]

    def _start_all(self) -> bool:
        """Start an episode in every slot; False where none is left to start."""
        while True:
            # Up to the first None: one that arrives after it waits, so that slot 0 has a start.
            starts = dict(zip(self._slots, iter(self._next, None), strict=False))
            if not starts:
                return False
            seeds, self._first_seeds = self._first_seeds, None
            if starts[0].seed is not None:
                # A slot without an episode is reset too, and then waits: any seed does.
                seeds = [starts.get(slot, starts[0]).seed for slot in self._slots]  # type: ignore[misc]
            if self._rebuild:
                self._env.rebuild_slots(self._slots)
            try:
                step = self._env.reset_all(seeds, self._options)
            except SlotError as error:
                self._give_up(error, starts)
                self._again.extendleft(reversed(starts.values()))
                continue
            if self._place is not None:
                home = self._place.home
                step = StepDict((key, value.to(home)) for key, value in step.items())
                if self._env.base is None:
                    self._place.keep_apart(step)
            for key in self._zeroed:
                step[key] = torch.zeros_like(self._present[key])
            step[keys.TRAJ_IDS] = torch.zeros(self._env.batch_size, dtype=torch.int64)
            self._present = step
            # Where seeds cannot be given singly, episodes with seeds start all at once, in waves.
            self._singly = starts[0].seed is None or self._env.seeds_singly
            self._note(starts, 0)
            if self._watch is not None:
                self._watch.started(
                    list(starts), lambda: nested(self._present.items(), self._env.batch_size)
                )
            return True

    def _note(self, starts: dict[int, Start], at: int) -> None:
        """Have episodes run from a step of the block on."""
        ids = self._present[keys.TRAJ_IDS] = self._present[keys.TRAJ_IDS].clone()
        for slot, start in starts.items():
            self._running[slot] = _Running(start, at)
            ids.view(-1)[slot] = start.traj_id
            if self._started is not None:
                self._started(slot, start)
        if self._max_episode_steps is not None:
            self._due[list(starts)] = self._taken + self._max_episode_steps

    def _step(self, batch: BatchBuilder, buffers: Any, pieces: list[Piece], at: int) -> int:
        """Step once; the number of steps that the batch has grown by."""
        step, running = self._present, self._running
        active = list(running)
        self._act(step, active)
        if self._next_keys is None:
            check_tensors(step)
            self._next_keys = [key for key in step if is_next(key)]
            self._zeroed = self._remembered(step)
        # Slots without an episode wait where the env lets them; else they run on, unseen.
        slots = active if self._env.waits and len(active) < len(self._slots) else None
        try:
            given = step if self._place is None else self._place.for_env(step, self._actions)
            following, error = self._env.advance(given, self._next_keys, buffers, slots)
            if self._place is not None and self._env.base is None:
                self._place.keep_apart(following)
        except SlotError as raised:
            # The step is lost in every slot: all episodes start again, these for a reason.
            self._stop(active, raised, pieces, at)
            return 0
        batch.append(step, following)
        if error is not None:
            self._stop([slot for slot in error.causes if slot in running], error, pieces, at)
        elif self._env.broken_episodes:
            error = SlotError("step", self._env.broken_episodes)
            lost = [slot for slot in error.causes if slot in running]
            self._stop(lost, error, pieces, at, built=True)
        at += 1
        done = self._ends(following)
        if not done and error is None and not self._more_arrived():  # nothing to start or to reset
            self._present = next_step(step, following, self._env.carried, self._next_keys)
            if self._watch is not None:
                self._watch.step_taken(step, following, self._present, [], active)
            return 1
        unbroken = [slot for slot in active if slot in running]
        ended = [slot for slot in done if slot in running]
        for slot in ended:
            run = running.pop(slot)
            info = self._env.latest_info(slot)
            pieces.append(Piece(run.start, slot, run.begin, at, True, info=info))
        begun, starts = self._start_free(following, done)
        self._present = next_step(step, begun or following, self._env.carried, self._next_keys)
        if starts:
            zero_rows(self._present, self._zeroed, self._env.batch_size, list(starts))
            self._note(starts, at)
        if self._watch is not None:
            self._watch.step_taken(step, following, self._present, ended, unbroken, list(starts))
        return 1

    def _ends(self, following: StepDict) -> list[int]:
        """The slots whose episodes have ended; marks those at the step limit as truncated."""
        self._taken += 1
        if self._max_episode_steps is not None:
            reached = np.flatnonzero(self._due <= self._taken).tolist()
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
            The entries that begin the next step, None where no slot was reset; and the episodes.
        """
        free = [slot for slot in self._slots if slot not in self._running]
        # Slots that run on unseen are reset where they end, as their env asks for.
        unseen = set() if self._env.waits else set(free).intersection(ended)
        starts: dict[int, Start] = {}
        while True:
            for slot in free if self._singly else ():
                if slot not in starts and (start := self._next()) is not None:
                    starts[slot] = start
            reset = sorted({*starts, *unseen})
            if not reset:
                return None, {}
            starting = torch.zeros(len(self._slots), dtype=torch.bool)
            starting[reset] = True
            starting = starting.view(following[keys.DONE].shape)
            seeds = None
            if starts and next(iter(starts.values())).seed is not None:
                seeds = [starts[slot].seed if slot in starts else 0 for slot in reset]
            if self._rebuild:
                self._env.rebuild_slots(list(starts))
            try:
                begun = self._env.begin(following, starting, reset, seeds, self._options)  # type: ignore[arg-type]
                if self._place is not None and self._env.base is None:
                    self._place.keep_apart(begun, of_reset=True)
            except SlotError as error:
                self._give_up(error, starts)
                continue
            return begun, starts

    def _stop(
        self,
        slots: list[int],
        error: SlotError,
        pieces: list[Piece],
        at: int,
        built: bool = False,
    ) -> None:
        """End the episodes of ``slots`` before their time; all of them start again."""
        runs = {slot: self._running.pop(slot) for slot in slots}
        for slot, run in runs.items():
            pieces.append(Piece(run.start, slot, run.begin, at, False, error))
            if slot not in error.causes:
                self._again.append(run.start)
        self._give_up(error, {slot: run.start for slot, run in runs.items()}, built)

    def _give_up(self, error: SlotError, starts: dict[int, Start], built: bool = False) -> None:
        """Build the envs that raised anew, unless built; take their episodes out of ``starts``."""
        if self._replace is None or not self._env.rebuilds_singly:
            raise error
        if not built:
            self._env.rebuild_slots(list(error.causes))
        for slot, cause in error.causes.items():
            start = starts.pop(slot, None)
            again = None if start is None else self._replace(start, cause)
            if again is not None:
                self._again.append(again)
