"""The rule of races: its capital, its interval, its ends, and what it refuses."""

from __future__ import annotations

import json
import math
from itertools import chain, combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdcollect.evaluation.ledger import FAILED, LOST, Episode
from tdcollect.lab.sequential import (
    BETS,
    LOG_WEIGHTS,
    TOLERANCE,
    Differences,
    Rule,
    Standing,
    e_holm,
)

DIFFERENCES = st.lists(st.floats(-1, 1), min_size=1, max_size=12)
LIMIT = math.log(20)


def records(values: list[Any], first: int = 0, on: str = "return") -> list[Episode]:
    """One record per value, completed; of None, one that failed."""
    key = "episode_return" if on == "return" else "success"
    return [
        Episode(first + at, 0, 0, status=FAILED)
        if value is None
        else Episode(first + at, 0, 0, **{key: value})
        for at, value in enumerate(values)
    ]


def race(rule: Rule, values: dict[str, list[Any]], block: int = 10) -> Standing:
    """Race over values of the policies, until it ends or the values do."""
    standing = Standing(rule)
    longest = len(next(iter(values.values())))
    for first in range(0, longest, block):
        if standing.ended:
            break
        standing.add(
            {
                name: records(values[name][first : first + block], first, rule.on)
                for name in standing.playing
            }
        )
    return standing


def draws(chances: dict[str, float], count: int, seed: int = 0) -> dict[str, list[bool]]:
    rng = np.random.default_rng(seed)
    return {name: (rng.random(count) < chance).tolist() for name, chance in chances.items()}


# The capital


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(0.05, 1)), min_size=1, max_size=3),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_the_capital_is_a_martingale_at_the_true_mean(
    outcomes: list[tuple[float, float]], episodes: int
) -> None:
    total = sum(weight for _, weight in outcomes)
    mean = sum(value * weight / total for value, weight in outcomes)
    if not -0.99 < mean < 0.99:
        return
    expected = 0.0
    for drawn in product(outcomes, repeat=episodes):
        chance = math.prod(weight / total for _, weight in drawn)
        found = Differences.of([value for value, _ in drawn], 1.0)
        expected += chance * math.exp(found.log_capital(mean))
    assert expected == pytest.approx(1, rel=1e-9)


def test_the_capital_is_that_of_the_formula() -> None:
    values, reach, mean = [3.0, -1.5, 3.0, 0.0], 5.0, 0.7
    expected = sum(
        weight * math.prod(1 - bet + bet * (d + reach) / (mean + reach) for d in values)
        for bet, weight in zip(BETS, np.exp(LOG_WEIGHTS), strict=True)
    )
    found = math.exp(Differences.of(values, reach).log_capital(mean))
    assert found == pytest.approx(expected, rel=1e-12)


# The interval


@given(DIFFERENCES, st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_the_lower_end_is_the_one_of_a_search_over_all_means(
    values: list[float], times: int
) -> None:
    found = Differences.of(values * times, 1.0)
    end = found.lower_end(-1.0, LIMIT, [0.0])
    mean = float(np.mean(values))
    below = [m for m in np.linspace(-0.999, 0.999, 400) if m < mean]
    excluded = [m for m in below if found.log_evidence(float(m)) >= LIMIT]
    assert all(m <= end + 1e-9 for m in excluded)
    assert all(m > end for m in below if m not in excluded)
    assert end <= max(mean, -1.0) + 1e-9


def test_evidence_is_convex_in_the_mean_and_none_at_the_mean_of_the_sample() -> None:
    values = np.random.default_rng(1).uniform(-1, 0.6, 40)
    found = Differences.of(values.tolist(), 1.0)
    grid = np.linspace(-0.9, 0.9, 61)
    logs = np.array([found.log_evidence(float(m)) for m in grid])
    assert (np.diff(logs, 2) > -1e-9).all()
    assert found.log_evidence(float(values.mean())) <= 1e-12


def test_the_ends_never_widen_and_hold_the_difference() -> None:
    rng = np.random.default_rng(2)
    values = {name: rng.uniform(0, 10, 300).tolist() for name in "ab"}
    looks = race(Rule(("a", "b"), value_range=(0, 10)), values).history["a", "b"]
    assert len(looks) == 30
    for before, after in pairwise(looks):
        assert before.low <= after.low <= after.high <= before.high
    assert looks[-1].low < looks[-1].difference < looks[-1].high
    assert looks[-1].high - looks[-1].low < 5
    assert looks[-1].difference == pytest.approx(np.mean(values["a"]) - np.mean(values["b"]))


def test_a_null_that_is_just_excluded_is_not_in_the_interval() -> None:
    found = Differences.of([0.3, -0.1, 0.5] * 60, 1.0)
    for null in (0.0, 0.1):
        assert null <= found.lower_end(-1.0, found.log_evidence(null), [null]) < null + 1e-3


def test_ends_that_would_pass_each_other_meet() -> None:
    values = {"a": [0.5] * 3000 + [0.0] * 6000, "b": [0.5] * 3000 + [1.0] * 6000}
    before, after = race(Rule(("a", "b"), value_range=(0, 1)), values, 3000).history["a", "b"]
    assert before.low < 0 < before.high
    assert (after.low, after.high) == (before.low, before.low)


def test_an_end_is_exact_to_the_tolerance() -> None:
    found = Differences.of([0.3, -0.1, 0.5] * 60, 1.0)
    end = found.lower_end(-1.0, LIMIT, [])
    assert found.log_evidence(end) >= LIMIT > found.log_evidence(end + 2 * TOLERANCE)


# The same input gives the same bits, and names do not matter


@pytest.mark.parametrize("block", [1, 7])
def test_the_same_records_give_the_same_bits(block: int) -> None:
    rng = np.random.default_rng(3)
    values = {name: rng.normal(size=140).tolist() for name in "abc"}
    rule = Rule(tuple("abc"), value_range=(-6, 6), margin=2)
    once, again = (race(rule, values, block) for _ in range(2))
    assert json.dumps(once.outcome) == json.dumps(again.outcome)
    assert once.history == again.history


@given(st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_exchanged_names_exchange_the_result(seed: int) -> None:
    values = draws({"a": 0.45, "b": 0.7}, 200, seed)
    one = race(Rule(("a", "b"), "success", margin=0.3), values).outcome
    other = race(Rule(("b", "a"), "success", margin=0.3), values).outcome
    (first,), (second,) = one["pairs"], other["pairs"]
    swap = {"better": "worse", "worse": "better"}
    assert first["decisions"] == [swap.get(word, word) for word in second["decisions"]]
    assert first["interval"] == [-end for end in reversed(second["interval"])]
    assert first["difference"] == -second["difference"]
    found, same = first["log_evidence"], second["log_evidence"]
    assert (found["better"], found["below margin"]) == (same["worse"], same["above -margin"])
    assert (one["out"], one["episodes"]) == (other["out"], other["episodes"])


def test_values_after_the_last_block_change_nothing() -> None:
    values = draws({"a": 0.2, "b": 0.9}, 400)
    ended = race(Rule(("a", "b"), "success"), values)
    assert ended.ended
    changed = {name: [*v[: ended.episodes], *v[::-1]] for name, v in values.items()}
    assert race(Rule(("a", "b"), "success"), changed).outcome == ended.outcome


# The ends of a race


@pytest.mark.parametrize(("chance", "word"), [(0.3, "worse"), (0.9, "better")])
def test_a_race_ends_when_the_better_policy_is_known(chance: float, word: str) -> None:
    standing = race(Rule(("a", "b"), "success"), draws({"a": chance, "b": 0.6}, 2000))
    (pair,) = standing.outcome["pairs"]
    loser = "a" if word == "worse" else "b"
    assert pair["decisions"] == [word]
    assert standing.out == {loser: {"by": [*{"a", "b"} - {loser}], "episodes": standing.episodes}}
    assert loser not in standing.playing
    assert 0 < standing.episodes < 400


@given(st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_of_two_policies_one_is_out_when_the_interval_excludes_zero(seed: int) -> None:
    values = draws({"a": 0.5, "b": 0.65}, 150, seed)
    standing = race(Rule(("a", "b"), "success"), values, block=1)
    *before, last = standing.history["a", "b"]
    assert all(look.low < 0 < look.high for look in before)
    assert standing.ended == (not last.low < 0 < last.high)


def test_both_are_said_of_a_difference_that_is_sure_and_small() -> None:
    values = {"a": [True] * 2000, "b": [True, True, True, True, False] * 400}
    standing = race(Rule(("a", "b"), "success", margin=0.4), values, block=2000)
    (pair,) = standing.outcome["pairs"]
    assert pair["decisions"] == ["better", "no difference larger than margin"]


def test_a_race_that_is_not_decided_says_so() -> None:
    standing = race(Rule(("a", "b"), "success", margin=0.1), draws({"a": 0.5, "b": 0.5}, 50))
    assert not standing.ended
    assert standing.outcome["pairs"][0]["decisions"] == ["undecided"]
    assert standing.playing == ("a", "b")


def test_a_race_before_its_first_block() -> None:
    outcome = Standing(Rule(("a", "b"), value_range=(0, 500))).outcome
    assert (outcome["ended"], outcome["episodes"]) == (False, 0)
    (pair,) = outcome["pairs"]
    assert (pair["difference"], pair["interval"]) == (None, [-500.0, 500.0])
    assert pair["decisions"] == ["undecided"]


def test_without_a_range_signs_count_and_the_result_says_so() -> None:
    # Mostly a little higher, rarely much lower: higher on more episodes, with the lower mean.
    values = {"a": [1.0, 1.0, 1.0, -1000.0] * 50, "b": [0.0] * 200}
    signs = race(Rule(("a", "b")), values)
    assert signs.playing == ("a",)
    assert "higher on more episodes" in signs.outcome["question"]
    look = signs.history["a", "b"][-1]
    assert look.difference == pytest.approx(0.5, abs=0.05)
    means = race(Rule(("a", "b"), value_range=(-1000, 1)), values)
    assert means.playing != ("a",)
    assert means.outcome["question"] == "is the mean return higher?"


def test_of_a_cost_the_lower_one_is_better() -> None:
    rng = np.random.default_rng(4)
    values = {"a": rng.uniform(0, 5, 400).tolist(), "b": rng.uniform(2, 8, 400).tolist()}
    mirrored = {name: [8 - value for value in found] for name, found in values.items()}
    cost = race(Rule(("a", "b"), value_range=(0, 8), lower_is_better=True), values)
    gain = race(Rule(("a", "b"), value_range=(0, 8)), mirrored)
    assert cost.playing == gain.playing == ("a",)
    assert cost.episodes == gain.episodes
    (one,), (other,) = cost.outcome["pairs"], gain.outcome["pairs"]
    assert one["decisions"] == other["decisions"] == ["better"]
    assert one["interval"] == pytest.approx([-end for end in reversed(other["interval"])])
    assert cost.rule.question == "is the mean return lower?"


# Several policies


def test_policies_that_are_out_play_no_more() -> None:
    chances = {"a": 0.05, "b": 0.6, "c": 0.9, "d": 0.9}
    standing = race(Rule(tuple("abcd"), "success"), draws(chances, 1000))
    assert [*standing.out] == ["a", "b"]
    assert standing.playing == ("c", "d")
    assert all(len(found["by"]) == len(set(found["by"])) for found in standing.out.values())
    played = {name: found["episodes"] for name, found in standing.out.items()}
    assert 0 < played["a"] < played["b"] < standing.episodes
    for names, looks in standing.history.items():
        assert looks[-1].episodes == min(played.get(name, 1000) for name in names)


def test_several_policies_end_when_those_left_are_within_the_margin() -> None:
    chances = {"a": 0.9, "b": 0.9, "c": 0.4}
    standing = race(Rule(tuple("abc"), "success", margin=0.15), draws(chances, 3000))
    assert standing.ended
    assert standing.playing == ("a", "b")
    assert standing.out.keys() == {"c"}
    words = {tuple(p["policies"]): p["decisions"] for p in standing.outcome["pairs"]}
    assert words["a", "b"] == ["no difference larger than margin"]
    low, high = standing.outcome["pairs"][0]["interval"]
    assert -0.15 <= low < high <= 0.15
    assert words["a", "c"] == words["b", "c"] == ["better"]


def test_a_policy_is_out_by_each_that_it_is_shown_to_be_worse_than() -> None:
    standing = race(Rule(tuple("abc"), "success"), draws({"a": 0.0, "b": 0.9, "c": 0.9}, 40), 40)
    assert standing.out["a"]["by"] == ["b", "c"] or standing.out["a"]["by"] == ["c", "b"]


def test_signs_that_go_round_in_a_circle_leave_one_policy() -> None:
    values = {"a": [1.0, 2.0, 3.0] * 200, "b": [2.0, 3.0, 1.0] * 200, "c": [3.0, 1.0, 2.0] * 200}
    standing = race(Rule(tuple("abc")), values, block=600)
    assert len(standing.playing) == 1
    assert standing.ended
    decided = [pair["decisions"] for pair in standing.outcome["pairs"]]
    assert decided == [["worse"], ["better"], ["worse"]]


@given(st.lists(st.floats(-5, 8), min_size=1, max_size=5), st.floats(0.01, 0.3))
@settings(max_examples=200, deadline=None)
def test_e_holm_is_the_closed_test_with_averages(logs: list[float], alpha: float) -> None:
    evidence = dict(enumerate(logs))
    sets = list(chain.from_iterable(combinations(evidence, size) for size in range(1, 6)))
    rejected = {
        key
        for key in evidence
        if all(
            np.mean([math.exp(evidence[other]) for other in group]) >= 1 / alpha
            for group in sets
            if key in group
        )
    }
    assert set(e_holm(evidence, alpha)) == rejected


def test_e_holm_gives_the_strongest_first() -> None:
    assert e_holm({"x": 5.0, "y": 900.0, "z": -9.0, "w": 7.0}, 0.05) == ["y", "w", "x"]
    assert e_holm({"x": 4.0, "y": -9.0, "z": -9.0}, 0.05) == []


# Failed and lost episodes


@pytest.mark.parametrize("status", [FAILED, LOST])
def test_failed_episodes_count_as_the_worst_value_or_not_at_all(status: str) -> None:
    gone = Episode(0, 0, 0, status=status)
    names = ("a", "b")
    assert Rule(names, value_range=(-5, 5)).value("a", gone) == -5
    assert Rule(names, value_range=(-5, 5), lower_is_better=True).value("a", gone) == 5
    assert Rule(names, "success").value("a", gone) == 0
    for rule in (Rule(names), Rule(names, "success", failed="leave out")):
        assert rule.failed == "leave out"
        assert rule.value("a", gone) is None


def test_pairs_with_a_failed_episode_are_left_out() -> None:
    values = {"a": [1.0, None, 3.0, None], "b": [0.0, 0.0, None, None]}
    standing = race(Rule(("a", "b"), value_range=(0, 5), failed="leave out"), values)
    (look,) = standing.history["a", "b"]
    assert (look.episodes, look.pairs, look.difference) == (4, 1, 1.0)
    assert standing.outcome["failed"] == "leave out"
    (worst,) = race(Rule(("a", "b"), value_range=(0, 5)), values).history["a", "b"]
    assert (worst.pairs, worst.difference) == (4, 1.0)


def test_a_pair_without_values_stays_open() -> None:
    standing = race(Rule(("a", "b")), {"a": [None] * 20, "b": [1.0] * 20})
    look = standing.history["a", "b"][-1]
    assert look == (20, 0, None, -1.0, 1.0)


# Settings, and what is refused


def test_a_rule_goes_through_json() -> None:
    rule = Rule(["a", "b"], value_range=[0, 500], margin=10)
    assert Rule(**json.loads(json.dumps(rule.to_dict()))) == rule
    assert rule.failed == "worst"
    json.dumps(race(rule, {"a": [1.0] * 20, "b": [2.0] * 20}).outcome, allow_nan=False)


TWO = ("a", "b")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"names": ("a",)}, r"two or more policies that differ, got \['a'\]; to run one policy"),
        ({"names": ("a", "a")}, "policies that differ"),
        ({"names": "ab"}, "expected names to be the names of policies, got 'ab'"),
        ({"names": ("a", "")}, "names of policies"),
        ({"on": 3}, "expected on to be 'return', 'success' or the name of a metric, got 3"),
        ({"alpha": 1}, "expected alpha to be between 0 and 1, got 1"),
        ({"failed": "skip"}, "expected failed to be 'worst' or 'leave out', got 'skip'"),
        ({"failed": "worst"}, "a range of returns with failed='worst', got none; give the range"),
        ({"margin": 1}, "a range of returns with a margin, got margin=1 alone; give the range"),
        ({"margin": 0, "on": "success"}, "margin to be above 0 and below 1, the largest"),
        ({"margin": 500, "value_range": (0, 500)}, "above 0 and below 500.*got 500"),
        ({"margin": "x", "on": "success"}, "got 'x'"),
        ({"value_range": (0, 1), "on": "success"}, "no range with on='success', got .0, 1.; leave"),
        ({"value_range": (1, 0)}, "from a finite number to a higher one, got .1, 0."),
        ({"value_range": (0, math.inf)}, "from a finite number to a higher one"),
        ({"value_range": 5}, "expected a range to be two numbers, got 5"),
        ({"value_range": (0, 1, 2)}, "expected a range to be two numbers"),
        ({"value_range": "ab"}, "expected a range to be two numbers"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(**{"names": TWO} | given)


@pytest.mark.parametrize("value", [500.5, -1.0])
def test_a_return_outside_the_range_names_policy_and_episode(value: float) -> None:
    standing = Standing(Rule(TWO, value_range=(0, 500)))
    standing.add({name: records([1.0]) for name in TWO})
    message = rf"from 0 to 500, got {value} in episode 2 of policy 'b'; give a range.*never clipped"
    with pytest.raises(ValueError, match=message):
        standing.add({"a": records([1.0, 2.0], 1), "b": records([3.0, value], 1)})
    assert standing.episodes == 1  # the block is not added


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_return_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"a finite return, got {value} in episode 0 of policy"):
        race(Rule(TWO), {"a": [value], "b": [0.0]})


def test_an_episode_without_success_is_refused() -> None:
    with pytest.raises(ValueError, match="to report success, got none in episode 0 of policy 'a'"):
        Rule(TWO, "success").value("a", Episode(0, 0, 0, episode_return=1.0))
