"""The workers of a ``process`` backend together: asked at once, and waited for at once."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import pickle
import select
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cloudpickle

from tdcollect.envs.process import worker
from tdcollect.envs.process.worker import CALL
from tdcollect.processes.channel import (
    Connection,
    Described,
    InterruptsHeld,
    packed,
    poll_awake,
    raised_there,
)
from tdcollect.processes.child import GRACE, Child, Forked, Spawned, disown_in_forks, shared_file

START_METHODS = ("spawn", "fork")

_START_SECONDS = 60.0
"""An interpreter and its envs have at least so long to start, whatever the timeout."""

# Seconds before a sleep. A worker has its core to itself; the parent may share one with a worker.
_WORKER_AWAKE, _PARENT_AWAKE = 1e-3, 2e-4


class WorkerLost(RuntimeError):
    """A worker process ended, or was killed as it hung; the envs of its slots are gone."""


class WorkerProcess:
    """The worker process that holds the envs of some slots.

    ``control`` is memory in which it notes the slot at work and its calls, two int64 per worker.
    """

    def __init__(
        self,
        index: int,
        slots: range,
        method: str,
        factories: Sequence[Callable[[], Any]],
        control: memoryview,
    ):
        self.index = index
        self.slots = slots
        self.lost: str | None = None  # the reason; None while it can be asked
        self._control = control
        self._sequence = 0
        self._child: Child
        if method == "spawn":
            self._child = Spawned("tdcollect.envs.process.worker:main")
        else:
            self._child = Forked(partial(worker.main, factories=factories))
        self.pid = self._child.pid
        self.connection = Connection(self._child.socket)
        disown_in_forks(self)

    @property
    def at_work(self) -> tuple[int, int]:
        """The slot of its latest call of an env, and the number of calls begun."""
        return self._control[2 * self.index], self._control[2 * self.index + 1]

    def ask(self, kind: int, payload: bytes = b"", descriptor: int = -1) -> bool:
        """Send a command; False if the worker has gone."""
        self._sequence = (self._sequence + 1) % 256
        try:
            self.connection.send(kind, self._sequence, payload, descriptor)
        except OSError:
            return False
        return True

    def call(self, name: str, *arguments: Any, descriptor: int = -1) -> bool:
        """Ask for a method of the worker by name."""
        return self.ask(CALL, packed((name, descriptor >= 0, arguments)), descriptor)

    def answer(self) -> bytes | None:
        """Return the answer to the latest command, or raise EOFError if the worker has gone.

        None if one to an earlier command came, which was interrupted.
        """
        try:
            _, sequence, payload = self.connection.receive()
        except OSError as error:
            raise EOFError from error
        return payload if sequence == self._sequence else None

    def lose(self, reason: str | None = None) -> str:
        """End the process, for a reason unless it ended by itself; return why it was lost."""
        if self.lost is None:
            slot, calls = self.at_work
            how = self.end(GRACE if reason is None else 0.0)
            where = f" while slot {slot} was at work" if calls else ""
            self.lost = f"the worker of {named(self.slots)} {reason or how}{where}"
        return self.lost

    def end(self, seconds: float) -> str:
        """End the process, which has so long to close its envs; say how it ended."""
        return self._child.end(seconds)

    def disown(self) -> None:
        """In a fork of the parent, which can ask nothing."""
        self.lost = "belongs to the process that this one was forked from"


def named(slots: Sequence[int]) -> str:
    """Return consecutive slots in words."""
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]}"


class Outcome(NamedTuple):
    """Of a step or a reset: errors, and values that did not fit the shared memory, by slot."""

    failed: dict[int, Exception]
    misfits: dict[int, Any]


Commands = Mapping[WorkerProcess, tuple[Sequence[int], bytes]]
"""The slots that each worker is to step or reset, and the payload that says so."""


class Posted:
    """A command for some slots that was sent, and is not waited for at once."""

    def __init__(self, verb: str, slots: Sequence[int], process: WorkerProcess):
        self.verb = verb
        self.slots = slots
        self.process = process
        self.at_work, self.since = process.at_work, time.monotonic()


class WorkerPool:
    """Worker processes that share out N slots, each with a run of them.

    An env may take ``timeout`` seconds for one call; those of a worker ``grace`` seconds to close.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        num_workers: int,
        timeout: float | None,
        method: str,
        grace: float = GRACE,
    ):
        self.processes: list[WorkerProcess] = []
        self.seeds: dict[int, int | None] = {}  # of each slot's latest reset, for messages
        self.timeout = timeout
        self.method = method
        self._grace = grace
        self._factories = list(factories)
        self._one_core_each = num_workers <= usable_cores()
        bounds = [len(factories) * i // num_workers for i in range(num_workers + 1)]
        runs = [range(*pair) for pair in itertools.pairwise(bounds)]
        self._poll = select.poll()
        self._by_descriptor: dict[int, WorkerProcess] = {}  # those that live
        self._posted: dict[WorkerProcess, Posted] = {}
        self.in_flight: set[int] = set()  # the slots of these commands
        self.busy: set[int] = set()  # the slots of workers that are at something
        # Answers to commands that were posted; None of a worker that was lost.
        self._arrived: dict[WorkerProcess, bytes | None] = {}
        self._files: list[int] = []
        # Also if nobody closes the env: when it is garbage collected, and when the program ends.
        self.end = weakref.finalize(self, _end_all, self.processes, self._files)
        self._control_file = self.new_file(16 * num_workers)
        self._control = memoryview(mmap.mmap(self._control_file, 0)).cast("q")
        try:
            pickled = [self._pickled(slots) for slots in runs]
            with InterruptsHeld():
                for index, slots in enumerate(runs):
                    self.processes.append(self._launch(index, slots, pickled[index]))
        except BaseException:
            self.end()
            raise

    def new_file(self, size: int) -> int:
        """The descriptor of a file to share, which is freed when the pool ends."""
        self._files.append(shared_file(size))
        return self._files[-1]

    # --- starting ------------------------------------------------------------------------------

    def _pickled(self, slots: range) -> bytes | None:
        """The factories of some slots, for a worker that is not forked."""
        if self.method == "fork":
            return None
        try:
            pickled: bytes = cloudpickle.dumps(self._factories[slots.start : slots.stop])
        except Exception as error:
            raise TypeError(
                "expected an env that can be sent to a worker process, got one that cannot be "
                f"pickled ({error}); make inside the callable what it needs, or use "
                "start_method='fork'"
            ) from error
        return pickled

    def _launch(self, index: int, slots: range, pickled: bytes | None) -> WorkerProcess:
        factories = self._factories[slots.start : slots.stop]
        process = WorkerProcess(index, slots, self.method, factories, self._control)
        awake = _WORKER_AWAKE if self._one_core_each else 0.0
        process.ask(CALL, packed((index, slots.start, awake, pickled)), self._control_file)
        self._poll.register(process.connection, select.POLLIN)
        self._by_descriptor[process.connection.fileno()] = process
        return process

    def relaunch(self, lost: WorkerProcess) -> WorkerProcess:
        """Start a new worker in the place of one that was lost."""
        if lost in self._posted:
            self._take(lost)
        pickled = self._pickled(lost.slots)
        self._control[2 * lost.index + 1] = 0
        with InterruptsHeld():
            process = self._launch(lost.index, lost.slots, pickled)
            self.processes[lost.index] = process
        return process

    def started(self, processes: Sequence[WorkerProcess]) -> list[Any]:
        """The answer of each worker once it has made its envs; raises as :meth:`call`."""
        timeout = None if self.timeout is None else max(self.timeout, _START_SECONDS)
        answers = self._wait("make", processes, timeout)
        return [self._result(process, answers.get(process)) for process in processes]

    # --- asking --------------------------------------------------------------------------------

    def call(
        self,
        name: str,
        *arguments: Any,
        descriptor: int = -1,
        processes: Sequence[WorkerProcess] | None = None,
        verb: str | None = None,
    ) -> list[Any]:
        """Call a method of the workers by name; returns their results, worker by worker.

        Messages say ``verb``, or the name.

        Raises:
            WorkerLost: if one is lost.
            Exception: the exception of the first env that failed.
        """
        asked = self.processes if processes is None else processes
        if asked and not self.end.alive:
            raise RuntimeError(f"cannot {verb or name}: the env is closed; make a new one")
        self.settle(asked)
        for process in asked:
            if not process.lost and not process.call(name, *arguments, descriptor=descriptor):
                self.lose(process)
        answers = self._wait(verb or name, asked, self.timeout)
        return [self._result(process, answers.get(process)) for process in asked]

    def ask(self, verb: str, kind: int, commands: Commands) -> Outcome:
        """Have workers step or reset, and wait for all of them."""
        self.settle(commands)
        for process, (_, payload) in commands.items():
            if not process.lost and not process.ask(kind, payload):
                self.lose(process)
        answers = self._wait(verb, commands, self.timeout)
        found = Outcome({}, {})
        for process, (slots, _) in commands.items():
            failed, misfits = self.read(process, answers.get(process), slots)
            found.failed.update(failed)
            found.misfits.update(misfits)
        return found

    def post(self, verb: str, kind: int, commands: Commands) -> None:
        """Have workers that have answered their last command step or reset, and go on.

        :meth:`collect` gives the answers.
        """
        with InterruptsHeld():  # a command that is on record has been sent
            for process, (slots, payload) in commands.items():
                assert process not in self._posted, "a worker has one command at a time"
                self._posted[process] = Posted(verb, slots, process)
                self.in_flight.update(slots)
                self.busy.update(process.slots)
                if process.lost or not process.ask(kind, payload):
                    self.lose(process)

    def collect(
        self, slots: int, seconds: float | None = None
    ) -> list[tuple[Posted, bytes | None]]:
        """Wait for posted commands of so many slots, or for so long and then for the next one.

        Returns:
            The commands that were answered, in the order of their workers, each with its answer;
            None of a worker that was lost.
        """
        end = math.inf if seconds is None else time.monotonic() + seconds
        awake = _PARENT_AWAKE if self._one_core_each else 0.0
        while len(self._arrived) < len(self._posted):
            ready = sum(len(self._posted[process].slots) for process in self._arrived)
            left = end - time.monotonic()
            if ready >= slots or (left <= 0 and ready):
                break
            waits = [t for t in (left, self.timeout) if t is not None and 0 < t < math.inf]
            limit = min(waits) * 1000 if waits else None
            self._receive(poll_awake(self._poll, awake) or self._poll.poll(limit))
            self._end_hanging()
        return [self._take(p) for p in sorted(self._arrived, key=lambda process: process.index)]

    def settle(self, asked: Iterable[WorkerProcess] | None = None) -> None:
        """Wait until workers (None for all) have done what was posted; its answers are kept."""
        if not self._posted:
            return
        of = set(self.processes if asked is None else asked)
        while any(process in of and process not in self._arrived for process in self._posted):
            limit = None if self.timeout is None else self.timeout * 1000
            self._receive(self._poll.poll(limit))
            self._end_hanging()

    def forget(self) -> None:
        """Drop the answers to what was posted; workers that are still at it finish first."""
        self.settle()
        for process in list(self._posted):
            self._take(process)

    def _take(self, process: WorkerProcess) -> tuple[Posted, bytes | None]:
        """Take a worker's command off the record; returns it, and its answer if that has come."""
        posted = self._posted.pop(process)
        self.in_flight.difference_update(posted.slots)
        self.busy.difference_update(process.slots)
        return posted, self._arrived.pop(process, None)

    def _receive(self, events: Iterable[tuple[int, int]]) -> None:
        """Read answers to what was posted."""
        with InterruptsHeld():  # an answer that was read is kept
            for descriptor, _ in events:
                process = self._by_descriptor[descriptor]
                try:
                    answer = process.answer()
                except EOFError:
                    self.lose(process)
                    continue
                if answer is not None and process in self._posted:
                    self._arrived[process] = answer

    def _end_hanging(self) -> None:
        """End the workers whose envs take longer than the timeout for one call."""
        if self.timeout is None:
            return
        now = time.monotonic()
        for process, posted in list(self._posted.items()):
            if process in self._arrived or now - posted.since < self.timeout:
                continue
            if process.at_work == posted.at_work:
                self._lose_hanging(process, posted.verb, self.timeout)
            posted.at_work, posted.since = process.at_work, now

    def read(self, process: WorkerProcess, answer: bytes | None, slots: Sequence[int]) -> Outcome:
        """The outcome for ``slots``, from a worker's answer, which is None if it was lost."""
        if answer is None:
            return Outcome({slot: _lost(process, slot) for slot in slots}, {})
        if not answer:
            return Outcome({}, {})
        failures, misfits = pickle.loads(answer)
        return Outcome({slot: self._raised(slot, f) for slot, f in failures.items()}, misfits)

    def _wait(
        self, verb: str, asked: Iterable[WorkerProcess], timeout: float | None
    ) -> dict[WorkerProcess, bytes]:
        """Wait for the answers of workers; one that is lost gives none."""
        waiting = {process.connection.fileno(): process for process in asked if not process.lost}
        answers: dict[WorkerProcess, bytes] = {}
        limit = None if timeout is None else timeout * 1000
        seen = {process: process.at_work for process in waiting.values()} if limit else {}
        awake = _PARENT_AWAKE if self._one_core_each else 0.0
        while waiting:
            events = poll_awake(self._poll, awake) or self._poll.poll(limit)
            for descriptor, event in events:
                process = waiting.get(descriptor)
                if process is None:
                    self._receive([(descriptor, event)])
                    continue
                try:
                    answer = process.answer()
                except EOFError:
                    self.lose(process)
                    waiting.pop(descriptor, None)
                    continue
                if answer is not None:
                    answers[process] = answer
                    waiting.pop(descriptor, None)
            if not events:
                for descriptor, process in list(waiting.items()):
                    if seen[process] == process.at_work:
                        assert timeout is not None
                        self._lose_hanging(process, verb, timeout)
                        del waiting[descriptor]
                    seen[process] = process.at_work
        return answers

    def _lose_hanging(self, process: WorkerProcess, verb: str, timeout: float) -> None:
        self.lose(process, f"was ended, as {verb}() took more than {timeout:g} s")

    def lose(self, process: WorkerProcess, reason: str | None = None) -> None:
        """Note that a worker has ended, or end it for a reason; its slots are lost with it."""
        if not process.lost:
            self._poll.unregister(process.connection)
            del self._by_descriptor[process.connection.fileno()]
        process.lose(reason)
        if process in self._posted:
            self._arrived.setdefault(process, None)

    def _result(self, process: WorkerProcess, answer: bytes | None) -> Any:
        if answer is None:
            raise WorkerLost(process.lost)
        failure, result = pickle.loads(answer)
        if failure is not None:
            raise self._raised(*failure)
        return result

    def _raised(self, slot: int, failure: Described) -> Exception:
        """The exception of an env in a worker; its cause is the traceback there."""
        seed = self.seeds.get(slot)
        seeded = "" if seed is None else f", last reset with seed {seed}"
        return raised_there(failure, f"the worker of slot {slot}{seeded}")

    # --- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the envs and end the workers; a second call does nothing."""
        if not self.end.alive:
            return
        living = [process for process in self.processes if not process.lost]
        try:
            asked = [process for process in living if process.call("close")]
            answers = self._wait("close", asked, self._grace)
        finally:
            self.end()
        for process, answer in answers.items():
            self._result(process, answer)


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lost(process: WorkerProcess, slot: int) -> WorkerLost:
    at_work, calls = process.at_work
    if not calls or slot == at_work:
        return WorkerLost(process.lost)
    return WorkerLost(f"went with the worker of {named(process.slots)}")


def _end_all(processes: Sequence[WorkerProcess], files: list[int]) -> None:
    """End workers that may still run, and free the shared memory."""
    for process in processes:
        process.connection.close()
    for process in processes:
        process.end(GRACE)
    while files:
        os.close(files.pop())
