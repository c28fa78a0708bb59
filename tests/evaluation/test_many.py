"""Ledgers of many episodes: time and memory grow linearly."""

from __future__ import annotations

import gc
import runpy
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tdcollect import evaluate
from tdcollect.evaluation import EvaluationSettings
from tdcollect.evaluation.statistics import summarize
from tdcollect.files import write_atomically
from tdcollect.pages import evaluation, plots
from tdcollect.pages.evaluation import write_report

from .ledgers import ledger, manifest

LEDGERS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "ledgers.py"))
HELD = 1000  # bytes an episode


def test_an_evaluation_holds_less_than_a_kilobyte_for_each_episode(monkeypatch) -> None:
    stopped = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=lambda: 0.0)
    monkeypatch.setattr("tdcollect.collect.episodes.time", stopped)  # blocks end by steps alone
    held = []
    for episodes in (20, 20, 420):  # the first one imports and fills caches
        gc.collect()
        tracemalloc.start()
        result = evaluate(LEDGERS["OneStep"], None, episodes, progress=False)
        gc.collect()
        held.append(tracemalloc.get_traced_memory())
        tracemalloc.stop()
        assert len(result.episodes) == episodes
    (at_end, at_peak), (at_end_of_many, at_peak_of_many) = held[1:]
    assert 100 < (at_end_of_many - at_end) / 400 < HELD
    assert (at_peak_of_many - at_peak) / 400 < 2 * HELD


def test_seeds_that_were_asked_for_are_not_held_for_ever() -> None:
    for seeds in (None, lambda number: number % 7):
        episode_seeds = EvaluationSettings(5, env_seeds=seeds).seed_schedule()
        assert episode_seeds(3) == episode_seeds(3)
        assert episode_seeds.cache_info().hits == 1
        assert episode_seeds.cache_info().maxsize < 100_000


def test_the_report_of_many_episodes_does_not_grow(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "MOST", 200)
    monkeypatch.setattr(evaluation, "EXTREMES", 50)
    sizes = []
    for count in (1000, 3000):
        returns = np.random.default_rng(0).normal(size=count).tolist()
        records = ledger(returns, failed=range(count // 3))
        described = manifest(episodes=list(range(count)), seeds={"root": 0, "env": [0] * count})
        summary = summarize(records, resamples=10)
        page = write_report(tmp_path / str(count), described, records, summary)[-1]
        sizes.append(len(page.read_bytes()))
    assert "3000 in all: manifest.json has them" in page.read_text()
    assert max(sizes) < 1.4 * min(sizes)


def test_drawings_of_many_values_have_a_bounded_size() -> None:
    values = np.random.default_rng(0).normal(size=200_000)
    x = np.arange(len(values), dtype=np.float64)
    for drawing, most in [
        (plots.histogram(values.tolist(), "return"), 12_000),
        (plots.cloud(values, values[::-1], "a", "b"), 60_000),
        (plots.lines([plots.Line("mean", x, values, values - 1, values + 1)], "x", "y"), 40_000),
        (plots.ridges([("a", values.tolist()), ("b", values.tolist())], "return"), 20_000),
    ]:
        assert len(drawing.content) < most
    assert plots.some_points(2500, 100)[[0, -1]].tolist() == [0, 2499]


def test_a_file_written_piece_by_piece_is_left_as_it_is_where_it_holds_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    inodes = []
    for text in (b"ab", b"ab", b"ac"):
        write_atomically(path, lambda file, text=text: file.writelines([text[:1], text[1:]]))
        assert path.read_bytes() == text
        inodes.append(path.stat().st_ino)
    assert inodes[0] == inodes[1] != inodes[2]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_the_benchmark_of_ledgers_measures_each_column() -> None:
    rows = [LEDGERS["measure"](30)]
    head, _, row = LEDGERS["table"](rows).splitlines()
    assert head.count("|") == row.count("|") == len(LEDGERS["HEADER"]) + 1
    assert row.startswith("| 30 | ")
    assert rows[0]["peak"] >= rows[0]["held"]  # none where this process had memory to spare
