"""The report of a suite: its page, with leaderboard, profiles and heat map; files for others."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tdcollect.display import count_text, listed_text, number_text, percent_text, visible
from tdcollect.evaluation.ledger import RESULTS, SUITE, sha256
from tdcollect.evaluation.statistics import ends
from tdcollect.evaluation.step_files import dump
from tdcollect.files import locked, remove, write_atomically, write_json
from tdcollect.lab.aggregates import LABELS, LOWER_IS_BETTER, Aggregates, Estimate
from tdcollect.lab.definition import Definition, Task
from tdcollect.lab.results import (
    FINISHED,
    WAIT,
    CellResult,
    SuiteResults,
    note_report,
    read_results,
)
from tdcollect.pages import build, plots
from tdcollect.pages.build import REPORT, Cell, Column, DataTable, Figure, Figures, Page, Part
from tdcollect.pages.evaluation import intervals_sentence, number_and_interval

MOST_ROWS = 24  # policies in a figure
MOST_LINES = 8  # policies in a plot of profiles


def suite_page(results: SuiteResults, links: Sequence[tuple[str, str]] = ()) -> Page:
    """Return the page of a suite, whose evaluations lie beside it and are linked."""
    aggregates = results.aggregates
    policies = count_text(len(results.policies), "policy")
    troubled = [cell for cell in results.cells if cell.status != FINISHED]
    notes = [] if aggregates is None else aggregates.notes()
    sections: list[tuple[str, Sequence[Part]]] = [
        ("Tasks and policies", [_heat_map(results)]),
        ("Evaluations", [_evaluations([cell for cell in results.cells if cell.episodes])]),
        ("Failed or missing", [_troubled(troubled)] if troubled else []),
        ("Remarks", [*notes, *results.remarks]),
        ("Scores and their sources", [_sources(results)]),
    ]
    if aggregates is not None:
        sections[:0] = [
            ("Leaderboard", [*_leaderboard(aggregates), Figures(_metrics(aggregates), row=True)]),
            ("Profiles and improvement", [Figures(_profiles(aggregates))]),
            ("Groups of tasks", _groups(aggregates) if aggregates.groups else []),
        ]
    return Page(
        results.name,
        f"{policies} · {count_text(len(results.tasks), 'task')} · "
        f"{count_text(results.episodes, 'test episode')} of each policy, run and task",
        f"Suite, version {results.version}",
        sections,
        _headline(results),
        "Made by tdcollect.",
        links,
    )


def _headline(results: SuiteResults) -> list[build.Card]:
    cards = []
    if (aggregates := results.aggregates) is not None:
        metric = aggregates.metrics[0]
        first, *others = [policy for rank, policy in aggregates.ranking() if rank == 1]
        best = aggregates.estimates[first][metric]
        also = f" and {len(others)} more" if others else ""
        value, interval = number_and_interval(
            best.value, best.interval, aggregates.confidence, _scores
        )
        end = "Lowest" if metric in LOWER_IS_BETTER else "Highest"
        words = f"{first}{also}" + f", {interval}" * (best.interval is not None)
        cards.append((f"{end} {LABELS[metric]}", value, words))
    done = sum(cell.status == FINISHED for cell in results.cells)
    runs = count_text(sum(len(policy.runs) for policy in results.policies), "training run")
    episodes = sum(cell.episodes for cell in results.cells)
    lost = f", {results.lost_episodes:,} lost" * bool(results.lost_episodes)
    return [
        *cards,
        ("Evaluations finished", f"{done} of {len(results.cells)}", runs),
        ("Test episodes", f"{episodes:,}", f"{results.failed_episodes:,} failed{lost}"),
    ]


def _leaderboard(aggregates: Aggregates) -> list[Part]:
    ranks, policies = zip(*aggregates.ranking(), strict=True)
    columns = [
        Column("policy", policies),
        Column("rank", [*map(str, ranks)], "n"),
        Column("runs", [str(aggregates.runs[policy]) for policy in policies], "n"),
    ]
    for metric in aggregates.metrics:
        texts = [_text(aggregates.estimates[policy][metric]) for policy in policies]
        columns.append(Column(LABELS[metric], texts, "n"))
    note = (
        f"Aggregates of normalised scores over {count_text(len(aggregates.tasks), 'task')} and all "
        f"runs, with {percent_text(aggregates.confidence)} intervals where there are several runs."
    )
    return [note, DataTable(columns, name="Leaderboard")]


def _metrics(aggregates: Aggregates) -> list[Figure]:
    """Return a narrow figure per metric, below their table: the policies in one order."""
    drawn = []
    for metric in aggregates.metrics:
        of = {policy: aggregates.estimates[policy][metric] for _, policy in aggregates.ranking()}
        rows = [row._replace(text="") for row in _rows(aggregates, of)]
        drawing = plots.intervals(rows, "score", unit=True)
        notes = ["Lower is better."] * (metric in LOWER_IS_BETTER)
        notes += [f"The {MOST_ROWS} best of {len(of)} are drawn."] * (len(of) > MOST_ROWS)
        said = _sentence(aggregates, of.items())
        title = LABELS[metric].capitalize()
        drawn.append(Figure(f"metric_{metric}", title, drawing, said, " ".join(notes)))
    return drawn


def _rows(aggregates: Aggregates, of: Mapping[str, Estimate], before: str = "") -> list[plots.Mark]:
    """Return the rows of a figure of estimates by policy: the first of many."""
    places = {name: place for place, name in enumerate(aggregates.policies)}
    return [
        plots.Mark(before + name, one.value, ends(one.interval), places[name], _text(one))
        for name, one in [*of.items()][:MOST_ROWS]
    ]


def _sentence(aggregates: Aggregates, of: Iterable[tuple[str, Estimate]]) -> str:
    """Return the first five of some estimates by name, with their intervals."""
    first = [(name, one.value, one.interval) for name, one in [*of][:5]]
    return intervals_sentence(first, aggregates.confidence, _scores)


def _profiles(aggregates: Aggregates) -> list[Figure]:
    x = np.array(aggregates.thresholds)
    order = [policy for _, policy in aggregates.ranking()][:MOST_LINES]
    drawn = []
    for policy in order:
        one, place = aggregates.profiles[policy], aggregates.policies.index(policy)
        low, high = (None if end is None else np.array(end) for end in (one.low, one.high))
        drawn.append(plots.Line(policy, x, np.array(one.values), low, high, place))
    y_label = "share of runs and tasks above"
    drawing = plots.lines(drawn, "score", y_label, y_limits=(-0.02, 1.02))
    half = int(np.argmin(np.abs(x - 0.5)))
    shares = [f"{line.name} {percent_text(round(float(line.y[half]), 3))}" for line in drawn]
    shows = f"Share of runs and tasks with a score above {x[half]:.2f}: {'; '.join(shares)}."
    left = len(aggregates.policies) - len(order)
    notes = [f"The {len(order)} best policies are drawn; {left} more are not."] * bool(left)
    for places in plots.equal_lines(drawn):
        names = listed_text([order[place] for place in places], len(places))
        notes.append(f"The lines of {names} are equal: their dashes alternate.")
    profiles = Figure("profiles", "Performance profiles", drawing, shows, " ".join(notes))
    return [profiles, _improvement(aggregates)] if len(order) > 1 else [profiles]


def _improvement(aggregates: Aggregates) -> Figure:
    best, *others = (policy for _, policy in aggregates.ranking())
    of = {other: aggregates.improvement[best][other] for other in others}
    said = _sentence(aggregates, ((f"Over {name}", one) for name, one in of.items()))
    note = (
        f"The chance that a training run of {best} scores above a run of the other on the same "
        "task, averaged over tasks; a tie counts half. The dashed line is an even chance."
    )
    rows = _rows(aggregates, of, "Over ")
    drawing = plots.intervals(rows, "probability of improvement", line_at=0.5, unit=True)
    return Figure("improvement", f"Probability of improvement of {best}", drawing, said, note)


def _groups(aggregates: Aggregates) -> list[Part]:
    metric = aggregates.metrics[0]
    policies = [policy for _, policy in aggregates.ranking()]
    columns = [Column("policy", policies)]
    for name, group in aggregates.groups.items():
        texts = [_text(group.estimates[policy][metric]) for policy in policies]
        columns.append(Column(name, texts, "n"))
    members = [f"{name}: {', '.join(group.tasks)}." for name, group in aggregates.groups.items()]
    caption = f"{LABELS[metric].capitalize()} of the scores of each group, with intervals."
    return [DataTable(columns, caption), *members]


def _heat_map(results: SuiteResults) -> DataTable:
    columns = [Column("task", [task.name for task in results.tasks])]
    for policy in results.policies:
        cells = [_heat_cell(task, results.of(task.name, policy.name)) for task in results.tasks]
        columns.append(Column(policy.name, cells))
    unscored = any(task.score is None for task in results.tasks)
    caption = "Scores" + ", and mean returns of tasks without a score" * unscored
    caption += "; each leads to the report of its evaluation."
    if any(len(policy.runs) > 1 for policy in results.policies):
        caption += " Where there are several runs: their mean, and the score of each run."
    return DataTable(columns, caption, heat=True)


def _heat_cell(task: Task, cells: Sequence[CellResult]) -> str | Cell:
    """Return the cell of a task and a policy: the mean over runs, and a link per run."""
    if not cells:
        return "-"
    show = number_text if task.score is None else _score
    values = [cell.mean if task.score is None else cell.score for cell in cells]
    known = [value for value in values if value is not None]
    runs = []
    for cell, value in zip(cells, values, strict=True):
        text = "-" if value is None else show(value)
        runs.append((text if cell.status == FINISHED else cell.status, _report_of(cell)))
    done = sum(cell.status == FINISHED for cell in cells)
    whole = done == len(known) == len(cells)
    kind = "bad" if not whole and (len(cells) > 1 or not done) else ""
    if whole and task.score is not None:
        kind = build.heat(sum(known) / len(known))
    if len(cells) == 1:
        return Cell(*runs[0], kind)
    text = show(sum(known) / len(known)) if whole else f"{done} of {len(cells)} runs"
    return Cell(text, kind=kind, more=tuple(runs))


def _report_of(cell: CellResult) -> str | None:
    return f"{cell.path}/{REPORT}" if cell.status == FINISHED else None


def _evaluations(cells: Sequence[CellResult]) -> DataTable:
    scores = [None if cell.score is None else _score(cell.score) for cell in cells]
    success = [None if c.success is None else percent_text(round(c.success, 4)) for c in cells]
    columns = [
        Column("evaluation", [Cell(cell.name, _report_of(cell)) for cell in cells]),
        Column("score", scores, "n"),
        Column("mean return", [cell.mean for cell in cells], "n"),
        Column("interval", [ends(cell.interval) for cell in cells], "n"),
        *(
            Column(f"mean {name}", [cell.metrics.get(name) for cell in cells], "n")
            for name in dict.fromkeys(name for cell in cells for name in cell.metrics)
        ),
        Column("success", success, "n"),
        Column("completed", [f"{cell.completed} of {cell.episodes}" for cell in cells], "n"),
    ]
    caption = "Intervals are over test episodes: they say nothing about another training run."
    return DataTable(columns, caption, hint="a task, a policy, score<0.5")


def _troubled(cells: Sequence[CellResult]) -> DataTable:
    columns = [
        Column("evaluation", [cell.name for cell in cells]),
        Column("status", [Cell(cell.status, kind="bad") for cell in cells]),
        Column("episodes", [str(cell.episodes) for cell in cells], "n"),
        Column("reason", [cell.reason or "-" for cell in cells], "t"),
    ]
    return DataTable(columns, name="Failed or missing")


def _sources(results: SuiteResults) -> DataTable:
    tasks = results.tasks
    spans = [results.ranges[task.name] or (None, None) for task in tasks]
    presets = [", ".join(f"{one} {at}" for one, at in task.presets.items()) for task in tasks]
    sources = ["-" if task.score is None else task.score.source for task in tasks]
    columns = [
        Column("task", [task.name for task in tasks]),
        Column("env", [task.env for task in tasks]),
        Column("group", [task.group or "-" for task in tasks]),
        Column("return of score 0", [number_text(low) for low, _ in spans], "n"),
        Column("of score 1", [number_text(high) for _, high in spans], "n"),
        Column("presets", [text or "-" for text in presets]),
        Column("source", [source or "the suite's file" for source in sources], "t"),
    ]
    return DataTable(columns, name="Scores and their sources")


def _score(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else number_text(value)


def _scores(values: Sequence[float | None]) -> list[str]:
    return [_score(value) for value in values if value is not None]


def _text(estimate: Estimate) -> str:
    value = _score(estimate.value)
    if estimate.interval is None:
        return value
    return f"{value} [{_score(estimate.interval.low)}, {_score(estimate.interval.high)}]"


FILES = ("scores.npz", "scores.json", "leaderboard.csv")
"""The files that are there if there is something to write into them."""


def report_on(suite: Definition, directory: Path) -> SuiteResults:
    """Read the results that a directory holds, and write the report on them.

    Of several processes that end at the same time, the last one to write has read all results.
    """
    with locked(directory, wait=WAIT):
        note_report(directory, suite)
        results = read_results(suite, directory)
        if results.aggregates is not None:
            write_scores(results, directory / "scores.npz")
            table = leaderboard(results.aggregates)
            write_atomically(directory / "leaderboard.csv", table.encode())
        else:
            for name in FILES:
                remove(directory / name)  # of results that have changed since
        write_atomically(directory / REPORT, suite_page(results).html())
        digests = {SUITE: sha256(directory / SUITE)}
        write_json(directory / RESULTS, {**results.to_dict(), "files": digests})
    return results


def write_scores(results: SuiteResults, file: Path) -> None:
    """Write scores ``[runs, tasks]``, an array per policy; and the names in a JSON file beside it.

    The arrays are the mapping that rliable's functions take. The names are ``{"tasks": [...],
    "policies": {key: name}}``.
    """
    # numpy takes a final ".npy" for the ending of the member's name.
    scores = results.scores()
    policies = {re.sub(r"\.(npy)?$", r"%2E\1", name): name for name in scores}
    arrays = {key: scores[name] for key, name in policies.items()}
    text = json.dumps({"tasks": results.scored_tasks, "policies": policies}, indent=2) + "\n"
    write_atomically(file.with_suffix(".json"), text.encode())
    write_atomically(file, partial(dump, arrays))


def leaderboard(aggregates: Aggregates) -> str:
    """Return the leaderboard as CSV: a row per policy, the best first.

    With rank, runs, each metric with the ends of its interval (empty where there is none), and the
    mean score of each task.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metrics = [f"{metric}{end}" for metric in aggregates.metrics for end in ("", "_low", "_high")]
    tasks = [f"score:{visible(task)}" for task in aggregates.tasks]
    writer.writerow(["rank", "policy", "runs", *metrics, *tasks])
    for rank, policy in aggregates.ranking():
        row: list[Any] = [rank, visible(policy), aggregates.runs[policy]]
        for metric in aggregates.metrics:
            estimate = aggregates.estimates[policy][metric]
            row += [estimate.value, *(ends(estimate.interval) or ("", ""))]
        row += aggregates.task_means[policy].values()
        writer.writerow(row)
    return text.getvalue()
