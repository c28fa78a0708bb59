"""The dispatcher: one evaluation after the other on workers, or several at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from tdcollect.display import count_text
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.episodes.probe import GROUPS
from tdcollect.evaluation.ledger.manifest import (
    MIXED,
    differences,
    git_state,
    may_be_mixed,
    mixed_entries,
)
from tdcollect.evaluation.ledger.records import LOST, Episode
from tdcollect.evaluation.runner import warn
from tdcollect.evaluation.workers.protocol import (
    MOST_HELD,
    Ended,
    Fetch,
    Lacks,
    Open,
    Opened,
    Probing,
    Run,
    State,
    Worker,
    Workers,
)
from tdcollect.evaluation.workers.schedule import WEIGHT, Schedule
from tdcollect.evaluation.workers.work import Work
from tdcollect.workers.protocol import raised_there

_START_SECONDS = 60.0  # an env has at least so long to be made, whatever the timeout
_LOOK_SECONDS = 0.5  # between two looks at the workers' steps


Event = tuple[Work, Finished | Exception | None]
"""An evaluation and what came of it: an episode, its failure, or None once it has a manifest."""


class Dispatcher:
    """Runs the episodes of evaluations on workers, whatever happens to them; close it.

    Args:
        workers: the workers, which are started if they are not running.
        allow_mixed: take workers in whose versions, platform or device differ from the manifest's.

    Attributes:
        workers: the workers.
        note: is told in a line of each worker that is lost; warns unless it is set.
        lost: how each lost worker ended, in lines.

    Raises:
        RuntimeError: if the workers are in use.
    """

    def __init__(self, workers: Workers, allow_mixed: bool = False):
        self.workers = workers
        self.note: Callable[[str], None] = warn
        self.lost: list[str] = []
        self._allow_mixed = allow_mixed
        self._works: dict[int, Work] = {}
        self._by_key: dict[str, Work] = {}  # those that a worker was sent
        self._added = 0
        self._opened: dict[int, Opened] = {}  # by rank; of the evaluation that it is at
        self._probing: dict[int, int] = {}  # by rank: the groups of seeds that it leaves out
        self._states: list[dict[str, Any]] = []
        self._beats: dict[int, tuple[int, float]] = {}  # of those at work, and since when
        self._schedule = Schedule(workers.num_workers, workers.max_lost)
        self._git = git_state()
        if workers.in_use:
            raise RuntimeError(f"expected workers that are free, got {workers!r}, which are in use")
        workers.in_use = True
        workers.turn += 1
        try:
            while found := list(workers.wait(0)):  # what was left unread comes before an end
                for worker, answer in found:
                    if answer is None:  # it ended while it had nothing to do
                        self._end(worker)
        except BaseException:
            self.close()
            raise

    def add(self, work: Work) -> None:
        """Add an evaluation; it is opened once a worker is free for it."""
        work.number = self._added
        self._added += 1
        self._works[work.number] = work
        self._schedule.add(work.number, None)

    def begin(self, work: Work, indices: Iterable[int]) -> None:
        """Run these episodes of an evaluation, which has been opened."""
        work.begun = True
        self._schedule.add(work.number, indices)

    def about(self, work: Work) -> dict[str, Any]:
        """Return the env of an evaluation and the workers, for the notes on a run."""
        workers = {
            "kind": self.workers.kind,
            "number": self.workers.num_workers,
            "lost": self.lost,
        }
        return {"env": work.env, "threads": work.threads, "workers": workers}

    def left(self, work: Work) -> int:
        """Return the number of episodes of an evaluation that have not ended."""
        return self._schedule.left(work.number)

    def remove(self, work: Work) -> None:
        """Forget an evaluation; if it has not ended, workers that are busy with it are ended."""
        unfinished = not work.begun or bool(self.left(work))
        del self._works[work.number]
        self._by_key = {key: other for key, other in self._by_key.items() if other is not work}
        for rank in self._schedule.drop(work.number):
            self._opened.pop(rank, None)
            if unfinished and rank in self._beats:
                self._end(self.workers.crew[rank])
        work.release()

    def events(self) -> Iterator[Event]:
        """Hand out episodes, and wait for answers for a moment; yields what came of them.

        Raises:
            NotReproducibleError: if an episode that ran twice has two digests.
        """
        yield from self.hand_out()
        yield from self.answers()

    def hand_out(self) -> Iterator[Event]:
        """Give workers what they lack; yields evaluations whose job cannot be made."""
        for rank in range(self.workers.num_workers):
            number = self._schedule.at(rank)
            placed = self._schedule.place(rank)
            if placed is None or placed not in self._works:
                continue
            work = self._works[placed]
            if placed != number or rank not in self.workers.crew:
                worker = self.workers.crew.get(rank) or self.workers.start(rank)
                try:
                    self._open(worker, work)
                except Exception as error:
                    yield self._fail(work, error)
                    continue
            if work.begun and rank in self._opened:
                self._hand_out(rank, work)

    def _hand_out(self, rank: int, work: Work) -> None:
        while work.unlike:
            unlike = work.unlike.pop()
            work.manifest[MIXED] = mixed_entries(work.manifest, unlike)
            work.let_in(unlike)
        idle = not self._schedule.holds(rank)
        more = self._schedule.hand_out(rank, self._opened[rank].slots)
        if more:
            worker = self.workers.crew[rank]
            worker.send(Run(self.workers.turn, work.key, more, work.keep))
            if idle:
                self._beats[rank] = (worker.beats(), time.monotonic())

    def policy_state(self, work: Work) -> dict[str, Any]:
        """Return the policy's ``state_dict``, on the CPU; empty if it has none."""
        asked: Worker | None = None
        self._states.clear()
        while not self._states:
            if not any(self._schedule.at(rank) == work.number for rank in self.workers.crew):
                self._schedule.put(0, work.number)  # all have been lost since
                self._open(self.workers.crew.get(0) or self.workers.start(0), work)
            ready = [rank for rank in self._opened if self._schedule.at(rank) == work.number]
            if ready and self.workers.crew[min(ready)] is not asked:
                asked = self.workers.crew[min(ready)]
                asked.send(Fetch(self.workers.turn, work.key))
            for _, what in self.events():
                if isinstance(what, Exception):
                    raise what
        return self._states.pop()

    def answers(self, wait: bool = True) -> Iterator[Event]:
        """Take answers in; yields what came of them.

        Args:
            wait: wait for them for a moment.

        Raises:
            NotReproducibleError: if an episode that ran twice has two digests.
        """
        timeout = self.workers.timeout
        seconds = min(_LOOK_SECONDS, timeout or _LOOK_SECONDS) if wait else 0.0
        answers = list(self.workers.wait(seconds))
        # Before anything else, as a worker cannot go on whose answers are not read.
        hanging = self._hanging({worker.rank for worker, _ in answers}) if timeout else []
        for worker, answer in answers:
            there = self.workers.crew.get(worker.rank) is worker
            if answer is None:
                if there:
                    yield from self._lose(worker)
                continue
            work = self._by_key.get(answer.key)
            if answer.turn != self.workers.turn or work is None:
                continue  # of an evaluation that ended before this worker was up
            if isinstance(answer, Ended):
                yield from self._ended(worker, answer, work)
            elif not there or self._schedule.at(worker.rank) != work.number:
                continue  # it was lost, or others ended this evaluation meanwhile
            elif isinstance(answer, Opened):
                yield from self._take_in(worker, answer, work)
            elif isinstance(answer, Probing):
                self._probing[worker.rank] = answer.skipped
            elif isinstance(answer, State):
                self._states.append(answer.state)
            elif isinstance(answer, Lacks):
                worker.holds.remove(answer.key)
                self._open(worker, work)
            else:
                self._end(worker)  # its env may be anywhere
                yield self._fail(work, raised_there(answer.failure, worker.name))
        for worker, limit in hanging:
            if self.workers.crew.get(worker.rank) is worker:
                yield from self._lose(worker, f"was ended, as it finished no step in {limit:g} s")

    def _ended(self, worker: Worker, answer: Ended, work: Work) -> Iterator[Event]:
        """Take in an episode that has ended."""
        new = self._schedule.take_in(work.number, worker.rank, worker.name, answer.record)
        if not self._schedule.holds(worker.rank):
            self._beats.pop(worker.rank, None)
        if new and answer.error is not None:
            work.errors[answer.record.index] = answer.error
        if new:
            yield work, Finished(answer.record, answer.data)

    def _fail(self, work: Work, error: Exception) -> Event:
        self.remove(work)
        return work, error

    def _open(self, worker: Worker, work: Work) -> None:
        """Have a worker make env and policy, unless it has them."""
        key, (_, env_key, job, around) = work.key, work.pickled
        self._by_key[key] = work
        sent = None if key in worker.holds else job
        verdict = self.workers.verdicts.get(env_key)
        self._opened.pop(worker.rank, None)
        self._probing.pop(worker.rank, None)
        turn, skipped = self.workers.turn, work.skipped
        worker.send(Open(turn, around, key, sent, work.weights, verdict, skipped))
        worker.holds = [*(held for held in worker.holds if held != key), key][-MOST_HELD:]
        self._beats[worker.rank] = (worker.beats(), time.monotonic())

    def _take_in(self, worker: Worker, opened: Opened, work: Work) -> Iterator[Event]:
        """Take a worker in that has env and policy."""
        crew = self.workers.crew
        self.workers.verdicts[work.pickled.env_key] = opened.verdict
        self._opened[worker.rank] = opened
        self._probing.pop(worker.rank, None)
        work.died.pop(worker.rank, None)
        work.died.pop(None, None)
        self._beats.pop(worker.rank, None)
        try:
            if work.manifest:
                self._check(worker, opened, work)
            elif not worker.rank or self._schedule.at(0) != work.number or not crew[0].beats():
                work.manifest = {**opened.manifest, "git": self._git}
                work.env, work.threads = opened.env, opened.threads
                for rank, other in self._opened.items():
                    if self._schedule.at(rank) == work.number:
                        self._check(crew[rank], other, work)
                yield work, None
        except ValueError as error:
            yield self._fail(work, error)

    def _check(self, worker: Worker, opened: Opened, work: Work) -> None:
        """Refuse a worker that differs from the manifest, unless it may."""
        manifest = {**opened.manifest, "git": self._git}
        found = differences(work.manifest, manifest)
        mixable = all(may_be_mixed(path) for path, *_ in found)
        if found and self._allow_mixed and mixable:
            work.unlike.append(manifest)
        elif found:
            texts = "; ".join(f"its {path} is {b!r} and not {a!r}" for path, a, b in found)
            advice = "; make them alike, or pass allow_mixed=True" if mixable else ""
            raise ValueError(
                f"expected workers that are alike, got {worker.name} that differs from the "
                f"evaluation's manifest: {texts}{advice}"
            )

    def _hanging(self, answered: Container[int]) -> list[tuple[Worker, float]]:
        """Return the workers at work that have neither answered nor finished a step for long.

        With each the seconds that it had.

        Args:
            answered: the ranks of those that have answered.
        """
        now, found = time.monotonic(), []
        for rank, (before, since) in self._beats.items():
            worker = self.workers.crew[rank]
            beats, limit = worker.beats(), self.workers.timeout or math.inf
            if rank not in self._opened:
                limit = max(limit, _START_SECONDS) if beats else math.inf
            if beats != before or rank in answered:
                self._beats[rank] = (beats, now)
            elif now - since > limit:
                found.append((worker, limit))
        return found

    def _lose(self, worker: Worker, reason: str | None = None) -> Iterator[Event]:
        """Let a worker go that was lost; yields episodes that are given up."""
        rank = worker.rank
        number = self._schedule.at(rank)
        ended = self._end(worker, waits=reason is None)
        how, outside = reason or ended, worker.outside and reason is None
        if number is None:
            return
        work = self._works[number]
        held = self._schedule.held(rank)
        failed = self._schedule.lose(rank, outside)
        if self._opened.pop(rank, None) is None:
            error = self._unopened(worker, work, how, outside)
            if error is not None:
                yield self._fail(work, error)
                return
        again = ""
        if failed:
            again = f"; episode {failed[0]}, its only one, is given up as lost"
        elif held:
            again = f"; {count_text(held, 'episode')} of it run again"
        self.lost.append(f"{worker.name} {how}{again}")
        self.note(self.lost[-1])
        for index in failed:
            text = f"its worker {how}, the last of {self.workers.max_lost} that it cost"
            work.errors[index] = text
            yield work, Finished(Episode(index, *work.seeds(index), LOST), None)

    def _unopened(self, worker: Worker, work: Work, how: str, outside: bool) -> Exception | None:
        """Count a worker that was lost as it made env and policy, or probed the env.

        Returns:
            The error once there were too many. If they were lost in the probe, it runs on other
            seeds before.
        """
        skipped = self._probing.pop(worker.rank, None)
        probing = skipped is not None
        if probing and skipped != work.skipped:  # others have found these seeds to end workers
            return None
        key = None if probing else worker.rank
        work.died[key] += 1 if outside else WEIGHT
        if work.died[key] < WEIGHT * (self.workers.max_lost + outside):
            return None
        if probing and work.skipped < GROUPS - 1:
            work.skipped += 1
            del work.died[None]
            return None
        before = work.died[key] // WEIGHT - 1
        what = "ran the env to check that a seed decides what it does"
        return RuntimeError(
            f"{worker.name} {how} as it {what if probing else 'made the env and the policy'}"
            f"{f', and so did {before} before it' if before else ''}; try the evaluation without "
            "workers"
        )

    def _end(self, worker: Worker, waits: bool = False) -> str:
        how = worker.end(waits)
        del self.workers.crew[worker.rank]
        self._beats.pop(worker.rank, None)
        return how

    def close(self) -> None:
        """Release the workers; those that have not ended their episodes are ended.

        So are those that have not made their env, if an evaluation was broken off: they may hang.
        """
        for work in [*self._works.values()]:
            self.remove(work)
        self.workers.in_use = False
