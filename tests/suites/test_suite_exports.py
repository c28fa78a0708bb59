"""A suite's exports: rliable's scores, the leaderboard as CSV and Markdown."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdcollect.suites.aggregates import aggregate
from tdcollect.suites.exports import (
    write_leaderboard_csv,
    write_leaderboard_markdown,
    write_scores_npz,
)

SCORES = {
    "ppo": np.array([[0.5, 1.0], [0.7, 0.9], [0.6, 0.8]]),
    "random": np.array([[0.0, 0.1]]),
}
TASKS = ["cart|pole", "pendulum"]


def found(**options: Any) -> Any:
    return aggregate(SCORES, tasks=TASKS, resamples=50, **options)


# scores.npz


def test_the_arrays_are_the_mapping_that_rliable_takes(tmp_path: Path) -> None:
    library = pytest.importorskip("rliable.library")
    metrics = pytest.importorskip("rliable.metrics")
    scores = dict(np.load(write_scores_npz(tmp_path / "scores.npz", SCORES, tasks=TASKS)))
    assert list(scores) == list(SCORES)
    for policy, array in scores.items():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, SCORES[policy])
    points, intervals = library.get_interval_estimates(
        scores, lambda sample: np.array([metrics.aggregate_iqm(sample)]), reps=10
    )
    assert points.keys() == intervals.keys() == SCORES.keys()
    assert points["ppo"][0] == pytest.approx(found().estimates["ppo"]["iqm"].value, abs=1e-12)


def test_the_names_lie_beside_the_scores(tmp_path: Path) -> None:
    write_scores_npz(tmp_path / "scores.npz", SCORES | {"a/b": [[1, 2]]}, tasks=TASKS)
    names = json.loads((tmp_path / "scores.json").read_text())
    assert names == {
        "tasks": TASKS,
        "policies": {"ppo": "ppo", "random": "random", "a%2Fb": "a/b"},
    }


ODD = ["file", "allow_pickle", "a", "a.npy", "A", "..", ".", "a/b", "a%2Fb", "../x", "\ud800", "\n"]


@settings(max_examples=50, deadline=None)
@given(names=st.lists(st.text(min_size=1) | st.sampled_from(ODD), min_size=1, unique=True))
def test_any_names_of_policies_come_back(names: list[str], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("scores") / "scores.npz"
    arrays = np.load(write_scores_npz(path, {name: [[n]] for n, name in enumerate(names)}))
    keys = json.loads(path.with_suffix(".json").read_text())["policies"]
    assert [keys[key] for key in arrays.files] == names
    assert [arrays[key].item() for key in arrays.files] == list(range(len(names)))
    for key in arrays.files:
        assert unquote(key, errors="surrogatepass") == keys[key]
        assert not set(key) & set('/\\:*?"<>|\n')
        assert not key.startswith(".")


def test_the_same_scores_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_scores_npz(tmp_path / d / "scores.npz", SCORES) for d in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_scores_that_cannot_be_held_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finite score of each run on each task"):
        write_scores_npz(tmp_path / "scores.npz", {"a": [[np.nan]]})
    with pytest.raises(ValueError, match=r"expected a path that ends in .npz, got '.*scores'"):
        write_scores_npz(tmp_path / "scores", SCORES)
    assert list(tmp_path.iterdir()) == []


# The leaderboard


def test_the_csv_has_every_digit_and_nothing_where_there_is_no_interval(tmp_path: Path) -> None:
    aggregates = found(metrics=["mean", "optimality_gap"])
    path = write_leaderboard_csv(tmp_path / "leaderboard.csv", aggregates)
    with path.open(newline="") as file:
        best, last = csv.DictReader(file)
    assert (best["rank"], best["policy"], best["runs"]) == ("1", "ppo", "3")
    estimate = aggregates.estimates["ppo"]["optimality_gap"]
    assert float(best["optimality_gap"]) == estimate.value
    assert float(best["optimality_gap_high"]) == estimate.interval.high
    assert float(best["score:cart|pole"]) == aggregates.task_means["ppo"]["cart|pole"]
    assert float(last["mean"]) == pytest.approx(0.05)
    assert last["mean_low"] == last["mean_high"] == ""
    assert list(best)[-2:] == ["score:cart|pole", "score:pendulum"]


def test_the_markdown_has_the_tables_and_the_notes(tmp_path: Path) -> None:
    aggregates = found(groups={"one_group": ["pendulum"]})
    path = write_leaderboard_markdown(tmp_path / "l.md", aggregates, title="my <suite>")
    text = path.read_text()
    assert text.startswith("# my \\<suite\\>\n\n| policy | rank | runs | interquartile mean |")
    assert f"| ppo | 1 | 3 | {aggregates.estimates['ppo']['iqm']} |" in text
    assert f"| random |  | {aggregates.improvement['ppo']['random']} |" not in text
    assert f"| ppo |  | {aggregates.improvement['ppo']['random']} |" in text
    assert "\n| cart\\|pole | 0.6 | 0 |\n" in text
    assert "\n## one\\_group: pendulum\n" in text
    assert "\n- One run of random: no interval." in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") > 2 for line in rows)


@pytest.mark.parametrize("write", [write_leaderboard_csv, write_leaderboard_markdown])
def test_control_characters_of_names_are_written_out(tmp_path: Path, write: Any) -> None:
    aggregates = aggregate({"a\nb\x1b\ud800": [[1.0]]}, tasks=["t\n"])
    options = {"title": "x"} if write is write_leaderboard_markdown else {}
    path = write(tmp_path / "file", aggregates, **options)
    assert write(tmp_path / "other", aggregates, **options).read_bytes() == path.read_bytes()
    assert "\x1b" not in path.read_text()
    assert "a\\nb" in path.read_text().replace("\\\\", "\\")
