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
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import cloudpickle

from tdcollect.cleanup import ended_on_error
from tdcollect.envs.process import worker
from tdcollect.processes import channel
from tdcollect.processes.channel import InterruptsHeld, packed, poll_awake
from tdcollect.processes.child import GRACE, Child, Forked, Spawned, disown_in_forks, shared_file
from tdcollect.surroundings import Surroundings

START_METHODS = ("spawn", "fork")

_START_SECONDS = 60.0
"""An interpreter and its envs have at least so long to start, whatever the timeout."""

# Seconds before a sleep. A worker has its core to itself; the parent may share one with a worker.
_WORKER_AWAKE, _PARENT_AWAKE = 1e-3, 2e-4

_NOT_HELD = nullcontext()


class WorkerLost(RuntimeError):
    """A worker process ended, or was killed as it hung; the envs of its slots are gone."""


class WorkerProcess:
    """The worker process that holds the envs of some slots.

    ``control`` is memory in which it notes the slot at work and its calls, two int64 per worker.
    """

    def __init__(self, index: int, slots: range, child: Child, control: memoryview):
        self.index = index
        self.slots = slots
        self.child = child
        self.lost: str | None = None  # the reason; None while it can be asked
        self._control = control
        self._sequence = 0
        self.pid = child.pid
        self.connection = channel.Connection(child.socket)
        disown_in_forks(self)

    @property
    def at_work(self) -> tuple[int, int]:
        return self._control[2 * self.index], self._control[2 * self.index + 1]

    def ask(self, kind: int, payload: bytes) -> bool:
        """Send a command; False if the worker has gone."""
        self._sequence = (self._sequence + 1) % 256
        try:
            self.connection.send(kind, self._sequence, payload)
        except OSError:
            return False
        return True

    def answer(self) -> bytes | None:
        """Return the answer to the latest command, or raise EOFError if the worker has gone.

        None if one to an earlier command came, which was interrupted.
        """
        try:
            _, sequence, payload = self.connection.receive()
        except OSError as error:
            raise EOFError from error
        return payload if sequence == self._sequence else None

    def lose(self, reason: str | None) -> None:
        """End the process, for a reason unless it ended by itself; note why it was lost."""
        if self.lost is None:
            slot, calls = self.at_work
            how = self.child.end(GRACE if reason is None else 0.0)
            where = f" while slot {slot} was at work" if calls else ""
            self.lost = f"the worker of {named(self.slots)} {reason or how}{where}"

    def disown(self) -> None:
        """In a fork of the parent, which can ask nothing."""
        self.lost = "belongs to the process that this one was forked from"


def named(slots: Sequence[int]) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]}"


class Outcome(NamedTuple):
    """Of a step or a reset: errors, and values that did not fit the shared memory, by slot."""

    failed: dict[int, Exception]
    misfits: dict[int, Any]


Commands = Mapping[WorkerProcess, tuple[Sequence[int], bytes]]
"""The slots that each worker is to step or reset, and the payload that says so."""


class Command:
    """A command that was sent to a worker, for some of its slots."""

    answer: bytes | None = None
    """None until it is done, and of a worker that was lost."""
    done = False

    def __init__(
        self, verb: str, slots: Sequence[int], process: WorkerProcess, timeout: float | None
    ):
        self.verb = verb
        self.slots = slots
        self.process = process
        self.timeout = timeout
        if timeout is not None:
            self.at_work, self.since = process.at_work, time.monotonic()


class WorkerPool:
    """Worker processes that share out N slots, each with a run of them.

    An env may take ``timeout`` seconds for one call; those of a worker ``grace`` seconds to close.
    ``values`` and ``infos`` are files for memory to share, which the workers have open.
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
        self.method = method
        self._timeout = timeout
        self._grace = grace
        self._factories, self._around = list(factories), Surroundings.here()
        one_core_each = num_workers <= usable_cores()
        self._awake = (_PARENT_AWAKE, _WORKER_AWAKE) if one_core_each else (0.0, 0.0)
        bounds = [len(factories) * i // num_workers for i in range(num_workers + 1)]
        runs = [range(*pair) for pair in itertools.pairwise(bounds)]
        self._poll = select.poll()
        self._by_descriptor: dict[int, WorkerProcess] = {}  # those that live
        self._awaited: dict[WorkerProcess, Command] = {}  # the latest commands, until they are done
        self._posted: dict[WorkerProcess, Command] = {}  # until they are collected
        self.in_flight: set[int] = set()  # the slots of sent commands
        self.busy: set[int] = set()  # the slots of workers that are at something
        self._files = [shared_file(16 * num_workers), shared_file(0), shared_file(0)]
        _, self.values, self.infos = self._files
        # Also if nobody closes the env: when it is garbage collected, and when the program ends.
        self.end = weakref.finalize(self, _end_all, self.processes, self._files)
        self._control = memoryview(mmap.mmap(self._files[0], 0)).cast("q")
        with ended_on_error(self.end):
            pickled = [self._pickled(slots) for slots in runs]
            with InterruptsHeld():
                each = zip(range(num_workers), runs, pickled, strict=True)
                self.launched = list(itertools.starmap(self._launch, each))

    # --- starting ------------------------------------------------------------------------------

    def _pickled(self, slots: range) -> bytes | None:
        if self.method == "fork":
            return None
        try:
            return cloudpickle.dumps(self._factories[slots.start : slots.stop])
        except Exception as error:
            raise TypeError(
                "expected an env that can be sent to a worker process, got one that cannot be "
                f"pickled ({error}); make inside the callable what it needs, or use "
                "start_method='fork'"
            ) from error

    def _launch(self, index: int, slots: range, pickled: bytes | None) -> Command:
        """Start a worker, in the place of another if there is one, and have it make its envs."""
        child: Child
        if pickled is None:
            factories = self._factories[slots.start : slots.stop]
            child = Forked(partial(worker.main, factories=factories), self._files)
        else:
            child = Spawned("tdcollect.envs.process.worker:main", self._files)
        process = WorkerProcess(index, slots, child, self._control)
        self.processes[index : index + 1] = [process]
        self._poll.register(process.connection, select.POLLIN)
        self._by_descriptor[process.connection.fileno()] = process
        payload = packed((index, slots.start, self._awake[1], self._around, pickled))
        timeout = None if self._timeout is None else max(self._timeout, _START_SECONDS)
        return self._ask("make", process, worker.CALL, slots, payload, timeout)

    def relaunch(self, lost: WorkerProcess) -> Command:
        """Start a new worker in the place of one that was lost; see :meth:`results`."""
        if lost in self._posted:
            self._take(lost)
        pickled = self._pickled(lost.slots)
        self._control[2 * lost.index + 1] = 0
        with InterruptsHeld():
            return self._launch(lost.index, lost.slots, pickled)

    # --- asking --------------------------------------------------------------------------------

    def _ask(
        self,
        verb: str,
        process: WorkerProcess,
        kind: int,
        slots: Sequence[int],
        payload: bytes,
        timeout: float | None,
    ) -> Command:
        self._awaited[process] = command = Command(verb, slots, process, timeout)
        if process.lost or not process.ask(kind, payload):
            self.lose(process)
        return command

    def call(
        self,
        name: str,
        *arguments: Any,
        processes: Sequence[WorkerProcess] | None = None,
        verb: str | None = None,
    ) -> list[Any]:
        """Call a method of the workers by name; returns their results, worker by worker.

        Messages say ``verb``, or the name.

        Raises:
            WorkerLost: if one is lost.
            Exception: the exception of the first env that failed.
        """
        verb, processes = verb or name, self.processes if processes is None else processes
        if processes and not self.end.alive:
            raise RuntimeError(f"cannot {verb}: the env is closed; make a new one")
        self.settle(processes)
        payload = packed((name, arguments))
        return self.results(
            [self._ask(verb, p, worker.CALL, p.slots, payload, self._timeout) for p in processes]
        )

    def results(self, calls: Sequence[Command]) -> list[Any]:
        """Wait for the results of calls; raises as :meth:`call`."""
        self._wait(calls)
        return [self._result(call) for call in calls]

    def ask(self, verb: str, kind: int, commands: Commands) -> Outcome:
        """Have workers step or reset, and wait for all of them."""
        self.settle(commands)
        sent = [
            self._ask(verb, process, kind, *command, self._timeout)
            for process, command in commands.items()
        ]
        self._wait(sent)
        outcome = Outcome({}, {})
        for command in sent:
            for whole, part in zip(outcome, self.outcome(command), strict=True):
                whole.update(part)
        return outcome

    def post(self, verb: str, kind: int, commands: Commands) -> None:
        """Have workers that have answered their last command step or reset, and go on.

        :meth:`collect` gives the answers.
        """
        with InterruptsHeld():  # a command that is on record has been sent
            for process, (slots, payload) in commands.items():
                assert process not in self._posted, "a worker has one command at a time"
                self.in_flight.update(slots)
                self.busy.update(process.slots)
                command = self._ask(verb, process, kind, slots, payload, self._timeout)
                self._posted[process] = command

    def collect(self, slots: int, seconds: float | None = None) -> list[Command]:
        """Wait for posted commands of so many slots, or for so long and then for the next one.

        Returns:
            The commands that are done, in the order of their workers.
        """
        end = math.inf if seconds is None else time.monotonic() + seconds
        posted = self._posted.values()
        while not all(command.done for command in posted):
            ready = sum(len(command.slots) for command in posted if command.done)
            left = end - time.monotonic()
            if ready >= slots or (left <= 0 and ready):
                break
            waits = [t for t in (left, self._timeout) if t is not None and 0 < t < math.inf]
            self._receive(min(waits, default=None))
            self._end_hanging(posted)
        done = [process for process in self.processes if process in self._posted]
        return [self._take(process) for process in done if self._posted[process].done]

    def settle(self, processes: Iterable[WorkerProcess]) -> None:
        """Wait until workers have done what was posted; its answers are kept."""
        if self._posted:
            self._wait([self._posted[p] for p in processes if p in self._posted])

    def forget(self) -> None:
        """Drop the answers to what was posted; workers that are still at it finish first."""
        self.settle(self.processes)
        for process in list(self._posted):
            self._take(process)

    def _take(self, process: WorkerProcess) -> Command:
        command = self._posted.pop(process)
        self.in_flight.difference_update(command.slots)
        self.busy.difference_update(process.slots)
        return command

    def _wait(self, commands: Sequence[Command]) -> None:
        for command in commands:
            while not command.done:
                self._receive(command.timeout)
                self._end_hanging(commands)

    def _receive(self, seconds: float | None) -> None:
        """Read answers as they come, for so long at most."""
        events = poll_awake(self._poll, self._awake[0])
        events = events or self._poll.poll(None if seconds is None else 1000 * seconds)
        with InterruptsHeld() if self._posted else _NOT_HELD:  # an answer that was read is kept
            for descriptor, _ in events:
                process = self._by_descriptor[descriptor]
                try:
                    answer = process.answer()
                except EOFError:
                    self.lose(process)
                    continue
                if answer is not None and process in self._awaited:
                    command = self._awaited.pop(process)
                    command.answer, command.done = answer, True

    def _end_hanging(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if command.timeout is None or command.done:
                continue
            now, at_work = time.monotonic(), command.process.at_work
            if now - command.since < command.timeout:
                continue
            if at_work == command.at_work:
                took = f"{command.verb}() took more than {command.timeout:g} s"
                self.lose(command.process, f"was ended, as {took}")
            command.at_work, command.since = at_work, now

    def lose(self, process: WorkerProcess, reason: str | None = None) -> None:
        """Note that a worker has ended, or end it for a reason; its slots are lost with it."""
        if not process.lost:
            self._poll.unregister(process.connection)
            del self._by_descriptor[process.connection.fileno()]
        process.lose(reason)
        if (command := self._awaited.pop(process, None)) is not None:
            command.done = True

    def outcome(self, command: Command) -> Outcome:
        """The outcome of a step or a reset that is done, for its slots."""
        process, slots = command.process, command.slots
        if command.answer is None:
            return Outcome({slot: _lost(process, slot) for slot in slots}, {})
        if not command.answer:
            return Outcome({}, {})
        failures, misfits = pickle.loads(command.answer)
        return Outcome({slot: self._raised(slot, f) for slot, f in failures.items()}, misfits)

    def _result(self, command: Command) -> Any:
        if command.answer is None:
            raise WorkerLost(command.process.lost)
        failure, result = pickle.loads(command.answer)
        if failure is not None:
            raise self._raised(*failure)
        return result

    def _raised(self, slot: int, failure: channel.Described) -> Exception:
        """The exception of an env in a worker; its cause is the traceback there."""
        seed = self.seeds.get(slot)
        seeded = "" if seed is None else f", last reset with seed {seed}"
        return channel.raised_there(failure, f"the worker of slot {slot}{seeded}")

    # --- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the envs and end the workers; a second call does nothing."""
        if not self.end.alive:
            return
        payload = packed(("close", ()))
        try:
            commands = [
                self._ask("close", process, worker.CALL, process.slots, payload, self._grace)
                for process in self.processes
                if not process.lost
            ]
            self._wait(commands)
        finally:
            self.end()
        for each in commands:
            if each.answer is not None:
                self._result(each)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lost(process: WorkerProcess, slot: int) -> WorkerLost:
    at_work, calls = process.at_work
    if not calls or slot == at_work:
        return WorkerLost(process.lost)
    return WorkerLost(f"went with the worker of {named(process.slots)}")


def _end_all(processes: Sequence[WorkerProcess], files: list[int]) -> None:
    for process in processes:
        process.connection.close()
    for process in processes:
        process.child.end(GRACE)
    while files:
        os.close(files.pop())
