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
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from tdcollect.evaluation.ledger.records import is_count
from tdcollect.evaluation.workers.protocol import Answer, Message, Worker, Workers
from tdcollect.evaluation.workers.template import Template
from tdcollect.workers.child import Lifeline, ending
from tdcollect.workers.launch import GRACE
from tdcollect.workers.protocol import InterruptsHeld, shared_file


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

    Raises:
        ValueError: if an argument cannot be honoured.

    Examples:
        >>> with LocalWorkers(4) as workers:
        ...     for checkpoint in checkpoints:
        ...         evaluate("CartPole-v1", load(checkpoint), workers=workers)
    """

    kind = "local"

    def __init__(self, num_workers: int, timeout: float | None = None, max_lost: int = 3):
        super().__init__(num_workers, timeout, max_lost)
        self._templates: list[Template] = []  # at most one
        self._beats: memoryview | None = None
        self._end: Any = None

    def start(self, rank: int) -> Worker:
        if self._beats is None:
            self._beats_file = shared_file(8 * self.num_workers)
            self._beats = memoryview(mmap.mmap(self._beats_file, 0)).cast("q")
            # Also if nobody closes them: when they are garbage collected, or the program ends.
            self._end = weakref.finalize(
                self, _end_all, self.crew, self._templates, self._beats_file
            )
        self._beats[rank] = 0
        for _ in range(2):  # a template that has gone is replaced
            if not self._templates:
                with InterruptsHeld():
                    self._templates.append(Template())
            template = self._templates[0]
            if template.ready():
                with InterruptsHeld():
                    worker = Process(rank, template, self._beats, self._beats_file)
                    self.crew[rank] = worker
                return worker
            template.close()
            self._templates.clear()
        raise RuntimeError("expected a process to start and to import tdcollect, but it ended")

    def wait(self, seconds: float) -> Iterator[tuple[Worker, Answer | None]]:
        awaited: dict[Any, Process] = {}
        for worker in self.crew.values():
            assert isinstance(worker, Process)
            awaited.update(dict.fromkeys(worker.signs, worker))
        ready = wait(list(awaited), seconds)
        for worker in {awaited[sign]: None for sign in ready}:
            yield worker, worker.answer()

    def close(self) -> None:
        if self._end is None:
            return
        living = [worker for worker in self.crew.values() if isinstance(worker, Process)]
        for worker in living:
            worker.leave()
        deadline = time.monotonic() + GRACE
        for worker in living:
            worker.wait(deadline - time.monotonic())
        self._end()
        self._end = self._beats = None


class Process(Worker):
    """A local worker."""

    def __init__(self, rank: int, template: Template, beats: memoryview, beats_file: int):
        super().__init__(rank)
        self._beats = beats
        self._template = template
        self._ended: str | None = None
        ours, theirs = socket.socketpair()
        self._lifeline = Lifeline()
        self._connection = Connection(ours.detach())
        descriptors = (self._lifeline.descriptor, theirs.fileno(), beats_file)
        try:
            pid = template.fork(descriptors)
        finally:
            theirs.close()
            os.close(self._lifeline.descriptor)
        if pid is None:
            raise RuntimeError("expected a worker to start, but the process that starts them ended")
        self._pid = pid
        # A process that the env has forked may hold the connection open: its end is no sure sign.
        self._process = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        self._connection.send(rank)

    @property
    def where(self) -> str:
        return f"process {self._pid}"

    @property
    def signs(self) -> list[Any]:
        """What becomes readable when it answers or ends."""
        return [self._connection, *([] if self._process is None else [self._process])]

    def send(self, message: Message | None) -> None:
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, pickled: bytes) -> None:
        """Send a pickled message."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(pickled)

    def answer(self) -> Answer | None:
        """Return the answer that is there; None if the process has ended instead."""
        pickled = self.answer_bytes()
        return None if pickled is None else pickle.loads(pickled)

    def answer_bytes(self) -> bytes | None:
        """Return the pickled answer that is there; None if the process has ended instead."""
        try:
            return self._connection.recv_bytes() if self._connection.poll() else None
        except (EOFError, OSError):
            return None

    def beats(self) -> int:
        return self._beats[self.rank]

    def leave(self) -> None:
        """Ask it to close its envs and to end."""
        self.send(None)

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        deadline = time.monotonic() + seconds
        sign = self._connection if self._process is None else self._process
        while wait([sign], max(0, deadline - time.monotonic())):
            if self.answer() is None:  # what it had to say is of no use now
                return

    def kill(self) -> None:
        """Kill it; ``end`` comes next."""
        if self._process is None:
            os.kill(self._pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def end(self) -> str:
        if self._ended is None:
            # If it has ended by itself, this tells how; a signal to it would not arrive.
            code = self._template.reap(self._pid, kill=True)
            self._lifeline.close()
            self._connection.close()
            if self._process is not None:
                os.close(self._process)
            self._ended = "ended" if code is None else ending(code)
        return self._ended


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


def main(lifeline: int, end: int, beats_file: int) -> None:
    """Run a worker.

    Args:
        lifeline: the read end of a pipe that the driver holds open.
        end: this worker's end of the socket pair.
        beats_file: memory with one int64 per worker, in which it counts its steps.
    """
    from tdcollect.evaluation.workers.serving import serve

    connection = Connection(end)
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
