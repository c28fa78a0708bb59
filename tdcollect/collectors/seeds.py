"""Seeds of workers: of the envs in their slots, and of their global random generators."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from tdcollect.envs.adopted import chain


def first_seeds(seed: int, slots: Sequence[int]) -> list[int]:
    """The seed of the first slot of each worker.

    Slot i of worker w is seeded with ``seed + w N + i``, N slots per worker: the slots of all
    workers count on from ``seed``, as those of one env do.

    Args:
        seed: of slot 0 of worker 0.
        slots: N of each worker.
    """
    return list(accumulate(slots[:-1], initial=seed))


def seedings(
    seed: int, slots: Sequence[int], static_seed: bool
) -> list[tuple[int, int, int, int, bool]]:
    """The arguments of :meth:`WorkerMethods.seed_worker` for each worker.

    Args:
        seed: of slot 0 of worker 0.
        slots: N of each worker.
        static_seed: as of ``set_seed``.
    """
    firsts = first_seeds(seed, slots)
    return [(first, seed, worker, 0, static_seed) for worker, first in enumerate(firsts)]


def following_seed(seed: int, workers: int, static_seed: bool) -> int:
    """The seed for the next env after so many workers, as TorchRL computes it."""
    return seed if static_seed else chain(seed, workers + 1)[-1]


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


def replacement_seed(seed: int, worker: int, replacement: int) -> int:
    """The seed of the first slot of a worker that takes the place of a lost one.

    It is another than that of the lost one, whose episodes would be collected twice, and repeats
    with ``seed``.

    Args:
        seed: of the whole collection.
        worker: the index of the place.
        replacement: 1 for the first worker that takes it.
    """
    key = (worker, replacement)
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(4)[3] >> 1)


def seed_generators(seed: int, worker: int, replacement: int = 0) -> None:
    """Seed the global generators of this process; see :func:`generator_seeds`."""
    torchs, numpys, pythons = generator_seeds(seed, worker, replacement)
    torch.manual_seed(torchs)
    np.random.seed(numpys)  # noqa: NPY002  envs may draw from it
    random.seed(pythons)
