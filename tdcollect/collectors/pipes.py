"""Pipes to the workers of a collector, and the guard that notices when one of these has died."""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, util
from multiprocessing.synchronize import Lock
from pathlib import Path
from queue import Empty
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from tdcollect._upstream.collectors import WorkersState, kept_by_others, locks_between, readers
from tdcollect.collectors.asking import WorkerLostError, WorkerReport
from tdcollect.processes.child import ending

COLLECT = ("continue", "continue_random")
_PATIENCE = 2.0  # seconds
_RUN_FREE, _PAUSE, _RESTART = "run_free", "pause", "restart"


class WorkerPipe:
    """The parent's end of the pipe to a worker, whichever process that is.

    A worker of an async collector drops its batch and waits when it is asked something; it is told
    to go on here. A process that takes the place of a lost one gets the messages of that one.
    """

    def __init__(self, pipe: connection.Connection, guard: Guard):
        self.pipe = pipe
        self.holds = False  # if so, the worker is not told to go on
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)


class WorkerQueue:
    """The queue on which workers give word of their batches; replacements have others."""

    def __init__(self, queue: Any, pipes: list[WorkerPipe], guard: Guard):
        self.first = queue
        """That of the first workers, which share it."""
        self._queues: list[tuple[Any, int | None]] = [(queue, None)]
        self._pipes = pipes
        self._guard = guard
        self._batches: dict[int, Any] = {}
        self._begun: set[int] = set()

    def begin(self) -> None:
        """Begin an iteration, for which workers name their memory with their first batch again."""
        self._begun = set(self._batches)

    def add(self, queue: Any, worker: int) -> None:
        """Read another queue, on which this one worker writes."""
        self._queues.append((queue, worker))

    def get(self, timeout: float | None = None) -> Any:
        """The next word of a worker; ``Empty`` is raised if none comes in ``timeout`` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            try:
                left = max(end - time.monotonic(), 0.0)
                return self._next(None if timeout is None else left)
            except Empty:
                if time.monotonic() >= end:
                    raise

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
        with suppress(Empty):
            while True:
                self._next(0.0)

    def full(self) -> bool:
        """Return whether the first workers' queue is full."""
        return bool(self.first.full())

    def close(self) -> None:
        """Close all queues."""
        for queue, _ in self._queues:
            queue.close()


def _found_dead(guard: Guard) -> None:
    """Something is broken because a process ends: wait for that, and have the guard look."""
    connection.wait(guard.deaths(), _PATIENCE)
    guard.check()


class Reports:
    """Files, each with the latest word of a worker: its report, or the error that it ended with."""

    def __init__(self, workers: int):
        self._folder = mkdtemp(prefix="tdcollect-reports-")
        # Unlike a `TemporaryDirectory`, it leaves the folder alone in forks of this process.
        self._remove = util.Finalize(self, rmtree, (self._folder, True), exitpriority=0)
        self.files = [self.file(worker) for worker in range(workers)]

    def file(self, number: int) -> Path:
        """Return the file of the worker with a number of its own."""
        return Path(self._folder, str(number))

    def latest(self, procs: Callable[[], Sequence[Any]]) -> list[WorkerReport]:
        """The latest report of each worker; ``procs`` raises or replaces one that has died."""
        for worker, proc in enumerate(procs()[: len(self.files)]):
            if self.last_word(worker):
                connection.wait([proc.sentinel], 5)  # it ends
        procs()
        return [pickle.loads(file.read_bytes()) for file in self.files]

    def last_word(self, worker: int) -> str:
        """The error that a worker ended with; empty where it was killed."""
        with suppress(OSError, IndexError):  # of none, where another's collector runs
            word = pickle.loads(self.files[worker].read_bytes())
            return word if isinstance(word, str) else ""
        return ""

    def close(self) -> None:
        """Remove the files."""
        self._remove()


_log = logging.getLogger("tdcollect.collectors")
_SIGNAL: Any = getattr(signal, "SIGCHLD", None)  # Windows has none
_MAX_LOST = 3
"""A worker that is lost so often is not replaced again, unless a batch came, or time passed."""
_LONG = 60.0
"""Seconds after which a worker has proved itself, as one that gives a batch."""
_WRITES = 5.0
"""Seconds in which a live worker gives back a lock: it writes one batch, or a message."""


class _Watched:
    """A process as TorchRL looks at it. If it finds one dead, it ends the others and gives up."""

    def __init__(self, proc: Any, guard: Guard):
        self._proc, self._guard = proc, guard

    def is_alive(self) -> bool:
        if not self._proc.is_alive():
            self._guard.check()
        return not self._guard.closed  # another has taken its place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proc, name)


class Guard:
    """Watches the worker processes of a collector, in a thread and wherever one is waited for.

    ``replace(worker, count)`` starts the count-th replacement of a lost worker and returns its
    process; None is to raise.
    """

    def __init__(self, collector: Any, procs: list[Any], replace: Callable[[int, int], Any] | None):
        self.procs = procs
        self.closed = False
        self.lock = threading.RLock()
        self._collector = weakref.ref(collector)
        self._replace = replace
        self._since = [time.monotonic()] * len(procs)
        self._in_a_row = [0] * len(procs)
        self._error: WorkerLostError | None = None
        self._previous: Any = None
        self._handler: Any = None
        self._wake, self._sleep = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._wake), name="tdcollect-guard", daemon=True
        )
        self._thread.start()

    def deaths(self) -> list[Any]:
        """The processes' sentinels, each ready once its process has ended."""
        if self.closed or self._error is not None:
            return []
        return [proc.sentinel for proc in self.procs]

    def watched(self) -> list[Any]:
        """The processes; a dead one is found by whoever looks whether it is alive."""
        return [_Watched(proc, self) for proc in self.procs]

    def delivered(self, worker: int) -> None:
        """A worker has given a batch."""
        self._in_a_row[worker] = 0

    def check(self) -> None:
        """Replace a worker that has died, or end the others and raise :class:`WorkerLostError`."""
        if self.closed:
            return
        with self.lock:
            self._look()
        if (error := self._error) is not None:
            if (collector := self._collector()) is not None:
                collector.shutdown(timeout=1.0, raise_on_error=False)
            raise error

    def _look(self) -> None:
        """Take note of workers that have died."""
        if self.closed or self._error is not None:
            return
        for worker, proc in enumerate(self.procs):
            if not proc.is_alive():  # a fork server's sentinel is ready only until somebody asks
                self._note(worker, proc)
                if self._error is not None:
                    return

    def _note(self, worker: int, proc: Any) -> None:
        collector = self._collector()
        if collector is None:  # which ends them all
            return
        proc.join(1.0)
        cause = collector.reports.last_word(worker)
        if time.monotonic() - self._since[worker] > _LONG:
            self._in_a_row[worker] = 0
        self._in_a_row[worker] += 1
        how = ending(proc.exitcode) + f" after {cause}" * bool(cause)
        frames = collector.frames_per_batch_worker(worker_idx=worker)
        replaced = self._replace is not None and self._in_a_row[worker] <= _MAX_LOST
        why = f"as {_MAX_LOST + 1} in a row ended so without a batch; mend what ends them"
        locks = locks_between(collector.replay_buffer, collector.queue_out.first)
        if replaced and any(kept_by_others(lock, _WRITES) for lock in locks):
            replaced = False
            why = "as it held a lock that they wait for; make a new collector"
        lost = collector._lost_worker(worker, proc.pid, how, frames, replaced)
        WorkersState(collector).release_update(worker)
        if self._replace is not None and replaced:
            _log.warning("%s; another takes its place", lost)
            try:
                places = sum(one.worker == worker for one in collector.lost if one.replaced)
                self.procs[worker] = self._replace(worker, places)
                self._since[worker] = time.monotonic()
                return
            except Exception as error:
                _log.exception("no worker could take the place of the lost one")
                why = f"as no other could take its place ({error})"
        _log.error("%s; the other workers are ended", lost)
        self._error = WorkerLostError(lost, *([why] if self._replace else []))
        for other in self.procs:
            if other is not proc:
                other.terminate()
        for other in self.procs:
            other.join(_PATIENCE)
        _give_back(locks)

    # ------------------------------------------------------------------------- while it runs free

    def raise_in_main_thread(self) -> None:
        """From now on, raise in the main thread when a worker is lost, by a handler of SIGCHLD."""
        if self._handler is not None or not _can_signal():
            return
        previous, itself = signal.getsignal(_SIGNAL), weakref.ref(self)

        def handler(number: int, frame: Any) -> None:
            if callable(previous):
                previous(number, frame)
            guard = itself()
            if guard is not None and not guard.closed and guard._error is not None:
                guard.check()

        self._previous = previous
        self._handler = handler
        signal.signal(_SIGNAL, handler)

    def look_in_thread(self) -> bool:
        """Look, in the thread that watches; True to go on watching."""
        with self.lock:
            if self.closed:
                return False
            with suppress(ValueError):  # of a process that a shutdown closes meanwhile
                self._look()
            if self._error is not None and self._handler is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            return self._error is None

    def close(self) -> None:
        """Stop looking; may be called again."""
        if self.closed:
            return
        self.closed = True
        with suppress(OSError):
            self._sleep.close()  # the thread finds its end closed
        if self._handler and _can_signal() and signal.getsignal(_SIGNAL) is self._handler:
            signal.signal(_SIGNAL, self._previous or signal.SIG_DFL)


def _give_back(locks: Sequence[Any]) -> None:
    """Give back the locks of workers that have ended, for whom others would wait for ever."""
    for lock in locks:
        if isinstance(lock, Lock) and kept_by_others(lock, _PATIENCE):
            lock.release()
            _log.warning("a worker ended as it wrote: rows of the replay buffer may be incomplete")


def _can_signal() -> bool:
    return _SIGNAL is not None and threading.current_thread() is threading.main_thread()


def _watch(guard_of: Callable[[], Guard | None], wake: connection.Connection) -> None:
    """Wait until a process ends, and have the guard look."""
    with wake:
        while True:
            guard = guard_of()
            if guard is None or guard.closed:
                return
            sentinels = guard.deaths()
            del guard  # or it would live as long as this thread
            ready = connection.wait([wake, *sentinels])
            guard = guard_of()
            if wake in ready or guard is None or not guard.look_in_thread():
                return
            del guard
