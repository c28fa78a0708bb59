"""Questions of collectors to their workers, and the collector in a worker; bad arguments."""

from __future__ import annotations

import pickle
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torchrl.collectors as upstream
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase, GymWrapper

from tdcollect import check
from tdcollect._upstream.collectors import (
    CollectorState,
    drop_generic_defaults,
    one_env_each,
    service_backend,
)
from tdcollect.collect import Collector
from tdcollect.collect.arguments import whole_trajectories
from tdcollect.collect.run import Explanation, Part
from tdcollect.collect.statistics import Moments, Statistics
from tdcollect.display import count_text
from tdcollect.envs.adopted import chain
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv

ID_BITS = 40
"""Worker w counts its trajectories from ``w << ID_BITS``."""


def worker_of(traj_ids: torch.Tensor) -> torch.Tensor:
    """The workers that collected trajectories, ``[...]`` int64, by their ids ``[...]``."""
    return traj_ids >> ID_BITS


class TrajectoryIds:
    """Counts the trajectory ids of one worker, in the place of TorchRL's counter.

    Worker w gives the ids ``w << 40``, ``(w << 40) + 1``, .... Unlike those of a counter that
    workers share, they do not depend on which worker came first, and are unique on several
    machines.
    """

    def __init__(self, worker: int):
        self._next = worker << ID_BITS

    def get_traj_and_increment(
        self, n: int = 1, device: torch.device | None = None
    ) -> torch.Tensor:
        """The next ``n`` ids, ``[n]`` int64."""
        ids = torch.arange(self._next, self._next + n, device=device)
        self._next += n
        return ids

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The next id, under TorchRL's name for it."""
        return {"traj_id": torch.tensor(self._next)}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""
        self._next = int(state_dict["traj_id"])


class WorkerFacts(NamedTuple):
    """Facts about a worker."""

    slots: int
    """N of its env."""
    seeds_in_a_row: bool
    """The slots of its env can go on from those of other workers, under one root seed."""


class WorkerReport(NamedTuple):
    """A worker's latest statistics and explanation."""

    statistics: dict[str, Any] | None
    """As ``Statistics.save_state()`` gives them; None where it keeps none."""
    parts: Any
    """Of its collector's ``explain()``."""


# ------------------------------------- functions of a worker's collector, which its parent calls


def facts_of(collector: Any) -> WorkerFacts:
    """The facts of a collector's env that its parent must know."""
    base = base_of(collector.env)
    in_a_row = isinstance(base, GymnasiumEnv) or (
        isinstance(base, GymWrapper) and bool(base.batch_size)
    )
    return WorkerFacts(collector.n_env, in_a_row)


def report_of(collector: Any, parts: Any = ()) -> WorkerReport:
    """The statistics of a collector, and the parts of its ``explain()`` unless they are known."""
    stats = collector._monitor.stats  # Ray puts a function in the place of `collector.stats`
    saved = stats.save_state() if stats.on else None
    return WorkerReport(saved, parts or tuple(collector.explain()))


def seeded(
    collector: Any,
    seed: int,
    root: int,
    worker: int,
    static_seed: bool = False,
    first_slot: int = 0,
) -> int:
    """Seed the global generators of a worker's process and its env, and restart.

    ``root`` is the seed of the whole collection, ``seed`` that of the env, whose slots are
    numbered from ``first_slot``. Returns the seed for the next env.
    """
    states = np.random.SeedSequence(root, spawn_key=(worker,)).generate_state(4)
    torchs, numpys, pythons, _ = map(int, states)
    torch.manual_seed(torchs)
    np.random.seed(numpys)  # noqa: NPY002  envs may draw from it
    random.seed(pythons)
    base = base_of(collector.env)
    if isinstance(base, GymnasiumEnv):
        base.first_slot = first_slot
    else:
        seed += first_slot
    return collector.set_seed(seed, static_seed=static_seed)


def take_weights(collector: Any, weights: Any, version: int) -> None:
    """Load weights of the policy; ``version`` is that of their sender, where it is tracked."""
    collector.update_policy_weights_(weights)
    if isinstance(getattr(collector, "policy_version", None), int):
        collector.policy_version_tracker.version = version


def load_state(collector: Any, state: Mapping[str, Any]) -> None:
    """Have a collector go on from a state dict."""
    collector.load_state_dict(state)
    collector.note_report()


# ------------------------------------------------------------------- collectors in processes


class WorkerMethods:
    """A mixin of :class:`tdcollect.Collector` in a process: it reports, and is called by pipe."""

    _report = WorkerReport(None, ())
    report_file: Path | None = None

    def rollout(self: Any) -> Any:
        """As the collector's own; reports afterwards, or notes the error that ends the worker."""
        try:
            batch = super().rollout()  # type: ignore[misc]
        except Exception as error:
            self.note(f"{type(error).__name__}: {error}")
            raise
        self.note_report()
        return batch

    def run_function(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this collector."""
        return function(self, *arguments)

    def note_report(self: Any) -> None:
        """Note the report that the parent reads, also while a batch is collected."""
        self._report = report_of(self, self._report.parts)
        self.note(self._report)

    def note(self, word: WorkerReport | str) -> None:
        """Replace the file that the parent reads: it has the one word or the other."""
        if self.report_file is None:
            return
        unread = self.report_file.with_suffix(".new")
        with suppress(OSError):  # the parent has ended, and taken the folder with it
            unread.write_bytes(pickle.dumps(word))
            unread.replace(self.report_file)


@dataclass(eq=False)
class InnerCollector:
    """Makes the collector of a worker: given to TorchRL in the place of a class, and pickled."""

    cls: type[Collector]
    files: Sequence[Path]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A collector, in a worker."""
        meta: Any = type(self.cls)
        # TorchRL sets attributes of the class before it makes the collector.
        attributes = {k: v for k, v in vars(self).items() if k not in self.__dataclass_fields__}
        cls = meta(f"{self.cls.__name__}InWorker", (WorkerMethods, self.cls), attributes)
        worker = kwargs.get("worker_idx") or 0
        kwargs["traj_pool"] = TrajectoryIds(worker)
        collector = cls(*args, backend="direct", **kwargs)
        _share_tensors_alone(collector, kwargs.get("use_buffers"))
        collector.report_file = self.files[worker]
        collector.note_report()
        return collector


def _share_tensors_alone(collector: Collector, use_buffers: bool | None) -> None:
    """Give each batch memory of its own where some entries, such as strings, are no tensors.

    The parent would see those of the first batch in all that follow, as a worker sends its batch
    once.
    """
    state = CollectorState(collector)
    if not state.preallocates:
        return
    lost = list(dict.fromkeys(_no_tensors(state.preallocated)))
    if lost and use_buffers:
        collector.shutdown()
        raise ValueError(
            f"expected use_buffers=False for the entries {lost}, which are no tensors and cannot "
            "be in memory that processes share, got use_buffers=True; pass use_buffers=False, or "
            "leave it out"
        )
    state.preallocates = not lost


def _no_tensors(entry: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of entries that are no tensors."""
    if is_non_tensor(entry):
        yield key
    elif isinstance(entry, LazyStackedTensorDict):
        for part in entry.tensordicts:
            yield from _no_tensors(part, key)
    elif isinstance(entry, TensorDictBase):
        for name, part in entry.items():
            yield from _no_tensors(part, (*key, name))


# ------------------------------------------------------------------------------- lost workers

_ADVICE = "make a new collector"


@dataclass(frozen=True)
class LostWorker:
    """One worker that ended before its time.

    Attributes:
        worker: its index.
        pid: of its process, or a name of it on another machine.
        how: the way in which it ended: ``"was killed by SIGKILL"``, ``"ended with exit code 3"``.
        slots: those that it held, counted over all workers; empty if it had not started.
    """

    worker: int
    pid: int | str | None
    how: str
    slots: range

    def __str__(self) -> str:
        first, last = self.slots.start, self.slots.stop - 1
        slots = f", slots {first} to {last}" if first < last else f", slot {first}"
        return f"worker {self.worker} (pid {self.pid}{slots if self.slots else ''}) {self.how}"


class WorkerLostError(RuntimeError):
    """A worker of a collector ended before its time.

    Attributes:
        lost: the record of it.
    """

    def __init__(self, lost: LostWorker, advice: str = _ADVICE):
        self.lost = lost
        self._advice = advice
        super().__init__(f"{lost}; the other workers have been ended, {advice}")

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[LostWorker, str]]:
        return type(self), (self.lost, self._advice)


# --------------------------------------------------------------------- on the side of the parent


Calls = Mapping[int, Sequence[Any]]
"""The arguments of a function of the worker's collector, by the index of the worker."""


class Asking(BaseCollector):
    """A mixin of collectors with workers, over one way to ask them."""

    _facts: Sequence[WorkerFacts] | None = None
    """None until the workers are known, and where they run another's collector."""

    @abstractmethod
    def _ask(self, function: Callable[..., Any], calls: Calls) -> list[Any]:
        """Call ``function(collector, *arguments)`` in workers, all at once; return its results."""

    def _ask_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Ask all workers, with the same arguments."""
        return self._ask(function, dict.fromkeys(range(self.num_workers), arguments))

    @property
    def _slots(self) -> list[int]:
        """N of each worker; 1 where it is not known."""
        if self._facts is None:
            return [1] * self.num_workers
        return [one.slots for one in self._facts]

    def _learn_facts(self) -> None:
        """Ask for what is the same as long as the workers live."""
        self._facts = self._ask_all(facts_of)

    def _seed_workers(self, seed: int, static_seed: bool) -> Any:
        """Seed all workers, their slots numbered on where envs can; return TorchRL's next seed."""
        if all(one.seeds_in_a_row for one in self._facts or ()):
            firsts = accumulate(self._slots[:-1], initial=0)
            calls = {w: (seed, seed, w, static_seed, first) for w, first in enumerate(firsts)}
            self._ask(seeded, calls)
            return seed if static_seed else chain(seed, len(calls) + 1)[-1]
        following = seed
        for worker in range(self.num_workers):
            call = following, seed, worker, static_seed
            (following,) = self._ask(seeded, {worker: call})
        return following

    @property
    def stats(self) -> Any:
        """Statistics merged over the workers; called, TorchRL's dict of counters."""
        return super().stats if self._facts is None else self._statistics

    @cached_property
    def _statistics(self) -> MergedStatistics:
        return MergedStatistics(self._reports, lambda: self._slots, super().stats)

    def explain(self) -> Explanation:
        """The parts of the workers' collections, and whether several workers pay.

        Raises:
            RuntimeError: where the collector is shut down, or its workers run another's collector.
        """
        if self._facts is None:
            kind = getattr(self, "collector_class", None)
            raise RuntimeError(
                "expected workers with tdcollect.Collector, got "
                f"{getattr(kind, '__name__', kind)}; leave collector_class out"
            )
        return merged_explanation(self._reports(), self._slots)

    def _reports(self) -> list[WorkerReport]:
        """The latest report of each worker."""
        return self._ask_all(report_of)

    def _lost_worker(self, worker: int, pid: Any, how: str) -> LostWorker:
        """The record of a lost worker."""
        first = sum(self._slots[:worker])
        slots = range(first, first + self._slots[worker]) if self._facts else range(0)
        return LostWorker(worker, pid, how, slots)


_PAYS = 10e-3
"""A batch takes a worker at least so many seconds where more processes pay.

To hand a batch over takes about 3 ms, and one process steps twice the slots in less than twice the
time: see benchmarks/processes.py.
"""


class MergedStatistics(Statistics):
    """Statistics of all workers of a collector: ``collector.stats``.

    Counts are sums over the workers, and times those of the slowest. Slots count on over the
    workers: slot i of worker w is ``w N + i``. ``latest`` holds the latest collection of each
    worker, and ``window`` the latest episodes of all, taken from the workers in turn.

    A call gives the dict of TorchRL's ``collector.stats(workers=...)``.
    """

    def __init__(
        self,
        reports: Callable[[], Sequence[WorkerReport]],
        slots: Callable[[], Sequence[int]],
        progress: Callable[..., dict[str, Any]],
    ):
        super().__init__(100, True, progress)
        self._reports = reports
        self._slots = slots

    def _check(self) -> None:
        """Ask the workers: what follows is as of now."""
        states = [report.statistics for report in self._reports() if report.statistics]
        self.load_state(merged_states(states, self._slots(), self._window.size))

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """TorchRL's counters: frames, batches, workers and so on."""
        return self._progress(*args, **kwargs)


def merged_states(
    states: Sequence[Mapping[str, Any]], slots: Sequence[int], window: int
) -> dict[str, Any]:
    """Statistics of workers with ``slots[w]`` slots each, as those of one collector."""
    latest = [
        {**state["latest"], "slots": state["latest"]["slots"] + first}
        for state, first in zip(states, np.cumsum([0, *slots[:-1]]), strict=True)
        if state["latest"] is not None
    ]
    return {
        "lifetime": _merged([state["lifetime"] for state in states]),
        "window": _merged_windows([state["window"] for state in states], window),
        "latest": _merged(latest) if latest else None,
    }


_LONGEST = ("seconds", "seconds_between", "env_seconds", "policy_seconds")


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The longest times, the sums of counts, the moments of all, and all episodes of each part."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        first = values[0]
        if name in _LONGEST:
            merged[name] = max((value for value in values if value is not None), default=None)
        elif any(value is None for value in values):
            merged[name] = None
        elif isinstance(first, np.ndarray):
            merged[name] = np.concatenate(values)
        elif name == "group_returns":
            merged[name] = _merged(values)
        elif isinstance(first, Mapping):
            moments = Moments(**first)
            for part in values[1:]:
                moments.merge(Moments(**part))
            merged[name] = vars(moments)
        else:
            merged[name] = sum(values)
    return merged


def _merged_windows(windows: Sequence[tuple[Any, Any]], size: int) -> tuple[Any, Any]:
    """The latest episodes of each worker in turn, the newest last."""
    newest = [zip(returns[::-1], lengths[::-1], strict=True) for returns, lengths in windows]
    episodes = [one for group in zip_longest(*newest) for one in group if one is not None]
    newest_last = episodes[:size][::-1]
    returns = np.array([episode[0] for episode in newest_last], np.float64)
    return returns, np.array([episode[1] for episode in newest_last], np.int64)


def merged_explanation(reports: Sequence[WorkerReport], slots: Sequence[int]) -> Explanation:
    """The parts of the workers' collections, and whether several processes pay."""
    alike: dict[tuple[Part, ...], list[int]] = {}
    for worker, report in enumerate(reports):
        alike.setdefault(tuple(report.parts), []).append(worker)
    merged = []
    for parts, workers in alike.items():
        of = "" if len(alike) == 1 else f"worker {', '.join(map(str, workers))}: "
        merged += [part._replace(name=of + part.name) for part in parts]
    return Explanation([*merged, _advice(reports, slots)])


def _advice(reports: Sequence[WorkerReport], slots: Sequence[int]) -> Part:
    counts = " or ".join(map(str, dict.fromkeys(slots)))
    what = f"{count_text(len(slots), 'worker')} of {counts} slots"
    seconds = [
        life["seconds"] / life["collections"]
        for report in reports
        if report.statistics is not None and (life := report.statistics["lifetime"])["collections"]
    ]
    if not seconds:
        return Part("workers", what, "whether they pay is known after the first batch")
    took = max(seconds)
    how = f"a batch takes one {took * 1e3:.3g} ms"
    if len(slots) == 1:
        return Part("workers", what, how)
    if took >= _PAYS:
        return Part("workers", what, f"{how}: several processes pay")
    better = f"larger batches, or one process with {sum(slots)} slots, would be faster"
    return Part("workers", what, f"{how}: {better}", "3 ms per batch")


# ---------------------------------------------------------------------------------------- arguments


_SELECTORS = ("backend_options", "num_collectors", "num_workers", "sync")


def collector_of_workers(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    backend: str,
    options: Mapping[str, Any],
    num_collectors: int | None,
    sync: bool | None,
) -> Any:
    """Make the collector that runs others in workers, for ``Collector(..., backend=)``."""
    check.positive_int_or_none(num_collectors=num_collectors)
    if sync is not None and not isinstance(sync, bool):
        raise TypeError(f"expected sync to be True, False or None, got {sync!r}")
    twice = sorted({*_SELECTORS, *kwargs, *("create_env_fn", "policy")[: len(args)]} & {*options})
    if twice:
        raise ValueError(
            f"expected each argument once, got {twice} in backend_options, which have an argument "
            "of their own; pass them there alone"
        )
    if backend not in ("process", "ray"):
        # On torch.distributed and its RPC the collectors are TorchRL's, with ours in workers.
        # Of others, TorchRL names those that there are.
        chosen = None if backend == service_backend() else backend
        how = {"backend_options": options, "num_collectors": num_collectors, "sync": sync}
        return upstream.Collector(*args, backend=chosen, **how, **kwargs)
    args, kwargs, count = one_env_each(args, {**kwargs, **options}, num_collectors)
    name = "MultiCollector" if backend == "process" else "RayCollector"
    cls = getattr(import_module("tdcollect.collectors"), name)
    drop_generic_defaults(cls, kwargs)
    if backend == "ray":
        kwargs["num_collectors"] = count
    return cls(*args, sync=bool(sync), **kwargs)


def _batch_size(env: Any, env_kwargs: Any) -> torch.Size:
    """The batch size of the first worker's env, which is made and closed for that."""
    if isinstance(env, EnvBase):
        return env.batch_size
    env_kwargs = env_kwargs or {}
    one = env(**(env_kwargs if isinstance(env_kwargs, Mapping) else env_kwargs[0]))
    one.close()
    return one.batch_size


def class_of_collectors(chosen: Any) -> Any:
    """Return the class of the collectors in the workers: tdcollect's for None and ``"single"``."""
    if chosen in (None, "single"):
        return Collector
    if not callable(chosen):
        kind = ValueError if isinstance(chosen, str) else TypeError
        raise kind(
            f"expected collector_class to be 'single', a class or a function, got {chosen!r}; "
            "leave it out for tdcollect.Collector"
        )
    return chosen


def check_shared_buffer(env: Any, policy: Any, options: Mapping[str, Any]) -> None:
    """Refuse a one-dimensional replay buffer, shared by workers, for an env of several slots.

    The env is made once to know its slots, and closed, unless its batches fit in any case.
    """
    buffer = options.get("replay_buffer")
    storage = getattr(buffer, "storage", None)
    if getattr(storage, "ndim", None) != 1 or getattr(storage, "initialized", True):
        return
    if getattr(buffer, "transform", None) or not options.get("extend_buffer", True):
        return
    made_inside = policy is None and options.get("policy_factory") is not None
    if made_inside or whole_trajectories(options):
        return
    batch_size = _batch_size(env, options.get("create_env_kwargs"))
    if batch_size:
        name = type(storage).__name__
        raise ValueError(
            "expected a replay buffer with a storage of 2 dimensions, for the batches [N, T] that "
            f"workers with envs of {batch_size.numel()} slots write, got ndim=1; make it "
            f"{name}(max_size, ndim=2), or pass trajs_per_batch to write whole trajectories"
        )
