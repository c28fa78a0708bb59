"""Aggregates: equal to rliable's on the same resamples, in any order, and honest about few runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tdcollect.lab.aggregates import (
    METRICS,
    Aggregates,
    aggregate,
    draw_runs,
    policy_generator,
    probability_of_improvement,
    resampled,
    shares_above,
)

THRESHOLDS = np.linspace(-1, 2, 13)


def scores_of(shape: tuple[int, int], seed: int = 0, digits: int = 1) -> Any:
    """Scores with ties, around 0.5."""
    return np.random.default_rng([seed, *shape]).normal(0.5, 0.5, shape).round(digits)


def suite(**runs: int) -> dict[str, Any]:
    """Scores of policies on four tasks, by the number of their runs."""
    return {name: scores_of((count, 4), seed, 3) for seed, (name, count) in enumerate(runs.items())}


def profile(scores: Any, thresholds: Any) -> Any:
    return shares_above(np.searchsorted(thresholds, scores), len(thresholds))


def quick(scores: Any, **options: Any) -> Aggregates:
    return aggregate(scores, **{"resamples": 200, **options})


# rliable: its functions on the resamples that ours get


@pytest.fixture(scope="module")
def rliable() -> Any:
    library = pytest.importorskip("rliable.library")
    metrics = pytest.importorskip("rliable.metrics")

    class Both:
        iqm = staticmethod(metrics.aggregate_iqm)
        mean = staticmethod(metrics.aggregate_mean)
        median = staticmethod(metrics.aggregate_median)
        optimality_gap = staticmethod(metrics.aggregate_optimality_gap)
        probability_of_improvement = staticmethod(metrics.probability_of_improvement)
        profile = staticmethod(library.score_distributions)

    return Both


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "other_runs"), [((1, 1), 1), ((3, 1), 3), ((1, 5), 4), ((10, 7), 4)], ids=str
)
def test_metrics_and_profiles_are_rliables_on_the_same_resamples(
    rliable: Any, shape: tuple[int, int], other_runs: int
) -> None:
    scores, rng = scores_of(shape), np.random.default_rng(1)
    samples = resampled(scores, rng.integers(0, shape[0], (20, *shape)))
    for name, metric in METRICS.items():
        theirs = getattr(rliable, name)
        options = {"gamma": 0.3} if name == "optimality_gap" else {}
        close(metric(scores, 0.3), theirs(scores, **options))
        close(metric(samples, 0.3), [theirs(sample, **options) for sample in samples])
    close(profile(samples, THRESHOLDS), [rliable.profile(sample, THRESHOLDS) for sample in samples])
    other = scores_of((other_runs, shape[1]), seed=1)
    others = resampled(other, rng.integers(0, other_runs, (20, *other.shape)))
    expected = list(map(rliable.probability_of_improvement, samples, others))
    close(probability_of_improvement(samples, others), expected)
    close(
        probability_of_improvement(scores, other), rliable.probability_of_improvement(scores, other)
    )


# From the draws to the result


@pytest.mark.parametrize("drawn_runs", ["n", "n-1"])
def test_estimates_come_from_the_draws_of_each_policys_generator(drawn_runs: str) -> None:
    runs = {"a": 3, "b": 5, "c": 2}
    scores = {name: np.sort(scores_of((n, 4), n), 0) for name, n in runs.items()}
    found = quick(scores, thresholds=THRESHOLDS, drawn_runs=drawn_runs, gamma=0.4, seed=7)
    indices = {}
    for policy, array in scores.items():
        drawn = len(array) - (drawn_runs == "n-1")
        (indices[policy],) = draw_runs(policy_generator(7, policy), 200, array, drawn, block=200)
        sample = resampled(array, indices[policy])
        assert sample.shape == (200, drawn, 4)
        for metric in METRICS:
            estimate = found.estimates[policy][metric]
            assert estimate.value == pytest.approx(METRICS[metric](array, 0.4), abs=1e-12)
            assert estimate.interval is not None
            close(
                [estimate.interval.low, estimate.interval.high],
                np.quantile(METRICS[metric](sample, 0.4), [0.025, 0.975]),
            )
        shown = found.profiles[policy]
        close(shown.values, profile(array, THRESHOLDS))
        close([shown.low, shown.high], np.quantile(profile(sample, THRESHOLDS), [0.025, 0.975], 0))
    for pair in combinations(scores, 2):
        values = probability_of_improvement(*(resampled(scores[p], indices[p]) for p in pair))
        interval = found.improvement[pair[0]][pair[1]].interval
        assert interval is not None
        close([interval.low, interval.high], np.quantile(values, [0.025, 0.975]))


def test_the_same_seed_gives_the_same_bits_and_another_one_others() -> None:
    """Policies of equal scores are drawn apart."""
    scores = suite(a=3, b=5)
    assert quick(scores, seed=1) == quick(scores, seed=1)
    assert quick(scores, seed=1).estimates != quick(scores, seed=2).estimates
    found = quick({"a": scores["b"], "b": scores["b"]}, seed=1)
    assert found.estimates["a"]["mean"].value == found.estimates["b"]["mean"].value
    assert found.estimates["a"]["mean"].interval != found.estimates["b"]["mean"].interval
    assert found.improvement["a"]["b"].value == 0.5


def test_policies_do_not_depend_on_each_other_or_on_their_order() -> None:
    scores, options = suite(a=3, b=5, c=1), {"thresholds": [0.0, 0.5]}
    whole = quick(scores, **options)
    turned = quick(dict(reversed(scores.items())), **options)
    assert turned.policies == ("c", "b", "a")
    for name in ("estimates", "improvement", "profiles", "task_means"):
        assert getattr(turned, name) == getattr(whole, name)
    pair = quick({name: scores[name] for name in ("b", "a")}, **options)
    for policy in pair.policies:
        assert pair.estimates[policy] == whole.estimates[policy]
        assert pair.profiles[policy] == whole.profiles[policy]
    assert pair.improvement["a"]["b"] == whole.improvement["a"]["b"]


some_scores = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.just(3)),
    elements=st.floats(-1e3, 1e3).map(lambda value: round(value, 3)),
)


@settings(max_examples=30, deadline=None)
@given(first=some_scores, second=some_scores, data=st.data())
def test_results_hold_for_any_scores(first: Any, second: Any, data: st.DataObject) -> None:
    tasks = ["x", "y", "z"]
    found = quick({"a": first, "b": second}, tasks=tasks, resamples=20)

    # The order of tasks, and of runs within each task, changes no bit.
    order = data.draw(st.permutations(range(3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    turned = {
        "a": rng.permuted(first, axis=0)[:, order],
        "b": rng.permuted(second, axis=0)[:, order],
    }
    same = quick(turned, tasks=[tasks[place] for place in order], resamples=20)
    for name in ("estimates", "improvement", "thresholds", "profiles"):
        assert getattr(same, name) == getattr(found, name)
    assert {p: dict(sorted(m.items())) for p, m in same.task_means.items()} == found.task_means

    for policy, scores in [("a", first), ("b", second)]:
        estimates = found.estimates[policy]
        slack = 1e-9 * max(1.0, np.abs(scores).max())
        for metric in ("iqm", "mean", "median"):
            interval = estimates[metric].interval
            ends = [] if interval is None else [interval.low, interval.high]
            assert ends == sorted(ends)
            for value in [estimates[metric].value, *ends]:
                assert scores.min() - slack <= value <= scores.max() + slack
        assert estimates["optimality_gap"].value >= -slack
        shown = found.profiles[policy]
        for line in (shown.values, shown.low, shown.high):
            assert line is None or all(1 >= a >= b >= 0 for a, b in zip(line, line[1:]))  # noqa: B905, RUF007
        if shown.low is not None:
            assert np.all(np.less_equal(shown.low, shown.high))

    there, back = found.improvement["a"]["b"], found.improvement["b"]["a"]
    assert there.value + back.value == pytest.approx(1, abs=1e-15)
    assert 0 <= there.value <= 1
    if there.interval is not None and back.interval is not None:
        assert there.interval.low + back.interval.high == pytest.approx(1, abs=1e-15)
    json.dumps(found.to_dict(), allow_nan=False)


# Few runs, few tasks


def test_one_run_has_values_and_no_intervals_and_a_note() -> None:
    found = quick(suite(random=1, heuristic=1))
    for policy in found.policies:
        assert all(estimate.interval is None for estimate in found.estimates[policy].values())
        assert found.profiles[policy].low is found.profiles[policy].high is None
    assert found.improvement["random"]["heuristic"].interval is None
    assert found.notes()[0] == (
        "One run of random and heuristic: no interval. One run cannot show how much another "
        "training run would differ."
    )


@pytest.mark.parametrize("drawn_runs", ["n", "n-1"])
def test_two_to_four_runs_have_a_note_with_the_coverage(drawn_runs: str) -> None:
    for runs in (2, 3, 4, 5, 10):
        notes = "\n".join(quick(suite(ppo=runs), drawn_runs=drawn_runs).notes())
        said = re.search(rf"from {runs} runs held the truth in \d+% to \d+% of cases", notes)
        assert (said is not None) == (runs < 5)


def test_fewer_runs_drawn_widen_intervals_as_the_variance_of_a_mean_asks() -> None:
    scores = {"ppo": np.random.default_rng(0).normal(size=(3, 50))}
    widths = []
    for drawn_runs in ("n", "n-1"):
        interval = aggregate(scores, drawn_runs=drawn_runs).estimates["ppo"]["mean"].interval
        assert interval is not None
        widths.append(interval.high - interval.low)
    assert widths[1] / widths[0] == pytest.approx(np.sqrt(3 / 2), rel=0.03)


def test_what_is_odd_about_the_runs_is_told() -> None:
    equal = quick({"ppo": np.full((5, 1), 0.5)})
    interval = equal.estimates["ppo"]["iqm"].interval
    assert interval is not None
    assert interval.low == interval.high == 0.5
    assert any("All runs of ppo give the same" in note for note in equal.notes())
    assert "One task: the numbers say nothing about others." in equal.notes()
    single = quick(suite(ppo=10, random=1))
    assert single.estimates["random"]["iqm"].interval is None
    assert single.improvement["ppo"]["random"].interval is not None
    said = "Intervals of a probability of improvement against one run take that run as it is."
    assert said in single.notes()


# Groups, ranks and shapes of results


def test_a_group_has_the_aggregates_of_its_tasks_alone() -> None:
    scores, tasks = suite(a=3, b=5), ["w", "x", "y", "z"]
    groups = {"first": ["x", "w"], "all": tasks}
    found = quick(scores, tasks=tasks, groups=groups, thresholds=[0.0, 1.0])
    alone = quick(
        {name: array[:, [1, 0]] for name, array in scores.items()},
        tasks=["x", "w"],
        thresholds=[0.0, 1.0],
    )
    assert found.groups["first"] == alone
    assert found.groups["all"].estimates == found.estimates
    assert found.to_dict()["groups"]["first"]["tasks"] == ["x", "w"]
    assert "\n\nfirst: x, w\n" in str(found)


def test_the_best_policy_comes_first_and_equal_ones_share_a_rank() -> None:
    found = quick({"low": [[0.1]], "b": [[0.5]], "a": [[0.5]], "high": [[0.9]]})
    expected = [(1, "high"), (2, "a"), (2, "b"), (4, "low")]
    assert found.ranking() == expected
    by_gap = replace(found, metrics=("optimality_gap",))  # where lower is better
    assert by_gap.ranking() == expected


def test_default_thresholds_reach_from_zero_to_one_and_over_most_scores() -> None:
    assert quick({"a": [[0.5]]}).thresholds == tuple(np.linspace(0, 1, 101))
    wide = quick({"a": np.linspace(-2, 9, 101)[:, None], "b": [[0.5]]}).thresholds
    assert (wide[0], wide[-1]) == pytest.approx((-1.45, 8.45))


# Refusals


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ({}, {}, r"scores of at least one policy, as {policy: scores}, got none"),
        ({"": [[1.0]]}, {}, "expected policies with names, got one without: name it"),
        ({"a": [1.0]}, {}, r"as \[runs, tasks\].*got shape \[1\]: for one run, pass \[scores\]"),
        ({"a": [[]]}, {}, r"at least one of each, got shape \[1, 0\]"),
        ({"a": [["x"]]}, {}, "expected scores of 'a' as numbers"),
        ({"a": [[1.0], [1.0, 2.0]]}, {}, "expected scores of 'a' as numbers"),
        ({"a": [[1.0]], "b": [[1.0, 2.0]]}, {}, "by policy, {'a': 1, 'b': 2} tasks"),
        ({"a": [[1.0, None]]}, {"tasks": ["x", "y"]}, "NaN or infinite ones of 'a' on y: leave"),
        ({"a": [[np.inf]]}, {}, "expected a finite score of each run on each task"),
        ({"a": [[1.0]]}, {"tasks": ["x", "x"]}, r"1 distinct names of tasks.*got \['x', 'x'\]"),
        ({"a": [[1.0]]}, {"tasks": []}, "1 distinct names of tasks"),
        ({"a": [[1.0]]}, {"metrics": ["best"]}, r"among iqm, mean, median, .*, got \['best'\]"),
        ({"a": [[1.0]]}, {"metrics": []}, "at least one, got"),
        ({"a": [[1.0]]}, {"metrics": ["iqm", "iqm"]}, "expected distinct metrics"),
        ({"a": [[1.0]]}, {"groups": {"g": ["x"]}}, "'g' to name distinct tasks.*the tasks are 0"),
        ({"a": [[1.0]]}, {"groups": {"g": []}}, "at least one, got"),
        ({"a": [[1.0]]}, {"thresholds": [1.0, 0.0]}, "finite, rising scores, got"),
        ({"a": [[1.0]]}, {"thresholds": []}, "finite, rising scores, got"),
        ({"a": [[1.0]]}, {"drawn_runs": "all"}, "drawn_runs to be 'n' or 'n-1', got 'all'"),
        ({"a": [[1.0]]}, {"gamma": np.nan}, "expected a finite gamma, got nan"),
        ({"a": [[1.0]]}, {"confidence": 95}, "confidence to be between 0 and 1"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(
    scores: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quick(scores, **options)
