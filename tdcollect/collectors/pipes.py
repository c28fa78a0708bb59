"""Pipes to the workers of a collector, and the guard that notices when one of these has died."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
_PAUSE = "pause"


class WorkerPipe:
    """The parent's end of the pipe to a worker.

    A worker of an async collector drops its batch and waits when it is asked something; it is told
    to go on here.
    """

    def __init__(self, pipe: connection.Connection, guard: Guard):
        self.pipe = pipe
        self.holds = False  # if so, the worker is not told to go on
        self._guard = guard
        self._order: Any = (None, COLLECT[0])  # the latest message to collect a batch
        self._owes = False  # word of a batch on the queue
        self._told = False  # it has been told to go on

    def send(self, message: Any) -> None:
        """Send a message of TorchRL's: its data, and its name."""
        if message[1] in COLLECT:
            self._order = message
            if self._told and self._owes:
                self._told = False
                return
            self._owes = True
        elif message[1] == _PAUSE:
            self._owes = False
        with _watched(self._guard):
            self.pipe.send(message)

    def recv(self) -> Any:
        """Receive an answer."""
        with _watched(self._guard):
            answer = self.pipe.recv()
        if not self.holds and self._owes:
            self.go_on()
        return answer

    def go_on(self) -> None:
        """Have the worker collect a batch, which it owes from now on."""
        self._owes = self._told = True
        self.pipe.send(self._order)

    def delivered(self) -> None:
        """The worker has given what it owed."""
        self._owes = self._told = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)


class WorkerQueue:
    """The queue on which workers give word of their batches."""

    def __init__(self, queue: Any, pipes: list[WorkerPipe], guard: Guard):
        self.queue = queue
        self._pipes = pipes
        self._guard = guard
        self._batches: dict[int, Any] = {}
        self._begun: set[int] = set()

    def begin(self) -> None:
        """Begin an iteration, for which workers name their memory with their first batch again."""
        self._begun = set(self._batches)

    def get(self, timeout: float | None = None) -> Any:
        """The next word of a worker; ``Empty`` is raised if none comes in ``timeout`` seconds."""
        (end,) = readers([self.queue])
        while end not in (ready := connection.wait([end, *self._guard.deaths()], timeout)):
            if not ready:
                raise Empty
            self._guard.check()
        with _watched(self._guard):  # the memory of a batch goes with its process
            what, count = self.queue.get()
        batch, worker = what if isinstance(what, tuple) else (None, what)
        self._pipes[worker].delivered()
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
                self.get(0.0)

    def full(self) -> bool:
        """Return whether the queue is full."""
        return bool(self.queue.full())

    def close(self) -> None:
        """Close the queue."""
        self.queue.close()


@contextmanager
def _watched(guard: Guard) -> Iterator[None]:
    """Have the guard look where something breaks, a little before a process has ended."""
    try:
        yield
    except (EOFError, OSError):
        if deaths := guard.deaths():
            connection.wait(deaths, _PATIENCE)
        guard.check()
        raise


class Reports:
    """Files, each with the latest word of a worker: its report, or the error that it ended with."""

    def __init__(self, workers: int):
        self._folder = mkdtemp(prefix="tdcollect-reports-")
        # Unlike a `TemporaryDirectory`, it leaves the folder alone in forks of this process.
        self._remove = util.Finalize(self, rmtree, (self._folder, True), exitpriority=0)
        self.files = [Path(self._folder, str(worker)) for worker in range(workers)]

    def latest(self, procs: Callable[[], Sequence[Any]]) -> list[WorkerReport]:
        """The latest report of each worker; ``procs`` raises for one that has died."""
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


class _Watched:
    """A process as TorchRL looks at it. If it finds one dead, it ends the others and gives up."""

    def __init__(self, proc: Any, guard: Guard):
        self._proc, self._guard = proc, guard

    def is_alive(self) -> bool:
        if not self._proc.is_alive():
            self._guard.check()
        return not self._guard.closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proc, name)


class Guard:
    """Watches the worker processes of a collector, in a thread and wherever one is waited for."""

    def __init__(self, collector: Any, procs: list[Any]):
        self.procs = procs
        self.closed = False
        self.lock = threading.RLock()
        self._collector = weakref.ref(collector)
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

    def check(self) -> None:
        """Raise :class:`WorkerLostError` if a worker has died; the others are ended."""
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
                return

    def _note(self, worker: int, proc: Any) -> None:
        collector = self._collector()
        if collector is None:  # which ends them all
            return
        proc.join(1.0)
        cause = collector.reports.last_word(worker)
        how = ending(proc.exitcode) + f" after {cause}" * bool(cause)
        lost = collector._lost_worker(worker, proc.pid, how)
        WorkersState(collector).release_update(worker)
        _log.error("%s; the other workers are ended", lost)
        self._error = WorkerLostError(lost)
        for other in self.procs:
            if other is not proc:
                other.terminate()
        for other in self.procs:
            other.join(_PATIENCE)
        _give_back(locks_between(collector.replay_buffer, collector.queue_out.queue))

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
