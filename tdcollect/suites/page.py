"""The page of a suite: leaderboard, profiles, and a heat map of tasks and policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tdcollect.display import count_text, listed_text, number_text, percent_text
from tdcollect.evaluation.reports.intervals import ends
from tdcollect.evaluation.reports.report import REPORT
from tdcollect.pages.drawing import HEIGHT
from tdcollect.pages.html import (
    Figure,
    cards,
    figures,
    heat_legend,
    page,
    paragraphs,
    section,
)
from tdcollect.pages.palette import heat
from tdcollect.pages.plots import Estimate as Row
from tdcollect.pages.plots import Line, equal_lines, intervals, lines
from tdcollect.pages.tables import Cell, Column, Value, table
from tdcollect.suites.definition import Task
from tdcollect.suites.estimates import LABELS, LOWER_IS_BETTER, Aggregates, Estimate, Profile
from tdcollect.suites.results import FINISHED, CellResult, SuiteResults

MOST_ROWS = 24  # policies in a figure
MOST_LINES = 8  # policies in a plot of profiles


def suite_page(results: SuiteResults, back: str = "") -> bytes:
    """Return the page of a suite: one file, the same bytes for the same results.

    Args:
        results: the results; their evaluations lie beside the page, and are linked.
        back: HTML above all sections, such as a link to an index.
    """
    found = results.aggregates
    sections = [*([back] if back else []), cards([*_headline(results)])]
    if found is not None:
        sections += [
            section("Leaderboard", _leaderboard(found), figures(_metrics(found), row=True)),
            section("Profiles and improvement", figures(_profiles(found))),
        ]
        if found.groups:
            sections.append(section("Groups of tasks", _groups(found)))
    sections.append(section("Tasks and policies", _heat_map(results)))
    sections.append(section("Evaluations", _evaluations(results)))
    if troubled := [cell for cell in results.cells if cell.status != FINISHED]:
        sections.append(section("Failed or missing", _troubled(troubled)))
    notes = [*([] if found is None else found.notes()), *results.remarks]
    if notes:
        sections.append(section("Remarks", paragraphs(notes)))
    sections.append(section("Scores and their sources", _sources(results)))
    counts = [
        (len(results.policies), "policies" if len(results.policies) != 1 else "policy"),
        (len(results.tasks), "tasks" if len(results.tasks) != 1 else "task"),
    ]
    lead = " · ".join(
        [*(f"{count} {name}" for count, name in counts)]
        + [f"{count_text(results.episodes, 'test episode')} of each policy, run and task"]
    )
    kicker = f"Suite, version {results.version}"
    return page(results.name, lead, sections, kicker=kicker, footer="Made by tdcollect.")


def _headline(results: SuiteResults) -> Iterator[tuple[str, str, str]]:
    found = results.aggregates
    if found is not None:
        metric = found.metrics[0]
        first, *others = [policy for rank, policy in found.ranking() if rank == 1]
        best = found.estimates[first][metric]
        label = LABELS[metric]
        also = f" and {len(others)} more" if others else ""
        end = "Lowest" if metric in LOWER_IS_BETTER else "Highest"
        words = ", ".join([f"{first}{also}", *_words(best, found.confidence)])
        yield f"{end} {label}", _score(best.value), words
    done = sum(cell.status == FINISHED for cell in results.cells)
    yield (
        "Evaluations finished",
        f"{done} of {len(results.cells)}",
        count_text(sum(len(policy.runs) for policy in results.policies), "training run"),
    )
    episodes = sum(cell.episodes for cell in results.cells)
    lost = f", {results.lost_episodes:,} lost" * bool(results.lost_episodes)
    yield "Test episodes", f"{episodes:,}", f"{results.failed_episodes:,} failed{lost}"


def _leaderboard(found: Aggregates) -> str:
    columns = [Column("policy"), Column("rank", number=True), Column("runs", number=True)]
    columns += [Column(LABELS[metric], number=True) for metric in found.metrics]
    rows = [
        [policy, str(rank), str(found.runs[policy])]
        + [_text(found.estimates[policy][metric]) for metric in found.metrics]
        for rank, policy in found.ranking()
    ]
    percent = percent_text(found.confidence)
    note = (
        f"Aggregates of normalised scores over {count_text(len(found.tasks), 'task')} and all "
        f"runs, with {percent} intervals where there are several runs."
    )
    return paragraphs([note]) + table(columns, rows, name="Leaderboard")


def _metrics(found: Aggregates) -> list[Figure]:
    """Return a narrow figure per metric: the policies in one order, with intervals."""
    drawn = []
    for metric in found.metrics:
        of = {(p, p): found.estimates[p][metric] for _, p in found.ranking()}
        rows, said, left = _estimates(found, of)
        drawing = intervals(rows, "score", unit=True, narrow=True)
        note = f"{'Lower is better. ' * (metric in LOWER_IS_BETTER)}{left}".strip()
        drawn.append(Figure(f"metric_{metric}", LABELS[metric].capitalize(), drawing, said, note))
    return drawn


def _estimates(
    found: Aggregates, of: Mapping[tuple[str, str], Estimate]
) -> tuple[list[Row], str, str]:
    """Return the rows of a figure, and what to say of those drawn, and of those left out.

    Args:
        found: the aggregates.
        of: the estimates, by policy and name.
    """
    rows = [
        Row(name, estimate.value, ends(estimate.interval), found.policies.index(policy))
        for (policy, name), estimate in of.items()
    ]
    said = [f"{name}: {_with_interval(one, found.confidence)}." for (_, name), one in of.items()]
    left = f"The {MOST_ROWS} best of {len(rows)} are drawn." if len(rows) > MOST_ROWS else ""
    return rows[:MOST_ROWS], " ".join(said[:5]), left


def _profiles(found: Aggregates) -> list[Figure]:
    """Return the figures of profiles, and of the improvement of the best policy."""
    x = np.array(found.thresholds)
    order = [policy for _, policy in found.ranking()][:MOST_LINES]
    drawn_lines = [_line(policy, x, found.profiles[policy], found) for policy in order]
    drawing = lines(
        drawn_lines,
        "score",
        "share of runs and tasks above",
        y_limits=(-0.02, 1.02),
        integer_x=False,
        height=HEIGHT * 1.25,
    )
    half = int(np.argmin(np.abs(x - 0.5)))
    shares = [
        f"{policy} {percent_text(round(found.profiles[policy].values[half], 3))}"
        for policy in order
    ]
    shows = f"Share of runs and tasks with a score above {x[half]:.2f}: {'; '.join(shares)}."
    left = len(found.policies) - len(order)
    notes = [f"The {len(order)} best policies are drawn; {left} more are not."] if left else []
    for places in equal_lines(drawn_lines):
        names = listed_text([order[place] for place in places], len(places))
        notes.append(f"The lines of {names} are equal: their dashes alternate.")
    drawn = [Figure("profiles", "Performance profiles", drawing, shows, " ".join(notes))]
    return [*drawn, _improvement(found)] if len(order) > 1 else drawn


def _line(policy: str, x: np.ndarray, profile: Profile, found: Aggregates) -> Line:
    low, high = (None if end is None else np.array(end) for end in (profile.low, profile.high))
    return Line(policy, x, np.array(profile.values), low, high, found.policies.index(policy))


def _improvement(found: Aggregates) -> Figure:
    best, *others = (policy for _, policy in found.ranking())
    of = {(other, f"Over {other}"): found.improvement[best][other] for other in others}
    rows, said, _ = _estimates(found, of)
    note = (
        f"The chance that a training run of {best} scores above a run of the other on the same "
        "task, averaged over tasks; a tie counts half. The dashed line is an even chance."
    )
    drawing = intervals(rows, "probability of improvement", line_at=0.5, unit=True)
    return Figure("improvement", f"Probability of improvement of {best}", drawing, said, note)


def _groups(found: Aggregates) -> str:
    """Return a table of the first metric by policy and group."""
    metric = found.metrics[0]
    columns = [Column("policy"), *(Column(name, number=True) for name in found.groups)]
    rows = [
        [policy, *(_text(group.estimates[policy][metric]) for group in found.groups.values())]
        for _, policy in found.ranking()
    ]
    members = [f"{name}: {', '.join(group.tasks)}." for name, group in found.groups.items()]
    caption = f"{LABELS[metric].capitalize()} of the scores of each group, with intervals."
    return table(columns, rows, caption) + paragraphs(members)


def _heat_map(results: SuiteResults) -> str:
    columns = [Column("task"), *(Column(policy.name) for policy in results.policies)]
    rows = [
        [task.name, *(_heat_cell(task, results.of(task.name, p.name)) for p in results.policies)]
        for task in results.tasks
    ]
    several = any(len(policy.runs) > 1 for policy in results.policies)
    unscored = any(task.score is None for task in results.tasks)
    caption = "Scores" + (", and mean returns of tasks without a score" if unscored else "")
    caption += "; each leads to the report of its evaluation."
    if several:
        caption += " Where there are several runs: their mean, and the score of each run."
    legend = heat_legend("0", "1 and above", "below 0")
    return legend + table(columns, rows, caption, heat=True)


def _heat_cell(task: Task, cells: Sequence[CellResult]) -> str | Cell:
    """Return the cell of a task and a policy: the mean over runs, and a link per run."""
    values = [cell.mean if task.score is None else cell.score for cell in cells]
    known = [value for value in values if value is not None]
    texts = [
        (cell.status if cell.status != FINISHED else _value(task, value), _report_of(cell))
        for cell, value in zip(cells, values, strict=True)
    ]
    if not cells:
        return "-"
    if len(known) < len(cells) or any(cell.status != FINISHED for cell in cells):
        if len(cells) == 1:
            return Cell(texts[0][0], texts[0][1], kind="bad" if cells[0].status != FINISHED else "")
        done = sum(cell.status == FINISHED for cell in cells)
        return Cell(f"{done} of {len(cells)} runs", kind="bad", more=tuple(texts))
    mean = sum(known) / len(known)
    kind = heat(mean) if task.score is not None else ""
    if len(cells) == 1:
        return Cell(_value(task, mean), texts[0][1], kind)
    return Cell(_value(task, mean), None, kind, tuple(texts))


def _value(task: Task, value: float | None) -> str:
    if value is None:
        return "-"
    return number_text(value) if task.score is None else _score(value)


def _report_of(cell: CellResult) -> str | None:
    return f"{cell.path}/{REPORT}" if cell.status == FINISHED else None


def _evaluations(results: SuiteResults) -> str:
    """Return the table of all evaluations that have episodes."""
    rows: list[list[Value]] = [
        [
            Cell(cell.name, _report_of(cell)),
            None if cell.score is None else _score(cell.score),
            cell.mean,
            ends(cell.interval),
            "-" if cell.success is None else percent_text(round(cell.success, 4)),
            f"{cell.completed} of {cell.episodes}",
        ]
        for cell in results.cells
        if cell.episodes
    ]
    columns = [
        Column("evaluation"),
        Column("score", number=True),
        Column("mean return", number=True),
        Column("interval", number=True),
        Column("success", number=True),
        Column("completed", number=True),
    ]
    caption = "Intervals are over test episodes: they say nothing about another training run."
    return table(columns, rows, caption, hint="a task, a policy, score<0.5")


def _troubled(cells: Sequence[CellResult]) -> str:
    rows: list[list[str | Cell]] = [
        [cell.name, Cell(cell.status, kind="bad"), str(cell.episodes), cell.reason or "-"]
        for cell in cells
    ]
    columns = [
        Column("evaluation"),
        Column("status"),
        Column("episodes", number=True),
        Column("reason", text=True),
    ]
    return table(columns, rows, name="Failed or missing")


def _sources(results: SuiteResults) -> str:
    columns = [
        Column("task"),
        Column("env"),
        Column("group"),
        Column("return of score 0", number=True),
        Column("of score 1", number=True),
        Column("presets"),
        Column("source", text=True),
    ]
    rows = []
    for task in results.tasks:
        span = results.ranges[task.name]
        low, high = ("-", "-") if span is None else map(number_text, span)
        presets = ", ".join(f"{name} {version}" for name, version in task.presets.items())
        source = "-" if task.score is None else task.score.source or "the suite's file"
        rows.append([task.name, task.env, task.group or "-", low, high, presets or "-", source])
    return table(columns, rows, name="Scores and their sources")


def _score(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else number_text(value)


def _text(estimate: Estimate) -> str:
    value = _score(estimate.value)
    if estimate.interval is None:
        return value
    return f"{value} [{_score(estimate.interval.low)}, {_score(estimate.interval.high)}]"


def _with_interval(estimate: Estimate, confidence: float) -> str:
    words = "".join(f" ({words})" for words in _words(estimate, confidence))
    return _score(estimate.value) + words


def _words(estimate: Estimate, confidence: float) -> list[str]:
    """Return the interval in words, if there is one."""
    if estimate.interval is None:
        return []
    low, high = _score(estimate.interval.low), _score(estimate.interval.high)
    return [f"{percent_text(confidence)} interval {low} to {high}"]
