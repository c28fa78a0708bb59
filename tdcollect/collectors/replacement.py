"""Workers that take the place of lost ones."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torchrl.collectors import MultiAsyncCollector, MultiCollector

from tdcollect._upstream.multi import WorkersState, same_threads
from tdcollect.collectors.inner import InnerCollector
from tdcollect.collectors.seeds import replacement_seed

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

    def __init__(self, collector: MultiCollector, inner: Any, options: Mapping[str, Any]):
        self.crews: dict[int, MultiAsyncCollector] = {}
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
            crew.map_fn("set_policy_version", [(self.versions.get(worker, 0),)])
            if self.seed is not None:
                first = replacement_seed(self.seed, worker, count)
                crew.map_fn("seed_worker", [(first, self.seed, worker, count)])
        before, self.crews[worker] = self.crews.get(worker), crew
        collector.queue_out.add(crew.queue_out, worker)
        collector.pipes[worker].replaced(crew.pipes[0])
        if before is not None:
            _end(before)
        return crew.procs[0]

    def _make(self, collector: Any, worker: int, inner: Any) -> MultiAsyncCollector:
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
        return MultiAsyncCollector([env], collector.policy, collector_class=inner, **options)

    def noted(self, worker: int) -> None:
        """Note that a worker is given weights."""
        self.versions[worker] = self.versions.get(worker, 0) + 1

    def shutdown(self) -> None:
        """End all that are in place."""
        for crew in self.crews.values():
            _end(crew)


def _end(crew: MultiAsyncCollector) -> None:
    crew.shutdown(timeout=1.0, raise_on_error=False)
    WorkersState(crew).end_weight_sync()
