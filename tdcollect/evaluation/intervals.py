"""Intervals by resampling, from a generator that the caller names."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdcollect.evaluation.extras import extra_module
from tdcollect.evaluation.tables import interval_text

Values = npt.NDArray[np.float64]

MOST_RESAMPLES = 10_000
RESAMPLED_VALUES = 20_000_000  # seconds of work, and for so many values 1,000 resamples will do
BATCH_VALUES = 1_000_000  # resampled values held at once: 8 MB


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
        resamples = max(1000, min(MOST_RESAMPLES, RESAMPLED_VALUES // max(1, episodes)))
    if resamples < 1:
        raise ValueError(f"expected a positive number of resamples, got {resamples}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"expected a seed that is an int and not negative, got {seed!r}")
    return resamples


def mean_interval(
    values: Values, confidence: float, resamples: int, rng: np.random.Generator
) -> Interval | None:
    """Bias-corrected and accelerated bootstrap interval of the mean of ``values [E]``.

    None for fewer than two values; of no width where all are equal.
    """
    return _bootstrap(values, _mean, "BCa", confidence, resamples, rng)


def interquartile_mean_interval(
    values: Values, confidence: float, resamples: int, rng: np.random.Generator
) -> Interval | None:
    """Percentile bootstrap interval of the interquartile mean of ``values [E]``.

    Not the bias-corrected one, whose jackknife fails for statistics that ignore the tails.
    """
    return _bootstrap(values, interquartile_mean, "percentile", confidence, resamples, rng)


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


def generator(seed: int, *stream: int) -> np.random.Generator:
    """A generator of its own for each use of one seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def _bootstrap(
    values: Values,
    statistic: Any,
    method: str,
    confidence: float,
    resamples: int,
    rng: np.random.Generator,
) -> Interval | None:
    if len(values) < 2:
        return None
    if (values == values[0]).all():
        return Interval(float(values[0]), float(values[0]))
    stats = extra_module("scipy.stats", "a bootstrap interval")
    state = rng.bit_generator.state
    with warnings.catch_warnings():
        # Said of data in which only rounding errors vary; answered below.
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            (values,),
            statistic,
            n_resamples=resamples,
            batch=max(1, BATCH_VALUES // len(values)),
            confidence_level=confidence,
            method=method,
            rng=rng,
        ).confidence_interval
    if method == "BCa" and not (np.isfinite(found.low) and np.isfinite(found.high)):
        rng.bit_generator.state = state
        return _bootstrap(values, statistic, "percentile", confidence, resamples, rng)
    return Interval(float(found.low), float(found.high))


def _mean(values: Values, axis: int = -1) -> Any:
    return values.mean(axis)
