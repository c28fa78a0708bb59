"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from tdcollect.evaluation.ledger.records import is_count
from tdcollect.evaluation.pickling import pickled_part
from tdcollect.evaluation.workers.protocol import Answer, Message, Worker, Workers
from tdcollect.evaluation.workers.template import ForkOfTemplate, Template
from tdcollect.workers.child import Lifeline, Spawned, ending
from tdcollect.workers.launch import GRACE
from tdcollect.workers.protocol import InterruptsHeld, shared_file

_Start = Callable[[Sequence[int]], Spawned | ForkOfTemplate]


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
        max_lost: the number of workers that an episode may cost, before it counts as failed.
        init_fn: called first in each worker, before torch is imported there. Each worker is then a
            fresh interpreter, which takes three seconds to start, and its core.

    Raises:
        ValueError: if an argument cannot be honoured.

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
        self._init_fn = None if init_fn is None else pickled_part("init_fn", init_fn)
        self.template_is_fork = False  # of this process; else a fresh interpreter
        self._templates: list[Template] = []  # at most one
        self._beats: memoryview | None = None
        self._end: Any = None

    def __reduce__(self) -> Any:
        """Copy the arguments only: the workers belong to this process."""
        return _unpickled, (self.num_workers, self.timeout, self.max_lost, self._init_fn)

    def start(self, rank: int) -> Worker:
        if self._beats is None:
            self._beats_file = shared_file(8 * self.num_workers)
            self._beats = memoryview(mmap.mmap(self._beats_file, 0)).cast("q")
            # Also if nobody closes them: when they are garbage collected, or the program ends.
            self._end = weakref.finalize(
                self, _end_all, self.crew, self._templates, self._beats_file
            )
        self._beats[rank] = 0
        if self._init_fn is not None:
            with InterruptsHeld():
                return self._started(rank, partial(Spawned, "tdcollect.workers.late"))
        for _ in range(2):  # a template that has gone is replaced
            if not self._templates:
                with InterruptsHeld():
                    self._templates.append(Template(self.template_is_fork))
            template = self._templates[0]
            if template.ready():
                with InterruptsHeld():
                    return self._started(rank, template.fork)
            template.close()
            self._templates.clear()
        raise RuntimeError("expected a process to start and to import tdcollect, but it ended")

    def _started(self, rank: int, start: _Start) -> Worker:
        assert self._beats is not None
        worker = LocalWorker(rank, self._beats, self._beats_file, start)
        worker.begin(self._init_fn)
        self.crew[rank] = worker
        return worker

    def wait(self, seconds: float) -> Iterator[tuple[Worker, Answer | None]]:
        awaited: dict[Any, LocalWorker] = {}
        for worker in self.crew.values():
            assert isinstance(worker, LocalWorker)
            awaited.update(dict.fromkeys(worker.signs, worker))
        ready = wait(list(awaited), seconds)
        for worker in {awaited[sign]: None for sign in ready}:
            yield worker, worker.answer()

    def close(self) -> None:
        if self._end is None:
            return
        living = [worker for worker in self.crew.values() if isinstance(worker, LocalWorker)]
        for worker in living:
            worker.leave()
        deadline = time.monotonic() + GRACE
        for worker in living:
            worker.wait(deadline - time.monotonic())
        self._end()
        self._end = self._beats = None


class LocalWorker(Worker):
    """A local worker.

    Args:
        rank: its rank.
        beats: the shared memory for its steps.
        beats_file: the file behind it.
        start: starts the process, given the descriptors that it inherits.

    Attributes:
        read: makes an answer of its bytes.
    """

    def __init__(
        self,
        rank: int,
        beats: memoryview,
        beats_file: int,
        start: _Start,
    ):
        super().__init__(rank)
        self._beats = beats
        self._ended: str | None = None
        self.read: Callable[[bytes], Any] = pickle.loads
        ours, theirs = socket.socketpair()
        self._lifeline = Lifeline()
        self._connection = Connection(ours.detach())
        try:
            self._child = start((self._lifeline.descriptor, theirs.fileno(), beats_file))
        finally:
            theirs.close()
            os.close(self._lifeline.descriptor)
        # A process that the env has forked may hold the connection open: its end is no sure sign.
        pid = self._child.pid
        self._process = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def begin(self, init_fn: bytes | None) -> None:
        """Send the first messages; those to a fresh interpreter have a function for it to call."""
        if init_fn is not None:
            self._connection.send((init_fn, __name__))
        self._connection.send(self.rank)

    @property
    def where(self) -> str:
        return f"process {self._child.pid}"

    @property
    def signs(self) -> list[Any]:
        """What becomes readable when it answers or ends."""
        return [self._connection, *([] if self._process is None else [self._process])]

    def send(self, message: Message) -> None:
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, message: bytes) -> None:
        """Send a pickled message."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def answer(self) -> Answer | None:
        """Return the answer that is there; None if the process has ended instead."""
        try:
            return self.read(self._connection.recv_bytes()) if self._connection.poll() else None
        except (EOFError, OSError):
            return None

    def beats(self) -> int:
        return self._beats[self.rank]

    def leave(self) -> None:
        """Ask it to close its envs and to end."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps(None))

    def kill(self) -> None:
        """Kill the process from another thread; ``end`` comes next."""
        os.kill(self._child.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        deadline = time.monotonic() + seconds
        sign = self._connection if self._process is None else self._process
        while wait([sign], max(0, deadline - time.monotonic())):
            if self.answer() is None:  # what it had to say is of no use now
                return

    def end(self) -> str:
        if self._ended is None:
            # If it has ended by itself, this tells how; a signal to it would not arrive.
            code = self._child.kill()
            self._lifeline.close()
            self._connection.close()
            if self._process is not None:
                os.close(self._process)
            self._ended = "ended" if code is None else ending(code)
        return self._ended


def _unpickled(
    num_workers: int, timeout: float | None, max_lost: int, init_fn: bytes | None
) -> LocalWorkers:
    workers = LocalWorkers(num_workers, timeout, max_lost)
    workers._init_fn = init_fn
    return workers


def _end_all(crew: dict[int, Worker], templates: list[Template], beats_file: int) -> None:
    """End all workers and their template, and free the shared memory."""
    for worker in crew.values():
        worker.end()
    crew.clear()
    while templates:
        templates.pop().close()
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


def main(connection: Connection, beats_file: int) -> None:
    """Run a worker.

    Args:
        connection: to the driver.
        beats_file: memory with one int64 per worker, in which it counts its steps.
    """
    from tdcollect.evaluation.workers.serving import serve

    rank = connection.recv()
    beats = memoryview(mmap.mmap(beats_file, 0)).cast("q")
    os.close(beats_file)

    def beat() -> None:
        beats[rank] += 1

    def receive(waits: bool) -> Message | None:
        if not (waits or connection.poll()):
            return None
        try:
            message: Message | None = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return message

    for answer in serve(receive, beat):
        connection.send_bytes(cloudpickle.dumps(answer))
