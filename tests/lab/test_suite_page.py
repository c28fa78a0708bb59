"""The page of a suite: leaderboard, figures, and the way from each cell to its evaluation."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tdcollect.lab.aggregates import aggregate
from tdcollect.lab.definition import Policy, Score, Task
from tdcollect.lab.pages.suite import suite_page
from tdcollect.lab.results import SuiteResults
from tdcollect.pages.build import heat

from ..zoo.html import Page
from .made import results

TASKS = [Task(f"task{n}", "Env-v0", score=Score(0.0, 100.0, "a paper")) for n in range(3)]
TASKS += [Task("free", "Free-v0")]
POLICIES = [Policy("random", "random"), Policy("ppo", "m:ppo", runs=("0", "1", "2"))]


def page_of(found: SuiteResults) -> Page:
    return Page(suite_page(found).html().decode())


@pytest.fixture(scope="module")
def whole() -> tuple[SuiteResults, Page]:
    """Results without gaps, and their page."""
    found = results(TASKS, POLICIES)
    return found, page_of(found)


def test_the_tables_are_those_of_the_results(whole: tuple[SuiteResults, Page]) -> None:
    found, page = whole
    estimate = found.aggregates.estimates["ppo"]["iqm"]
    low, high = estimate.interval.low, estimate.interval.high
    head, first, second = page.tables[0]
    assert head[:4] == ["policy", "rank", "runs", "interquartile mean"]
    assert first[:4] == ["ppo", "1", "3", f"{estimate.value:.2f} [{low:.2f}, {high:.2f}]"]
    assert second[:3] == ["random", "2", "1"]
    assert all(note in page.words for note in found.aggregates.notes())
    assert page.tables[-1][1] == ["task0", "Env-v0", "-", "0", "100", "-", "a paper"]
    assert page.tables[-1][4] == ["free", "Free-v0", "-", "-", "-", "-", "-"]


def test_each_cell_leads_to_its_report_or_has_a_reason() -> None:
    found = results(TASKS, POLICIES, missing=[2], failed={3: "no <checkpoint>"})
    page = page_of(found)
    finished = [cell for cell in found.cells if cell.status == "finished"]
    leads = [f"./{cell.path}/report.html" for cell in finished]
    # Of the heat map, and of the table of evaluations:
    assert page.values("a", "href") == [*leads, *leads]
    assert [row[0] for row in page.tables[-3][1:]] == [cell.name for cell in finished]
    rows = {row[0]: row[1:] for row in page.tables[-4]}
    first, of_ppo = found.cell("task0", "random"), found.of("task0", "ppo")
    one_of_three = f"1 of 3 runs {of_ppo[0].score:.2f} missing failed"
    assert rows["task0"] == [f"{first.score:.2f}", one_of_three]
    assert page.text.count('<td class="bad">') == 3  # one here, and two with a reason
    values = [cell.score for cell in found.of("task1", "ppo")]
    mean = f"{sum(values) / 3:.2f}"
    assert rows["task1"][1] == " ".join([mean, *(f"{value:.2f}" for value in values)])
    assert rows["free"][0] == f"{found.cell('free', 'random').mean:.5g}"
    assert page.tables[-2][1:] == [
        ["task0/ppo/1", "missing", "0", "-"],
        ["task0/ppo/2", "failed", "0", "no <checkpoint>"],
    ]


def test_figures_say_what_they_show(whole: tuple[SuiteResults, Page]) -> None:
    """Those of metrics stand in one row, with the policies in one order."""
    found, page = whole
    shown = page.values("svg", "aria-label")
    assert len(shown) == 6
    iqm = found.aggregates.estimates["random"]["iqm"].value
    assert f"random: {iqm:.2f}." in shown[0]
    assert shown[-2].startswith("Performance profiles. Share of runs and tasks with a score")
    assert shown[-1].startswith("Probability of improvement of ppo. Over random: 1.00")
    row = page.text.partition('<div class="figures row">')[2].partition("</section>")[0]
    assert row.count("<figure>") == 4
    assert re.findall(">(random|ppo|[01][.]0)</text>", row) == ["0.0", "1.0", "ppo", "random"] * 4
    captions = re.findall("<figcaption>(.*?)</figcaption>", row)
    assert captions == ["", "", "", "Lower is better."]  # numbers are in the table above


def test_profiles_that_are_equal_are_named(whole: tuple[SuiteResults, Page]) -> None:
    found, page = whole
    scores = {name: [[0.1, 0.5]] for name in ("random", "ppo", "last")} | {"other": [[0.2, 0.5]]}
    equal = replace(found, aggregates=aggregate(scores, resamples=9))
    said = "The lines of last, ppo and random are equal: their dashes alternate."
    assert said in page_of(equal).words
    assert "are equal" not in page.words


@pytest.mark.parametrize(("tasks", "policies"), [(TASKS[:1], POLICIES[:1]), (TASKS[3:], POLICIES)])
def test_any_suite_has_a_page(tasks: list[Task], policies: list[Policy]) -> None:
    for missing in ([], [0]):
        page = suite_page(results(tasks, policies, missing=missing)).html()
        assert b"</h2>\n</section>" not in page  # nothing is announced that is not there
    assert page == suite_page(results(tasks, policies, missing=[0])).html()


def test_the_colour_of_a_score() -> None:
    roles = [heat(score) for score in (-9.0, -0.1, 0.0, 0.5, 1.0, 7.0, float("inf"), None)]
    assert roles == ["heat-2", "heat-1", "heat0", "heat3", "heat6", "heat6", "heat6", ""]
    assert heat(float("nan")) == ""
