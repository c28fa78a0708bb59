"""Resamples of a sample, and flips of its signs, in time that grows linearly with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

MOST_RESAMPLES = 10_000
RESAMPLED_VALUES = 20_000_000  # a second or so of work
FEWEST_RESAMPLES = 1000
DRAWN_SINGLY = RESAMPLED_VALUES // FEWEST_RESAMPLES  # for longer samples see _means_by_blocks
BATCH_VALUES = 1_000_000  # held at once: 8 MB


def generator(seed: int, *stream: int) -> np.random.Generator:
    """A generator of its own for each use of one seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def resampled_means(
    values: Values, cut: int, resamples: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """The means of bootstrap resamples of ``values [E]``, each without its extremes.

    A resample is E values, drawn with replacement (Efron, *Bootstrap Methods: Another Look at the
    Jackknife*, Annals of Statistics 7, 1979). Those of more than 20,000 values are drawn by blocks
    of values that are close to each other, which takes the square root of E in time and memory.

    Args:
        values: the sample.
        cut: how many of the lowest values of each resample are left out, and of the highest.
        resamples: how many.
        rng: what draws them.

    Returns:
        Float64 ``[resamples]``.
    """
    if len(values) > DRAWN_SINGLY:
        return _means_by_blocks(values, cut, resamples, rng)
    count = len(values)
    rows = max(1, BATCH_VALUES // count)
    found = []
    for first in range(0, resamples, rows):
        drawn = values[rng.integers(0, count, (min(rows, resamples - first), count))]
        if cut:
            drawn.sort(axis=1)
        found.append(drawn[:, cut : count - cut].mean(1))
    return np.concatenate(found)


def _means_by_blocks(
    values: Values, cut: int, resamples: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """As :func:`resampled_means`, block by block of the values in their order.

    Blocks are about ``sqrt(E)`` values long, but each of the ``sqrt(E)`` lowest and highest values
    is one of its own. How many values of a resample fall into each block is multinomial, as it is
    of single values. The sum of c values out of a block with mean m and variance v is drawn as
    normal, of mean ``c m`` and variance ``c v``: exact for a block of one value or of equal ones,
    and near it for the others, whose values are close and many. The two blocks that the cuts go
    through are drawn value by value.
    """
    count, side = len(values), math.isqrt(len(values))
    center = values.mean()
    offsets = np.sort(values) - center  # sums of them round less than those of large values
    unit = np.abs(offsets[[0, -1]]).max() or 1.0
    offsets /= unit
    inner = np.arange(side, count - side, side)
    starts = np.concatenate([np.arange(side), inner, np.arange(count - side, count)])
    sizes = np.diff(starts, append=count)
    means = np.add.reduceat(offsets, starts) / sizes
    variances = np.add.reduceat((offsets - np.repeat(means, sizes)) ** 2, starts) / sizes
    rows = max(1, BATCH_VALUES // len(starts))
    found = []
    for first in range(0, resamples, rows):
        drawn = rng.multinomial(count, sizes / count, size=min(rows, resamples - first))
        ends = drawn.cumsum(1)
        kept = np.diff(ends.clip(cut, count - cut), prepend=cut, axis=1)
        whole = np.where(kept == drawn, kept, 0)
        # Sums, not products of matrices, whose rounding depends on the number of threads.
        spread = np.sqrt((whole * variances).sum(1))
        sums = (whole * means).sum(1) + spread * rng.standard_normal(len(drawn))
        for row, block in np.argwhere(kept > whole).tolist():
            within = rng.integers(0, sizes[block], drawn[row, block])
            ordered = np.sort(offsets[starts[block] + within])
            below = max(0, cut - (ends[row, block] - drawn[row, block]))
            sums[row] += ordered[below : below + kept[row, block]].sum()
        found.append(sums)
    return center + unit * (np.concatenate(found) / (count - 2 * cut))


def sign_flip_p_value(values: Values, resamples: int, rng: np.random.Generator) -> float:
    """The p-value of a mean of zero of ``values [E]``, two-sided, by flipping their signs.

    The permutation test of one paired sample, as ``scipy.stats.permutation_test`` with
    ``permutation_type="samples"`` does it: the share of flips with a sum as far out as the one
    seen. All flips are tried where there are at most ``resamples``; else so many random ones are,
    and the sample itself is counted among them (Phipson and Smyth, *Permutation P-values Should
    Never Be Zero*, 2010).
    """
    count = len(values)
    if count == 1 or not values.any():
        return 1.0  # flips give the same mean, up to its sign
    exact = flips_are_exact(count, resamples)
    tried = 2**count if exact else resamples
    observed = values.sum()
    slack = 100 * np.finfo(np.float64).eps * np.abs(values).sum()  # more than sums round
    rows = max(1, BATCH_VALUES // count)
    below = above = 0 if exact else 1
    flipped: npt.NDArray[Any]
    for first in range(0, tried, rows):
        size = min(rows, tried - first)
        if exact:
            flipped = np.arange(first, first + size)[:, None] >> np.arange(count) & 1
        else:
            octets = rng.integers(0, 256, (size, -(-count // 8)), np.uint8)
            flipped = np.unpackbits(octets, axis=1, count=count)
        sums = observed - 2 * (flipped * values).sum(1)
        below += int(np.count_nonzero(sums <= observed + slack))
        above += int(np.count_nonzero(sums >= observed - slack))
    return min(1.0, 2 * min(below, above) / (tried if exact else tried + 1))


def flips_are_exact(count: int, resamples: int) -> bool:
    """Tell whether ``count`` values have no more sign flips than ``resamples``."""
    return count < 63 and 2**count <= resamples
