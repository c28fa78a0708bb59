"""Resampling and sign flips: equal to scipy's where possible, in linear time."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tdcollect.evaluation import statistics
from tdcollect.evaluation.statistics import (
    Values,
    interquartile_mean,
    mean_interval,
    sign_flip_p_value,
)

Draw = Callable[[np.random.Generator, int], Any]

RETURNS: dict[str, Draw] = {
    "normal": lambda rng, count: rng.normal(300, 80, count),
    "exponential": lambda rng, count: rng.exponential(size=count),
    "heavy tail": lambda rng, count: rng.pareto(1.5, count),
    "two values": lambda rng, count: np.where(rng.random(count) < 0.75, 500.0, 10.0),
    "small beside large": lambda rng, count: 1e8 + rng.normal(size=count),
}


def scipys(values: Values, statistic: Any, method: str, rng: Any) -> tuple[float, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            (values,), statistic, n_resamples=1000, method=method, rng=rng, confidence_level=0.9
        ).confidence_interval
    return found.low, found.high


@pytest.mark.parametrize(("returns", "count"), zip(RETURNS, (3, 20, 101, 20, 101), strict=True))
def test_intervals_are_those_of_scipy_with_the_same_generator(returns: str, count: int) -> None:
    values = RETURNS[returns](np.random.default_rng(count), count)
    found = mean_interval(values, 0.9, 1000, np.random.default_rng(1))
    expected = scipys(values, np.mean, "BCa", np.random.default_rng(1))
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-12)

    def trimmed(sample: Any, axis: int) -> Any:
        return stats.trim_mean(sample, 0.25, axis)

    found = mean_interval(values, 0.9, 1000, np.random.default_rng(1), interquartile_mean)
    expected = scipys(values, trimmed, "percentile", np.random.default_rng(1))
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mean", [np.mean, interquartile_mean])
def test_intervals_of_many_values_are_students_and_near_those_by_resamples(
    mean: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).exponential(size=statistics.DRAWN_SINGLY + 1)
    start = time.process_time()
    found = mean_interval(values, 0.95, 1000, np.random.default_rng(0), mean)
    assert time.process_time() - start < 3
    if mean is np.mean:
        low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    else:
        low, high = stats.mstats.trimmed_mean_ci(values, (0.25, 0.25), alpha=0.05)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-5)
    monkeypatch.setattr(statistics, "DRAWN_SINGLY", len(values))
    drawn = mean_interval(values, 0.95, 1000, np.random.default_rng(0), mean)
    assert (drawn.low, drawn.high) == pytest.approx((low, high), abs=0.1 * (high - low))


@pytest.mark.parametrize("unit", [1.0, 0.1], ids=["whole numbers", "tenths"])
def test_p_values_of_few_values_are_those_of_all_flips(unit: float) -> None:
    # Sums of tenths that are equal differ by rounding: scipy takes some of them for unequal.
    for seed in range(60):
        rng = np.random.default_rng(seed)
        values = rng.integers(-3, 4, rng.integers(2, 9))
        sums = [
            int((values * signs).sum()) for signs in itertools.product([1, -1], repeat=len(values))
        ]
        expected = min(1.0, 2 * min(np.mean(sums <= values.sum()), np.mean(sums >= values.sum())))
        assert sign_flip_p_value(values * unit, 256, rng) == pytest.approx(expected)


def test_the_p_value_of_many_values_is_near_that_of_the_t_test_and_takes_linear_time() -> None:
    values = np.random.default_rng(2).normal(0.006, 1, 50_000)
    start = time.process_time()
    found = sign_flip_p_value(values, 1000, np.random.default_rng(0))
    assert time.process_time() - start < 3
    assert found == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.05)
    assert found != sign_flip_p_value(values, 1000, np.random.default_rng(1))
