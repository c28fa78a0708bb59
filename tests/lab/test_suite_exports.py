"""A suite's files for others: rliable's scores, the leaderboard as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdcollect.lab import Policy, Score, SuiteResults, Task, aggregate
from tdcollect.lab.pages.suite import leaderboard, write_scores

from .made import results

SCORES = {"ppo": np.array([[0.5, 1.0], [0.7, 0.9], [0.6, 0.8]]), "random": np.array([[0.0, 0.1]])}
TASKS = ["cart|pole", "pendulum"]


def found(**options: Any) -> Any:
    return aggregate(SCORES, tasks=TASKS, resamples=50, **options)


def run(*names: str, tasks: Sequence[str] = ("walk", "swim"), **options: Any) -> SuiteResults:
    """The results of policies of two runs each, or of ``random``."""
    made = [Policy(name, "a:b", runs=("0", "1")) for name in names]
    return results([Task(name, "e", score=Score(0.0, 100.0)) for name in tasks], made, **options)


# scores.npz


def test_the_arrays_are_the_mapping_that_rliable_takes(tmp_path: Path) -> None:
    library = pytest.importorskip("rliable.library")
    metrics = pytest.importorskip("rliable.metrics")
    of = run("ppo", "random")
    write_scores(of, tmp_path / "scores.npz")
    scores = dict(np.load(tmp_path / "scores.npz"))
    assert list(scores) == ["ppo", "random"]
    for policy, array in scores.items():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, of.scores()[policy])
    points, intervals = library.get_interval_estimates(
        scores, lambda sample: np.array([metrics.aggregate_iqm(sample)]), reps=10
    )
    assert points.keys() == intervals.keys() == scores.keys()
    assert of.aggregates is not None
    expected = of.aggregates.estimates["ppo"]["iqm"].value
    assert points["ppo"][0] == pytest.approx(expected, abs=1e-12)


def test_the_names_lie_beside_the_scores(tmp_path: Path) -> None:
    names = ["ppo", "a.npy", "file", "allow_pickle", "b."]  # some that numpy would take for its own
    of = run(*names)
    for name in ("scores.npz", "again.npz"):
        write_scores(of, tmp_path / name)
    arrays = np.load(tmp_path / "scores.npz")
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "scores.npz").read_bytes()
    read = json.loads((tmp_path / "scores.json").read_text())
    assert read["tasks"] == ["walk", "swim"]
    assert [read["policies"][key] for key in arrays.files] == names
    assert [*read["policies"]] == ["ppo", "a%2Enpy", "file", "allow_pickle", "b%2E"]
    for key, name in read["policies"].items():
        np.testing.assert_array_equal(arrays[key], of.scores()[name])


# The leaderboard


def test_the_csv_has_every_digit_and_nothing_where_there_is_no_interval() -> None:
    aggregates = found(metrics=["mean", "optimality_gap"])
    best, last = csv.DictReader(leaderboard(aggregates).splitlines())
    assert (best["rank"], best["policy"], best["runs"]) == ("1", "ppo", "3")
    estimate = aggregates.estimates["ppo"]["optimality_gap"]
    assert float(best["optimality_gap"]) == estimate.value
    assert float(best["optimality_gap_high"]) == estimate.interval.high
    assert float(best["score:cart|pole"]) == aggregates.task_means["ppo"]["cart|pole"]
    assert float(last["mean"]) == pytest.approx(0.05)
    assert last["mean_low"] == last["mean_high"] == ""
    assert list(best)[-2:] == ["score:cart|pole", "score:pendulum"]


def test_control_characters_of_names_are_written_out() -> None:
    aggregates = aggregate({"a\nb\x1b\ud800": [[1.0]]}, tasks=["t\n"])
    text = leaderboard(aggregates)
    assert "\x1b" not in text
    assert "a\\nb" in text
