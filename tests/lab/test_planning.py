"""Plans: numbers of episodes and runs, their power, and what tells too little."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from tdcollect import compare
from tdcollect.evaluation import episodes_needed
from tdcollect.lab.planning import (
    Aim,
    episodes_for_success,
    plan,
    power_for_success,
    rate_bound,
    runs_needed,
)

from ..evaluation.ledgers import run

RNG = np.random.default_rng(0)
EASE = RNG.normal(300, 80, size=50)
OLD, NEW = run(EASE), run(EASE + RNG.normal(3, 12, size=50))


def said(successes: str):
    """An evaluation with a letter for each episode: y or n."""
    return run([0.0] * len(successes), success={i: c == "y" for i, c in enumerate(successes)})


def test_a_pilot_of_two_gives_the_spread_of_paired_differences() -> None:
    found = plan([OLD, NEW], 5.0, power=0.9, names=["old", "new"])
    (d,) = compare(OLD, NEW, names="ab").differences
    (need,) = found.needs
    assert need.number == d.episodes_needed(5.0, 0.9)
    assert need.spread == d.difference.std
    # The variance over a chi-squared variable: this is its upper 80% limit.
    limit = d.difference.std * math.sqrt(49 / stats.chi2.ppf(0.2, 49))
    assert need.cautious == episodes_needed(5.0, limit, 0.9) > need.number
    assert "paired differences of new and old on 50 episodes" in found.pilot


def test_a_pilot_of_one_takes_the_correlation_that_is_stated() -> None:
    std = float(np.std(EASE, ddof=1))
    for correlation, spread in [(None, std * 2**0.5), (0.5, std), (0.98, std * 0.2)]:
        (need,) = plan([OLD], 10.0, correlation=correlation).needs
        assert need.spread == pytest.approx(spread)
        assert need.number == episodes_needed(10.0, need.spread)
    both = np.random.default_rng(1).multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], 100_000)
    (need,) = plan([run(both[:, 0])], 1.0, correlation=0.7).needs
    assert need.spread == pytest.approx(np.diff(both).std(), rel=0.01)


@pytest.mark.parametrize("differing", [0.1, 0.3, 1.0])
def test_the_power_for_success_is_that_of_mcnemars_exact_test(differing: float) -> None:
    """Against all outcomes of 12 episodes, each with the p-value of the test by scipy."""
    total, difference = 0.0, 0.08
    chances = [(differing + difference) / 2, (differing - difference) / 2, 1 - differing]
    for gained in range(13):
        for lost in range(13 - gained):
            if gained + lost and stats.binomtest(gained, gained + lost).pvalue <= 0.1:
                cell = [gained, lost, 12 - gained - lost]
                total += stats.multinomial.pmf(cell, 12, chances)
    assert power_for_success(12, difference, differing, 0.9) == pytest.approx(total, abs=1e-10)


@pytest.mark.parametrize(("difference", "differing"), [(0.1, 0.2), (-0.3, 0.3), (0.02, 0.1)])
def test_the_number_for_success_is_the_first_with_the_power(difference, differing) -> None:
    number = episodes_for_success(difference, differing, 0.85)
    assert power_for_success(number, abs(difference), differing) >= 0.85
    assert power_for_success(number - 1, abs(difference), differing) < 0.85


def test_success_is_planned_from_two_or_from_one() -> None:
    old, new = said("y" * 30 + "n" * 20), said("y" * 26 + "n" * 18 + "y" * 6)
    (need,) = plan([old, new], 0.1, on="success", names="ab").needs
    assert need.spread == 10 / 50
    assert need.number == episodes_for_success(0.1, 0.2) < need.cautious
    (need,) = plan([old, new], 0.5, on="success", names="ab").needs
    assert need.number == episodes_for_success(0.5, 0.5)  # no fewer differ than that
    (need,) = plan([old], 0.1, on="success").needs
    assert need.spread == pytest.approx(0.6 * 0.3 + 0.4 * 0.7)  # as if independent
    assert need.cautious is None
    (together,) = plan([old], 0.1, on="success", correlation=0.99).needs
    assert together.spread == pytest.approx(0.1)  # the least that the rates allow
    assert together.number < need.number
    with pytest.raises(ValueError, match=r"success rate from 0 to 1, got 0\.5 beside a rate of 0"):
        plan([old], 0.5, on="success")
    with pytest.raises(ValueError, match="expected an env that reports success"):
        plan([OLD], 0.1, on="success")
    with pytest.raises(ValueError, match="expected an env that reports success"):
        plan([OLD, NEW], 0.1, on="success", names="ab")


def test_runs_are_planned_for_a_test_of_two_samples() -> None:
    rng = np.random.default_rng(0)
    scores = [rng.normal(0, [0.1, 0.3], (40, 2)), rng.normal(0, [0.2, 0.2], (60, 2))]
    need = runs_needed(scores, Aim(0.2))
    variances = [array.var(0, ddof=1).sum() / 4 for array in scores]
    assert need.spread == pytest.approx(sum(variances) ** 0.5)
    size = 0.2 / (sum(variances) / 2) ** 0.5
    freedom, edge = 2 * need.number - 2, stats.t.ppf(0.975, 2 * need.number - 2)
    assert stats.nct.sf(edge, freedom, size * (need.number / 2) ** 0.5) >= 0.79
    z = 1.959964 + 0.841621
    assert need.number == math.ceil((z * need.spread / 0.2) ** 2 + 1.959964**2 / 4)
    parts = [array.var(0, ddof=1) / 4 for array in scores]
    freedom = need.spread**4 / sum(
        sum(part**2) / n for part, n in zip(parts, (39, 59), strict=True)
    )
    limit = need.spread * (freedom / stats.chi2.ppf(0.2, freedom)) ** 0.5
    small = runs_needed(scores, Aim(0.01))  # whose number tells one degree of freedom from the next
    assert small.cautious == math.ceil((z * limit / 0.01) ** 2 + 1.959964**2 / 4)
    few = runs_needed([array[:3] for array in scores], Aim(0.2))
    assert few.cautious / few.number > need.cautious / need.number


def test_what_cannot_be_planned_is_refused() -> None:
    for pilot, options, told in [
        ([OLD], {"difference": 0}, "a finite difference other than zero, got 0"),
        ([OLD], {"difference": 1, "power": 1}, "expected power to be between 0 and 1, got 1"),
        ([OLD], {"difference": 1, "on": "cost"}, "expected on to be 'return' or 'success'"),
        ([OLD], {"difference": 1, "correlation": 1}, "from 0 to below 1, and a pilot of one"),
        ([OLD, NEW], {"difference": 1, "correlation": 0.5, "names": "ab"}, "got 0.5 and 2"),
        ([OLD, NEW, NEW], {"difference": 1}, "expected one or two evaluations as a pilot, got 3"),
        ([run([1.0])], {"difference": 1}, "at least two completed episodes with finite returns"),
        ([run([1.0, math.nan])], {"difference": 1}, "with finite returns"),
    ]:
        with pytest.raises(ValueError, match=told):
            plan(pilot, **options)
    with pytest.raises(ValueError, match=r"episodes that differ from 0\.3 to 1, got 0\.2"):
        episodes_for_success(0.3, 0.2)


def test_a_plan_reads_like_this() -> None:
    found = plan([OLD, NEW], 5.0, names=["old", "new"])
    assert str(found).splitlines()[:4] == [
        "A difference of 5 in the mean return, with power 80% at significance 0.05.",
        "From the paired differences of new and old on 50 episodes.",
        "",
        "          needed  with 80% assurance  spread",
    ]
    assert repr(found) == f"Plan(the mean return, {found.needs[0].number} episodes)"
    assert json.loads(json.dumps(found.to_dict()))["needs"][0]["thing"] == "episodes"


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
