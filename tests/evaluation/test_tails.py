"""The bad end of a ledger: quantiles, worst parts, failure rates, worst episodes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from tdcollect.evaluation.tails import rate_bound, tails, worst_mean

from .ledgers import ledger, unfinished

RETURNS = np.random.default_rng(0).exponential(100, size=200)


def test_quantiles_lie_in_intervals_between_two_returns() -> None:
    found = tails(ledger(RETURNS))
    for q in found.quantiles:
        assert q.value == np.quantile(RETURNS, q.share)
        assert q.interval.low <= q.value <= q.interval.high
        assert {q.interval.low, q.interval.high} <= {*RETURNS.tolist(), -math.inf, math.inf}


@pytest.mark.parametrize(("count", "share"), [(30, 0.5), (100, 0.05), (200, 0.1), (57, 0.9)])
def test_intervals_of_quantiles_hold_the_truth_as_often_as_they_say(count, share) -> None:
    """Exactly, for any distribution: the number of returns below the true quantile is binomial."""
    found = {q.share: q for q in tails(ledger(np.arange(count, dtype=float))).quantiles}[share]
    low, high = found.interval.low, min(found.interval.high, count)
    below = np.arange(count + 1)
    holds = (below > low) & (below <= high)  # returns number low and high, from 0
    assert 0.95 <= stats.binom.pmf(below, count, share)[holds].sum() < 0.985


def test_few_episodes_leave_an_end_open() -> None:
    first, *_, last = tails(ledger(RETURNS[:20])).quantiles
    assert first.interval.low == -math.inf
    assert last.interval.high == math.inf


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.333, 0.9])
@pytest.mark.parametrize("count", [7, 30, 200])
def test_the_worst_mean_is_the_conditional_value_at_risk(count: int, share: float) -> None:
    """By Rockafellar and Uryasev's formula (Journal of Risk 2, 2000), whose best level is a return.

    Below one episode in all, it is the lowest return in both.
    """
    returns = RETURNS[:count]
    levels = [t - np.maximum(t - returns, 0).mean() / share for t in returns]
    assert worst_mean(returns, share) == pytest.approx(max(levels))
    assert worst_mean(np.full(count, 0.1), share) == pytest.approx(0.1, abs=0, rel=1e-15)


def test_the_bound_of_a_rate_without_failures_is_the_rule_of_three() -> None:
    assert rate_bound(0, 100, 0.95) == pytest.approx(1 - 0.05**0.01)
    assert rate_bound(0, 1000, 0.95) == pytest.approx(3 / 1000, rel=5e-3)
    assert rate_bound(10, 10, 0.95) == 1
    assert rate_bound(3, 50, 0.9) == pytest.approx(stats.beta.ppf(0.9, 4, 47))


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3])
def test_the_bound_is_too_low_in_at_most_one_case_of_twenty(rate: float) -> None:
    counts = np.arange(101)
    missed = [rate_bound(k, 100, 0.95) < rate for k in counts.tolist()]
    assert stats.binom.pmf(counts, 100, rate)[missed].sum() <= 0.05


def test_a_failure_is_no_success_or_a_low_return_or_no_return() -> None:
    said = {0: True, 1: False, 2: True, 3: True}
    records = ledger([5.0, 4.0, 3.0, 2.0, 1.0, float("nan")], failed=[3], success=said)
    found = tails(records).failures
    assert (found.failures, found.count, found.what) == (2, 4, "were no success")
    found = tails(records, below=4.0).failures
    assert (found.failures, found.count) == (4, 6)
    found = tails(ledger([5.0, 4.0], failed=[0])).failures
    assert (found.failures, found.count, found.rate) == (1, 2, 0.5)
    assert found.bound == rate_bound(1, 2, 0.95)
    assert tails([]).failures is None


def test_the_worst_episodes_are_failed_ones_then_low_returns() -> None:
    records = ledger([5.0, float("nan"), 1.0, 1.0, 7.0, 0.0], failed=[4])
    assert [e.index for e in tails(records, worst=5).worst] == [4, 1, 5, 2, 3]
    found = tails(records[:1] + records[2:])
    assert found.to_dict()["worst"] == [4, 5, 2, 3, 0]
    json.dumps(found.to_dict())


def test_tails_read_like_this() -> None:
    found = tails(ledger(RETURNS.round(), failed=[3]), below=10)
    assert str(found).splitlines()[:5] == [
        "200 episodes, 199 completed",
        "",
        "                       return  95% interval",
        "5% quantile              6.80       [1, 10]",
        "10% quantile            11.00       [7, 21]",
    ]
    assert "16 of 200 episodes did not reach a return of 10: 8%, and with 95% " in str(found)
    assert "The worst 5% are 9.95 episodes: their mean says little about others." in str(found)
    nan = tails(ledger([1.0, float("nan")]))
    assert "No return, or one that is NaN or infinite: no quantiles." in str(nan)
    assert "quantile" not in str(tails(ledger([1.0, 2.0]))).splitlines()[0]
    for tail in (found, nan):
        assert tail._repr_html_().startswith("<p>")


def test_settings_out_of_range_are_refused() -> None:
    for settings, said in [
        ({"confidence": 1}, "expected confidence to be between 0 and 1, got 1"),
        ({"worst": -1}, "expected worst to be an int and not negative, got -1"),
        ({"below": float("nan")}, "expected below to be a finite return, or None, got nan"),
    ]:
        with pytest.raises(ValueError, match=said):
            tails(ledger([1.0]), **settings)


def test_summary_prints_what_evaluate_did_or_the_bad_end(typed, here) -> None:
    command = "evaluate CartPole-v1 --policy @:lean --episodes 30 --output-dir runs/lean"
    out = typed(command)[1]
    status, again, _ = typed("summary runs/lean")
    assert (status, again) == (0, out.rpartition("report ")[0])
    status, said, _ = typed("summary runs/lean --tails --worst 2 --below 40")
    assert status == 0
    first, second = [line.strip() for line in said.splitlines() if "  tdcollect replay" in line]
    assert typed(first.removeprefix("tdcollect "))[0] == 0
    assert first != second
    told = json.loads(typed("summary runs/lean --tails --below 40 --json")[1])
    lowest = min(told["tails"]["worst_means"], key=lambda one: one["share"])
    assert told["returns"]["min"] <= lowest["mean"] < told["returns"]["mean"]
    assert told["tails"]["failures"]["count"] == 30
    assert told["tails"]["quantiles"][0]["interval"]["low"] is None
    assert typed("summary runs/lean --below 40")[0] == 2
    unfinished(here / "runs" / "lean", 12)
    status, _, err = typed("summary runs/lean")
    assert status == 0
    assert "runs/lean is unfinished: it lacks 18 episodes" in err
