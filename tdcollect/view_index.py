"""The index of a folder that is viewed: its suites, evaluations and learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tdcollect.display import count_text, percent_text
from tdcollect.evaluation.beside.curve import Best, Point
from tdcollect.evaluation.beside.curve_page import step_text
from tdcollect.evaluation.reports.intervals import ends
from tdcollect.evaluation.reports.sentences import with_interval
from tdcollect.evaluation.reports.statistics import Summary
from tdcollect.pages.html import Figure, figures, page, paragraphs, section
from tdcollect.pages.plots import Estimate, intervals
from tdcollect.pages.tables import Cell, Column, Value, table
from tdcollect.suites.results import SuiteResults

FINISHED, COMPARISON = "finished", "comparison"
LEFT_OUT = "left out, as its numbers are in no file: tdcollect compare makes it anew"
_KINDS = {name.split()[-1]: name for name in ("suite", "evaluation", "learning curve", COMPARISON)}
_FIGURES, _ROWS = 6, 20  # figures, and rows of each


@dataclass(frozen=True)
class Viewed:
    """An evaluation, a learning curve, a suite or a comparison that was found.

    Attributes:
        path: its folder, relative to the one that was viewed.
        kind: ``"evaluation"``, ``"curve"``, ``"suite"`` or ``"comparison"``.
        status: ``"finished"``; or what it is instead, such as ``"unfinished, 3 of 10 episodes"``.
        page: its page, relative to the index; None for what is unfinished or cannot be read.
        env: the env's name.
        policy: the policy's name.
        summary: the statistics of an evaluation.
        curve: the points of a curve.
        best: the best of them.
        suite: the results of a suite.
    """

    path: str
    kind: str
    status: str
    page: str | None = None
    env: str = "-"
    policy: str = "-"
    summary: Summary | None = None
    curve: Sequence[Point] = ()
    best: Best | None = None
    suite: SuiteResults | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what was found as plain dicts, lists, strings and numbers, for JSON."""
        found = {name: getattr(self, name) for name in ("path", "kind", "status", "page", "env")}
        found["policy"] = self.policy
        if self.summary is not None:
            found["summary"] = self.summary.to_dict()
        if self.kind == "curve":
            found["points"] = len(self.curve)
            found["best"] = None if self.best is None else [self.best.step, self.best.value]
        if self.suite is not None:
            found["suite"] = self.suite.to_dict()
        return found


def index_page(name: str, found: Sequence[Viewed]) -> bytes:
    """Return the index of what was found in a folder of a name."""
    groups = {kind: [one for one in found if one.kind == kind] for kind in _KINDS}
    suites, evaluations, curves, comparisons = groups.values()
    parts = []
    if suites:
        parts.append(section("Suites", _suites(suites)))
    if drawn := _figures(evaluations):
        parts.append(section("Mean returns", figures(drawn)))
    if evaluations:
        parts.append(section("Evaluations", _evaluations(evaluations)))
    if curves:
        parts.append(section("Learning curves", _curves(curves)))
    if comparisons:
        left = [f"{one.path}: {one.status}." for one in comparisons]
        parts.append(section("Comparisons", paragraphs(left)))
    lead = [count_text(len(some), _KINDS[kind]) for kind, some in groups.items() if some]
    without = sum(one.page is None for one in found)
    lead += [f"{without} without a page"] if without else []
    return page(name, " · ".join(lead), parts, kicker="Evaluations")


def _figures(evaluations: Sequence[Viewed]) -> list[Figure]:
    """Return a figure per env with several evaluations: their mean returns."""
    by_env: dict[str, list[tuple[float, Viewed, Summary]]] = {}
    for one in evaluations:
        if one.summary is not None and (mean := one.summary.returns.mean) is not None:
            by_env.setdefault(one.env, []).append((mean, one, one.summary))
    drawn: list[Figure] = []
    for place, (env, ones) in enumerate(sorted(by_env.items())):
        if len(ones) < 2 or len(drawn) == _FIGURES:
            continue
        shown = sorted(ones, key=itemgetter(0), reverse=True)[:_ROWS]
        rows = [Estimate(_name(one), mean, ends(s.returns.mean_interval)) for mean, one, s in shown]
        said = [
            f"{_name(one)}: {with_interval(mean, s.returns.mean_interval, s.confidence)}."
            for mean, one, s in shown[:5]
        ]
        left = len(ones) - len(shown)
        note = f"The {len(shown)} highest are drawn; {left} more are in the table." if left else ""
        drawn.append(
            Figure(f"env_{place}", env, intervals(rows, "mean return"), " ".join(said), note)
        )
    return drawn


def _name(one: Viewed) -> str:
    return one.path if one.path != "." else one.policy


def _evaluations(evaluations: Sequence[Viewed]) -> str:
    success = any(one.summary and one.summary.success for one in evaluations)
    lost = any(one.summary and one.summary.lost for one in evaluations)
    columns = [
        Column("evaluation"),
        Column("env"),
        Column("policy"),
        Column("episodes", number=True),
        Column("mean return", number=True),
        Column("95% interval", number=True),
        *([Column("success", number=True)] if success else []),
        Column("length", number=True),
        Column("failed or lost" if lost else "failed", number=True),
        Column("status", text=True),
    ]
    rows: list[list[Value]] = []
    for one in evaluations:
        row: list[Value] = [Cell(one.path, one.page), one.env, one.policy]
        s = one.summary
        if s is None:
            rows.append([*row, *["-"] * (6 if success else 5), _status(one)])
            continue
        row += [str(s.episodes), s.returns.mean, ends(s.returns.mean_interval)]
        if success:
            row.append("-" if s.success is None else percent_text(round(s.success.rate, 3)))
        row += [s.lengths.mean, str(s.failed + s.lost), one.status]
        rows.append(row)
    return table(columns, rows, hint="words, or mean>100", name="Evaluations")


def _suites(suites: Sequence[Viewed]) -> str:
    columns = [
        Column("suite"),
        Column("name"),
        Column("policies", number=True),
        Column("tasks", number=True),
        Column("evaluations", number=True),
        Column("best policy"),
        Column("status", text=True),
    ]
    rows: list[list[str | Cell]] = []
    for one in suites:
        row: list[str | Cell] = [Cell(one.path, one.page)]
        found = one.suite
        if found is None:
            row += ["-"] * 5
        else:
            best = found.aggregates.ranking()[0][1] if found.aggregates is not None else "-"
            counts = (len(found.policies), len(found.tasks), len(found.cells))
            row += [f"{found.name} {found.version}", *map(str, counts), best]
        rows.append([*row, _status(one)])
    return table(columns, rows, name="Suites")


def _status(one: Viewed) -> str | Cell:
    return one.status if one.status == FINISHED else Cell(one.status, kind="bad")


def _curves(curves: Sequence[Viewed]) -> str:
    columns = [
        Column("learning curve"),
        Column("env"),
        Column("policy"),
        Column("evaluations", number=True),
        Column("best", number=True),
        Column("at step", number=True),
        Column("last mean return", number=True),
        Column("status", text=True),
    ]
    rows: list[list[Value]] = []
    for one in curves:
        best = one.best
        rows.append(
            [
                Cell(one.path, one.page),
                one.env,
                one.policy,
                str(len(one.curve)),
                None if best is None else best.value,
                "-" if best is None else step_text(best.step),
                one.curve[-1].mean if one.curve else None,
                _status(one),
            ]
        )
    return table(columns, rows, name="Learning curves")
