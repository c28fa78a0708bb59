"""The collector inside a worker, and what a collector with workers calls there."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor
from torchrl.envs import GymWrapper

from tdcollect._upstream.collectors import CollectorState
from tdcollect.collect import Collector
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv

ID_BITS = 40
"""Worker w counts its trajectories from ``w << ID_BITS``."""


def worker_of(traj_ids: torch.Tensor) -> torch.Tensor:
    """The workers that collected trajectories, ``[...]`` int64, by their ids ``[...]``.

    Workers that took the place of lost ones have numbers of their own, after those of the first.
    """
    return traj_ids >> ID_BITS


class TrajectoryIds:
    """Counts the trajectory ids of one worker, in TorchRL's place for such a counter.

    Worker w gives the ids ``w << 40``, ``(w << 40) + 1``, ...: worker 0 those that one collector
    would. TorchRL's workers share one counter, so that an id depends on which of them came first;
    these repeat, are unique on several machines too, and those of a worker that takes the place of
    a lost one are new, whatever the lost one gave.

    Args:
        worker: w, the number of the worker.
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
    """Slot i of its env is seeded with ``seed + i``."""


class WorkerReport(NamedTuple):
    """A worker's latest statistics and explanation."""

    statistics: dict[str, Any] | None
    """As ``Statistics.save_state()`` gives them; None where it keeps none."""
    parts: Any
    """Of its collector's ``explain()``."""


class WorkerFailure(NamedTuple):
    """The error that ended a worker, sent before it exits: its kind and its text."""

    error: str


# ------------------------------------- functions of a worker's collector, which its parent calls


def facts_of(collector: Any) -> WorkerFacts:
    """The facts of a collector's env that its parent must know."""
    base = base_of(collector.env)
    in_a_row = isinstance(base, GymnasiumEnv) or (
        isinstance(base, GymWrapper) and bool(base.batch_size)
    )
    return WorkerFacts(collector.n_env, in_a_row)


def report_of(collector: Any) -> WorkerReport:
    """The statistics of a collector, and the parts of its ``explain()``."""
    stats = collector._monitor.stats  # Ray puts a function in the place of `collector.stats`
    return WorkerReport(stats.save_state() if stats.on else None, tuple(collector.explain()))


def generator_seeds(seed: int, worker: int, replacement: int = 0) -> tuple[int, int, int]:
    """The seeds of torch's, NumPy's and Python's global generators in a worker.

    Args:
        seed: of the whole collection.
        worker: the worker's index, from 0.
        replacement: how many workers have taken this place after the first.
    """
    key = (worker, replacement) if replacement else (worker,)
    torchs, numpys, pythons = np.random.SeedSequence(seed, spawn_key=key).generate_state(3)
    return int(torchs), int(numpys), int(pythons)


def seeded(
    collector: Any,
    env_seed: int,
    root: int,
    worker: int,
    replacement: int = 0,
    static_seed: bool = False,
) -> int:
    """Seed the global generators of a worker's process and its env, and restart.

    Args:
        collector: of the worker.
        env_seed: of the first slot.
        root: the seed of the whole collection.
        worker: the worker's index.
        replacement: how many workers had the place before.
        static_seed: return ``env_seed`` as it is.

    Returns:
        The seed for the next env, as TorchRL computes it.
    """
    torchs, numpys, pythons = generator_seeds(root, worker, replacement)
    torch.manual_seed(torchs)
    np.random.seed(numpys)  # noqa: NPY002  envs may draw from it
    random.seed(pythons)
    following: int = collector.set_seed(env_seed, static_seed=static_seed)
    return following


def set_version(collector: Any, version: int) -> None:
    """Count the versions of weights on from this one, where they are tracked by numbers."""
    if isinstance(getattr(collector, "policy_version", None), int):
        collector.policy_version_tracker.version = version


def take_weights(collector: Any, weights: Any, version: int) -> None:
    """Load weights of the policy; ``version`` is that of their sender, where it is tracked."""
    collector.update_policy_weights_(weights)
    set_version(collector, version)


def take_place(
    collector: Any, worker: int, weights: Any, version: int, seeding: tuple[Any, ...] | None
) -> None:
    """Make a new collector that of a worker that was lost.

    Args:
        collector: the new one.
        worker: the worker's index.
        weights: of the policy; None for those that it has.
        version: of the weights.
        seeding: the arguments of :func:`seeded`; None if the lost worker was not seeded.
    """
    collector.worker_idx = worker
    if weights is not None:
        take_weights(collector, weights, version)
    if seeding is not None:
        seeded(collector, *seeding)


def counted(collector: Any) -> None:
    """Count that a worker has been seeded; its batches tell how often."""
    collector.seedings += 1


def state_of(collector: Any) -> dict[str, Any]:
    """The state dict, random states of the process included."""
    state: dict[str, Any] = collector.state_dict()
    return state


def load_state(collector: Any, state: Mapping[str, Any]) -> None:
    """Have a collector go on from a state dict."""
    collector.load_state_dict(state)
    collector.note_report()


# ------------------------------------------------------------------- collectors in processes


class WorkerMethods:
    """A mixin of :class:`tdcollect.Collector` in a process: it reports, and is called by pipe."""

    _report = WorkerReport(None, ())
    report_channel: Connection | None = None

    def rollout(self: Any) -> Any:
        """As the collector's own; reports afterwards."""
        try:
            batch = super().rollout()  # type: ignore[misc]
        except Exception as error:
            if self.report_channel is not None:
                self.report_channel.send(WorkerFailure(f"{type(error).__name__}: {error}"))
            raise
        self.note_report()
        return batch

    def run_function(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this collector."""
        return function(self, *arguments)

    def note_report(self: Any) -> None:
        """Make the report that is given when the parent asks, also while a batch is collected."""
        stats, parts = self.stats, self._report.parts
        saved = stats.save_state() if stats.on else None
        # One reference is replaced: another thread reads the one report or the other.
        self._report = WorkerReport(saved, parts or tuple(self.explain()))

    def serve(self, channel: Connection) -> None:
        """Give the report as of the latest batch whenever the parent asks."""
        self.report_channel = channel

        def answer() -> None:
            try:
                while True:
                    channel.recv()
                    channel.send(self._report)
            except (EOFError, OSError):
                pass  # the parent has ended

        threading.Thread(target=answer, name="tdcollect-reports", daemon=True).start()


def worker_class(cls: type[Collector]) -> type[Any]:
    """The class of collectors of ``cls`` in workers."""
    meta: Any = type(cls)
    made: type[Any] = meta(f"{cls.__name__}InWorker", (WorkerMethods, cls), {})
    return made


class InnerCollector:
    """Makes the collector of a worker: given to TorchRL in the place of a class, and pickled.

    Args:
        cls: of the collectors: :class:`tdcollect.Collector`, or a subclass.
        numbers: the number of each worker, which its trajectory ids begin with.
        channels: one per worker, on which it is asked for reports; None for none.
        options: of each collector, beside those that TorchRL passes.
    """

    def __init__(
        self,
        cls: type[Collector],
        numbers: Sequence[int],
        channels: Sequence[Connection] | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        self.cls = cls
        self.numbers = numbers
        self.channels = channels
        self.options = dict(options or {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A collector, in a worker."""
        cls = worker_class(self.cls)
        # TorchRL sets attributes of the class before it makes the collector.
        for name, value in vars(self).items():
            if name not in ("cls", "numbers", "channels", "options"):
                setattr(cls, name, value)
        worker = kwargs.get("worker_idx") or 0
        kwargs["traj_pool"] = TrajectoryIds(self.numbers[worker])
        collector = cls(*args, backend="direct", **self.options, **kwargs)
        _share_tensors_alone(collector, kwargs.get("use_buffers"))
        collector.note_report()
        if self.channels is not None:
            collector.serve(self.channels[worker])
        return collector


def _share_tensors_alone(collector: Collector, use_buffers: bool | None) -> None:
    """Give each batch memory of its own where some entries, such as strings, are no tensors.

    The parent process would see those of the first batch in all that follow: the worker sends its
    batch once, and shares the memory of the tensors in it.

    Raises:
        ValueError: for ``use_buffers=True`` with such entries.
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
