"""Functions that run where a worker's collector is, on Ray; it is the first argument."""

from __future__ import annotations

from typing import Any

from tdcollect.collectors.inner import WorkerMethods, WorkerReport

facts = WorkerMethods.worker_facts
seeded = WorkerMethods.seed_worker


def report(collector: Any) -> WorkerReport:
    """The statistics of a collector, and the parts of its ``explain()``."""
    stats = collector._monitor.stats  # Ray puts a function in the place of `collector.stats`
    return WorkerReport(stats.save_state() if stats.on else None, tuple(collector.explain()))


def take_weights(collector: Any, weights: Any, version: int) -> None:
    """Load weights of the policy; ``version`` is that of their sender, where it is tracked."""
    collector.update_policy_weights_(weights)
    if isinstance(getattr(collector, "policy_version", None), int):
        collector.policy_version_tracker.version = version


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
