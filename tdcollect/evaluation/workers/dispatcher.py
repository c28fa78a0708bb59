"""The dispatcher of evaluations: it hands episodes to workers, and goes on if one is lost."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from tdcollect.cleanup import ended_on_error
from tdcollect.display import count_text
from tdcollect.evaluation import ledger
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.manifest import git_state
from tdcollect.evaluation.workers import local
from tdcollect.evaluation.workers.worker import Job, Pickled
from tdcollect.processes.child import raised_there
from tdcollect.randomness import NotReproducibleError

_START_SECONDS = 60.0  # an env has at least so long to be made, whatever the timeout
_LOOK_SECONDS = 0.5  # between two looks at the workers' steps
_SECONDS = 0.5  # of work that a worker has beside the episodes that it runs
_MOST = 1024  # episodes beside those


@dataclass(eq=False, repr=False)
class Evaluation:
    """An evaluation to run, and what is known of it on its way.

    Attributes:
        make_job: returns its job; called when its turn has come, or a worker is free for it.
        record: given its manifest, opens its recording.
        keep: yield the data of episodes too.
        weights: pickled weights by model id, in place of the job's own.
        recording: its :class:`~tdcollect.evaluation.evaluate.Recording`, while it is open.
        errors: the last error of each failed episode, by index, as text.
        about: the env and what runs it, for the notes on a run.
    """

    make_job: Callable[[], Job]
    record: Callable[[Mapping[str, Any]], Any]
    keep: bool = False
    weights: Mapping[str, bytes] | None = None
    number: int = -1
    manifest: dict[str, Any] = field(default_factory=dict)
    recording: Any = None
    dispatcher: Dispatcher | None = None
    errors: dict[int, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    begun: bool = False
    # Workers lost as they made the env and the policy, by rank.
    died: Counter[int] = field(default_factory=Counter)
    # Who has an episode to run again, and who does, to find out whether envs must be new ones.
    can_try: set[int] = field(default_factory=set)
    trier: int | None = None
    told: bool = False  # all at it have been told what was found
    # Who ran the witness first, and the machines on which another has run it.
    witness_by: int | None = None
    proved: set[str] = field(default_factory=set)

    @cached_property
    def pickled(self) -> Pickled:
        """The job, pickled; made when it is first asked for."""
        job = self.make_job()
        self.seeds = job.settings.seed_schedule()
        return job.pickled()

    @property
    def key(self) -> str:
        """The key of its messages; others may have an equal job."""
        return f"{self.pickled.key}, {self.number}"


Event = tuple[Evaluation, "Finished | Exception | local.Found | None"]
"""An evaluation and what came of it: an episode, its failure, or None once it has a manifest; or
what was found out by running an episode again, after which there may be nothing left to run."""


class Dispatcher:
    """Runs the episodes of evaluations on workers, whatever happens to them; close it.

    ``note`` is told in a line of each worker that is lost.
    """

    def __init__(self, workers: local.Workers, note: Callable[[str], None]):
        self.workers = workers
        self.note = note
        self.lost: list[str] = []  # how each lost worker ended, in lines
        self._lost_ranks: set[int] = set()
        self._by_key: dict[str, Evaluation] = {}  # those that a worker was sent
        self._added = 0
        self._schedule = Schedule[Evaluation](workers.num_workers, workers.max_lost)
        self._git = git_state()
        if workers.in_use:
            raise RuntimeError(f"expected workers that are free, got {workers!r}, which are in use")
        workers.in_use = True
        workers.turn += 1
        with ended_on_error(self.close):
            while unread := list(workers.wait(0)):  # what was left unread comes before an end
                for worker, message in unread:
                    if message is None or isinstance(message.what, local.Raised):
                        self._end(worker)  # which had nothing to do

    def add(self, work: Evaluation) -> None:
        """Add an evaluation; it is opened once a worker is free for it."""
        work.number, work.dispatcher = self._added, self
        self._added += 1
        self._schedule.add(work, None)

    def begin(self, work: Evaluation, indices: Iterable[int]) -> None:
        """Run these episodes of an evaluation, which has been opened."""
        work.begun = True
        self._schedule.add(work, indices)

    def about(self, work: Evaluation) -> dict[str, Any]:
        """Return its env and the workers, for the notes on a run."""
        workers = {"kind": self.workers.kind, "number": self.workers.num_workers, "lost": self.lost}
        return {**work.about, "workers": workers}

    def left(self, work: Evaluation) -> int:
        """Return the number of episodes of an evaluation that have not ended, reruns included."""
        seats = self._schedule.seats_at(work).values()
        again = sum(seat.tries + (seat.proves is not None) for seat in seats)
        return self._schedule.left(work) + again

    def remove(self, work: Evaluation) -> None:
        """Forget an evaluation; if it has not ended, workers that are busy with it are ended."""
        if work not in self._schedule.queues:
            return
        unfinished = not work.begun or bool(self.left(work))
        self._by_key = {key: other for key, other in self._by_key.items() if other is not work}
        for rank, seat in self._schedule.drop(work).items():
            if unfinished and seat.at_work and rank in self.workers.crew:
                self._end(self.workers.crew[rank])
        work.__dict__.pop("pickled", None)

    def hand_out(self) -> Iterator[Event]:
        """Give workers what they lack; yields evaluations whose job cannot be made."""
        for rank in range(self.workers.num_workers):
            before, seat = self._schedule.seats.get(rank), self._schedule.place(rank)
            if seat is None:
                continue
            work = seat.evaluation
            if seat is not before:
                try:
                    work.pickled  # noqa: B018, which fails before a worker starts
                except Exception as error:
                    yield self._fail(work, error)
                    continue
                self._open(self.workers.crew.get(rank) or self.workers.start(rank), work)
            if work.recording is not None and work.begun and seat.opened is not None:
                self._hand_out(self.workers.crew[rank], seat, work)
                self._try(work)

    def _hand_out(self, worker: local.Member, seat: Seat[Evaluation], work: Evaluation) -> None:
        recording = work.recording
        if self._must_prove(worker, seat, work):
            seat.proves = recording.proof
            seat.replaces = False
            work.proved.add(worker.machine)
            self._send(worker, work, local.Run([seat.proves], work.keep, again=True))
        assert seat.opened is not None
        if more := self._schedule.hand_out(worker.rank, seat.opened.slots):
            run = local.Run(more, work.keep, recording.keep_steps, recording.cuts)
            self._send(worker, work, run)

    def _must_prove(self, worker: local.Member, seat: Seat[Evaluation], work: Evaluation) -> bool:
        """Return whether a worker is to run the witness: one on each machine, and replacements."""
        if work.recording.proof is None or seat.proves is not None:
            return False
        other = worker.rank != work.witness_by and worker.machine not in work.proved
        return other or seat.replaces

    def _try(self, work: Evaluation) -> None:
        """Have one worker find out whether envs must be new ones, unless that is known."""
        known = self.workers.fresh_envs.get(work.pickled.env_key)
        if known is not None:  # by another evaluation in the same env
            self.tell(work, known)
        elif work.trier is None and (able := work.can_try & self._schedule.seats_at(work).keys()):
            work.trier = min(able)
            self._schedule.seats[work.trier].tries = True
            self._send(self.workers.crew[work.trier], work, local.Told(None))

    def tell(self, work: Evaluation, fresh_envs: bool | None) -> None:
        """Tell all workers at an evaluation whether episodes run on new envs, if that is known."""
        if fresh_envs is None or work.told:
            return
        work.told = True
        self.workers.fresh_envs[work.pickled.env_key] = fresh_envs
        for rank, seat in self._schedule.seats_at(work).items():
            seat.tries = False
            if seat.opened is not None:
                self._send(self.workers.crew[rank], work, local.Told(fresh_envs))

    def _send(self, worker: local.Member, work: Evaluation, what: Any) -> None:
        worker.send(local.Message(self.workers.turn, work.key, what))

    def answers(self, wait: bool = True) -> Iterator[Event]:
        """Take answers in, for which it may wait a moment; yields what came of them."""
        timeout = self.workers.timeout
        seconds = min(_LOOK_SECONDS, timeout or _LOOK_SECONDS) if wait else 0.0
        answers = list(self.workers.wait(seconds))
        # Before anything else, as a worker cannot go on whose answers are not read.
        hanging = self._hanging({worker.rank for worker, _ in answers}) if timeout else []
        for worker, message in answers:
            there = self.workers.crew.get(worker.rank) is worker
            if message is None:
                if there:
                    yield from self._lose(worker)
                continue
            turn, key, answer = message
            work = self._by_key.get(key) if turn == self.workers.turn else None
            seat = self._schedule.seats.get(worker.rank) if there else None
            if isinstance(answer, local.Raised) and there:
                self._end(worker)  # its env may be anywhere
                self._schedule.lose(worker.rank)
            if work is None:
                continue  # of an evaluation that ended before this worker was up
            if isinstance(answer, local.Ended):
                yield from self._ended(worker, answer, work)
            elif seat is None or seat.evaluation is not work:
                continue  # it was lost, or others ended this evaluation meanwhile
            elif isinstance(answer, local.Ready):
                yield from self._take_in(worker, answer, work)
            elif isinstance(answer, local.Found):
                if work.recording is not None:
                    work.recording.note(answer.entries)
                self.tell(work, answer.entries.get(ledger.FRESH_ENVS))
                yield work, answer
            elif isinstance(answer, local.Raised):
                yield self._fail(work, raised_there(answer.failure, worker.name))
        for worker, limit in hanging:
            if self.workers.crew.get(worker.rank) is worker:
                yield from self._lose(worker, f"was ended, as it finished no step in {limit:g} s")

    def _ended(
        self, worker: local.Member, answer: local.Ended, work: Evaluation
    ) -> Iterator[Event]:
        finished, seat = answer.finished, self._schedule.seats.get(worker.rank)
        record = finished.record
        own = seat is not None and seat.evaluation is work
        try:
            if own and seat and finished.again and seat.proves == record.index:
                seat.proves = None
                if work.recording is not None:
                    work.recording.prove(finished, worker.name)
                yield work, local.Found({})
                return
            if own and record.completed and finished.nth == 1 and not finished.again:
                work.can_try.add(worker.rank)
            new = self._schedule.take_in(work, worker.rank, worker.name, record)
        except NotReproducibleError as error:
            yield self._fail(work, error)
            return
        if new and answer.error is not None:
            work.errors[record.index] = answer.error
        if new:
            yield work, finished
            witness = None if work.recording is None else work.recording.witness
            if witness is not None and witness.record is record:
                work.witness_by = worker.rank

    def _fail(self, work: Evaluation, error: Exception) -> Event:
        self.remove(work)
        return work, error

    def _open(self, worker: local.Member, work: Evaluation) -> None:
        key, (_, env_key, job, around) = work.key, work.pickled
        self._by_key[key] = work
        sent = None if key in worker.holds else job
        known = self.workers.fresh_envs.get(env_key)
        self._send(worker, work, local.Open(around, sent, work.weights, known))
        worker.holds = [*(held for held in worker.holds if held != key), key][-local.MOST_HELD :]

    def _take_in(
        self, worker: local.Member, opened: local.Ready, work: Evaluation
    ) -> Iterator[Event]:
        crew, seats = self.workers.crew, self._schedule.seats_at(work)
        own = seats[worker.rank]
        own.opened = opened
        own.replaces = worker.rank in self._lost_ranks
        work.died.pop(worker.rank, None)
        try:
            if work.manifest:
                self._check(worker, opened, work)
            elif not worker.rank or 0 not in seats or not crew[0].beats():
                work.manifest = {**opened.manifest, "git": self._git}
                work.about = opened.about
                for rank, seat in seats.items():
                    if seat.opened is not None:
                        self._check(crew[rank], seat.opened, work)
                yield work, None
        except ValueError as error:
            yield self._fail(work, error)

    def _check(self, worker: local.Member, opened: local.Ready, work: Evaluation) -> None:
        """Refuse a worker that differs from the manifest."""
        manifest = {**opened.manifest, "git": self._git}
        if unlike := ledger.differences(work.manifest, manifest):
            texts = "; ".join(f"its {path} is {b!r} and not {a!r}" for path, a, b in unlike)
            raise ValueError(
                f"expected workers that are alike, got {worker.name} that differs from the "
                f"evaluation's manifest: {texts}"
            )

    def _hanging(self, answered: Container[int]) -> list[tuple[local.Member, float]]:
        """Return the workers that have neither answered nor stepped for long, and their limits."""
        now, hanging = time.monotonic(), []
        for rank, seat in self._schedule.seats.items():
            worker = self.workers.crew[rank]
            beats, limit = worker.beats(), self.workers.timeout or math.inf
            if seat.opened is None:
                limit = max(limit, _START_SECONDS) if beats else math.inf
            if beats != seat.beats or rank in answered or not seat.at_work:
                seat.beats, seat.since = beats, now
            elif now - seat.since > limit:
                hanging.append((worker, limit))
        return hanging

    def _lose(self, worker: local.Member, reason: str | None = None) -> Iterator[Event]:
        """Let a worker go that was lost; yields episodes that are given up."""
        rank = worker.rank
        seat = self._schedule.seats.get(rank)
        ended = self._end(worker, waits=reason is None)
        if seat is None:
            return
        how = reason or ended
        work, held = seat.evaluation, len(seat.held)
        self._lost_ranks.add(rank)
        work.can_try.discard(rank)
        work.trier = None if work.trier == rank else work.trier
        work.proved -= {worker.machine} if seat.proves is not None else set()
        failed = self._schedule.lose(rank)
        if seat.opened is None:
            work.died[rank] += 1
            if (count := work.died[rank]) >= self.workers.max_lost:
                others = f", and so did {count - 1} before it" if count > 1 else ""
                text = f"{worker.name} {how} as it made the env and the policy{others}"
                error = RuntimeError(f"{text}; try the evaluation without workers")
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
            yield work, Finished(ledger.Episode(index, *work.seeds(index), ledger.LOST))

    def _end(self, worker: local.Member, waits: bool = False) -> str:
        how = worker.end(local.EXIT_SECONDS if waits else 0.0)
        del self.workers.crew[worker.rank]
        return how

    def close(self) -> None:
        """Release the workers; those that have not ended their episodes or made envs are ended."""
        for work in [*self._schedule.queues]:
            self.remove(work)
        self.workers.in_use = False


Key = TypeVar("Key")


class Schedule(Generic[Key]):
    """Hands out the episodes of one evaluation, or of several that share the workers.

    A worker runs episodes of one evaluation at a time. It begins with one that no other works at,
    and helps where most is left once there is none. It gets a little more than it can run at once,
    so that no slot waits for the driver; and near the end no more than a fair share.

    The episodes of a lost worker run again. One of them may have been the cause, so each has a
    worker to itself. An episode that is alone when it loses its ``max_lost``-th worker is given up.
    """

    def __init__(self, num_workers: int, max_lost: int):
        self._num_workers = num_workers
        self._max_lost = max_lost
        self.queues: dict[Key, _Queue] = {}  # by evaluation
        self.seats: dict[int, Seat[Key]] = {}  # by rank

    def add(self, evaluation: Key, indices: Iterable[int] | None) -> None:
        """Add the episodes of an evaluation; None if they are not known before it is opened."""
        self.queues[evaluation] = _Queue(indices)

    def drop(self, evaluation: Key) -> dict[int, Seat[Key]]:
        """Forget an evaluation; return the seats at it, whose workers have none afterwards."""
        del self.queues[evaluation]
        seats = self.seats_at(evaluation)
        for rank in seats:
            del self.seats[rank]
        return seats

    def seats_at(self, evaluation: Key) -> dict[int, Seat[Key]]:
        """Return the seats at an evaluation, by rank."""
        return {rank: seat for rank, seat in self.seats.items() if seat.evaluation == evaluation}

    def left(self, evaluation: Key) -> int:
        """Return the number of episodes of an evaluation that have not ended."""
        seats = self.seats_at(evaluation).values()
        return self.queues[evaluation].left + sum(len(seat.held) for seat in seats)

    def place(self, rank: int) -> Seat[Key] | None:
        """Put a worker at an evaluation with episodes to hand out; return its seat, if any."""
        seat = self.seats.get(rank)
        if seat is not None and (seat.busy or self.queues[seat.evaluation].waits):
            return seat
        staff = Counter(seat.evaluation for seat in self.seats.values())
        waiting = [one for one, queue in self.queues.items() if queue.waits]
        if waiting:
            # In the order in which they were added, unless somebody is at each.
            at = min(waiting, key=lambda n: (staff[n] > 0, -self.queues[n].left / (1 + staff[n])))
            self.seats[rank] = Seat(at)
        return self.seats.get(rank)

    def hand_out(self, rank: int, slots: int) -> list[int]:
        """Return further episodes for a worker with so many slots; none if it has enough."""
        seat = self.seats[rank]
        queue, held = self.queues[seat.evaluation], seat.held
        if seat.alone:
            return []
        if queue.suspects and not held:
            group = [queue.suspects.popleft()]
            seat.alone = True
        else:
            depth = slots + seat.episodes_in(_SECONDS)
            if len(held) > depth - max(1, depth // 4):
                return []
            # What others hold, they may be about to end; but at first nobody is.
            left = sum(len(other.waiting or ()) for other in self.queues.values())
            if not seat.ended:
                left += sum(len(other.held) for other in self.seats.values()) + len(queue.suspects)
            share = -(-left // self._num_workers)
            waiting = queue.waiting or deque()
            count = min(depth, share, len(held) + len(waiting)) - len(held)
            group = [waiting.popleft() for _ in range(count)]
        held.update(dict.fromkeys(group))
        return group

    def take_in(self, evaluation: Key, rank: int, name: str, record: ledger.Episode) -> bool:
        """Take a record in; False if the episode had ended before, with the same record.

        Raises:
            NotReproducibleError: if the records differ.
        """
        queue, seat = self.queues[evaluation], self.seats.get(rank)
        if seat is not None and seat.evaluation == evaluation:
            seat.ended += 1
            seat.held.pop(record.index, None)
            seat.alone &= bool(seat.held)
        before = queue.ended.get(record.index)
        if before is None:
            if queue.lost[record.index]:
                queue.ended[record.index] = (record, name)
            return True
        first, by = before
        for what, one, other in ledger.record_differences(first, record)[:1]:
            raise NotReproducibleError(
                f"expected one {what} of episode {record.index}, which ran twice, got {one} from "
                f"{by} and {other} from {name}: the machines differ, or something that no seed "
                "reaches decides the episode"
            )
        return False

    def lose(self, rank: int) -> list[int]:
        """Take the episodes of a lost worker back; return the one that is given up, if any."""
        seat = self.seats.pop(rank, None)
        if seat is None:
            return []
        queue = self.queues[seat.evaluation]
        held = [index for index in seat.held if index not in queue.ended]
        queue.lost.update(held)
        if len(held) == 1 and queue.lost[held[0]] >= self._max_lost:
            return held
        queue.suspects.extend(held)
        return []


class _Queue:
    """The episodes of an evaluation that nobody runs."""

    def __init__(self, indices: Iterable[int] | None):
        # Those that have not been handed out; None if they are not known yet.
        self.waiting = None if indices is None else deque(indices)
        self.suspects: deque[int] = deque()  # those whose worker was lost; each runs alone
        self.lost: Counter[int] = Counter()  # the number of workers lost, by episode
        # Record and worker of episodes that may end twice.
        self.ended: dict[int, tuple[ledger.Episode, str]] = {}

    @property
    def left(self) -> int:
        return len(self.waiting or ()) + len(self.suspects)

    @property
    def waits(self) -> bool:
        """Episodes can be handed out, or it must be opened to know them."""
        return self.waiting is None or bool(self.left)


@dataclass(eq=False)
class Seat(Generic[Key]):
    """A worker at an evaluation, the episodes that it holds, in order, and those it has ended."""

    evaluation: Key
    held: dict[int, None] = field(default_factory=dict)
    alone: bool = False  # it runs a suspect, and nothing beside it
    ended: int = 0
    begun: float | None = None  # when it was first to be given episodes
    opened: local.Ready | None = None  # its answer, once it has env and policy
    beats: int = -1  # its steps so far
    since: float = 0.0  # when it was last seen to do something, or to have nothing to do
    tries: bool = False  # it runs an episode again, to find out whether envs must be new ones
    proves: int | None = None  # the witness that it runs again
    replaces: bool = False  # it has the rank of a worker that was lost

    @property
    def busy(self) -> bool:
        """It has episodes to run."""
        return bool(self.held) or self.tries or self.proves is not None

    @property
    def at_work(self) -> bool:
        """It has episodes to run, or makes env and policy."""
        return self.busy or self.opened is None

    def episodes_in(self, seconds: float) -> int:
        """Estimate how many it ends in some time; at least two."""
        now = time.monotonic()
        self.begun = now if self.begun is None else self.begun
        pace = self.ended / max(now - self.begun, 1e-3)
        return int(min(_MOST, max(2, pace * seconds)))
