"""Reports: the content of the page, its independence of other files, and its fixed bytes."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tdcollect import compare
from tdcollect.evaluation import summarize
from tdcollect.evaluation.ledger import RANDOM
from tdcollect.evaluation.statistics import mean_and_deviation
from tdcollect.pages import evaluation
from tdcollect.pages.evaluation import (
    percents,
    write_comparison_report,
    write_report,
)
from tdcollect.pages.plots import bin_edges

from ..forkserver import run as in_fork
from ..zoo.html import Page
from .ledgers import ledger, manifest, run

RETURNS = np.random.default_rng(0).normal(300, 80, size=40).round().tolist()
FAILED = 7
SVG = "{http://www.w3.org/2000/svg}"


def stripped(rows):
    """The rows as a page has them, where a style indents them."""
    return [[first.strip(), *rest] for first, *rest in rows]


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


# The page


def test_the_files_are_the_page_and_its_figures_and_tell_no_time_and_no_path(whole) -> None:
    written, _ = whole
    directory = written[-1].parent
    assert [str(path.relative_to(directory)) for path in written] == [
        "figures/returns.svg",
        "figures/cumulative.svg",
        "figures/lengths.svg",
        "figures/endings.svg",
        "report.html",
    ]
    assert sorted(path for path in directory.rglob("*") if path.is_file()) == sorted(written)
    for text in (path.read_text() for path in written):
        assert str(directory) not in text
        assert not re.search(r"20\d\d-\d\d|metadata|matplotlib", text)


def test_the_page_needs_no_other_file_and_lets_none_load(whole) -> None:
    _, page = whole
    attributes = {(tag, name) for tag, name, _ in page.attributes}
    assert not attributes & {("img", "src"), ("script", "src"), ("link", "href"), ("a", "href")}
    assert not {name for _, name in attributes if name.startswith("on") or name == "style"}
    (policy,) = (value for value in page.values("meta", "content") if "default-src" in value)
    text = (whole[0][-1]).read_text()
    for tag in ("style", "script"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_each_figure_says_what_it_shows_and_is_in_the_page(whole) -> None:
    written, page = whole
    completed = np.delete(RETURNS, FAILED)
    low, first, third, high = np.quantile(completed, [0, 0.25, 0.75, 1])
    described = page.values("svg", "aria-label")
    assert described[0].startswith(
        f"Returns. Half of the 39 returns lie between {first:.1f} and {third:.1f}, all between "
        f"{low:.0f} and {high:.0f}. The mean is {completed.mean():.2f} (95% interval "
    )
    assert described[-1].startswith(
        "How episodes ended. 38 episodes terminated, 1 truncated, 1 failed. 20 of 40 episodes were "
        "a success: 50% (95% interval "
    )
    for path, words in zip(written[:-1], described, strict=True):
        root = ElementTree.fromstring(path.read_bytes())
        inside = {element.get("d") for element in root.iter() if element.get("d")}
        assert inside <= {*page.values("path", "d")}
        assert len(inside) > 4  # something is drawn
        assert root.findtext(f"{SVG}desc") in words


def test_the_page_says_what_the_summary_and_the_manifest_say(whole) -> None:
    _, page = whole
    summary = summarize(records())
    interval = summary.returns.mean_interval
    assert page.words.index("Success rate") < page.words.index("Mean return")
    assert str(summary).startswith(f"Success rate 0.5 {summary.success.interval}. 40 episodes: ")
    for said in (
        f"95% interval {interval.low:.2f} to {interval.high:.2f}",
        *("39 of 40", "1 failed, 2 restarted", "Failed or restarted: episodes 3 and 7."),
        "Without the policy, `tdcollect audit DIR` runs episodes again by the actions that were",
    ):
        assert said in page.words
    assert page.tables[0][1:] == stripped(summary.rows())
    entries = dict(page.tables[2][1:])
    assert entries["env.wrappers"] == "TimeLimit, OrderEnforcing"
    assert entries["versions.torch"] == "2.13.0"
    assert entries["seeds.root"] == "0"
    assert entries["max_episode_steps"] == entries["git"] == "none"
    head, *rows = page.tables[1]
    assert head == ["episode", "return", "length", "ended", "success", "restarts", "env seed"]
    assert [int(row[0]) for row in rows] == list(range(40))
    seeds = [str(record.env_seed) for record in records()]
    assert rows[2] == ["2", f"{RETURNS[2]:.5g}", "12", "terminated", "yes", "0", seeds[2]]
    assert rows[3] == ["3", f"{RETURNS[3]:.5g}", "13", "truncated", "no", "1", seeds[3]]
    assert rows[FAILED] == ["7", "-", "-", "failed", "-", "3", seeds[FAILED]]
    lowest = min((e for e in records() if e.completed), key=lambda e: e.episode_return)
    assert f"Lowest returns: {lowest.episode_return:.5g} in episode {lowest.index}, " in page.words
    before = 'tdcollect.EvaluationResult.load(".", env, policy).replay('
    assert f"{before}{lowest.index})" in page.words
    assert page.values("table", "data-before") == [before]
    assert page.values("table", "data-after") == [")"]


def test_returns_that_equal_the_lengths_are_shown_once_and_said(tmp_path: Path) -> None:
    written, page = report(tmp_path, ledger(range(10, 50)))  # as lengths are
    assert [path.stem for path in written] == ["returns", "cumulative", "endings", "report"]
    assert "The length of each episode, in steps, is the same as its return." in page.words
    assert page.tables[0][0] == ["", "return and length (steps)"]
    assert page.tables[0][1][1] == "29.50"
    assert "Mean return and length" in page.words
    assert "Mean length" not in page.words


def test_the_actions_of_a_policy_that_draws_are_sampled(tmp_path: Path) -> None:
    episodes = ledger([1.0], failed=[0])
    for name, exploration, said in [
        ("lab.Actor", "deterministic", "Actor · 1 test episode · deterministic actions"),
        ("lab.Actor", "random", "Actor · 1 test episode · sampled actions"),
        (RANDOM, "random", "random actions · 1 test episode"),
    ]:
        described = manifest(name)
        described["policy"]["exploration"] = exploration
        write_report(tmp_path, described, episodes, summarize(episodes))
        assert f'<p class="lead">{said}</p>' in (tmp_path / "report.html").read_text()


def test_lost_equal_and_kept_episodes_are_remarked_on(tmp_path: Path) -> None:
    for name in ("000002.npz", "000039.npz", "000003", "12.npz", "x", "000001.npz.part"):
        (tmp_path / "trajectories" / name).mkdir(parents=True)
    _, page = report(
        tmp_path,
        [
            replace(e, digest=f"{e.index % 2:064x}") if e.completed else replace(e, status="lost")
            for e in records()
        ],
    )
    assert "0 failed, 1 lost, 2 restarted, only 2 distinct" in page.words
    assert "38 episodes terminated, 1 truncated, 1 lost." in page.values("svg", "aria-label")[-1]
    assert "Failed, lost or restarted: episodes 3 and 7." in page.words
    assert "Only 2 of 39 completed episodes are distinct: 37 repeat another one" in page.words
    column = page.tables[1][0].index("equal to")
    assert [row[column] for row in page.tables[1][1:]][:9] == [
        *("-", "-", "0", "1", "0", "1", "0", "-", "0")
    ]
    links = page.values("a", "href")
    assert links == ["./trajectories/000002.npz", "./trajectories/000039.npz"]
    assert [row[0] for row in page.tables[1][1:] if row[-1] == "kept"] == ["2", "39"]


EVIL = '</svg></style><script>alert("1 & 2")</script><img src=x onerror=alert(1)>'


def test_every_text_is_escaped(tmp_path: Path) -> None:
    episodes = [replace(e, status=EVIL, restarts=1) for e in ledger([1.0])] + records()[1:]
    changed = {"policy": {"class": EVIL}, EVIL: {EVIL: [EVIL]}, "env": {"id": EVIL}}
    _, page = report(tmp_path, episodes, **changed)
    text = (tmp_path / "report.html").read_text()
    assert text.count("<script") == text.count("</style") == 1
    assert "<img" not in text
    assert page.words.count(EVIL) >= 5
    assert page.tables[1][1][3] == EVIL


def test_of_many_episodes_those_that_matter_are_listed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "MOST", 100)
    monkeypatch.setattr(evaluation, "EXTREMES", 5)
    _, page = report(tmp_path, ledger(range(130), failed=range(20, 40)))
    listed = [int(row[0]) for row in page.tables[1][1:]]
    assert listed == [*range(5), *range(20, 25), *range(125, 130)]
    assert "The table lists 15 of 130 episodes: the 5 lowest and the 5 highest" in page.words
    assert "episodes.jsonl has all." in page.words


# Degenerate evaluations


def test_without_a_completed_episode_there_is_no_figure(tmp_path: Path) -> None:
    for values, said in [([], "No episode completed."), ([1.0, 2.0], "0 of 2")]:
        written, page = report(tmp_path, ledger(values, failed=[0, 1]))
        assert [path.name for path in written] == ["report.html"]
        assert said in page.words


def test_the_lowest_returns_are_named_where_there_are_lower_ones(tmp_path: Path) -> None:
    for values, said in [
        ([3.0, 1.0, 2.0], ""),
        ([3.5, 1.0, 2.0, 4.0, 5.0], "Lowest return: 1 in episode 1."),
        ([3.5, 1, 2.25, 4, 5, 6, 7, 8], "Lowest returns: 1.00 in episode 1 and 2.25 in epi"),
        ([5.0] * 6, ""),
        ([np.nan, 1.0, 2.0], ""),
    ]:
        _, page = report(tmp_path, ledger(values))
        assert said in page.words
        assert ("Lowest" in page.words) == bool(said)


# Bytes


def test_the_same_evaluation_gives_the_same_bytes_in_another_process(whole) -> None:
    written, _ = whole
    again = written[-1].parent.parent / "again"
    done = in_fork(report, again)
    assert done.returncode == 0, done.stderr
    assert [(again / path.relative_to(written[-1].parent)).read_bytes() for path in written] == [
        path.read_bytes() for path in written
    ]


# What the figures show


def test_the_running_mean_and_deviation_are_those_of_the_first_values() -> None:
    values = np.array(RETURNS) + 1e6
    mean, deviation = mean_and_deviation(values)
    for count in (2, 3, 17, 40):
        assert mean[count - 1] == pytest.approx(values[:count].mean(), rel=1e-12)
        assert deviation[count - 1] == pytest.approx(values[:count].std(ddof=1), rel=1e-6)


def test_a_histogram_has_few_bars_and_holds_every_value() -> None:
    for values, bars in [
        ([3.0, 5.0], 3),
        ([0.0, 1000.0] * 5, 10),
        (list(np.arange(1e5) / 7), 40),
        ([0.5], 1),
    ]:
        edges = bin_edges(np.array(values))
        assert len(edges) - 1 == bars
        assert np.histogram(values, edges)[0].sum() == len(values)


# Comparisons


def compared(directory: Path, *runs, names):
    found = compare(*runs, names=names)
    written = write_comparison_report(directory, found)
    return found, written, Page((directory / "comparison.html").read_text())


def test_a_comparison_of_many_has_its_table_and_figures(tmp_path: Path) -> None:
    runs = [run(RETURNS), run(np.add(RETURNS, 5.0)), run(RETURNS, failed=range(40))]
    found, written, page = compared(tmp_path, *runs, names=["random", "<ppo>", "broken"])
    names = ["returns.svg", "intervals.svg", "difference_1.svg", "pairs_1.svg", "comparison.html"]
    assert [path.name for path in written] == names
    assert page.tables[0] == [["", "<ppo>", "broken"], *stripped(found.rows())]
    described = page.values("svg", "aria-label")
    low, high = (f"{end:.1f}" for end in np.quantile(RETURNS, [0.25, 0.75]))
    assert f"Half of the returns lie: random between {low} and {high}; <ppo>" in described[0]
    assert "<ppo>: 5 (95% interval 5 to 5)." in described[1]
    assert "<ppo> has the higher return in 40 of 40 episodes" in described[3]
    assert all(note in page.words for note in found.notes())


def test_a_comparison_of_two_says_how_many_episodes_were_won(tmp_path: Path) -> None:
    changed = np.add(RETURNS, [1.0] * 20 + [0.0] * 10 + [-2.0] * 10)
    names = ["costs $1", "costs $2"]
    found, written, page = compared(tmp_path / "a", run(RETURNS), run(changed), names=names)
    assert found.differences[0].improvement == 25 / 40
    assert "Probability of improvement0.625" in page.words.replace("\n", "")
    assert "(won + tied / 2) / episodes." in page.words
    said = "40 episodes, costs $2 has a higher return than costs $1 in 20, an equal one in 10, and"
    assert said in page.values("svg", "aria-label")[1]
    again = write_comparison_report(tmp_path / "b", found)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_a_comparison_shows_success_where_the_env_reports_it(tmp_path: Path) -> None:
    runs = [run([1.0] * 20, success={i: i < most for i in range(20)}) for most in (8, 14)]
    found, _, page = compared(tmp_path, *runs, names=["old", "new"])
    assert page.tables[0] == [["", "new"], *stripped(found.success_rows())]
    assert ["gained, lost", "6, 0"] in page.tables[0]
    assert found.rows()[0][0] == "success rate"
    assert "McNemar's exact test" in page.words
    low, high = percents(
        [found.differences[0].success.interval.low, found.differences[0].success.interval.high]
    )
    words = page.words.replace("\n", "")
    assert f"Difference of success rates30%95% interval {low} to {high}Mean difference" in words


def test_a_comparison_with_more_of_the_baseline_is_on_the_shared_episodes(tmp_path) -> None:
    changed = np.add(RETURNS[:30], np.arange(30.0))
    found, _, page = compared(tmp_path, run(RETURNS), run(changed), names=["old", "new"])
    assert page.tables[0] == [["", "new"], *stripped(found.rows())]
    assert [row[0] for row in page.tables[1][1:]] == [str(i) for i in range(30)]
    assert "on the same 30 test episodes" in page.words


def test_a_comparison_lists_each_episode_or_those_that_differ_most(tmp_path, monkeypatch) -> None:
    runs = [run([1.0, 2.0, 3.0]), run([5.0, 1.0, 1.0], failed=[1]), run([1.0, 2.0, 4.0])]
    _, _, page = compared(tmp_path, *runs, names=["a", "b", "c"])
    assert page.tables[1] == [
        ["episode", "a", "b", "difference", "c", "difference"],
        ["0", "1", "5", "4", "1", "0"],
        ["1", "2", "-", "-", "2", "0"],
        ["2", "3", "1", "-2", "4", "1"],
    ]
    monkeypatch.setattr(evaluation, "MOST", 30)
    monkeypatch.setattr(evaluation, "EXTREMES", 3)
    runs = [run([0.0] * 40), run(range(40))]
    _, _, page = compared(tmp_path, *runs, names=["a", "b"])
    assert [row[0] for row in page.tables[1][1:]] == ["0", "1", "2", "37", "38", "39"]
    assert "The table lists 6 of 40 episodes" in page.words
