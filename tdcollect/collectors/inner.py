"""The collector inside of each worker, and the methods of it that the parent calls by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor
from torchrl.envs import GymWrapper

from tdcollect._upstream.collector import CollectorState
from tdcollect.collect import Collector
from tdcollect.collectors.seeds import seed_generators
from tdcollect.collectors.trajectory_ids import TrajectoryIds
from tdcollect.envs.transforms import base_of
from tdcollect.envs.wrapper import GymnasiumEnv


class WorkerFacts(NamedTuple):
    """Facts about a worker.

    Attributes:
        slots: N of its env.
        seeds_in_a_row: slot i of its env is seeded with ``seed + i``.
    """

    slots: int
    seeds_in_a_row: bool


class WorkerReport(NamedTuple):
    """News of a worker.

    Attributes:
        statistics: of its collector, as ``Statistics.save_state()`` gives them; None where it
            keeps none.
        parts: of its collector's ``explain()``.
    """

    statistics: dict[str, Any] | None
    parts: Any


class WorkerFailure(NamedTuple):
    """The last word of a worker that ends with an error.

    Attributes:
        error: its kind and its text.
    """

    error: str


class WorkerMethods:
    """Methods that a parent calls on the collectors of its workers, over pipes or Ray.

    A mixin of :class:`tdcollect.Collector`.
    """

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

    def worker_facts(self: Any) -> WorkerFacts:
        """The facts of the env that the parent must know."""
        base = base_of(self.env)
        in_a_row = isinstance(base, GymnasiumEnv) or (
            isinstance(base, GymWrapper) and bool(base.batch_size)
        )
        return WorkerFacts(self.n_env, in_a_row)

    def seed_worker(
        self: Any,
        env_seed: int,
        root: int,
        worker: int,
        replacement: int = 0,
        static_seed: bool = False,
    ) -> int:
        """Seed the global generators of this process and the env, and restart.

        Args:
            env_seed: of the first slot.
            root: the seed of the whole collection.
            worker: the worker's index.
            replacement: how many workers had the place before.
            static_seed: return ``env_seed`` as it is.

        Returns:
            The seed for the next env, as TorchRL computes it.
        """
        seed_generators(root, worker, replacement)
        following: int = self.set_seed(env_seed, static_seed=static_seed)
        return following

    def set_policy_version(self: Any, version: int) -> None:
        """Count the versions of weights on from this one, where they are tracked by numbers."""
        if isinstance(self.policy_version, int):
            self.policy_version_tracker.version = version

    def worker_state(self: Any) -> dict[str, Any]:
        """The state dict, random states of this process included."""
        state: dict[str, Any] = self.state_dict()
        return state

    def load_worker_state(self: Any, state: Mapping[str, Any]) -> None:
        """Go on from a state dict; see :meth:`tdcollect.Collector.load_state_dict`."""
        self.load_state_dict(state)
        self.note_report()

    def note_report(self: Any) -> None:
        """Make the report that :meth:`worker_report` gives."""
        stats = self.stats
        saved = stats.save_state() if stats.on else None
        # One reference is replaced: another thread reads the one report or the other.
        self._report = WorkerReport(saved, self._report.parts or tuple(self.explain()))

    def worker_report(self) -> WorkerReport:
        """The report as of the latest batch; may be called while the next one is collected."""
        return self._report


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
            serve(collector, self.channels[worker])
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


def serve(collector: Any, channel: Connection) -> None:
    """Give a worker's report whenever the parent asks, also while a batch is collected."""
    collector.report_channel = channel

    def answer() -> None:
        try:
            while True:
                channel.recv()
                channel.send(collector.worker_report())
        except (EOFError, OSError):
            pass  # the parent has ended

    threading.Thread(target=answer, name="tdcollect-reports", daemon=True).start()
