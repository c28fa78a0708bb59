"""The page of the learning curves of several training runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tdcollect.display import count_text, number_text, number_texts
from tdcollect.lab.curves import Curves
from tdcollect.pages import build, plots
from tdcollect.pages.build import Column, DataTable, Figure, Figures, Page
from tdcollect.pages.curve import from_to

CURVES_REPORT = "curves.html"
MOST_RUNS = 10  # with a line of their own


def write_curves_page(directory: Path, curves: Curves) -> list[Path]:
    """Write the page of the curves of several runs, and its figures; return the files."""
    return build.write_page(directory / CURVES_REPORT, curves_page(curves))


def curves_page(curves: Curves) -> Page:
    """Return the page of the learning curves of several training runs."""
    heads, rows = curves.header(), curves.rows()
    names, *columns = zip(*rows, strict=True)
    table = [Column(head, cells, "n") for head, cells in zip(heads[1:], columns, strict=True)]
    last, *measured = rows[len(curves.steps) - 1 :]
    return Page(
        f"{curves.env}: learning curves",
        f"{curves.what} of {count_text(curves.episodes, 'test episode')} at each step, over "
        f"{count_text(len(curves.runs), 'training run')}",
        "Learning curves",
        [
            ("Figures", [Figures(_over_runs(curves))]),
            ("Numbers", [DataTable([Column("step", names), *table], sort=False), *curves.notes()]),
        ],
        [
            (f"{heads[1]}, {name}".capitalize(), value, f"{heads[2]} {interval}")
            for name, value, interval, *_ in [[f"at step {last[0]}", *last[1:]], *measured]
        ],
    )


def _over_runs(curves: Curves) -> list[Figure]:
    x, both = np.array(curves.steps, np.float64), [point.estimate for point in curves.points]
    y = np.array([one.value for one in both])
    low, high = (
        np.array([getattr(one.interval, end, np.nan) for one in both]) for end in ("low", "high")
    )
    middle = [plots.Line("interquartile mean", x, y, low, high)]
    goal = curves.threshold
    levels = {} if goal is None else {goal: f"threshold {number_text(goal)}"}
    values = np.array([point.runs for point in curves.points]).T[:MOST_RUNS]
    runs = [plots.Line(curves.runs[at], x, own, series=at) for at, own in enumerate(values)]
    over, each = (
        plots.lines(drawn, "training steps", plots.short(curves.what), levels=levels)
        for drawn in (middle, runs)
    )
    shows = from_to("The interquartile mean over runs", x, y)
    note = f"The band is the {curves.header()[2]}." if len(curves.runs) > 1 else ""
    low_text, high_text = number_texts([*np.quantile(values[:, -1], [0, 1])])
    said = f"At step {x[-1]:,.0f} the means are from {low_text} to {high_text}."
    left = len(curves.runs) - len(runs)
    return [
        Figure("curves", "Interquartile mean over runs", over, shows, note),
        Figure("runs", "Each run", each, said, f"{left} more are in the table." * bool(left)),
    ]
