"""TorchRL's collectors with workers on this machine, tdcollect's in each."""

from __future__ import annotations

import atexit
import inspect
import logging
import multiprocessing
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from multiprocessing import connection, util
from multiprocessing.synchronize import Lock
from operator import methodcaller
from pathlib import Path
from queue import Empty
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torchrl.collectors as upstream

from tdcollect import check
from tdcollect._upstream.collectors import (
    MultiCollectorMeta,
    WorkersState,
    kept_by_others,
    locks_between,
    readers,
)
from tdcollect.collect import Collector
from tdcollect.collect.arguments import check_arguments, check_known
from tdcollect.collect.collector import extends
from tdcollect.collectors import asking
from tdcollect.collectors.asking import WorkerLostError, WorkerReport
from tdcollect.display import count_text, one_line
from tdcollect.processes.child import children_hash_by, ending, hash_seed

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


class _BySync(MultiCollectorMeta):
    """``MultiCollector(sync=...)`` makes a collector of the class that it names."""

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        kind = [inspect.signature(_BySync.__call__).parameters["sync"]] * (cls is MultiCollector)
        return signature.replace(parameters=[*signature.parameters.values()][1:] + kind)

    def __call__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> Any:
        if cls is not MultiCollector:
            if sync is not None:
                raise TypeError(
                    f"expected no sync for a {cls.__name__}, got sync={sync}; pass it to "
                    "MultiCollector"
                )
            return super().__call__(*args, **kwargs)
        if not isinstance(sync, bool):
            raise TypeError(
                f"expected sync to be True or False, got {sync!r}; pass sync=True for on-policy "
                "learners, sync=False for off-policy ones"
            )
        return (MultiSyncCollector if sync else MultiAsyncCollector)(*args, **kwargs)


class MultiCollector(asking.Asking, upstream.MultiCollector, metaclass=_BySync):
    """Collectors on several processes of this machine.

    TorchRL's class, with :class:`tdcollect.Collector` in each worker: the arguments of
    :class:`torchrl.collectors.MultiCollector`, its methods and its batches. ``sync=True`` makes a
    :class:`MultiSyncCollector`, ``sync=False`` a :class:`MultiAsyncCollector`.

    Args:
        create_env_fn: makes the env of each worker; a list of one function per worker.
        policy: as TorchRL has it.
        collector_class: of the collectors in the workers; None or ``"single"`` for
            :class:`tdcollect.Collector`.
        **kwargs: as TorchRL has them.

    Attributes:
        stats: :class:`tdcollect.collect.Statistics`, merged over the workers; a call gives
            TorchRL's dict of counters.

    Raises:
        WorkerLostError: wherever the collector waits, if a worker has died; the others are ended.
    """

    @extends(upstream.MultiCollector.__init__)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        collector_class: Any = None,
        **kwargs: Any,
    ):
        self.closed = True
        self._guard: Any = None
        several = isinstance(create_env_fn, (list, tuple))
        count = len(create_env_fn) if several else kwargs.get("num_workers")
        workers: Any = 1 if isinstance(self, upstream.AsyncCollector) else count
        check_known(type(self), kwargs)
        check_arguments((create_env_fn, policy), kwargs)
        if workers is None:
            name = getattr(create_env_fn, "__name__", "make")
            raise ValueError(
                "expected a list of functions that make envs, one per worker, or num_workers, got "
                f"one function and no number; pass [{name}] * 2"
            )
        check.positive_int(**{"the number of workers": workers})
        inner = asking.class_of_collectors(collector_class)
        self._ours = isinstance(inner, type) and issubclass(inner, Collector)
        asking.check_shared_buffer(create_env_fn[0] if several else create_env_fn, policy, kwargs)
        self.reports = Reports(workers if self._ours else 0)
        if self._ours:
            inner = asking.InnerCollector(inner, self.reports.files)
        try:
            with children_hash_by(hash_seed()):
                super().__init__(create_env_fn, policy, collector_class=inner, **kwargs)
        except Exception as error:
            self._name_lost_at_start(error)
            raise
        guard = Guard(self, self._procs)
        pipes, queue = vars(self)["pipes"], vars(self)["queue_out"]  # as TorchRL has made them
        self.pipes = [WorkerPipe(pipe, guard) for pipe in pipes]
        self.queue_out = WorkerQueue(queue, self.pipes, guard)
        self._guard = guard
        ended = atexit.register(_shut_down, weakref.ref(self))
        # A process of multiprocessing runs no atexit, and would wait for its workers for ever.
        util.Finalize(self, ended, (weakref.ref(self),), exitpriority=10)
        if self._ours:
            self._learn_facts()

    def _name_lost_at_start(self, error: Exception) -> None:
        """Raise for a worker that died as it started; TorchRL has ended the others."""
        for worker, proc in enumerate(vars(self).get("_procs", ())):
            if proc.exitcode not in (None, 0, -signal.SIGTERM):
                how = f"{ending(proc.exitcode)} as it started"
                lost = self._lost_worker(worker, proc.pid, how)
                advice = "mend what ended it, which its own output tells"
                raise asking.WorkerLostError(lost, advice) from error

    # ----------------------------------------------------------------------------- lost workers

    @property
    def procs(self) -> list[Any]:
        """The processes; TorchRL looks at them before it talks to them, so lost ones are found."""
        self._look()
        if self._guard is None or self._guard.closed:
            return self._procs
        return self._guard.watched()

    @procs.setter
    def procs(self, procs: list[Any]) -> None:
        self._procs = procs

    def _look(self) -> None:
        """Look after the workers; see :attr:`procs`."""
        if self._guard is not None and not self.closed:
            self._guard.check()

    def start(self) -> None:
        """Have the workers write to the replay buffer by themselves; see the parent's method.

        A worker that dies is noticed at once. A :class:`WorkerLostError` is raised in the main
        thread wherever that is, if this method was called there; otherwise by the next call of the
        collector.
        """
        self._guard.raise_in_main_thread()
        super().start()

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """End the workers; see the parent's method."""
        if self._guard is not None:
            self._guard.close()
        try:
            super().shutdown(*args, **kwargs)
        finally:
            WorkersState(self).end_weight_sync()
            self.reports.close()

    def iterator(self) -> Iterator[Any]:
        """Iterate over batches; see the parent's method. May be called again."""
        self.queue_out.begin()
        yield from super().iterator()

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Send weights to the workers; see the parent's method."""
        self._look()
        super().update_policy_weights_(policy_or_weights, **kwargs)
        self._look()

    # ------------------------------------------------------------------------- seeds and states

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all workers and restart them.

        The next row that slot i of worker w collects is a reset with :func:`tdcollect.slot_seed` of
        ``seed`` and w N + i, N slots per worker, for the envs that :func:`tdcollect.make_env`
        makes. (TorchRL's class resets once more, and the seeded episodes are gone.) Envs of
        TorchRL's are seeded by its chain. The global generators of torch, NumPy and Python in
        worker w start from ``(seed, w)``.

        Args:
            seed: of slot 0 of worker 0.
            static_seed: return the seed as it is.

        Returns:
            The seed for the next env, as TorchRL computes it.
        """
        if self._facts is None:
            return super().set_seed(seed, static_seed)
        self._look()
        WorkersState(self).flush_trajectories()
        # The workers wait, and drop what they have collected.
        for pipe in self.pipes:
            pipe.holds = True
        try:
            following: int = self._seed_workers(seed, static_seed)
        finally:
            for pipe in self.pipes:
                pipe.holds = False
        self.queue_out.drain()
        if getattr(self, "running", False):  # an iteration waits for them
            for pipe in self.pipes:
                pipe.go_on()
        return following

    def _ask(self, function: Callable[..., Any], calls: asking.Calls) -> list[Any]:
        self._look()
        for worker, arguments in calls.items():
            call: Any = "run_function", (function, *arguments), {}
            self.pipes[worker].send((call, "cascade_execute"))
        answers = [WorkersState(self).answer(worker)[0] for worker in calls]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def state_dict(self) -> Any:
        """The state of all workers, random states included, for :meth:`load_state_dict`.

        With ``sync=True``, between batches, and envs of ``make_env(..., resumable=True)``, a
        collector that loads it yields the batches that this one would have yielded.
        """
        if not self._ours:
            return super().state_dict()
        # The memory of a worker's state goes with the worker.
        workers = deepcopy(self._ask_all(methodcaller("state_dict")))
        state: dict[str, Any] = {f"worker{w}": one for w, one in enumerate(workers)}
        counters = WorkersState(self)
        state |= {"frames": counters.frames, "iter": counters.iteration}
        pools = [one["traj_pool"] for one in workers]
        state["traj_pool"] = max(pools, key=lambda pool: int(pool["traj_id"])).copy()
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the state of a collector with as many workers.

        Args:
            state_dict: the result of :meth:`state_dict`.

        Raises:
            ValueError: for the state of more or fewer workers.
        """
        count = sum(str(name).startswith("worker") for name in state_dict)
        if count != self.num_workers:
            raise ValueError(
                f"expected the state of {count_text(self.num_workers, 'worker')}, got that of "
                f"{count}; make the collector with {count}"
            )
        if not self._ours:
            super().load_state_dict(state_dict)
            return
        states = deepcopy([state_dict[f"worker{w}"] for w in range(self.num_workers)])
        self._ask(asking.load_state, {worker: (state,) for worker, state in enumerate(states)})
        counters = WorkersState(self)
        counters.frames, counters.iteration = int(state_dict["frames"]), int(state_dict["iter"])
        version = state_dict.get("policy_version")
        if version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version
            counters.acknowledged_version = version

    # ---------------------------------------------------------------------------------- reports

    def _reports(self) -> list[asking.WorkerReport]:
        """The latest report of each worker; these go on collecting."""
        if self.closed:
            raise RuntimeError("the collector is shut down; ask a live one")
        return self.reports.latest(lambda: self.procs)

    def __repr__(self) -> str:
        if self.closed:
            return one_line(self, "shut down")
        frames = f"frames_per_batch={self.requested_frames_per_batch}"
        slots = f"slots={self._slots}" if self._facts is not None else ""
        parts = [count_text(self.num_workers, "worker"), slots, frames]
        return one_line(self, *filter(None, parts), f"total_frames={self.total_frames}")


class MultiSyncCollector(MultiCollector, upstream.MultiSyncCollector):
    """Workers that collect one batch together, each its part, and wait for the next.

    For on-policy learners: all rows of a batch are of the same weights. See
    :class:`MultiCollector`, and :class:`torchrl.collectors.MultiSyncCollector`.
    """


class MultiAsyncCollector(MultiCollector, upstream.MultiAsyncCollector):
    """Workers that collect a batch each, whenever they are ready.

    For off-policy learners: weights arrive while a batch is collected, so that one batch may be of
    several versions; ``track_policy_version=True`` keeps that of each row under
    ``("next", "policy_version")``. See :class:`MultiCollector`, and
    :class:`torchrl.collectors.MultiAsyncCollector`.
    """


class AsyncCollector(MultiAsyncCollector, upstream.AsyncCollector):
    """One worker that collects while this process learns.

    See :class:`MultiAsyncCollector`, and :class:`torchrl.collectors.AsyncCollector`.
    """


def _shut_down(collector_of: Callable[[], MultiCollector | None]) -> None:
    """End the workers with the program, which would wait for them."""
    collector = collector_of()
    if collector is not None:
        collector.shutdown(timeout=1.0, raise_on_error=False)
