"""Intervals by resampling, from a generator that the caller names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdcollect.evaluation.extras import extra_module
from tdcollect.evaluation.reports.resampling import (
    FEWEST_RESAMPLES,
    MOST_RESAMPLES,
    RESAMPLED_VALUES,
    Values,
    resampled_means,
)
from tdcollect.evaluation.reports.tables import interval_text


@dataclass(frozen=True)
class Interval:
    """A confidence interval: both ends belong to it."""

    low: float
    high: float

    def __str__(self) -> str:
        return interval_text(self.low, self.high)


def check_settings(confidence: float, resamples: int | None, seed: int, episodes: int) -> int:
    """The number of resamples, as asked for or by default; refuses what has no interval."""
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
    """Bias-corrected and accelerated bootstrap interval of the mean of ``values [E]``.

    Efron, *Better Bootstrap Confidence Intervals*, JASA 82, 1987: the interval between those
    quantiles of the resampled means that make up for their bias and for the skew of the sample.
    The same as ``scipy.stats.bootstrap(method="BCa")`` with the same generator, but for rounding.

    None for fewer than two values; of no width where all are equal.
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
    """Percentile bootstrap interval of the interquartile mean of ``values [E]``.

    Not the bias-corrected one, whose jackknife fails for statistics that ignore the tails.
    """
    if len(values) < 2 or _all_equal(values):
        return _of_no_width(values)
    means = resampled_means(values, len(values) // 4, resamples, rng)
    return _between(means, [(1 - confidence) / 2, (1 + confidence) / 2])


def interquartile_mean(values: Values, axis: int = -1) -> Any:
    """The mean along ``axis``, a quarter of the values, rounded down, cut off at each end.

    ``scipy.stats.trim_mean(values, 0.25)``, which rliable calls the interquartile mean.
    """
    count = values.shape[axis]
    middle = np.arange(count // 4, count - count // 4)
    return np.sort(values, axis).take(middle, axis).mean(axis)


def exact_mean(values: Values) -> float:
    """The mean from the exactly rounded sum, which neither order nor machine changes.

    Between the extremes even where the division rounds, so that equal values are their mean.
    """
    mean = math.fsum(values) / len(values)
    return float(min(max(mean, values.min()), values.max()))


def _all_equal(values: Values) -> bool:
    return bool((values == values[0]).all())


def _of_no_width(values: Values) -> Interval | None:
    return Interval(float(values[0]), float(values[0])) if len(values) > 1 else None


def _acceleration(values: Values) -> float:
    """The acceleration: how fast the standard error changes with the mean, by the jackknife.

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
