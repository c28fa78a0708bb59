"""The statistics of a ledger: numbers, intervals, and episodes that must count."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tdcollect import compare
from tdcollect.evaluation.comparison import Difference, episodes_needed
from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.statistics import (
    Interval,
    Summary,
    check_settings,
    mean_interval,
    summarize,
)

from .ledgers import ENV, ledger

pytestmark = pytest.mark.filterwarnings("error")

RNG = np.random.default_rng(0)
RETURNS = RNG.normal(300, 80, size=100).tolist()


def text_of(summary: Summary) -> str:
    return json.dumps(summary.to_dict(), allow_nan=False)


# Numbers


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_numbers_are_those_of_the_standard_library_and_scipy(values: list[float]) -> None:
    found = summarize(ledger(values), resamples=50).returns
    assert found.count == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.median == pytest.approx(statistics.median(values), rel=1e-12)
    middle = stats.trim_mean(values, 0.25)
    assert found.interquartile_mean == pytest.approx(middle, rel=1e-9, abs=1e-9)
    assert (found.min, found.max) == (min(values), max(values))
    assert found.min <= found.mean <= found.max
    assert found.min <= found.interquartile_mean <= found.max
    if len(values) == 1:
        return
    assert found.std == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-9)
    assert found.standard_error == pytest.approx(stats.sem(values), rel=1e-9, abs=1e-9)
    slack = 1e-9 * max(map(abs, values))  # the bootstrap's sums round
    for interval in (found.mean_interval, found.interquartile_mean_interval):
        assert found.min - slack <= interval.low <= interval.high <= found.max + slack


# The same input gives the same bits


def test_order_of_records_does_not_matter() -> None:
    records = ledger(RETURNS[:20], failed=[4])
    expected = text_of(summarize(records, resamples=100))
    for seed in range(3):
        np.random.default_rng(seed).shuffle(records)
        assert text_of(summarize(records, resamples=100)) == expected


def test_the_seed_decides_intervals_and_no_global_random_state() -> None:
    one, other = (summarize(ledger(RETURNS), seed=seed).returns for seed in (0, 1))
    assert one.mean == other.mean
    assert one.mean_interval != other.mean_interval
    assert one.interquartile_mean_interval != other.interquartile_mean_interval
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    started = time.process_time()
    assert summarize(ledger(RETURNS)).returns == one
    assert time.process_time() - started < 3  # at the default number of resamples
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


def test_the_number_of_resamples_at_once_changes_nothing(monkeypatch) -> None:
    """By default, many episodes are resampled fewer times."""
    values = np.array(RETURNS)
    whole = mean_interval(values, 0.95, 1000, np.random.default_rng(0))
    monkeypatch.setattr("tdcollect.evaluation.statistics.BATCH_VALUES", 700)
    assert mean_interval(values, 0.95, 1000, np.random.default_rng(0)) == whole
    for count, resamples in [(0, 10_000), (2000, 10_000), (4000, 5000), (10**6, 1000)]:
        assert check_settings(0.95, None, 0, count) == resamples
        assert check_settings(0.95, 7, 0, count) == 7


# Failures and unknowns


def test_failed_and_lost_episodes_are_counted_and_have_no_return() -> None:
    episodes = ledger([1.0, 1000.0, 2000.0, 3.0], failed=[1, 2], success={0: True, 3: True})
    summary = summarize(episodes)
    assert (summary.episodes, summary.completed, summary.failed) == (4, 2, 2)
    assert summary.restarted == 2
    assert summary.returns.mean == 2.0
    assert "4 episodes: 2 completed, 2 failed, 2 restarted" in str(summary)
    assert "mean over 2 completed of 4" in str(summary)
    assert "2 of 4 episodes failed and have no return" in str(summary)
    assert "lost" not in summary.to_dict()
    episodes[2] = replace(episodes[2], status="lost")
    summary = summarize(episodes)
    assert (summary.completed, summary.failed, summary.lost) == (2, 1, 1)
    assert summary.to_dict()["lost"] == 1
    assert "2 completed, 1 failed, 1 lost, 2 restarted" in str(summary)
    assert "1 of 4 episodes were lost with their workers and have no return" in str(summary)
    assert "The same command, or call, runs those again" in str(summary)
    assert "2 of 4 episodes, failed and lost ones counted as no success" in str(summary)


def test_failed_episodes_are_no_successes_and_those_without_a_word_apart() -> None:
    success = summarize(ledger([1.0] * 4, failed=[3], success={0: True, 1: True, 2: False})).success
    assert (success.successes, success.count, success.rate) == (2, 4, 0.5)
    assert summarize(ledger([1.0, 2.0], failed=[1])).success is None
    summary = summarize(ledger([1.0, 2.0, 3.0], success={0: True, 1: False}))
    assert (summary.success.count, summary.success.unknown) == (2, 1)
    assert "Of 1 completed episodes the env did not say." in str(summary)


def test_the_interval_of_a_rate_solves_wilsons_equation() -> None:
    # Its ends are the rates from which the observed one lies z standard deviations away.
    z = statistics.NormalDist().inv_cdf(0.975)
    for successes, count in [(0, 1), (1, 1), (0, 9), (2, 7), (13, 20), (20, 20)]:
        records = ledger([0.0] * count, success={i: i < successes for i in range(count)})
        found = summarize(records, resamples=1).success
        for end in (found.interval.low, found.interval.high):
            variance = end * (1 - end) / count
            assert (found.rate - end) ** 2 == pytest.approx(z**2 * variance, abs=1e-12)
        assert 0 <= found.interval.low <= found.rate <= found.interval.high <= 1


# Degenerate ledgers have a defined answer


def test_ledgers_without_statistics() -> None:
    summary = summarize([])
    assert (summary.episodes, summary.completed, summary.success) == (0, 0, None)
    assert summary.returns.mean is summary.returns.mean_interval is None
    assert "mean over 0 completed of 0" in str(summary)
    text_of(summary)
    summary = summarize(ledger([0.0, 0.0], failed=[0, 1]))
    assert (summary.failed, summary.returns.mean) == (2, None)
    found = summarize(ledger([7.0])).returns
    assert found.mean == found.median == found.interquartile_mean == 7.0
    assert found.std is found.standard_error is found.mean_interval is None


def test_equal_returns_give_intervals_of_no_width_and_nearly_equal_ones_finite_ones() -> None:
    for value, count in [(500.0, 2), (0.1, 3), (0.1, 10), (-1e-300, 3), (1e300, 2)]:
        summary = summarize(ledger([value] * count))
        found = summary.returns
        assert (found.mean, found.std) == (value, 0.0)
        assert found.mean_interval == found.interquartile_mean_interval == Interval(value, value)
        assert "All returns are equal" in str(summary)
    rounding, small = [1.0, 1.0, 1.0 + 2e-16], [1e8, 1e8 + 1e-7, 1e8]
    for values in (rounding, small, [0.0] * 99 + [1.0], [1.0, 2.0]):
        found = summarize(ledger(values)).returns
        for interval in (found.mean_interval, found.interquartile_mean_interval):
            assert min(values) - 1e-6 <= interval.low <= interval.high <= max(values) + 1e-6


def compared(first: list[Episode], second: list[Episode]) -> Difference:
    sides = (SimpleNamespace(manifest={"env": ENV}, episodes=one) for one in (first, second))
    return compare(*sides).differences[0]


def numbers(unit: float) -> list[float]:
    """The statistics of returns in this unit."""
    first, second = (ledger([v * unit for v in of]) for of in (RETURNS, RETURNS[:59:-1]))
    pair = compared(first, second)
    found = [summarize(first).returns, pair.difference]
    ends = [astuple(q)[2:9] + astuple(q)[9] + astuple(q)[10] for q in found]
    more = pair.detectable(), pair.p_value * unit
    return [value / unit for value in itertools.chain(*ends, more)]


@pytest.mark.parametrize("power", [-1000, 508, 1013])
def test_statistics_of_large_and_small_returns_are_those_of_others_to_the_bit(power: int) -> None:
    """Their squares and sums leave the range of floats."""
    assert numbers(2.0**power) == numbers(1.0)


def test_a_deviation_beyond_the_largest_float_is_none_and_a_number_of_samples_refused() -> None:
    most = sys.float_info.max
    summary = summarize(ledger([most, -most]))
    assert (summary.returns.mean, summary.returns.std) == (0.0, None)
    assert summary.returns.mean_interval.high == most
    text_of(summary)
    assert compared(ledger([most, 1.0]), ledger([-most, 2.0])).difference.not_finite == 1
    with pytest.raises(ValueError, match=r"above 1e\+50, as the .* is 1e\+200, got 1: no number"):
        episodes_needed(1.0, 1e200)


def test_returns_that_are_not_finite_or_few_are_said_to_be_so() -> None:
    for value in (math.nan, math.inf):
        summary = summarize(ledger([1.0, value]))
        assert (summary.returns.not_finite, summary.returns.mean) == (1, None)
        assert summary.lengths.mean == 10.5
        assert "1 returns are NaN or infinite: no statistics of returns" in str(summary)
        text_of(summary)
    said = "fewer than 20 episodes hold the truth less often than they say"
    assert said in str(summarize(ledger(RETURNS[:19])))
    assert said not in str(summarize(ledger(RETURNS[:20])))


# Bad input


def test_settings_and_records_that_cannot_be_are_refused() -> None:
    for changed, said in [
        ({"confidence": 95}, "expected confidence to be between 0 and 1, got 95"),
        ({"confidence": 0.0}, "expected confidence to be between 0 and 1"),
        ({"resamples": 0}, "expected resamples to be a positive int, got 0"),
        ({"seed": -1}, "expected seed to be an int and not negative, got -1"),
        ({"seed": 1.0}, "expected seed to be an int and not negative, got 1.0"),
    ]:
        with pytest.raises(ValueError, match=said):
            summarize(ledger([1.0]), **changed)
    with pytest.raises(ValueError, match="expected one record per index, got two of index 0"):
        summarize(ledger([1.0]) * 2)
    with pytest.raises(ValueError, match="got return None and length None of index 5"):
        summarize([Episode(5, 1, 2)])
