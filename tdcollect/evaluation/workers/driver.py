"""The driver: runs the episodes of a job on workers, whatever happens to them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from typing import Any

from tdcollect.display import count_text
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.ledger.manifest import (
    MIXED,
    differences,
    git_state,
    may_be_mixed,
    mixed_entries,
)
from tdcollect.evaluation.ledger.records import FAILED, Episode
from tdcollect.evaluation.runner import warn
from tdcollect.evaluation.workers.job import Job
from tdcollect.evaluation.workers.protocol import (
    MOST_HELD,
    Fetch,
    Lacks,
    Open,
    Opened,
    Raised,
    Run,
    State,
    Worker,
    Workers,
)
from tdcollect.evaluation.workers.schedule import Schedule
from tdcollect.workers.protocol import raised_there

_START_SECONDS = 60.0  # an env has at least so long to be made, whatever the timeout
_LOOK_SECONDS = 0.5  # between two looks at the workers' steps


class Driver:
    """Runs the episodes of a job on workers; make one for each evaluation, and close it.

    Args:
        workers: the workers, which are started if they are not running.
        job: the job.
        weights: pickled weights by model id, where the job's own are not meant.
        allow_mixed: take workers in whose versions, platform or device differ from the manifest's.

    Attributes:
        manifest: the manifest of the evaluation, of worker 0's machine; of the first worker's that
            is ready, while worker 0 waits for a place.
        num_workers: the number of workers.
        note: is told in a line of each worker that is lost; warns unless it is set.
        let_in: is given the manifest of a worker that differs, before it runs an episode.
        errors: the last error of each failed episode, by index, as text.
        lost: how each lost worker ended, in lines.

    Raises:
        Exception: that the env or the policy raises as it is made.
        RuntimeError: if workers are lost again and again as they make them.
        TypeError: for a job that cannot be pickled.
    """

    def __init__(
        self,
        workers: Workers,
        job: Job,
        weights: Mapping[str, bytes] | None = None,
        allow_mixed: bool = False,
    ):
        self._workers = workers
        self._pickled = job.pickled()
        self._weights = weights
        if weights is not None:  # in place of the job's, which stay where it is held as it is
            self._pickled = self._pickled._replace(key=f"{self._pickled.key}, with weights")
        self._seeds = job.settings.seed_schedule()
        self.num_workers = workers.num_workers
        self.note: Callable[[str], None] = warn
        self.let_in: Callable[[Mapping[str, Any]], None] = lambda manifest: None
        self._allow_mixed = allow_mixed
        self._unlike: list[Mapping[str, Any]] = []  # manifests of workers that are let in
        self._first: Opened | None = None
        self._state: dict[str, Any] | None = None
        self._opened: dict[int, Opened] = {}
        self._died: Counter[int] = Counter()  # workers in a row as they made the env, by rank
        self._beats: dict[int, tuple[int, float]] = {}  # of those at work, and since when
        self._schedule = Schedule([], workers.num_workers, workers.max_lost)
        self.errors: dict[int, str] = {}
        self.lost: list[str] = []
        self._finished = False
        if workers.in_use:
            raise RuntimeError(f"expected workers that are free, got {workers!r}, which are in use")
        workers.in_use = True
        workers.turn += 1
        try:
            while found := list(workers.wait(0)):  # what was left unread comes before an end
                for worker, answer in found:
                    if answer is None:  # it ended while it had nothing to do
                        self._end(worker)
            for rank in range(workers.num_workers):
                self._open(workers.crew.get(rank) or workers.start(rank))
            while self._first is None:
                list(self._answers())  # no episode, as none has been handed out
        except BaseException:
            self.close()
            raise
        self.manifest: dict[str, Any] = {**self._first.manifest, "git": git_state()}

    @property
    def about(self) -> dict[str, Any]:
        """The env and the workers, for the notes on a run."""
        assert self._first is not None
        kind, number = self._workers.kind, self._workers.num_workers
        workers = {"kind": kind, "number": number, "lost": self.lost}
        return {"env": self._first.env, "threads": self._first.threads, "workers": workers}

    def run(self, indices: Iterable[int], keep: bool) -> Generator[Finished, None, None]:
        """Run episodes; yields them as they end.

        Args:
            indices: of the episodes.
            keep: yield their data too.

        Raises:
            NotReproducibleError: if an episode that ran twice has two digests.
            ValueError: for a worker that differs from the manifest.
            Exception: that a worker raises, as an evaluation without workers would.
        """
        workers = self._workers
        self._schedule = Schedule(indices, workers.num_workers, workers.max_lost)
        while self._schedule.left:
            while self._unlike:
                unlike = self._unlike.pop()
                self.manifest[MIXED] = mixed_entries(self.manifest, unlike)
                self.let_in(unlike)
            for rank, opened in self._opened.items():
                idle = not self._schedule.holds(rank)
                more = self._schedule.hand_out(rank, opened.slots)
                if more:
                    workers.crew[rank].send(Run(workers.turn, self._pickled.key, more, keep))
                if more and idle:
                    self._beats[rank] = (workers.crew[rank].beats(), time.monotonic())
            yield from self._answers()
        self._finished = True

    def policy_state(self) -> dict[str, Any]:
        """Return the policy's ``state_dict``, on the CPU; empty if it has none."""
        asked: Worker | None = None
        self._state = None
        while self._state is None:
            worker = self._workers.crew[min(self._opened, default=0)]
            if self._opened and worker is not asked:
                asked = worker
                worker.send(Fetch(self._workers.turn, self._pickled.key))
            list(self._answers())
        return self._state

    def _answers(self) -> Iterator[Finished]:
        """Wait for answers for a moment; yields the episodes that have ended."""
        timeout = self._workers.timeout
        answers = list(self._workers.wait(min(_LOOK_SECONDS, timeout or _LOOK_SECONDS)))
        # Before anything else, as a worker cannot go on whose answers are not read.
        hanging = self._hanging({worker.rank for worker, _ in answers}) if timeout else []
        for worker, answer in answers:
            if answer is None:
                yield from self._lose(worker)
            elif answer.turn != self._workers.turn:
                continue  # of an evaluation that ended before this worker was up
            elif isinstance(answer, Opened):
                self._take_in(worker, answer)
            elif isinstance(answer, State):
                self._state = answer.state
            elif isinstance(answer, Lacks):
                worker.holds.remove(self._pickled.key)
                self._open(worker)
            elif isinstance(answer, Raised):
                self._end(worker)  # its env may be anywhere
                raise raised_there(answer.failure, worker.name)
            else:
                new = self._schedule.take_in(worker.rank, worker.name, answer.record)
                if not self._schedule.holds(worker.rank):
                    self._beats.pop(worker.rank, None)
                if new and answer.error is not None:
                    self.errors[answer.record.index] = answer.error
                if new:
                    yield Finished(answer.record, answer.data)
        for worker in hanging:
            yield from self._lose(worker, f"was ended, as it finished no step in {timeout:g} s")

    def _open(self, worker: Worker) -> None:
        """Have a worker make env and policy, unless it has them."""
        key, env_key, job, around = self._pickled
        sent = None if key in worker.holds else job
        verdict = self._workers.verdicts.get(env_key)
        worker.send(Open(self._workers.turn, around, key, sent, self._weights, verdict))
        worker.holds = [*(held for held in worker.holds if held != key), key][-MOST_HELD:]
        self._beats[worker.rank] = (worker.beats(), time.monotonic())

    def _take_in(self, worker: Worker, opened: Opened) -> None:
        """Take a worker in that has env and policy."""
        self._workers.verdicts[self._pickled.env_key] = opened.verdict
        self._opened[worker.rank] = opened
        self._died.pop(worker.rank, None)
        self._beats.pop(worker.rank, None)
        if self._first is not None:
            self._check(worker, opened)
        elif worker.rank == 0 or not self._workers.crew[0].beats():
            self._first = opened
            for rank, other in self._opened.items():
                self._check(self._workers.crew[rank], other)

    def _check(self, worker: Worker, opened: Opened) -> None:
        """Refuse a worker that differs from the manifest, unless it may."""
        assert self._first is not None
        found = differences(self._first.manifest, opened.manifest)
        mixable = all(may_be_mixed(path) for path, *_ in found)
        if found and self._allow_mixed and mixable:
            self._unlike.append(opened.manifest)
        elif found:
            texts = "; ".join(f"its {path} is {b!r} and not {a!r}" for path, a, b in found)
            advice = "; make them alike, or pass allow_mixed=True" if mixable else ""
            raise ValueError(
                f"expected workers that are alike, got {worker.name} that differs from the "
                f"evaluation's manifest: {texts}{advice}"
            )

    def _hanging(self, answered: Container[int]) -> list[Worker]:
        """Return the workers at work that have neither answered nor finished a step for long.

        Args:
            answered: the ranks of those that have answered.
        """
        now, found = time.monotonic(), []
        for rank, (before, since) in self._beats.items():
            worker = self._workers.crew[rank]
            beats, limit = worker.beats(), self._workers.timeout or math.inf
            if rank not in self._opened:
                limit = max(limit, _START_SECONDS) if beats else math.inf
            if beats != before or rank in answered:
                self._beats[rank] = (beats, now)
            elif now - since > limit:
                found.append(worker)
        return found

    def _lose(self, worker: Worker, reason: str | None = None) -> Iterator[Finished]:
        """Put another worker in the place of one that was lost; yields episodes that it fails."""
        rank, workers = worker.rank, self._workers
        ended = self._end(worker)
        how = reason or ended
        held = self._schedule.held(rank)
        failed = self._schedule.lose(rank)
        if self._opened.pop(rank, None) is None:
            self._died[rank] += 1
            if self._died[rank] >= workers.max_lost:
                before = self._died[rank] - 1
                raise RuntimeError(
                    f"{worker.name} {how} as it made the env and the policy"
                    f"{f', and so did {before} before it' if before else ''}; try the evaluation "
                    "without workers"
                )
        again = ""
        if failed:
            again = f"; episode {failed[0]}, its only one, has failed"
        elif held:
            again = f"; {count_text(held, 'episode')} of it run again"
        self.lost.append(f"{worker.name} {how}{again}")
        self.note(self.lost[-1])
        self._open(workers.start(rank))
        for index in failed:
            self.errors[index] = f"its worker {how}, the last of {workers.max_lost} that it cost"
            yield Finished(Episode(index, *self._seeds(index), FAILED), None)

    def _end(self, worker: Worker) -> str:
        how = worker.end()
        del self._workers.crew[worker.rank]
        self._beats.pop(worker.rank, None)
        return how

    def close(self) -> None:
        """Release the workers; those that have not ended their episodes are ended.

        So are those that have not made the env, if the evaluation was broken off: they may hang.
        """
        for rank, worker in [*self._workers.crew.items()]:
            starts = rank not in self._opened and not self._finished
            if starts or self._schedule.holds(rank):
                self._end(worker)
        self._workers.in_use = False
