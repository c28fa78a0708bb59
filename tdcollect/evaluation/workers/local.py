"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import cloudpickle

from tdcollect.evaluation.ledger.records import is_count
from tdcollect.evaluation.workers.channel import Channel
from tdcollect.evaluation.workers.protocol import Answer, Message, Worker, Workers
from tdcollect.evaluation.workers.serving import serve
from tdcollect.evaluation.workers.template import Template
from tdcollect.workers.child import Lifeline, ending
from tdcollect.workers.launch import GRACE
from tdcollect.workers.protocol import InterruptsHeld, shared_file


class LocalWorkers(Workers):
    """Processes of this machine that run test episodes.

    Pass them to :func:`tdcollect.evaluate`; the episodes are the same to the bit as without. They
    start when they are first needed (about four seconds, whatever their number), and keep env and
    policy for the evaluations that follow. Their environment variables are those of that moment.
    They end with :meth:`close`, with a ``with`` block, when
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
        _living.add(self)

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
                with InterruptsHeld(), contextlib.suppress(ChildProcessError):
                    worker = _Process(rank, template, self._beats, self._beats_file)
                    self.crew[rank] = worker
                    return worker
            template.close()
            self._templates.clear()
        raise RuntimeError("expected a process to start and to import tdcollect, but it ended")

    def wait(self, seconds: float) -> Iterator[tuple[Worker, Answer | None]]:
        awaited: dict[int, _Process] = {}
        waiting = select.poll()
        for worker in self.crew.values():
            assert isinstance(worker, _Process)
            for descriptor, events in worker.signs:
                awaited[descriptor] = worker
                waiting.register(descriptor, events)
        ready = {descriptor for descriptor, _ in waiting.poll(1000 * seconds)}
        for worker in {awaited[descriptor]: None for descriptor in ready}:
            for answer in worker.answers(ready):
                yield worker, answer

    def close(self) -> None:
        if self._end is None:
            return
        living = [worker for worker in self.crew.values() if isinstance(worker, _Process)]
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
        for worker in self.crew.values():
            assert isinstance(worker, _Process)
            worker.abandon()
        for template in self._templates:
            template.abandon()
        os.close(self._beats_file)
        self.crew.clear()
        self._templates.clear()
        self._end = self._beats = None
        self.in_use = False


class _Process(Worker):
    """A local worker."""

    def __init__(self, rank: int, template: Template, beats: memoryview, beats_file: int):
        super().__init__(rank)
        self._beats = beats
        self._template = template
        self._ended: str | None = None
        ours, theirs = socket.socketpair()
        self._lifeline = Lifeline()
        self._channel = Channel(ours)
        self._process: int | None = None
        descriptors = (self._lifeline.descriptor, theirs.fileno(), beats_file)
        try:
            pid = template.fork(descriptors)
            if pid is None:
                raise ChildProcessError("the process that starts workers has ended")
            self._pid = pid
            # A process that the env has forked may hold the socket open: its end is no sure sign.
            if hasattr(os, "pidfd_open"):
                self._process = os.pidfd_open(pid)
            self._channel.post(pickle.dumps(rank))
        except BaseException:
            self.abandon()
            raise
        finally:
            theirs.close()
            os.close(self._lifeline.descriptor)

    @property
    def where(self) -> str:
        return f"process {self._pid}"

    @property
    def signs(self) -> list[tuple[int, int]]:
        """The descriptors that tell when it answers or ends, with the events to poll them for."""
        own = [] if self._process is None else [(self._process, select.POLLIN)]
        return [(self._channel.fileno(), self._channel.events), *own]

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._channel.post(pickle.dumps(message))

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
        if messages is None and self._process in ready:
            yield None
        yield from map(pickle.loads, messages or ())

    def beats(self) -> int:
        return self._beats[self.rank] + self._channel.progress

    def leave(self) -> None:
        """Ask it to close its envs and to end."""
        self._channel.send_no_more()

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            waiting = select.poll()
            for descriptor, events in self.signs:
                waiting.register(descriptor, events)
            ready = {descriptor for descriptor, _ in waiting.poll(1000 * left)}
            if None in self.answers(ready):  # the others are of no use now
                return

    def end(self) -> str:
        if self._ended is None:
            # If it has ended by itself, its exit code tells how; the signal does not arrive.
            with contextlib.suppress(ProcessLookupError):
                if self._process is None:
                    os.kill(self._pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
            code = self._template.reap(self._pid)
            self.abandon()
            self._ended = "ended" if code is None else ending(code)
        return self._ended

    def abandon(self) -> None:
        """Close all that leads to the process."""
        self._lifeline.close()
        self._channel.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None


_living: weakref.WeakSet[LocalWorkers] = weakref.WeakSet()


def _disown_all() -> None:
    for workers in list(_living):
        workers.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


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
    channel = Channel(socket.socket(fileno=end))
    messages: deque[bytes] = deque()

    def receive(waits: bool) -> Any:
        try:
            while not messages:
                arrived = channel.read()
                if arrived is None and not waits:
                    return None
                if arrived is None:
                    channel.wait()
                messages.extend(arrived or ())
        except EOFError:
            return None
        return pickle.loads(messages.popleft())

    rank = receive(True)
    beats = memoryview(mmap.mmap(beats_file, 0)).cast("q")
    os.close(beats_file)

    def beat() -> None:
        beats[rank] += 1

    for answer in serve(receive, beat):
        channel.send(cloudpickle.dumps(answer))
