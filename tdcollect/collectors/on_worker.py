"""Functions that run where a worker's collector is; the first argument is that collector."""

from __future__ import annotations

from typing import Any

from tdcollect.collectors.seeds import seed_generators
from tdcollect.envs.transforms import base_of
from tdcollect.envs.wrapper import GymnasiumEnv


def slots(collector: Any) -> int | None:
    """Return the number of slots that count their seeds on; None for envs that do otherwise."""
    base = base_of(collector.env) if hasattr(collector, "env") else None
    return int(base.batch_size.numel()) if isinstance(base, GymnasiumEnv) else None


def seeded(
    collector: Any, first: int, static_seed: bool, seed: int, worker: int, replacement: int = 0
) -> Any:
    """Seed a worker's generators and its envs; return the seed for the next env.

    Args:
        collector: its collector.
        first: the seed of its first slot.
        static_seed: as ``set_seed`` has it.
        seed: of the whole collection.
        worker: its index.
        replacement: how many workers had its place before.
    """
    seed_generators(seed, worker, replacement)
    return collector.set_seed(first, static_seed)


def take_place(collector: Any, worker: int, weights: Any, seeding: tuple[Any, ...] | None) -> None:
    """Make a new collector the one of a worker that was lost.

    Args:
        collector: the new one.
        worker: the worker's index.
        weights: of the policy; None for those that it has.
        seeding: what :func:`seeded` takes; None if the lost worker was not seeded.
    """
    collector.worker_idx = worker
    if weights is not None:
        collector.update_policy_weights_(weights)
    if seeding is not None:
        seeded(collector, *seeding)


def counted(collector: Any) -> None:
    """Count that a worker has been seeded; its batches tell how often."""
    collector.seedings += 1
