"""The pages of learning curves: of one training run, and over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tdcollect.display import count_text, number_text, number_texts
from tdcollect.pages import build, plots
from tdcollect.pages.build import Cell, Column, Figure, Figures, Page, Part, Table

if TYPE_CHECKING:
    from tdcollect.evaluation.curve import Best, Point
    from tdcollect.lab.curves import Curves

CURVES_REPORT = "curves.html"
MOST_RUNS = 10  # with a line of their own

_INTERVAL = "95% interval"
_BEST_BY = {"mean": "mean return", "iqm": "interquartile mean"}


def curve_page(
    curve: Sequence[Point],
    best: Best | None,
    name: str,
    by: str,
    path_of: Callable[..., str | None],
    report: Point | None = None,
    back: tuple[str, str] | None = None,
) -> Page:
    """Return the page of an env's curve; its first figure is that of the returns, if finite.

    The best point is best by its ``"mean"`` or ``"iqm"``. ``path_of`` returns the page of the
    evaluation at a step, relative to this one, or None; with ``"report"``, that of its report.
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
            ("Report of the best", [*_report(curve, report, by, path_of)] if report else []),
            ("Evaluations", [_points(curve, best, path_of)]),
        ],
        _curve_headline(curve, best, by, report),
        back=back,
    )


def _curve_headline(
    curve: Sequence[Point], best: Best | None, by: str, report: Point | None
) -> list[build.Card]:
    entries = []
    if best is not None:
        name = f"Best {_BEST_BY[by]}"
        entries.append((name, number_text(best.value), f"at step {best.step:,}"))
    if report is not None:
        value = number_text(report.mean if by == "mean" else report.iqm)
        others = f"on {count_text(report.episodes, 'other episode')}"
        entries.append((f"Reported {_BEST_BY[by]}", value, others))
    if curve:
        last = curve[-1]
        mean, low, high = number_texts([last.mean, last.low, last.high])
        words = "" if last.low is None else f", {_INTERVAL} {low} to {high}"
        entries.append(("Last mean return", mean, f"at step {last.step:,}{words}"))
    failed = f"{sum(point.failed for point in curve)} failed"
    return [*entries, ("Test episodes", str(sum(point.episodes for point in curve)), failed)]


def _report(
    curve: Sequence[Point], report: Point, by: str, path_of: Callable[..., str | None]
) -> Iterator[Part]:
    """Yield the reason for two numbers of one checkpoint, and both."""
    both = [next(point for point in curve if point.step == report.step), report]
    yield (
        f"The highest {_BEST_BY[by]} of {count_text(len(curve), 'evaluation')} is too high on "
        "average, as luck on their episodes helped to choose it; the reported one is of the same "
        f"checkpoint, of step {report.step:,}, on episodes of another root seed, which chose "
        "nothing."
    )
    labels = [
        Cell("as chosen", path_of(report.step)),
        Cell("reported", path_of(report.step, "report")),
    ]
    yield Table([Column("", labels), *_columns(both)], sort=False, name="Report of the best")


def _curve_figures(curve: Sequence[Point], best: Best | None, by: str) -> list[Figure]:
    if not curve:
        return []
    x, mean, low, high, length = (
        np.array([getattr(point, key) for point in curve], np.float64)  # None is NaN
        for key in ("step", "mean", "low", "high", "length")
    )
    marks = len(curve) <= 60
    metrics = _metric_curves(curve, marks)
    shows, at = _from_to("The mean return", x, mean), None
    if best is not None and best.step in x:
        at = (float(best.step), float(mean[x == best.step][0]))
        value = number_text(best.value)
        shows += f" The best {_BEST_BY[by]}, {value}, is that of step {best.step:,}."
    line = plots.Line("mean return", x, mean, low, high)
    x_label, title = "training steps", "Return of test episodes"
    returns = plots.lines([line], x_label, "return", band_name=_INTERVAL, marks=marks, best=at)
    if (mean == length).all():
        note = "The mean length, in steps, is the same at each step, and not drawn by itself."
        return [Figure("curve", title, returns, shows, note), *metrics]
    line = plots.Line("mean length", x, length, series=2)
    lengths = plots.lines([line], x_label, "length (steps)", marks=marks)
    first, last = number_texts([float(length[0]), float(length[-1])])
    said = f"The mean length is {first} steps at first and {last} at the end."
    return [
        Figure("curve", title, returns, shows),
        Figure("lengths", "Length of test episodes", lengths, said),
        *metrics,
    ]


def _metric_curves(curve: Sequence[Point], marks: bool) -> Iterator[Figure]:
    """Yield the figure of each metric; a step without a finite mean is left out."""
    for place, (name, *_) in enumerate(curve[0].metrics, 1):
        found = [(point.step, *point.metrics[place - 1][1:]) for point in curve]
        rows = np.array([row for row in found if row[1] is not None], np.float64)
        if not len(rows):
            continue
        x, mean, low, high = rows.T
        line = plots.Line(f"mean {name}", x, mean, low, high)
        drawing = plots.lines([line], "training steps", name, band_name=_INTERVAL, marks=marks)
        yield Figure(f"metric_{place}", name, drawing, _from_to("The mean", x, mean))


def _from_to(what: str, x: plots.Values, y: plots.Values) -> str:
    first, last = number_texts([float(y[0]), float(y[-1])])
    return f"{what} is {first} at step {x[0]:,.0f} and {last} at step {x[-1]:,.0f}."


def _points(curve: Sequence[Point], best: Best | None, path_of: Callable[..., str | None]) -> Table:
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
    return Table(columns, caption, hint="words, or step>1000")


def _columns(points: Sequence[Point]) -> list[Column]:
    """Return the columns of evaluations, their ledgers last."""
    found = [None if p.low is None or p.high is None else (p.low, p.high) for p in points]
    return [
        Column("mean return", [point.mean for point in points], "n"),
        Column(_INTERVAL, found, "n"),
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


def write_curves_page(directory: Path, found: Curves) -> list[Path]:
    """Write the page of the curves of several runs, and its figures; return the files."""
    return build.write_page(directory / CURVES_REPORT, curves_page(found))


def curves_page(found: Curves) -> Page:
    """Return the page of the learning curves of several training runs."""
    heads, rows = found.header(), found.rows()
    names, *columns = zip(*rows, strict=True)
    table = [Column(head, cells, "n") for head, cells in zip(heads[1:], columns, strict=True)]
    last, *measured = rows[len(found.steps) - 1 :]
    return Page(
        f"{found.env}: learning curves",
        f"{found.what} of {count_text(found.episodes, 'test episode')} at each step, over "
        f"{count_text(len(found.runs), 'training run')}",
        "Learning curves",
        [
            ("Figures", [Figures(_over_runs(found))]),
            ("Numbers", [Table([Column("step", names), *table], sort=False), *found.notes()]),
        ],
        [
            (f"{heads[1]}, {name}".capitalize(), value, f"{heads[2]} {interval}")
            for name, value, interval, *_ in [[f"at step {last[0]}", *last[1:]], *measured]
        ],
    )


def _over_runs(found: Curves) -> list[Figure]:
    x, both = np.array(found.steps, np.float64), [point.estimate for point in found.points]
    y = np.array([one.value for one in both])
    low, high = (
        np.array([getattr(one.interval, end, np.nan) for one in both]) for end in ("low", "high")
    )
    middle = [plots.Line("interquartile mean", x, y, low, high)]
    if found.threshold is not None:
        name = f"threshold {number_text(found.threshold)}"
        middle.append(plots.Line(name, x, np.full(len(x), found.threshold), series=1))
    values = np.array([point.runs for point in found.points]).T[:MOST_RUNS]
    runs = [plots.Line(found.runs[at], x, own, series=at) for at, own in enumerate(values)]
    over, each = (
        plots.lines(drawn, "training steps", plots.short(found.what), marks=len(x) <= 60)
        for drawn in (middle, runs)
    )
    shows = _from_to("The interquartile mean over runs", x, y)
    note = f"The band is the {found.header()[2]}." if len(found.runs) > 1 else ""
    low_text, high_text = number_texts([*np.quantile(values[:, -1], [0, 1])])
    said = f"At step {x[-1]:,.0f} the means are from {low_text} to {high_text}."
    left = len(found.runs) - len(runs)
    return [
        Figure("curves", "Interquartile mean over runs", over, shows, note),
        Figure("runs", "Each run", each, said, f"{left} more are in the table." * bool(left)),
    ]
