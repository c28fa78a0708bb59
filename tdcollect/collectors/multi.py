"""TorchRL's collectors with workers on this machine, tdcollect's in each."""

from __future__ import annotations

import atexit
import inspect
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import util
from typing import Any

import torch
import torchrl.collectors as upstream

from tdcollect._upstream.collectors import MultiCollectorMeta, WorkersState, same_threads
from tdcollect.collect import Collector
from tdcollect.collect.collector import extends
from tdcollect.collectors.arguments import (
    check_restartable,
    check_shared_buffer,
    check_workers,
    collector_class,
)
from tdcollect.collectors.asking import (
    Asking,
    LostWorker,
    LostWorkers,
    WorkerLostError,
    replacement_seed,
)
from tdcollect.collectors.pipes import Guard, Reports, WorkerPipe, WorkerQueue
from tdcollect.collectors.worker import (
    InnerCollector,
    WorkerReport,
    load_state,
    seeded,
    set_version,
    state_of,
)
from tdcollect.display import count_text, one_line
from tdcollect.processes.child import ending

_REPLACEMENTS = "replacements"


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


class MultiCollector(Asking, upstream.MultiCollector, metaclass=_BySync):
    """Collectors on several processes of this machine.

    TorchRL's class, with :class:`tdcollect.Collector` in each worker: the arguments of
    :class:`torchrl.collectors.MultiCollector`, its methods and its batches. ``sync=True`` makes a
    :class:`MultiSyncCollector`, ``sync=False`` a :class:`MultiAsyncCollector`.

    Args:
        create_env_fn: makes the env of each worker; a list of one function per worker.
        policy: as TorchRL has it.
        on_worker_lost: what to do when a worker dies. ``"raise"`` ends the others and raises
            :class:`WorkerLostError`; ``"restart"`` has another take its place, with the newest
            weights, new trajectory ids, and seeds that follow from :meth:`set_seed`; a worker
            that is lost four times in a row, each within a minute and without a batch, raises.
        collector_class: of the collectors in the workers; None or ``"single"`` for
            :class:`tdcollect.Collector`.
        **kwargs: as TorchRL has them.

    Attributes:
        stats: :class:`tdcollect.collect.Statistics`, merged over the workers; a call gives
            TorchRL's dict of counters.
        lost: the workers that were lost, and how many frames at most with them.
    """

    @extends(upstream.MultiCollector.__init__)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        on_worker_lost: str = "raise",
        collector_class: Any = None,
        **kwargs: Any,
    ):
        self.closed = True
        self._guard: Guard | None = None
        self.reports = Reports(0)
        inner = self._prepare(create_env_fn, policy, on_worker_lost, collector_class, kwargs)
        self._crews = Crews(self, inner, kwargs)
        try:
            super().__init__(create_env_fn, policy, collector_class=inner, **kwargs)
        except Exception as error:
            self._name_lost_at_start(error)
            raise
        self._watch_workers(on_worker_lost)

    def _prepare(
        self,
        envs: Any,
        policy: Any,
        on_worker_lost: str,
        given: Any,
        options: Mapping[str, Any],
    ) -> Any:
        """Check the arguments; returns the class of the collectors inside."""
        several = isinstance(envs, (list, tuple))
        count = options.get("num_workers") if not several else len(envs)
        workers: Any = 1 if isinstance(self, upstream.AsyncCollector) else count
        check_workers((envs, policy), options, on_worker_lost, workers)
        if on_worker_lost == "restart":
            check_restartable(options)
        cls = collector_class(given)
        self._ours = isinstance(cls, type) and issubclass(cls, Collector)
        if options.get("replay_buffer") is not None and options.get("extend_buffer", True):
            env_kwargs = options.get("create_env_kwargs") or {}
            first = env_kwargs if isinstance(env_kwargs, Mapping) else env_kwargs[0]
            if policy is not None or options.get("policy_factory") is None:
                check_shared_buffer(
                    options["replay_buffer"],
                    envs[0] if several else envs,
                    first,
                    trajectories=options.get("trajs_per_batch") is not None,
                )
        if not self._ours:
            return cls
        self.reports = Reports(workers)
        return InnerCollector(cls, range(workers), self.reports.ends)

    def _name_lost_at_start(self, error: Exception) -> None:
        """Raise for a worker that died as it started; TorchRL has ended the others."""
        for worker, proc in enumerate(vars(self).get("_procs", ())):
            if proc.exitcode not in (None, 0, -signal.SIGTERM):
                how = f"{ending(proc.exitcode)} as it started"
                lost = LostWorker(worker, proc.pid, how, range(0), 0, replaced=False)
                raise WorkerLostError(lost) from error

    def _watch_workers(self, on_worker_lost: str) -> None:
        """Look after the workers, which have started."""
        frames = [self.frames_per_batch_worker(worker_idx=w) for w in range(self.num_workers)]
        replace = self._crews.start if on_worker_lost == "restart" else None
        guard = Guard(self, self._procs, frames, replace, self.reports.last_word)
        pipes, queue = vars(self)["pipes"], vars(self)["queue_out"]  # as TorchRL has made them
        self.pipes = [WorkerPipe(pipe, guard) for pipe in pipes]
        self.queue_out = WorkerQueue(queue, self.pipes, guard)
        self._guard = guard
        ended = atexit.register(_shut_down, weakref.ref(self))
        # A process of multiprocessing runs no atexit, and would wait for its workers for ever.
        util.Finalize(self, ended, (weakref.ref(self),), exitpriority=10)
        if self._ours:
            self._learn_facts()
            guard.slots = self._slots

    # ----------------------------------------------------------------------------- lost workers

    @property
    def procs(self) -> list[Any]:
        """The processes. TorchRL looks at them before it talks to them; here lost ones are found.

        Raises:
            WorkerLostError: where one has died, for ``on_worker_lost="raise"``.
        """
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

    @property
    def lost(self) -> LostWorkers:  # type: ignore[override]
        """The workers that were lost, and how many frames at most with them."""
        return LostWorkers() if self._guard is None else self._guard.lost

    def start(self) -> None:
        """Have the workers write to the replay buffer by themselves; see the parent's method.

        A worker that dies is noticed at once. For ``on_worker_lost="raise"``,
        :class:`WorkerLostError` is raised in the main thread wherever that is, if this method was
        called there; otherwise by the next call of the collector.
        """
        if self._guard is not None:
            self._guard.raise_in_main_thread()
        super().start()

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """End the workers; see the parent's method."""
        if self._guard is not None:
            self._guard.close()
        try:
            super().shutdown(*args, **kwargs)
        finally:
            self._crews.shutdown()
            WorkersState(self).end_weight_sync()
            self.reports.close()

    def iterator(self) -> Iterator[Any]:
        """Iterate over batches; see the parent's method. May be called again."""
        if self._guard is not None:
            self.queue_out.begin()
        yield from super().iterator()

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Send weights to the workers; see the parent's method."""
        self._look()
        if policy_or_weights is not None:
            self._crews.weights = policy_or_weights
        crews, chosen = dict(self._crews.crews), kwargs.pop("worker_ids", None)
        everyone = _as_list(range(self.num_workers) if chosen is None else chosen)
        for worker in everyone:
            self._crews.noted(worker)
            if worker in crews:
                crews[worker].update_policy_weights_(policy_or_weights, **kwargs)
        first = [worker for worker in everyone if worker not in crews]
        if first:
            ids = first if crews else chosen
            super().update_policy_weights_(policy_or_weights, worker_ids=ids, **kwargs)
        self._look()

    # ------------------------------------------------------------------------- seeds and states

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all workers and restart them.

        The next row that slot i of worker w collects is a reset with seed ``seed + w N + i``, N
        slots per worker, for the envs that :func:`tdcollect.make_env` makes. (TorchRL's class
        resets once more, and the seeded episodes are gone.) Envs of TorchRL's are seeded by its
        chain. The global generators of torch, NumPy and Python in worker w start from
        ``(seed, w)``.

        Args:
            seed: of slot 0 of worker 0.
            static_seed: return the seed as it is.

        Returns:
            The seed for the next env, as TorchRL computes it.
        """
        if self._facts is None:
            return super().set_seed(seed, static_seed)
        self._look()
        self._crews.seed = seed
        WorkersState(self).flush_trajectories()
        with _held(self):
            following: int = self._seed_workers(seed, static_seed)
        return following

    @property
    def _workers(self) -> range:
        return range(self.num_workers)

    def _ask(self, function: Callable[..., Any], given: Mapping[int, Sequence[Any]]) -> list[Any]:
        self._look()
        for worker, arguments in given.items():
            call: Any = "run_function", (function, *arguments), {}
            self.pipes[worker].send((call, "cascade_execute"))
        answers = [WorkersState(self).answer(worker)[0] for worker in given]
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
        self._look()
        workers = self._ask_all(state_of)
        state: dict[str, Any] = {f"worker{w}": _copied(one) for w, one in enumerate(workers)}
        counters = WorkersState(self)
        state |= {"frames": counters.frames, "iter": counters.iteration}
        state["traj_pool"] = max((one["traj_pool"] for one in workers), key=_next_id).copy()
        state[_REPLACEMENTS] = self._crews.begun
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
        given = sum(str(name).startswith("worker") for name in state_dict)
        if given != self.num_workers:
            raise ValueError(
                f"expected the state of {count_text(self.num_workers, 'worker')}, got that of "
                f"{given}; make the collector with {given}"
            )
        if not self._ours:
            super().load_state_dict(state_dict)
            return
        states = [_copied(state_dict[f"worker{w}"]) for w in range(self.num_workers)]
        self._ask(load_state, {worker: (state,) for worker, state in enumerate(states)})
        for worker, state in enumerate(states):
            self._crews.versions[worker] = int(state.get("policy_version", 0))
        counters = WorkersState(self)
        counters.frames, counters.iteration = int(state_dict["frames"]), int(state_dict["iter"])
        self._crews.begun = int(state_dict.get(_REPLACEMENTS, 0))
        version = state_dict.get("policy_version")
        if version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version

    # ---------------------------------------------------------------------------------- reports

    def _reports(self) -> list[WorkerReport]:
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
        parts += [f"total_frames={self.total_frames}", f"lost={len(self.lost)}" * bool(self.lost)]
        return one_line(self, *filter(None, parts))


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


_OF_ALL = (
    "cat_results",
    "device",
    "num_workers",
    "preemptive_threshold",
    "split_trajs",
    "traj_format",
    "trajs_per_batch",
    "update_at_each_batch",
)
"""Options of a collector that its workers are not given, or not so."""


class Crews:
    """Starts workers in the place of lost ones: each is a collector of TorchRL's with one worker.

    Args:
        collector: that has lost the worker; is not kept alive.
        inner: makes the collectors in its workers.
        options: arguments that it was made with.

    Attributes:
        crews: those in place now, by the index of the worker.
        seed: of the whole collection; None if it is not seeded.
        weights: the latest weights that were given; None for those of the policy.
        versions: how many times each worker was given weights, by its index.
        begun: how many had begun before this collector was made, for one that goes on from a state.
    """

    def __init__(self, collector: Any, inner: Any, options: Mapping[str, Any]):
        self.crews: dict[int, Any] = {}
        self.seed: int | None = None
        self.weights: Any = None
        self.versions: dict[int, int] = {}
        self.begun = 0
        self._collector = weakref.ref(collector)
        self._inner = inner
        self._options = options

    def start(self, worker: int, count: int) -> Any:
        """Start a worker, and have it go on for the lost one.

        Args:
            worker: the index of the place.
            count: 1 for the first worker that takes it.

        Returns:
            Its process.
        """
        collector: Any = self._collector()
        inner, number = self._inner, collector.num_workers + self.begun
        if isinstance(inner, InnerCollector):
            end = collector.reports.replace(worker)
            inner = InnerCollector(inner.cls, [number], [end], inner.options)
        self.begun += 1
        with same_threads():
            crew = self._make(collector, worker, inner)
        if self.weights is not None:
            crew.update_policy_weights_(self.weights)
        if isinstance(inner, InnerCollector):
            crew.map_fn("run_function", [(set_version, self.versions.get(worker, 0))])
            if self.seed is not None:
                first = replacement_seed(self.seed, worker, count)
                crew.map_fn("run_function", [(seeded, first, self.seed, worker, count)])
        before, self.crews[worker] = self.crews.get(worker), crew
        collector.queue_out.add(crew.queue_out, worker)
        collector.pipes[worker].replaced(crew.pipes[0])
        if before is not None:
            _end(before)
        return crew.procs[0]

    def _make(self, collector: Any, worker: int, inner: Any) -> Any:
        options = {name: v for name, v in self._options.items() if name not in _OF_ALL}
        options |= {
            "create_env_kwargs": [collector.create_env_kwargs[worker]],
            "env_device": collector.env_device[worker],
            "frames_per_batch": collector.frames_per_batch_worker(worker_idx=worker),
            "num_threads": collector.num_threads,
            "policy_device": collector.policy_device[worker],
            "policy_factory": collector.policy_factory[worker],
            "storing_device": collector.storing_device[worker],
            "total_frames": -1,
            "trajs_per_batch": WorkersState(collector).worker_trajectories,
        }
        env = collector.create_env_fn[worker]
        return upstream.MultiAsyncCollector(
            [env], collector.policy, collector_class=inner, **options
        )

    def noted(self, worker: int) -> None:
        """Note that a worker is given weights."""
        self.versions[worker] = self.versions.get(worker, 0) + 1

    def shutdown(self) -> None:
        """End all that are in place."""
        for crew in self.crews.values():
            _end(crew)


def _end(crew: Any) -> None:
    crew.shutdown(timeout=1.0, raise_on_error=False)
    WorkersState(crew).end_weight_sync()


@contextmanager
def _held(collector: MultiCollector) -> Iterator[None]:
    """Have the workers wait, and drop what they have collected, while they are seeded."""
    for pipe in collector.pipes:
        pipe.holds = True
    try:
        yield
    finally:
        for pipe in collector.pipes:
            pipe.holds = False
    collector.queue_out.drain()
    if getattr(collector, "running", False):  # an iteration waits for them
        for pipe in collector.pipes:
            pipe.go_on()


def _next_id(pool: Mapping[str, torch.Tensor]) -> int:
    return int(pool["traj_id"])


def _as_list(workers: Any) -> list[int]:
    return [workers] if isinstance(workers, int) else list(workers)


def _shut_down(collector_of: Callable[[], MultiCollector | None]) -> None:
    """End the workers with the program, which would wait for them."""
    collector = collector_of()
    if collector is not None:
        collector.shutdown(timeout=1.0, raise_on_error=False)


def _copied(value: Any) -> Any:
    """A state with memory of its own: that of a worker's goes with the worker."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
