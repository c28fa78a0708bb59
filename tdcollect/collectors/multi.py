"""TorchRL's collectors with workers on this machine, tdcollect's in each."""

from __future__ import annotations

import atexit
import inspect
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from multiprocessing import util
from operator import methodcaller
from typing import Any

import torch
import torchrl.collectors as upstream

from tdcollect import check
from tdcollect._upstream.collectors import MultiCollectorMeta, WorkersState
from tdcollect.collect import Collector
from tdcollect.collect.arguments import check_arguments, check_known
from tdcollect.collect.collector import extends
from tdcollect.collectors import asking, dispatch
from tdcollect.collectors.pipes import Guard, Reports, WorkerPipe, WorkerQueue
from tdcollect.display import count_text, one_line
from tdcollect.processes.child import children_hash_by, ending, hash_seed
from tdcollect.threads import with_threads


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


def _advice_at_start(proc: Any) -> str:
    """Return what to do about a process that ended as it started."""
    imports = proc.exitcode == 1 and type(proc).__name__ != "ForkProcess"
    with suppress(OSError, TypeError):  # a notebook has no file, and nothing to import
        program = compile(inspect.getsource(sys.modules["__main__"]), "", "exec")
        if imports and "__name__" not in program.co_names:
            guard = 'put what makes it under `if __name__ == "__main__":`'
            return f"{guard}, as each worker imports the program first"
    return "mend what ended it, which its own output tells"


class MultiCollector(asking.Asking, upstream.MultiCollector, metaclass=_BySync):
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
            that is lost four times in a row, each within a minute and without a batch, raises, and
            so does one that is killed as it writes to the replay buffer, with the lock of all.
        collector_class: of the collectors in the workers; None or ``"single"`` for
            :class:`tdcollect.Collector`.
        reset_options: as :class:`tdcollect.Collector` has it; slot i of worker w is ``w N + i``.
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
        reset_options: Any = None,
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
        dispatch.check_on_worker_lost(on_worker_lost, kwargs)
        inner = dispatch.class_of_collectors(collector_class)
        self._ours = isinstance(inner, type) and issubclass(inner, Collector)
        options = asking.options_of_workers(reset_options, inner, workers)
        dispatch.check_shared_buffer(create_env_fn[0] if several else create_env_fn, policy, kwargs)
        self.reports = Reports(workers if self._ours else 0)
        if self._ours:
            inner = asking.InnerCollector(inner, range(workers), self.reports.files, options)
        self._crews = Crews(self, inner, kwargs)
        try:
            with children_hash_by(hash_seed()):
                super().__init__(create_env_fn, policy, collector_class=inner, **kwargs)
        except Exception as error:
            self._name_lost_at_start(error)
            raise
        replace = self._crews.start if on_worker_lost == "restart" else None
        guard = Guard(self, self._procs, replace)
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
                lost = self._lost_worker(worker, proc.pid, how, 0)
                raise asking.WorkerLostError(lost, _advice_at_start(proc)) from error

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
            self._crews.shutdown()
            WorkersState(self).end_weight_sync()
            self.reports.close()

    def iterator(self) -> Iterator[Any]:
        """Iterate over batches; see the parent's method. May be called again."""
        self.queue_out.begin()
        yield from super().iterator()

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Send weights to the workers; see the parent's method."""
        self._look()
        if policy_or_weights is not None:
            self._crews.weights = policy_or_weights
        crews, chosen = dict(self._crews.crews), kwargs.pop("worker_ids", None)
        everyone = range(self.num_workers) if chosen is None else chosen
        everyone = [everyone] if isinstance(everyone, int) else everyone
        for worker in everyone:
            self._crews.versions[worker] += 1
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
        self._crews.seed = seed
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
        state["replacements"] = self._crews.begun
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
        for worker, state in enumerate(states):
            self._crews.versions[worker] = int(state.get("policy_version", 0))
        counters = WorkersState(self)
        counters.frames, counters.iteration = int(state_dict["frames"]), int(state_dict["iter"])
        self._crews.begun = int(state_dict.get("replacements", 0))
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
    """Starts workers in the place of lost ones, each a TorchRL collector with one worker."""

    def __init__(self, collector: Any, inner: Any, options: Mapping[str, Any]):
        self.crews: dict[int, Any] = {}
        """Those in place now, by the index of the worker."""
        self.seed: int | None = None
        """Of the whole collection; None if it is not seeded."""
        self.weights: Any = None
        """The latest weights that were given; None for those of the policy."""
        self.versions: Counter[int] = Counter()
        """The number of times that each worker was given weights, by its index."""
        self.begun = 0
        """The number that have begun, before the state that the collector went on from too."""
        self._collector = weakref.ref(collector)
        self._inner = inner
        self._options = options

    def start(self, worker: int, count: int) -> Any:
        """Start a worker in the place of a lost one, the first for ``count=1``; its process."""
        collector: Any = self._collector()
        inner, number = self._inner, collector.num_workers + self.begun
        if isinstance(inner, asking.InnerCollector):
            file = collector.reports.file(number)
            inner = asking.InnerCollector(inner.cls, [number], [file], [inner.options[worker]])
        self.begun += 1
        with with_threads(torch.get_num_threads()):  # TorchRL's collectors change it
            crew = self._make(collector, worker, inner)
        if self.weights is not None:
            crew.update_policy_weights_(self.weights)
        if isinstance(inner, asking.InnerCollector):
            collector.reports.files[worker] = file
            crew.map_fn("run_function", [(asking.set_version, self.versions[worker])])
            if self.seed is not None:
                crew.map_fn("run_function", [(asking.seeded, None, self.seed, worker, count)])
        before, self.crews[worker] = self.crews.get(worker), crew
        collector.queue_out.add(crew.queue_out, worker)
        collector.pipes[worker].replaced(crew.pipes[0])
        if before is not None:
            _end(before)
        return crew.procs[0]

    def _make(self, collector: Any, worker: int, inner: Any) -> Any:
        options = {name: v for name, v in self._options.items() if name not in _OF_ALL}
        options |= {
            "collector_class": inner,
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
        envs = [collector.create_env_fn[worker]]
        with children_hash_by(hash_seed()):
            return upstream.MultiAsyncCollector(envs, collector.policy, **options)

    def shutdown(self) -> None:
        """End all that are in place."""
        for crew in self.crews.values():
            _end(crew)


def _end(crew: Any) -> None:
    crew.shutdown(timeout=1.0, raise_on_error=False)
    WorkersState(crew).end_weight_sync()


def _shut_down(collector_of: Callable[[], MultiCollector | None]) -> None:
    """End the workers with the program, which would wait for them."""
    collector = collector_of()
    if collector is not None:
        collector.shutdown(timeout=1.0, raise_on_error=False)
