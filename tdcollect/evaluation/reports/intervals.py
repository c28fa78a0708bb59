"""Bootstrap intervals and sign flips, from generators that the caller gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdcollect.display import interval_text
from tdcollect.extras import extra_module

Values = npt.NDArray[np.float64]

MOST_RESAMPLES = 10_000
RESAMPLED_VALUES = 20_000_000  # a second or so of work
FEWEST_RESAMPLES = 1000
DRAWN_SINGLY = RESAMPLED_VALUES // FEWEST_RESAMPLES  # for longer samples see _means_by_blocks
BATCH_VALUES = 1_000_000  # held at once: 8 MB


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Return an independent generator for each use of one seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def resampled_means(
    values: Values, cut: int, resamples: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return the means of bootstrap resamples of ``values [E]``, each without its extremes.

    A resample is E values, drawn with replacement (Efron, *Bootstrap Methods: Another Look at the
    Jackknife*, Annals of Statistics 7, 1979). Those of more than 20,000 values are drawn by blocks
    of values that are close to each other, which takes the square root of E in time and memory.

    Args:
        values: the sample.
        cut: the number of lowest, and of highest, values of each resample to leave out.
        resamples: the number of resamples.
        rng: the generator that draws them.

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
    """Return the means of :func:`resampled_means`, drawn by blocks of the sorted values.

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
        uncut = np.where(kept == drawn, kept, 0)
        # Sums, not products of matrices, whose rounding depends on the number of threads.
        spread = np.sqrt((uncut * variances).sum(1))
        sums = (uncut * means).sum(1) + spread * rng.standard_normal(len(drawn))
        for row, block in np.argwhere(kept > uncut).tolist():
            within = rng.integers(0, sizes[block], drawn[row, block])
            ordered = np.sort(offsets[starts[block] + within])
            below = max(0, cut - (ends[row, block] - drawn[row, block]))
            sums[row] += ordered[below : below + kept[row, block]].sum()
        found.append(sums)
    return center + unit * (np.concatenate(found) / (count - 2 * cut))


def sign_flip_p_value(values: Values, resamples: int, rng: np.random.Generator) -> float:
    """Return the two-sided p-value of a mean of zero of ``values [E]``, by flipping signs.

    The permutation test of one paired sample, as ``scipy.stats.permutation_test`` with
    ``permutation_type="samples"`` does it: the share of flips with a sum as extreme as the one
    observed. All flips are tried if there are at most ``resamples``; else that many random ones,
    with the sample itself counted among them (Phipson and Smyth, *Permutation P-values Should
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


@dataclass(frozen=True)
class Interval:
    """A confidence interval: both ends belong to it."""

    low: float
    high: float

    def __str__(self) -> str:
        return interval_text(self.low, self.high)


def ends(value: Any) -> Any:
    """Return the ends of an interval as a pair; anything else as it is."""
    return (value.low, value.high) if isinstance(value, Interval) else value


def check_settings(confidence: float, resamples: int | None, seed: int, episodes: int) -> int:
    """Return the number of resamples, given or by default; refuse settings without an interval."""
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, 0.95 say, got {confidence}")
    if resamples is None:
        wanted = min(MOST_RESAMPLES, RESAMPLED_VALUES // max(1, episodes))
        resamples = max(FEWEST_RESAMPLES, wanted)
    if resamples < 1:
        raise ValueError(f"expected a positive number of resamples, got {resamples}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"expected a seed that is an int and not negative, got {seed!r}")
    return resamples


def mean_interval(
    values: Values, confidence: float, resamples: int, rng: np.random.Generator
) -> Interval | None:
    """Return the bias-corrected and accelerated bootstrap interval of the mean of ``values [E]``.

    Efron, *Better Bootstrap Confidence Intervals*, JASA 82, 1987: the interval between those
    quantiles of the resampled means that make up for their bias and for the skew of the sample.
    The same as ``scipy.stats.bootstrap(method="BCa")`` with the same generator, but for rounding.

    None for fewer than two values; of no width if all are equal.
    """
    if len(values) < 2 or _all_equal(values):
        return _of_no_width(values)
    special = extra_module("scipy.special", "a bootstrap interval")
    means = resampled_means(values, 0, resamples, rng)
    mean = values.mean()
    below = np.count_nonzero(means < mean) + np.count_nonzero(means <= mean)
    bias = special.ndtri(below / (2 * resamples))
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    if np.isfinite(bias):  # else only rounding errors vary: the percentiles as they are
        shifted = bias + special.ndtri(ends)
        with np.errstate(divide="ignore"):
            ends = special.ndtr(bias + shifted / (1 - _acceleration(values) * shifted))
    return _between(means, ends)


def interquartile_mean_interval(
    values: Values, confidence: float, resamples: int, rng: np.random.Generator
) -> Interval | None:
    """Return the percentile bootstrap interval of the interquartile mean of ``values [E]``.

    Not the bias-corrected one, whose jackknife fails for statistics that ignore the tails.
    """
    if len(values) < 2 or _all_equal(values):
        return _of_no_width(values)
    means = resampled_means(values, len(values) // 4, resamples, rng)
    return _between(means, [(1 - confidence) / 2, (1 + confidence) / 2])


def interquartile_mean(values: Values, axis: int = -1) -> Any:
    """Return the mean along ``axis`` without a quarter of the values at each end, rounded down.

    ``scipy.stats.trim_mean(values, 0.25)``, which rliable calls the interquartile mean.
    """
    count = values.shape[axis]
    middle = np.arange(count // 4, count - count // 4)
    return np.sort(values, axis).take(middle, axis).mean(axis)


def exact_mean(values: Values) -> float:
    """Return the mean from the exactly rounded sum, the same in any order and on any machine.

    It lies between the extremes even if the division rounds, so equal values are their mean.
    """
    mean = math.fsum(values) / len(values)
    return float(min(max(mean, values.min()), values.max()))


def _all_equal(values: Values) -> bool:
    return bool((values == values[0]).all())


def _of_no_width(values: Values) -> Interval | None:
    return Interval(float(values[0]), float(values[0])) if len(values) > 1 else None


def _acceleration(values: Values) -> float:
    """Return the acceleration, the change of the standard error with the mean, by the jackknife.

    The mean without value i lies ``(mean - x_i) / (E - 1)`` from the mean. So equation 14.15 of
    Efron and Tibshirani, *An Introduction to the Bootstrap*, 1993, comes to
    ``sum(d**3) / (6 sum(d**2)**1.5)`` with ``d = x - mean``: a sixth of the sample's skewness over
    the root of E.
    """
    offsets = values - values.mean()
    offsets /= np.abs(offsets).max()  # their third powers overflow later
    return float((offsets**3).sum() / (6 * (offsets**2).sum() ** 1.5))


def _between(means: Values, ends: Any) -> Interval:
    low, high = np.quantile(means, ends)
    return Interval(float(low), float(high))
