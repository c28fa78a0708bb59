"""Guard: notices when a worker dies, and ends the others or puts another in its place."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from torchrl.collectors import MultiCollector

from tdcollect._upstream.multi import WorkersState
from tdcollect.collectors.lost import LostWorker, LostWorkers, WorkerLostError, slots_of
from tdcollect.workers.child import ending

_log = logging.getLogger("tdcollect.collectors")
_SIGNAL = getattr(signal, "SIGCHLD", None)
_MAX_LOST = 3
"""A worker that is lost so often is not replaced again, unless a batch came, or time passed."""
_LONG = 60.0
"""Seconds after which a worker has proved itself, as one that gives a batch."""


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
    """Looks after the worker processes of a collector.

    A thread of it waits until a process ends. Whoever waits for a worker in another thread looks
    here too.

    Args:
        collector: whose workers they are; is not kept alive.
        procs: the processes.
        frames: how many frames each collects per batch.
        replace: starts another worker in the place of a lost one, given its index and how many
            have taken this place, the new one included; returns its process. None to raise.
        cause: the error that a worker ended with, given its index; empty if it had none to tell.

    Attributes:
        slots: N of each worker; set once it is known.
        closed: the collector is shut down.
        lost: the workers that were lost.
        lock: held while a worker is replaced.
    """

    def __init__(
        self,
        collector: MultiCollector,
        procs: list[Any],
        frames: Sequence[int],
        replace: Callable[[int, int], Any] | None,
        cause: Callable[[int], str],
    ):
        self.procs = procs
        self.pids = [proc.pid for proc in procs]
        self.slots = [1] * len(procs)
        self.closed = False
        self.lost = LostWorkers()
        self.lock = threading.RLock()
        self._collector = weakref.ref(collector)
        self._frames = frames
        self._replace = replace
        self._cause = cause
        self._since = [time.monotonic()] * len(procs)
        self._in_a_row = [0] * len(procs)
        self._error: WorkerLostError | None = None
        self._raises_in_main = False
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

    def replacements(self, worker: int) -> int:
        """The number of workers that have taken this place after the first."""
        return sum(lost.worker == worker for lost in self.lost if lost.replaced)

    def watched(self) -> list[Any]:
        """The processes; a dead one is found by whoever looks whether it is alive."""
        return [_Watched(proc, self) for proc in self.procs]

    def delivered(self, worker: int) -> None:
        """A worker has given a batch."""
        self._in_a_row[worker] = 0

    def check(self) -> None:
        """Raise for a worker that has died, or put another in its place.

        Raises:
            WorkerLostError: for ``on_worker_lost="raise"``, and for a worker that is lost again and
                again; the other workers are ended.
        """
        if self.closed:
            return
        with self.lock:
            self._look()
        if self._error is not None:
            error = self._error
            collector = self._collector()
            if collector is not None:
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
        proc.join(1.0)
        cause = self._cause(worker)
        if time.monotonic() - self._since[worker] > _LONG:
            self._in_a_row[worker] = 0
        self._in_a_row[worker] += 1
        lost = LostWorker(
            worker,
            self.pids[worker],
            ending(proc.exitcode) + f" after {cause}" * bool(cause),
            slots_of(worker, self.slots),
            self._frames[worker],
            replaced=self._replace is not None and self._in_a_row[worker] <= _MAX_LOST,
        )
        self.lost = LostWorkers((*self.lost, lost))
        collector = self._collector()
        if collector is not None:
            WorkersState(collector).release_update(worker)
        why = f"as {_MAX_LOST + 1} in a row ended so without a batch; mend what ends them"
        if self._replace is not None and lost.replaced:
            _log.warning("%s; another takes its place", lost)
            try:
                self.procs[worker] = self._replace(worker, self.replacements(worker))
                self.pids[worker], self._since[worker] = self.procs[worker].pid, time.monotonic()
                return
            except Exception as error:
                _log.exception("no worker could take the place of the lost one")
                why = f"as no other could take its place ({error})"
        _log.error("%s; the other workers are ended", lost)
        self._error = WorkerLostError(lost, *([why] if self._replace else []))
        for other in self.procs:
            if other is not proc:
                other.terminate()

    # ------------------------------------------------------------------------- while it runs free

    def raise_in_main_thread(self) -> None:
        """From now on, raise in the main thread when a worker is lost: nothing else may ask here.

        As torch's DataLoader does it: by a handler of SIGCHLD, which calls the one before it.
        """
        here = threading.current_thread() is threading.main_thread()
        if self._raises_in_main or self._replace is not None or _SIGNAL is None or not here:
            return
        self._raises_in_main = True
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
            with contextlib.suppress(ValueError):  # of a process that a shutdown closes meanwhile
                self._look()
            if self._error is not None and self._raises_in_main and _SIGNAL is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            return self._error is None

    def close(self) -> None:
        """Stop looking; may be called again."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):
            self._sleep.close()  # the thread finds its end closed
        here = threading.current_thread() is threading.main_thread()
        if self._raises_in_main and here and signal.getsignal(signal.SIGCHLD) is self._handler:
            signal.signal(signal.SIGCHLD, self._previous or signal.SIG_DFL)


def _watch(guard_of: Callable[[], Guard | None], wake: connection.Connection) -> None:
    """Wait until a process ends, and have the guard look."""
    try:
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
    finally:
        wake.close()
