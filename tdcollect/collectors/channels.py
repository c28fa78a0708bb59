"""Pipes and the queue of a collector's workers, which notice when one of these has died."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import connection
from queue import Empty
from typing import TYPE_CHECKING, Any

from tdcollect._upstream.multi import readers

if TYPE_CHECKING:
    from tdcollect.collectors.guard import Guard

COLLECT = ("continue", "continue_random")
_PATIENCE = 2.0  # seconds
_RUN_FREE, _PAUSE, _RESTART = "run_free", "pause", "restart"


class WorkerPipe:
    """The parent's end of the pipe to a worker, whichever process that is.

    TorchRL sends its messages on it. A worker of an async collector that is asked something while
    it collects drops its batch and waits; it is told to go on here. A process that takes the place
    of a lost one is told and asked what that one was.

    Args:
        pipe: the connection to the first process.
        guard: of all workers.

    Attributes:
        pipe: the connection to the present process.
        holds: do not tell the worker to go on.
    """

    def __init__(self, pipe: connection.Connection, guard: Guard):
        self.pipe = pipe
        self.holds = False
        self._guard = guard
        self._order: Any = (None, COLLECT[0])  # the latest message to collect a batch
        self._owed: Any = None  # the message on which the worker owes word on the queue
        self._asked: Any = None  # the message that it owes an answer to, on the pipe
        self._free = False  # it writes to the replay buffer by itself
        self._told = False  # it has been told to go on

    def send(self, message: Any) -> None:
        """Send a message of TorchRL's: its data, and its name."""
        name = message[1]
        if name in COLLECT:
            self._order = message
            if self._told and self._owed is not None:
                self._told = False
                return
            self._owed = message
        elif name == _RUN_FREE:
            self._free = True
        elif name == _PAUSE:
            self._owed = message
        elif name != _RESTART:
            self._asked = message
        before = self.pipe
        try:
            before.send(message)
        except OSError:
            self._replaced_or_raise(before)  # the new process has the message

    def recv(self) -> Any:
        """Receive an answer."""
        while True:
            before = self.pipe
            try:
                answer = before.recv()
                break
            except (EOFError, OSError):
                self._replaced_or_raise(before)
        self._asked = None
        if not self.holds and self._owed is not None and self._owed[1] in COLLECT:
            self.go_on()
        return answer

    def _replaced_or_raise(self, before: connection.Connection) -> None:
        """Have the guard look, while an error is handled; raise it if the process lives on."""
        end = time.monotonic() + _PATIENCE  # a pipe breaks a little before its process has ended
        while self.pipe is before:
            if self._guard.closed or time.monotonic() > end:
                raise
            _found_dead(self._guard)

    def go_on(self) -> None:
        """Have the worker collect a batch, which it owes from now on."""
        self._owed = self._order
        self.pipe.send(self._order)
        self._told = True

    def delivered(self) -> None:
        """The worker has given what it owed."""
        self._owed, self._told = None, False

    def replaced(self, pipe: connection.Connection) -> None:
        """Talk to another process from now on, and tell it what the lost one was told."""
        self.pipe, self._told = pipe, False
        if self._asked is not None:
            pipe.send(self._asked)
        if self._free:
            pipe.send((None, _RUN_FREE))
        if self._owed is not None:
            pipe.send(self._owed)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Tell whether there is an answer within so many seconds."""
        return self.pipe.poll(timeout)

    def close(self) -> None:
        """Close the pipe."""
        self.pipe.close()


class WorkerQueue:
    """The queue on which workers give word of their batches.

    A worker that takes a lost one's place has a queue of its own, read here too.

    Args:
        queue: of the first workers.
        pipes: to the workers.
        guard: of all workers.
    """

    def __init__(self, queue: Any, pipes: list[WorkerPipe], guard: Guard):
        self._queues: list[tuple[Any, int | None]] = [(queue, None)]
        self._pipes = pipes
        self._guard = guard
        self._batches: dict[int, Any] = {}
        self._begun: set[int] = set()

    def begin(self) -> None:
        """Begin an iteration: TorchRL's has forgotten the memory that workers collect into.

        They name it with their first batch only. Here it is named with the first of each iteration.
        """
        self._begun = set(self._batches)

    def add(self, queue: Any, worker: int) -> None:
        """Read another queue, on which this one worker writes."""
        self._queues.append((queue, worker))

    def get(self, timeout: float | None = None) -> Any:
        """The next word of a worker.

        Raises:
            Empty: if there is none within ``timeout`` seconds.
        """
        return _before(timeout, self._next)

    def _next(self, timeout: float | None) -> Any:
        ends = readers(queue for queue, _ in self._queues)
        ready = connection.wait([*ends, *self._guard.deaths()], timeout)
        for (queue, worker), end in zip(self._queues, ends, strict=True):
            if end not in ready:
                continue
            try:
                word = queue.get()
            except (EOFError, OSError):  # its memory went with the process
                _found_dead(self._guard)
                continue
            return self._noted(word, worker)
        if ready:
            self._guard.check()
        raise Empty

    def _noted(self, word: Any, only: int | None) -> Any:
        what, count = word
        batch, worker = what if isinstance(what, tuple) else (None, what)
        worker = worker if only is None else only
        self._pipes[worker].delivered()
        self._guard.delivered(worker)
        if isinstance(what, tuple):
            self._batches[worker] = batch
        elif worker in self._begun:
            batch, count = self._batches[worker], 0
        self._begun.discard(worker)
        return (worker if batch is None else (batch, worker)), count

    def drain(self) -> None:
        """Drop what workers have given and nobody has taken."""
        while True:
            try:
                self._next(0.0)
            except Empty:
                return

    def full(self) -> bool:
        """Tell whether the first workers' queue is full."""
        return bool(self._queues[0][0].full())

    def close(self) -> None:
        """Close all queues."""
        for queue, _ in self._queues:
            queue.close()


def _before(timeout: float | None, attempt: Callable[[float | None], Any]) -> Any:
    """Try again until it does not raise ``Empty``, or the time is over."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if end is None else max(end - time.monotonic(), 0.0)
        try:
            return attempt(left)
        except Empty:
            if end is not None and time.monotonic() >= end:
                raise


def _found_dead(guard: Guard) -> None:
    """Something is broken because a process ends: wait for that, and have the guard look."""
    connection.wait(guard.deaths(), _PATIENCE)
    guard.check()
