"""Differences of policies on shared episodes: their intervals, and Holm's correction over all."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tdcollect.evaluation.statistics import Interval
from tdcollect.lab import aggregates, export
from tdcollect.lab.aggregates import METRICS, Aggregates, aggregate, generator, policy_generator

RUNS = {"a": 3, "b": 2, "c": 1}


def played(runs: dict[str, int], tasks: int = 2, count: int = 8, seed: int = 0) -> dict[str, Any]:
    """Scores of episodes ``[runs, tasks, episodes]``, with starts that all policies share."""
    rng = np.random.default_rng(seed)
    ease = rng.normal(0, 0.4, (tasks, count))
    return {
        name: ease
        + 0.2 * place
        + rng.normal(0, 0.1, (of, tasks, 1))
        + rng.normal(0, 0.3, (of, tasks, count))
        for place, (name, of) in enumerate(runs.items())
    }


def quick(episodes: dict[str, Any], **options: Any) -> Aggregates:
    scores = {policy: np.nanmean(array, -1) for policy, array in episodes.items()}
    return aggregate(scores, episodes=episodes, **{"resamples": 99, **options})


# By a plain loop over resamples


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("failed", [False, True])
def test_differences_come_from_the_draws_of_runs_and_of_episodes(metric: str, failed: bool) -> None:
    episodes = played(RUNS)
    if failed:
        episodes["a"][0, 1, 3] = episodes["c"][0, 0, 5] = np.nan
    found = quick(episodes, metrics=[metric], gamma=0.4, seed=7, confidence=0.9)
    numbers = generator(7, 0).integers(0, 8, (99, 7, 1))[..., 0]
    resampled = {}
    for policy, array in episodes.items():
        order = np.stack([np.lexsort(array[:, task].T) for task in range(2)], 1)
        array = np.take_along_axis(array, order[..., None], 0)  # of runs, which are a set
        whole, fewer = np.nanmean(array, -1), max(1, len(array) - 1)
        indices = policy_generator(7, policy).integers(0, len(array), (99, fewer, 2))
        rows = []
        for chosen, drawn in zip(indices, numbers, strict=True):
            means = np.nanmean(array[..., drawn], -1)
            of_runs, of_both = (np.take_along_axis(one, chosen, 0) for one in (whole, means))
            rows.append([METRICS[metric](sample, 0.4) for sample in (of_runs, means, of_both)])
        resampled[policy] = np.transpose(rows)
    for a, b in combinations(RUNS, 2):
        of_runs, of_episodes, of_both = resampled[a] - resampled[b]
        both = np.var(of_both - of_runs - of_episodes)
        alone = np.var(of_runs), np.var(of_episodes)
        variance = max(*alone, sum(alone) - both)
        parts = [(np.nanmean(episodes[p], -1)[:, t].var(ddof=1) / RUNS[p] / 4, RUNS[p] - 1)
                 for p in (a, b) if RUNS[p] > 1 for t in range(2)]  # fmt: skip
        ahead = episodes[a].mean((0, 1)) - episodes[b].mean((0, 1))
        ahead = ahead[~np.isnan(ahead)]
        parts += [(ahead.var(ddof=1) / len(ahead), len(ahead) - 1)]
        freedom = sum(part for part, _ in parts) ** 2 / sum(part**2 / of for part, of in parts)
        value = found.estimates[a][metric].value - found.estimates[b][metric].value
        law = stats.t(freedom, value, np.sqrt(variance))
        one = found.differences[a][b]
        assert one.value == value
        assert one.interval is not None
        assert (one.interval.low, one.interval.high) == pytest.approx(law.interval(0.9), abs=1e-9)
        assert one.p_value == pytest.approx(2 * min(law.cdf(0), law.sf(0)), rel=1e-6)


def test_single_runs_are_compared_nearly_as_by_a_paired_t_test_without_a_p_value() -> None:
    episodes = played({"a": 1, "b": 1}, tasks=1, count=100)
    one = quick(episodes, metrics=["mean"], resamples=20_000).differences["b"]["a"]
    exact = stats.ttest_rel(episodes["b"].ravel(), episodes["a"].ravel())
    low, high = exact.confidence_interval()
    assert one.interval is not None
    assert one.interval.high - one.interval.low == pytest.approx(high - low, rel=0.03)
    assert one.p_value is None  # of other training runs, two say nothing
    assert "two such policies have no p-value" in str(quick(episodes, metrics=["mean"]))


# For any scores


def holm(p_values: list[float]) -> list[float]:
    """Holm's adjusted p-values by definition."""
    ranks = np.argsort(np.argsort(p_values, kind="stable"))
    weighted = (len(ranks) - ranks) * p_values
    return [min(1.0, weighted[ranks <= rank].max()) for rank in ranks]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5), st.data())
def test_differences_hold_for_any_scores(
    seed: int, tasks: int, count: int, data: st.DataObject
) -> None:
    runs = data.draw(st.fixed_dictionaries({name: st.integers(1, 4) for name in "abcd"}))
    episodes = played(runs, tasks, count, seed)
    episodes["d"] = episodes["a"]  # by another name
    found = quick(episodes)
    for a, b in permutations(episodes, 2):
        one, back = found.differences[a][b], found.differences[b][a]
        assert (one.value, one.p_value) == (-back.value, back.p_value)
        assert (one.interval is None) == (count == 1 and len(episodes[a]) == len(episodes[b]) == 1)
        if one.interval is not None:
            assert one.interval == Interval(-back.interval.high, -back.interval.low)
            leaves_out_zero = one.interval.low > 0 or one.interval.high < 0
            assert one.p_value is None or leaves_out_zero == (one.p_value < 0.05)
    same = found.differences["a"]["d"]
    expected = 1.0 if runs["a"] > 1 else None
    assert (same.value, same.p_value, same.adjusted_p_value) == (0.0, expected, expected)
    each = [found.differences[a][b] for a, b in combinations(episodes, 2)]
    tested = [(one.p_value, one.adjusted_p_value) for one in each if one.p_value is not None]
    assert [adjusted for _, adjusted in tested] == pytest.approx(holm([p for p, _ in tested]))
    for (p, adjusted), (q, other) in permutations(tested, 2):
        assert p <= adjusted <= 1
        assert p > q or adjusted <= other
    # No order changes a bit, nor do other policies change p-values of a pair.
    order = data.draw(st.permutations(range(tasks)))
    rng = np.random.default_rng(seed)
    turned = {
        policy: np.stack([rng.permutation(array[:, task]) for task in order], 1)
        for policy, array in reversed(episodes.items())
    }
    again = quick(turned, tasks=list(map(str, order)))
    assert again.differences == found.differences
    pair = quick({policy: episodes[policy] for policy in "ab"}).differences["a"]["b"]
    assert pair == replace(found.differences["a"]["b"], adjusted_p_value=pair.adjusted_p_value)


def test_seeds_decide_and_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = played(RUNS)
    expected = quick(episodes, seed=1)
    assert quick(episodes, seed=2).differences != expected.differences
    for held in (1, 100):
        monkeypatch.setattr(aggregates, "BATCH_VALUES", held)
        assert quick(episodes, seed=1) == expected


def test_what_no_resample_changes_has_no_p_value() -> None:
    episodes = played({"a": 1, "b": 1})
    episodes["b"] = episodes["a"] + 0.25
    one = quick(episodes).differences["b"]["a"]
    assert (one.p_value, one.adjusted_p_value) == (None, None)
    assert one.interval is not None
    assert (one.interval.low, one.interval.high) == pytest.approx((0.25, 0.25))
    rare = played({"a": 1, "b": 1})
    rare["b"][0, 0, 1:] = np.nan  # so that some resample has no episode of this task
    one = quick(rare).differences["b"]["a"]
    assert (one.interval, one.p_value) == (None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c": None}, r"of the same policies as scores, \['a', 'b', 'c'\], got \['a', 'b'\]"),
        ({"a": np.zeros((3, 2))}, r"of 'a' as \[runs, tasks, episodes\], .*got shape \(3, 2\)"),
        ({"b": np.zeros((2, 2, 5))}, r"of 'b' as .*, \(2, 2, 8\), with its.*shape \(2, 2, 5\)"),
        ({"b": np.zeros((2, 2, 8))}, "with its scores as their means.* or other means"),
        ({"c": np.full((1, 2, 8), np.nan)}, "of 'c' .* or other means"),
    ],
)
def test_episodes_that_are_not_of_the_scores_are_refused(change: Any, message: str) -> None:
    episodes = played(RUNS)
    scores = {policy: array.mean(-1) for policy, array in episodes.items()}
    given = {policy: array for policy, array in {**episodes, **change}.items() if array is not None}
    with pytest.raises(ValueError, match=message):
        aggregate(scores, episodes=given)


# Shown


def test_all_pairs_are_shown_with_what_was_adjusted_for(tmp_path: Path) -> None:
    found = quick(played(RUNS))
    assert found.pairs() == [("c", "b"), ("c", "a"), ("b", "a")]
    said = "by Holm's correction for 3 comparisons: all pairs of policies of this leaderboard, in"
    text = str(found)
    for shown in (text, found._repr_html_()):
        assert said.replace("'", "&#x27;" if "<table" in shown else "'") in shown
        assert "c minus b" in shown
    assert "b minus a" not in text  # which has those of the best
    path = export(found, "csv", tmp_path / "l.csv")
    with path.open(newline="") as file:
        best, middle, _ = csv.DictReader(file)
    one = found.differences["b"]["a"]
    columns = [middle[f"minus:a{end}"] for end in ("", "_low", "_high", "_p", "_adjusted_p")]
    expected = [one.value, one.interval.low, one.interval.high, one.p_value, one.adjusted_p_value]
    assert [float(value) for value in columns] == expected
    assert best["minus:c_p"] == ""
    told = json.loads(json.dumps(found.to_dict()))["differences"]["b"]["a"]
    assert told["adjusted_p_value"] == one.adjusted_p_value
    assert "differences" not in aggregate({"a": [[1.0]]}).to_dict()
