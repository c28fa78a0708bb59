"""The page of a learning curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tdcollect.display import count_text, number_text, number_texts, percent_text
from tdcollect.pages.build import Cell, Column, Figure, Figures, Page, Table
from tdcollect.pages.plots import Line, lines

if TYPE_CHECKING:
    from tdcollect.evaluation.curve import Best, Point

INTERVAL = f"{percent_text(0.95)} interval"
NAMES = {"mean": "mean return", "iqm": "interquartile mean"}


def curve_page(
    curve: Sequence[Point],
    best: Best | None,
    name: str,
    by: str,
    path_of: Callable[[int], str | None],
    back: tuple[str, str] | None = None,
) -> Page:
    """Return the page of an env's curve; its first figure is that of the returns, if finite.

    The best point is best by its ``"mean"`` or ``"iqm"``. ``path_of`` returns the page of the
    evaluation at a step, relative to this one, or None.
    """
    drawn = _figures([point for point in curve if point.mean is not None], best, by)
    lead = f"{count_text(len(curve), 'evaluation')} beside training"
    if curve:
        lead += f", {count_text(curve[-1].episodes, 'test episode')} each"
    return Page(
        f"{name}: learning curve",
        lead,
        "Learning curve",
        [
            ("Figures", [Figures(drawn)] if drawn else ["No return is finite."]),
            ("Evaluations", [_points(curve, best, path_of)]),
        ],
        _headline(curve, best, by),
        back=back,
    )


def _headline(curve: Sequence[Point], best: Best | None, by: str) -> list[tuple[str, str, str]]:
    entries = []
    if best is not None:
        entries.append((f"Best {NAMES[by]}", number_text(best.value), f"at step {best.step:,}"))
    if curve:
        last = curve[-1]
        remark = f"at step {last.step:,}"
        mean, low, high = number_texts([last.mean, last.low, last.high])
        if last.low is not None:
            remark += f", {INTERVAL} {low} to {high}"
        entries.append(("Last mean return", mean, remark))
    failed = f"{sum(point.failed for point in curve)} failed"
    return [*entries, ("Test episodes", str(sum(point.episodes for point in curve)), failed)]


def _figures(curve: Sequence[Point], best: Best | None, by: str) -> list[Figure]:
    if not curve:
        return []
    x, mean, low, high, length = (
        np.array([getattr(point, key) for point in curve], np.float64)  # None is NaN
        for key in ("step", "mean", "low", "high", "length")
    )
    marks = len(curve) <= 60
    first, last = number_texts([float(mean[0]), float(mean[-1])])
    shows = (
        f"The mean return is {first} at step {curve[0].step:,} and {last} at step "
        f"{curve[-1].step:,}."
    )
    at = None
    if best is not None and best.step in x:
        at = (float(best.step), float(mean[x == best.step][0]))
        value = number_text(best.value)
        shows += f" The best {NAMES[by]}, {value}, is that of step {best.step:,}."
    line = Line("mean return", x, mean, low, high)
    returns = lines(
        [line], "training steps", "return", band_name=INTERVAL, marks=marks, best=at
    )  # fmt: skip
    if (mean == length).all():
        note = "The mean length, in steps, is the same at each step, and not drawn by itself."
        return [Figure("curve", "Return of test episodes", returns, shows, note)]
    line = Line("mean length", x, length, series=2)
    lengths = lines([line], "training steps", "length (steps)", marks=marks)
    first, last = number_texts([float(length[0]), float(length[-1])])
    said = f"The mean length is {first} steps at first and {last} at the end."
    return [
        Figure("curve", "Return of test episodes", returns, shows),
        Figure("lengths", "Length of test episodes", lengths, said),
    ]


def _points(
    curve: Sequence[Point], best: Best | None, path_of: Callable[[int], str | None]
) -> Table:
    steps = [point.step for point in curve]
    found = [None if p.low is None or p.high is None else (p.low, p.high) for p in curve]
    chosen = [Cell("best", kind="good") if best and step == best.step else "" for step in steps]
    columns = [
        Column("step", [Cell(f"{step:,}", path_of(step)) for step in steps], "n"),
        Column("mean return", [point.mean for point in curve], "n"),
        Column(INTERVAL, found, "n"),
        Column("std", [point.std for point in curve], "n"),
        Column("interquartile mean", [point.iqm for point in curve], "n"),
        Column("length", [point.length for point in curve], "n"),
        Column("episodes", [str(point.episodes) for point in curve], "n"),
        Column("failed", [str(point.failed) for point in curve], "n"),
        Column("", chosen),
        Column("ledger", [point.digest[:12] for point in curve]),
    ]
    caption = "A step leads to the report of its evaluation."
    return Table(columns, caption, hint="words, or step>1000")
