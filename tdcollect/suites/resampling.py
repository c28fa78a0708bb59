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
    return _improvement(
        wins(first, second),
        _counts(first_indices, len(first)),
        _counts(second_indices, len(second)),
    )


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
        By the name of each metric ``[resamples]``; ``profile`` and ``average_profile``
        ``[resamples, thresholds]``.
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
        means = np.searchsorted(thresholds, sample.mean(-2))
        found.setdefault("average_profile", []).append(shares_above(means, len(thresholds)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def resampled_improvements(
    scores: Mapping[str, Scores],
    drawn: Mapping[str, int],
    resamples: int,
    rngs: Mapping[str, np.random.Generator],
) -> dict[tuple[str, str], Scores]:
    """Return the probability of improvement of each pair of policies, ``[resamples]`` each."""
    pairs = list(combinations(scores, 2))
    won = {(a, b): wins(scores[a], scores[b]) for a, b in pairs}
    found: dict[tuple[str, str], list[Scores]] = {pair: [] for pair in pairs}
    block = max(1, BATCH_VALUES // sum(array.size for array in scores.values()))
    draws = {
        name: draw_runs(rngs[name], resamples, array, drawn[name], block)
        for name, array in scores.items()
    }
    for blocks in zip(*draws.values(), strict=True):
        counts = {
            name: _counts(indices, len(scores[name]))
            for name, indices in zip(draws, blocks, strict=True)
        }
        for a, b in pairs:
            found[a, b].append(_improvement(won[a, b], counts[a], counts[b]))
    return {pair: np.concatenate(parts) for pair, parts in found.items()}


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


def _improvement(won: Scores, first: Scores, second: Scores) -> Scores:
    # Counts and halves: their sums are exact, in any order and with any number of threads.
    beaten = np.matmul(second, won.transpose(0, 2, 1))
    pairs = len(won) * first[0, 0].sum() * second[0, 0].sum()
    return (beaten * first).sum((0, 2)) / pairs
