"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tdcollect import check
from tdcollect.check import is_count
from tdcollect.evaluation.workers.protocol import Answer, Message, Worker, Workers, pickled_part
from tdcollect.processes.channel import Channel, InterruptsHeld
from tdcollect.processes.child import GRACE, Child, Forked, Spawned, disown_in_forks, shared_file
from tdcollect.processes.template import FromTemplate, Template

_WORKER = "tdcollect.evaluation.workers.worker"
_Start = Callable[[tuple[int, ...]], Child]
_EXIT_SECONDS = 2.0  # between the end of a process's connection and its own
_STARTS = 4  # of templates, one after the other
_FROM_OUTSIDE = (-signal.SIGTERM, -signal.SIGHUP)  # as a scheduler or a user ends a process


class LocalWorkers(Workers):
    """Processes of this machine that run test episodes.

    Pass them to :func:`tdcollect.evaluate`; the episodes are the same to the bit as without. They
    start when they are first needed (about four seconds, whatever their number), and keep env and
    policy for the evaluations that follow. They end with :meth:`close`, with a ``with`` block, when
    nothing refers to them any more, and with this process, however it ends.

    Args:
        num_workers: the number of processes.
        timeout: end a worker that finishes no step for so many seconds; None to wait for ever. An
            env has a minute to start, whatever the timeout.
        max_lost: the number of workers that an episode may cost, before it counts as lost. Those
            that are known to be lost by causes outside of it weigh a tenth each.
        init_fn: called first in each worker, before torch is imported there. Each worker is then a
            fresh interpreter, which takes three seconds of a core to start.

    Raises:
        TypeError, ValueError: if an argument cannot be honoured.

    Examples:
        >>> with LocalWorkers(4) as workers:
        ...     for checkpoint in checkpoints:
        ...         evaluate("CartPole-v1", load(checkpoint), workers=workers)
    """

    kind = "local"

    def __init__(
        self,
        num_workers: int,
        timeout: float | None = None,
        max_lost: int = 3,
        *,
        init_fn: Callable[[], Any] | None = None,
    ):
        super().__init__(num_workers, timeout, max_lost)
        check.callables(init_fn=init_fn)
        self.init_fn = None if init_fn is None else pickled_part("init_fn", init_fn)
        self.template_is_fork = False  # of this process; else a fresh interpreter
        self._templates: list[Template] = []  # at most one
        self._beats: memoryview | None = None
        self._end: Any = None
        disown_in_forks(self)

    def __reduce__(self) -> Any:
        """Copy the arguments only: the workers belong to this process."""
        return _unpickled, (self.num_workers, self.timeout, self.max_lost, self.init_fn)

    def start(self, rank: int) -> Worker:
        if self._beats is None:
            self._beats_file = shared_file(8 * self.num_workers)
            self._beats = memoryview(mmap.mmap(self._beats_file, 0)).cast("q")
            # Also if nobody closes them: when they are garbage collected, or the program ends.
            held = (self.crew, self._templates, self._beats_file)
            self._end = weakref.finalize(self, _end_all, *held)
        self._beats[rank] = 0
        if self.init_fn is not None:
            with InterruptsHeld():
                return self._started(
                    rank, partial(Spawned, f"{_WORKER}:main", init_fn=self.init_fn)
                )
        for _ in range(_STARTS):  # one that has gone, or goes as it starts, is replaced
            if not self._templates:
                with InterruptsHeld():
                    self._templates.append(Template(self._template_process()))
            template = self._templates[0]
            if template.ready():
                with InterruptsHeld(), contextlib.suppress(ChildProcessError):
                    return self._started(rank, partial(FromTemplate, template))
            self._templates.pop().child.end()
        raise RuntimeError("expected a process to start and to import tdcollect, but it ended")

    def _template_process(self) -> Child:
        if not self.template_is_fork:
            return Spawned(f"{_WORKER}:template")
        from tdcollect.evaluation.workers.worker import template

        return Forked(template)

    def _started(self, rank: int, start: _Start) -> Worker:
        assert self._beats is not None
        worker = LocalWorker(rank, self._beats, self._beats_file, start)
        self.crew[rank] = worker
        return worker

    def wait(self, seconds: float) -> Iterator[tuple[Worker, Answer | None]]:
        awaited: dict[int, LocalWorker] = {}
        waiting = select.poll()
        for worker in self._running:
            for descriptor, events in worker.signs:
                awaited[descriptor] = worker
                waiting.register(descriptor, events)
        ready = {descriptor for descriptor, _ in waiting.poll(1000 * seconds)}
        for worker in {awaited[descriptor]: None for descriptor in ready}:
            for answer in worker.answers(ready):
                yield worker, answer

    @property
    def _running(self) -> list[LocalWorker]:
        return [worker for worker in self.crew.values() if isinstance(worker, LocalWorker)]

    def close(self) -> None:
        if self._end is None:
            return
        living = self._running
        for worker in living:
            worker.leave()
        deadline = time.monotonic() + GRACE
        for worker in living:
            worker.wait(deadline - time.monotonic())
        self._end()
        self._end = self._beats = None

    def disown(self) -> None:
        """In a fork of this process: these workers are not its own."""
        if self._end is None:
            return
        self._end.detach()
        os.close(self._beats_file)
        self.crew.clear()
        self._templates.clear()
        self._end = self._beats = None
        self.in_use = False


class LocalWorker(Worker):
    """A local worker.

    Args:
        rank: its rank.
        beats: the shared memory for its steps.
        beats_file: the file behind it.
        start: starts the process, given the files for it.

    Attributes:
        read: makes an answer of its bytes.
    """

    def __init__(self, rank: int, beats: memoryview, beats_file: int, start: _Start):
        super().__init__(rank)
        self._beats = beats
        self.read: Callable[[bytes], Any] = pickle.loads
        self.process = start((beats_file,))
        self._channel = Channel(self.process.socket)
        with contextlib.suppress(OSError):  # it has gone, which reading tells
            self._channel.post(pickle.dumps(rank))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def where(self) -> str:
        return f"process {self.pid}"

    @property
    def signs(self) -> list[tuple[int, int]]:
        """The descriptors that tell when it answers or ends, with the events to poll them for."""
        signs = [(self._channel.fileno(), self._channel.events)]
        if self.process.pidfd is not None:
            # A process that the env has forked may hold the socket open: its end is no sure sign.
            signs.append((self.process.pidfd, select.POLLIN))
        return signs

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._channel.post(pickle.dumps(message))

    def send_bytes(self, message: bytes) -> None:
        """Send a pickled message, however long it takes; from another thread than the driver's."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def answers(self, ready: set[int]) -> Iterator[Answer | None]:
        """Yield the answers that are there; None if the process has ended, and said all it had to.

        Args:
            ready: the descriptors that an event was seen on.
        """
        with contextlib.suppress(OSError):  # reading tells
            self._channel.flush()
        try:
            messages = self._channel.read()
        except EOFError:
            yield None
            return
        if messages is None and self.process.pidfd in ready:
            yield None
        yield from map(self.read, messages or ())

    def beats(self) -> int:
        return self._beats[self.rank] + self._channel.progress

    def leave(self) -> None:
        """Ask it to close its envs and to end."""
        self._channel.send_no_more()

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most; it may have much to clear away after its last word."""
        deadline, listened = time.monotonic() + seconds, True
        while (left := deadline - time.monotonic()) > 0:
            waiting = select.poll()
            for descriptor, events in self.signs:
                if listened or descriptor == self.process.pidfd:
                    waiting.register(descriptor, events)
            ready = {descriptor for descriptor, _ in waiting.poll(1000 * left)}
            if self.process.pidfd in ready:
                return
            if None in self.answers(ready):  # the others are of no use now
                if self.process.pidfd is None:
                    return
                listened = False

    def end(self, waits: bool = False) -> str:
        how = self.process.end(_EXIT_SECONDS if waits else 0.0)
        self.outside = self.process.code in _FROM_OUTSIDE
        return how


def _unpickled(
    num_workers: int, timeout: float | None, max_lost: int, init_fn: bytes | None
) -> LocalWorkers:
    workers = LocalWorkers(num_workers, timeout, max_lost)
    workers.init_fn = init_fn
    return workers


def _end_all(crew: dict[int, Worker], templates: list[Template], beats_file: int) -> None:
    """End all workers and their template, and free the shared memory."""
    for worker in crew.values():
        worker.end()
    crew.clear()
    while templates:
        templates.pop().child.end()
    os.close(beats_file)


def as_workers(workers: Any) -> Workers | None:
    """Return the workers that are asked for; None for this process.

    Raises:
        TypeError, ValueError: for what asks for none.
    """
    if workers is None or isinstance(workers, Workers):
        return workers
    if not is_count(workers):
        raise TypeError(
            "expected workers to be the number of processes, a LocalWorkers or a RayWorkers, got "
            f"{workers!r}"
        )
    return LocalWorkers(workers) if workers else None
