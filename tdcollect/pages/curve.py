"""The page of the learning curve of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tdcollect.display import count_text, number_text, number_texts
from tdcollect.pages import build, plots
from tdcollect.pages.build import Cell, Column, DataTable, Figure, Figures, Page

if TYPE_CHECKING:
    from tdcollect.evaluation.curve import Best, Point

_INTERVAL = "95% interval"
_BEST_BY = {"mean": "mean return", "iqm": "interquartile mean"}


def curve_page(
    curve: Sequence[Point],
    best: Best | None,
    name: str,
    by: str,
    path_of: Callable[[int], str | None],
    links: Sequence[tuple[str, str]] = (),
) -> Page:
    """Return the page of an env's curve; its first figure is that of the returns, if finite.

    The best point is best by its ``"mean"`` or ``"iqm"``. ``path_of`` returns the page of the
    evaluation at a step, relative to this one, or None.
    """
    drawn = _curve_figures([point for point in curve if point.mean is not None], best, by)
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
        _curve_headline(curve, best, by),
        links=links,
    )


def _curve_headline(curve: Sequence[Point], best: Best | None, by: str) -> list[build.Card]:
    entries = []
    if best is not None:
        name = f"Best {_BEST_BY[by]}"
        entries.append((name, number_text(best.value), f"at step {best.step:,}"))
    if curve:
        last = curve[-1]
        mean, low, high = number_texts([last.mean, last.low, last.high])
        words = "" if last.low is None else f", {_INTERVAL} {low} to {high}"
        entries.append(("Last mean return", mean, f"at step {last.step:,}{words}"))
    failed = f"{sum(point.failed for point in curve)} failed"
    return [*entries, ("Test episodes", str(sum(point.episodes for point in curve)), failed)]


def _curve_figures(curve: Sequence[Point], best: Best | None, by: str) -> list[Figure]:
    if not curve:
        return []
    x, mean, low, high, length = (
        np.array([getattr(point, key) for point in curve], np.float64)  # None is NaN
        for key in ("step", "mean", "low", "high", "length")
    )
    metrics = _metric_curves(curve)
    shows, at = from_to("The mean return", x, mean), None
    if best is not None and best.step in x:
        at = (float(best.step), float(mean[x == best.step][0]))
        value = number_text(best.value)
        shows += f" The best {_BEST_BY[by]}, {value}, is that of step {best.step:,}."
    line = plots.Line("mean return", x, mean, low, high)
    x_label, title = "training steps", "Return of test episodes"
    returns = plots.lines([line], x_label, "return", band_name=_INTERVAL, best=at)
    if (mean == length).all():
        note = "The mean length, in steps, is the same at each step, and not drawn by itself."
        return [Figure("curve", title, returns, shows, note), *metrics]
    line = plots.Line("mean length", x, length, series=2)
    lengths = plots.lines([line], x_label, "length (steps)")
    first, last = number_texts([float(length[0]), float(length[-1])])
    said = f"The mean length is {first} steps at first and {last} at the end."
    return [
        Figure("curve", title, returns, shows),
        Figure("lengths", "Length of test episodes", lengths, said),
        *metrics,
    ]


def _metric_curves(curve: Sequence[Point]) -> Iterator[Figure]:
    """Yield the figure of each metric; a step without a finite mean is left out."""
    for place, (name, *_) in enumerate(curve[0].metrics, 1):
        points = [(point.step, *point.metrics[place - 1][1:]) for point in curve]
        rows = np.array([row for row in points if row[1] is not None], np.float64)
        if not len(rows):
            continue
        x, mean, low, high = rows.T
        line = plots.Line(f"mean {name}", x, mean, low, high)
        drawing = plots.lines([line], "training steps", name, band_name=_INTERVAL)
        yield Figure(f"metric_{place}", name, drawing, from_to("The mean", x, mean))


def from_to(what: str, x: plots.Values, y: plots.Values) -> str:
    """Return the first and the last value of a curve in words."""
    first, last = number_texts([float(y[0]), float(y[-1])])
    return f"{what} is {first} at step {x[0]:,.0f} and {last} at step {x[-1]:,.0f}."


def _points(
    curve: Sequence[Point], best: Best | None, path_of: Callable[[int], str | None]
) -> DataTable:
    steps = [point.step for point in curve]
    *statistics, ledger = _columns(curve)
    chosen = [Cell("best", kind="good") if best and step == best.step else "" for step in steps]
    columns = [
        Column("step", [Cell(f"{step:,}", path_of(step)) for step in steps], "n"),
        *statistics,
        Column("", chosen),
        ledger,
    ]
    caption = "A step leads to the report of its evaluation."
    return DataTable(columns, caption, hint="words, or step>1000")


def _columns(points: Sequence[Point]) -> list[Column]:
    """Return the columns of evaluations, their ledgers last."""
    intervals = [None if p.low is None or p.high is None else (p.low, p.high) for p in points]
    return [
        Column("mean return", [point.mean for point in points], "n"),
        Column(_INTERVAL, intervals, "n"),
        Column("std", [point.std for point in points], "n"),
        Column("interquartile mean", [point.iqm for point in points], "n"),
        Column("length", [point.length for point in points], "n"),
        *(
            Column(f"mean {name}", [point.metrics[place].mean for point in points], "n")
            for place, (name, *_) in enumerate(points[0].metrics if points else ())
        ),
        Column("episodes", [str(point.episodes) for point in points], "n"),
        Column("failed", [str(point.failed) for point in points], "n"),
        Column("ledger", [point.digest[:12] for point in points]),
    ]
