"""The mean of the first 1, 2, ... returns, with its intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tdcollect.evaluation.reports.intervals import Values
from tdcollect.extras import extra_module


class Running(NamedTuple):
    """The mean over the first 1, 2, ... values.

    Attributes:
        mean: float64 ``[E]``.
        low: the lower ends of Student's t intervals ``[E]``; NaN for the first one.
        high: the upper ends.
    """

    mean: Values
    low: Values
    high: Values

    def limits(self) -> tuple[float, float] | None:
        """Return a range that shows the later intervals: the first are so wide that they hide them.

        None for one value, and for equal ones.
        """
        count = len(self.mean)
        later = slice(min(count - 1, max(4, count // 20)), None)
        bottom, top = float(self.low[later].min()), float(self.high[later].max())
        if not top > bottom:
            return None
        margin = 0.1 * (top - bottom)
        return bottom - margin, top + margin


def running_mean(values: Values, confidence: float) -> Running:
    """Return the running mean of finite values ``[E]``, with Student's t intervals."""
    stats = extra_module("scipy.stats", "the interval of a cumulative mean")
    mean, deviation = mean_and_deviation(values)
    count = np.arange(1, len(values) + 1)
    reach = np.full(len(values), np.nan)
    if len(values) > 1:
        quantile = stats.t.ppf(0.5 + confidence / 2, count[1:] - 1)
        reach[1:] = quantile * deviation[1:] / np.sqrt(count[1:])
    return Running(mean, mean - reach, mean + reach)


def mean_and_deviation(values: Values) -> tuple[Values, Values]:
    """Return mean and standard deviation of the first 1, 2, ... values; the first one is zero."""
    count = np.arange(1, len(values) + 1)
    mean = np.cumsum(values) / count
    before = np.concatenate([[0.0], mean[:-1]])
    # Welford's recurrence: a difference of two sums of squares would lose digits.
    squares = np.cumsum(np.where(count > 1, (values - before) * (values - mean), 0.0))
    return mean, np.sqrt(np.maximum(squares, 0.0) / np.maximum(count - 1, 1))
