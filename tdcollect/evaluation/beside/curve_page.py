"""The page of a learning curve, and its figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tdcollect.display import count_text, number_text, number_texts, percent_text
from tdcollect.evaluation.beside.curve import Best, Point
from tdcollect.pages.html import Figure, cards, figures, page, paragraphs, section
from tdcollect.pages.plots import Line, lines
from tdcollect.pages.tables import Cell, Column, Value, table

CONFIDENCE = 0.95  # of the intervals of points
NAMES = {"mean": "mean return", "iqm": "interquartile mean"}


def curve_page(
    curve: Sequence[Point],
    best: Best | None,
    name: str,
    by: str,
    path_of: Callable[[int], str | None],
    back: str = "",
) -> tuple[bytes, Figure | None]:
    """Return the page of a curve, and the figure of its returns; None for none that is finite.

    Args:
        curve: the points, by step.
        best: the best of them.
        name: the env's.
        by: the value that the best has the most of: ``"mean"`` or ``"iqm"``.
        path_of: the page of the evaluation at a step, relative to this page; None for none.
        back: HTML above all sections, such as a link to an index.
    """
    drawn = [figure for figure in _figures(curve, best, by) if figure is not None]
    sections = [
        *([back] if back else []),
        cards(_headline(curve, best, by)),
        section("Figures", figures(drawn) if drawn else paragraphs(["No return is finite."])),
        section("Evaluations", _points(curve, best, path_of)),
    ]
    lead = f"{count_text(len(curve), 'evaluation')} beside training"
    if curve:
        lead += f", {count_text(curve[-1].episodes, 'test episode')} each"
    html = page(f"{name}: learning curve", lead, sections, kicker="Learning curve")
    return html, drawn[0] if drawn else None


def step_text(step: int) -> str:
    """Return a step with commas between thousands."""
    return f"{step:,}"


def _headline(curve: Sequence[Point], best: Best | None, by: str) -> list[tuple[str, str, str]]:
    entries = []
    if best is not None:
        name = f"Best {NAMES[by]}"
        entries.append((name, number_text(best.value), f"at step {step_text(best.step)}"))
    if curve:
        last = curve[-1]
        remark = f"at step {step_text(last.step)}"
        mean, low, high = number_texts([last.mean, last.low, last.high])
        if last.low is not None and last.high is not None:
            remark += f", {percent_text(CONFIDENCE)} interval {low} to {high}"
        entries.append(("Last mean return", mean, remark))
    episodes, failed = (sum(getattr(p, key) for p in curve) for key in ("episodes", "failed"))
    entries.append(("Test episodes", str(episodes), f"{failed} failed"))
    return entries


def _figures(curve: Sequence[Point], best: Best | None, by: str) -> list[Figure | None]:
    drawn = [point for point in curve if point.mean is not None]
    if not drawn:
        return [None]
    x = np.array([point.step for point in drawn], np.float64)
    mean, low, high, length = (
        np.array([getattr(point, key) for point in drawn], np.float64)  # None is NaN
        for key in ("mean", "low", "high", "length")
    )
    at = next((place for place, p in enumerate(drawn) if best and p.step == best.step), None)
    marks = len(drawn) <= 60
    returns = lines(
        [Line("mean return", x, mean, low, high)],
        "training steps",
        "return",
        band_name=f"{percent_text(CONFIDENCE)} interval",
        marks=marks,
        best=None if at is None else (float(x[at]), float(mean[at])),
    )
    first, last = number_texts([float(mean[0]), float(mean[-1])])
    shows = (
        f"The mean return is {first} at step {step_text(int(x[0]))} and {last} at step "
        f"{step_text(int(x[-1]))}."
    )
    if at is not None and best is not None:
        shows += (
            f" The best {NAMES[by]}, {number_text(best.value)}, is that of step "
            f"{step_text(best.step)}."
        )
    if (mean == length).all():
        note = "The mean length, in steps, is the same at each step, and not drawn by itself."
        return [Figure("curve", "Return of test episodes", returns, shows, note)]
    lengths = lines(
        [Line("mean length", x, length, series=2)],
        "training steps",
        "length (steps)",
        marks=marks,
    )
    first, last = number_texts([float(length[0]), float(length[-1])])
    said = f"The mean length is {first} steps at first and {last} at the end."
    return [
        Figure("curve", "Return of test episodes", returns, shows),
        Figure("lengths", "Length of test episodes", lengths, said),
    ]


def _points(curve: Sequence[Point], best: Best | None, path_of: Callable[[int], str | None]) -> str:
    columns = [
        Column("step", number=True),
        Column("mean return", number=True),
        Column(f"{percent_text(CONFIDENCE)} interval", number=True),
        Column("std", number=True),
        Column("interquartile mean", number=True),
        Column("length", number=True),
        Column("episodes", number=True),
        Column("failed", number=True),
        Column(""),
        Column("ledger"),
    ]
    rows: list[list[Value]] = []
    for point in curve:
        found = None if point.low is None or point.high is None else (point.low, point.high)
        rows.append(
            [
                Cell(step_text(point.step), path_of(point.step)),
                point.mean,
                found,
                *(point.std, point.iqm, point.length),
                str(point.episodes),
                str(point.failed),
                Cell("best", kind="good") if best and point.step == best.step else "",
                point.digest[:12],
            ]
        )
    caption = "A step leads to the report of its evaluation."
    return table(columns, rows, caption, hint="words, or step>1000")
