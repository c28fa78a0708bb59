"""Reports: the content of the page, its independence of other files, and its fixed bytes."""

from __future__ import annotations

import base64
import re
import struct
import sys
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tdcollect import files as files_module
from tdcollect.evaluation import (
    compare,
    summarize,
    write_comparison_report,
    write_report,
)
from tdcollect.evaluation.reports.figures import _edges, _running

from ..forkserver import run as in_fork
from .ledgers import ledger, manifest, run

RETURNS = np.random.default_rng(0).normal(300, 80, size=40).round().tolist()
FAILED = 7


class Page(HTMLParser):
    """The parts of a page, and whether its elements are closed in order."""

    EMPTY = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tables: list[list[list[str]]] = []
        self.words = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words += data
        if "th" in self.open or "td" in self.open:
            self.tables[-1][-1][-1] += data


def records():
    found = ledger(RETURNS, failed=[FAILED], success={i: i % 2 == 0 for i in range(40)})
    found[3] = replace(found[3], restarts=1, terminated=False, truncated=True)
    return found


def report(directory: Path, episodes=None, **changed):
    episodes = records() if episodes is None else episodes
    written = write_report(directory, manifest(**changed), episodes, summarize(episodes))
    return written, Page((directory / "report.html").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return report(tmp_path_factory.mktemp("report"))


def pixels(png: bytes) -> bytes:
    """The raw image data of a PNG, chunk by chunk checked as a decoder would."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", png[at + 8 + length :][:4])[0]
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    return zlib.decompress(data)


# The page


def test_the_files_are_the_page_and_its_figures(whole) -> None:
    written, _ = whole
    directory = written[-1].parent
    assert [str(path.relative_to(directory)) for path in written] == [
        "figures/returns.png",
        "figures/cumulative.png",
        "figures/lengths.png",
        "report.html",
    ]
    assert sorted(path for path in directory.rglob("*") if path.is_file()) == sorted(written)


def test_the_page_needs_no_other_file(whole) -> None:
    _, page = whole
    sources = [value for _, name, value in page.attributes if name in ("src", "href")]
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_the_page_holds_the_figures_that_are_beside_it(whole) -> None:
    written, page = whole
    inside = [
        base64.b64decode(value.partition(",")[2])
        for _, name, value in page.attributes
        if name == "src"
    ]
    assert inside == [path.read_bytes() for path in written[:-1]]
    assert all(len(set(pixels(png))) > 10 for png in inside)  # something is drawn


def test_each_figure_has_a_description(whole) -> None:
    _, page = whole
    described = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")]
    assert len(described) == 3
    assert described[0] == "Return of 39 episodes: how many episodes have each."


def test_the_headline_has_the_mean_with_its_interval_and_what_completed(whole) -> None:
    _, page = whole
    summary = summarize(records())
    assert f"95% interval {summary.returns.mean_interval}" in page.words
    assert "39 of 40" in page.words
    assert "1 failed, 2 restarted" in page.words


def test_the_statistics_are_those_of_the_summary(whole) -> None:
    _, page = whole
    assert page.tables[0][1:] == summarize(records()).rows()


def test_the_lowest_returns_come_first_with_the_call_that_runs_them_again(whole) -> None:
    _, page = whole
    completed = [e for e in records() if e.completed]
    lowest = sorted(completed, key=lambda e: e.episode_return)[:10]
    rows = page.tables[1][1:]
    assert [float(row[1]) for row in rows] == [e.episode_return for e in lowest]
    again = f'tdcollect.EvaluationResult.load(".", env, policy).replay({lowest[0].index})'
    assert rows[0][-1] == again
    assert rows[0][-2] == str(lowest[0].env_seed)


def test_failed_and_restarted_episodes_are_listed(whole) -> None:
    _, page = whole
    rows = page.tables[2][1:]
    assert [row[:4] for row in rows] == [
        ["3", "completed", "1", f"{RETURNS[3]:.5g}"],
        [str(FAILED), "failed", "3", "-"],
    ]


def test_the_manifest_is_there_entry_by_entry(whole) -> None:
    _, page = whole
    entries = dict(page.tables[3][1:])
    assert entries["env.wrappers"] == "TimeLimit, OrderEnforcing"
    assert entries["versions.torch"] == "2.13.0"
    assert entries["seeds.root"] == "0"
    assert entries["max_episode_steps"] == entries["git"] == "none"


def test_every_text_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("1 & 2")</script>'
    episodes = [replace(e, status=evil, restarts=1) for e in ledger([1.0])] + records()[1:]
    changed = {"policy": evil, evil: {evil: [evil]}, "env": {"id": evil}}
    _, page = report(tmp_path, episodes, **changed)
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert page.words.count(evil) >= 5
    assert ["0", evil, "1"] == page.tables[2][1][:3]


def test_many_failed_episodes_are_counted_beyond_the_first_hundred(tmp_path: Path) -> None:
    _, page = report(tmp_path, ledger([1.0] * 130, failed=range(1, 130)))
    assert "29 more are in episodes.jsonl." in page.words


# Degenerate evaluations


def test_no_episode(tmp_path: Path) -> None:
    written, page = report(tmp_path, [])
    assert [path.name for path in written] == ["report.html"]
    assert "No episode completed." in page.words


def test_all_failed(tmp_path: Path) -> None:
    written, page = report(tmp_path, ledger([1.0, 2.0], failed=[0, 1]))
    assert [path.name for path in written] == ["report.html"]
    assert "0 of 2" in page.words


@pytest.mark.parametrize(
    "values",
    [[3.0], [5.0] * 4, [0.1] * 4, [0.0] * 99 + [1e9], [np.nan, 1.0, 2.0], [np.inf], [1e-9, 2e-9]],
    ids=["one", "equal", "equal, not whole", "outlier", "NaN", "infinite", "small"],
)
@pytest.mark.filterwarnings("error")
def test_any_returns_can_be_drawn(tmp_path: Path, values: list[float]) -> None:
    written, _ = report(tmp_path, ledger(values))
    assert written[-1].name == "report.html"


# Bytes


def report_under_other_settings(directory: Path) -> None:
    import matplotlib

    matplotlib.rcParams.update({"font.size": 20, "axes.grid": True, "savefig.dpi": 50})
    report(directory)
    assert "matplotlib.pyplot" not in sys.modules
    assert matplotlib.rcParams["font.size"] == 20


def test_the_same_evaluation_gives_the_same_bytes_in_another_process(whole) -> None:
    written, _ = whole
    again = written[-1].parent.parent / "again"
    done = in_fork(report_under_other_settings, again)
    assert done.returncode == 0, done.stderr
    assert [(again / path.relative_to(written[-1].parent)).read_bytes() for path in written] == [
        path.read_bytes() for path in written
    ]


def test_no_time_and_no_path_is_in_the_files(whole) -> None:
    written, _ = whole
    for path in written:
        data = path.read_bytes()
        assert str(path.parent).encode() not in data
        assert not re.search(rb"tEXt|tIME|iTXt", data[:2000])


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(files_module.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        files_module.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_missing_matplotlib_is_named_with_the_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = r"a figure needs the matplotlib package: pip install 'tdcollect\[evaluate\]'"
    with pytest.raises(ModuleNotFoundError, match=said):
        report(tmp_path)


# What the figures show


def test_the_running_mean_and_deviation_are_those_of_the_first_values() -> None:
    values = np.array(RETURNS) + 1e6
    mean, deviation = _running(values)
    for count in (2, 3, 17, 40):
        assert mean[count - 1] == pytest.approx(values[:count].mean(), rel=1e-12)
        assert deviation[count - 1] == pytest.approx(values[:count].std(ddof=1), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "bars"),
    [([3.0, 5.0], 3), ([0.0, 1000.0] * 5, 10), (list(np.arange(1e5) / 7), 40), ([0.5], 1)],
    ids=["few whole numbers", "few values", "many values", "one value"],
)
def test_a_histogram_has_few_bars_and_holds_every_value(values: list[float], bars: int) -> None:
    edges = _edges(np.array(values))
    assert len(edges) - 1 == bars
    assert np.histogram(values, edges)[0].sum() == len(values)


# Comparisons


def test_a_comparison_has_its_table_and_a_figure_for_each_policy(tmp_path: Path) -> None:
    runs = [run(RETURNS), run(np.add(RETURNS, 5.0)), run(RETURNS, failed=range(40))]
    found = compare(*runs, names=["random", "<ppo>", "broken"])
    written = write_comparison_report(tmp_path, found)
    assert [path.name for path in written] == ["difference_1.png", "comparison.html"]
    page = Page((tmp_path / "comparison.html").read_text())
    assert page.tables[0] == [["", "<ppo>", "broken"], *found.rows()]
    assert "Return of <ppo> minus that of random, in 40 episodes: 40 won" in " ".join(
        value for _, name, value in page.attributes if name == "alt"
    )
    assert all(note in page.words for note in found.notes())


def test_the_same_comparison_gives_the_same_bytes(tmp_path: Path) -> None:
    found = compare(run(RETURNS), run(RETURNS[::-1]), names=["a", "costs $1 and $2"])
    first, second = (write_comparison_report(tmp_path / name, found) for name in "ab")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
