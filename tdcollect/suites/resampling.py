"""Stratified bootstrap over training runs, from generators of each policy's own.

The runs are resampled within each task, and the tasks stay (Agarwal et al. 2021). So intervals
tell what other training runs on the same tasks would give, and nothing about other tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from tdcollect.evaluation.reports.intervals import BATCH_VALUES, generator
from tdcollect.suites.metrics import METRICS, Scores, shares_above, wins

Indices = npt.NDArray[np.int64]


def policy_generator(seed: int, policy: str) -> np.random.Generator:
    """Return the generator of a policy, independent of those of other names."""
    digest = hashlib.sha256(policy.encode("utf-8", "surrogatepass")).digest()
    return generator(seed, *np.frombuffer(digest, "<u4", count=4).tolist())


def draw_runs(
    rng: np.random.Generator, resamples: int, scores: Scores, drawn: int, block: int
) -> Iterator[Indices]:
    """Yield indices of runs, ``[resamples, drawn, tasks]`` in blocks along the first axis.

    Args:
        rng: the generator that draws them; the same draws for any ``block``.
        resamples: the number of resamples.
        scores: ``[runs, tasks]``.
        drawn: the number of runs in a resample of each task.
        block: the number of resamples that are held at once.
    """
    runs, tasks = scores.shape
    for first in range(0, resamples, block):
        yield rng.integers(0, runs, (min(block, resamples - first), drawn, tasks))


def resampled(values: npt.NDArray[Any], indices: Indices) -> npt.NDArray[Any]:
    """Return resamples of ``values [runs, tasks]``, as ``[resamples, drawn, tasks]``.

    Args:
        values: one value per run and task.
        indices: runs, ``[resamples, drawn, tasks]``.
    """
    return values[indices, np.arange(values.shape[1])]


def resampled_improvement(
    first: Scores, second: Scores, first_indices: Indices, second_indices: Indices
) -> Scores:
    """Return the probability of improvement in each resample, ``[resamples]``.

    Equals :func:`~tdcollect.suites.metrics.probability_of_improvement` of the resampled scores,
    in less time: pairs of runs are compared once, and counted as often as they are drawn.

    Args:
        first: scores ``[runs, tasks]`` of one policy.
        second: those of another.
        first_indices: runs of the first, ``[resamples, drawn, tasks]``.
        second_indices: runs of the second.
    """
    sizes = np.array([len(first), len(second)])
    both = np.concatenate([first, second])
    counts = [_counts(first_indices, len(first)), _counts(second_indices, len(second))]
    pairs = first_indices[0].size * second_indices.shape[1]
    return _times_won(wins(both, both), np.concatenate(counts, axis=2), sizes)[:, 0, 1] / pairs


def resampled_metrics(
    scores: Scores,
    metrics: tuple[str, ...],
    thresholds: Scores,
    gamma: float,
    drawn: int,
    resamples: int,
    rng: np.random.Generator,
) -> dict[str, Scores]:
    """Return metrics and profiles of resamples of ``scores [runs, tasks]``.

    Returns:
        By the name of each metric ``[resamples]``, and ``profile`` ``[resamples, thresholds]``.
    """
    ranks = np.searchsorted(thresholds, scores)
    found: dict[str, list[Scores]] = {}
    block = max(1, BATCH_VALUES // scores.size)
    for indices in draw_runs(rng, resamples, scores, drawn, block):
        sample = resampled(scores, indices)
        for name in metrics:
            found.setdefault(name, []).append(METRICS[name](sample, gamma))
        together = resampled(ranks, indices).reshape(len(indices), -1)
        found.setdefault("profile", []).append(shares_above(together, len(thresholds)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def resampled_improvements(
    scores: Mapping[str, Scores],
    drawn: Mapping[str, int],
    resamples: int,
    rngs: Mapping[str, np.random.Generator],
) -> Iterator[tuple[tuple[str, str], Scores]]:
    """Yield each pair of policies with its probability of improvement, ``[resamples]``."""
    together = np.concatenate(list(scores.values()))
    won = wins(together, together)
    sizes = np.array([len(array) for array in scores.values()])
    tasks = len(won)
    block = max(1, BATCH_VALUES // (tasks * int(sizes.sum())))
    draws = [
        draw_runs(rngs[name], resamples, array, drawn[name], block)
        for name, array in scores.items()
    ]
    sums = np.empty((resamples, len(sizes), len(sizes)))
    for number, blocks in enumerate(zip(*draws, strict=True)):
        counts = np.concatenate(list(map(_counts, blocks, sizes)), axis=2)
        sums[number * block : (number + 1) * block] = _times_won(won, counts, sizes)
    for (place, a), (other, b) in combinations(enumerate(scores), 2):
        yield (a, b), sums[:, place, other] / (tasks * drawn[a] * drawn[b])


def percentile_interval(values: Scores, confidence: float) -> Scores:
    """Return the low and the high percentile of resamples ``[resamples, ...]``, ``[2, ...]``."""
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    return np.quantile(values, ends, axis=0)


def _counts(indices: Indices, runs: int) -> Scores:
    """Return how often each run was drawn, ``[tasks, resamples, runs]``."""
    resamples, _, tasks = indices.shape
    rows = np.arange(tasks) * resamples + np.arange(resamples)[:, None]
    places = rows[:, None] * runs + indices
    counts = np.bincount(places.ravel(), minlength=tasks * resamples * runs)
    return counts.reshape(tasks, resamples, runs).astype(np.float64)


def _times_won(won: Scores, counts: Scores, sizes: npt.NDArray[np.int64]) -> Scores:
    """Return how often runs of one policy score above those of another, over all tasks.

    Args:
        won: each run of all policies against each other one, ``[tasks, runs, runs]``.
        counts: how often each run was drawn, ``[tasks, resamples, runs]``.
        sizes: the number of runs of each policy, in their order.

    Returns:
        ``[resamples, policies, policies]``, above the diagonal; pairs of equal scores count half.
    """
    starts = np.cumsum(sizes) - sizes
    sums = np.zeros((counts.shape[1], len(sizes), len(sizes)))
    for place, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        if not place:
            continue
        # Counts and halves: the sums are exact, in any order and with any number of threads.
        beaten = sum(
            drawn[:, :start]
            * (drawn[:, start : start + size] @ scored[:start, start : start + size].T)
            for drawn, scored in zip(counts, won, strict=True)
        )
        sums[:, :place, place] = np.add.reduceat(beaten, starts[:place], axis=1)
    return sums
