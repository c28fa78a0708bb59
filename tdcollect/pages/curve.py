"""The pages of learning curves: of one training run, and over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tdcollect.display import count_text, listed_text, number_text, number_texts
from tdcollect.evaluation.statistics import ends
from tdcollect.pages import plots
from tdcollect.pages.build import (
    Card,
    Cell,
    Column,
    Figure,
    Figures,
    Page,
    Part,
    Table,
    write_page,
)
from tdcollect.pages.evaluation import intervals_sentence, number_and_interval

if TYPE_CHECKING:
    from tdcollect.evaluation.curve import Best, Point
    from tdcollect.suites.curves import Curves, Measure

CURVES_REPORT = "curves.html"
MOST_RUNS = 8  # with a line of their own
MOST_MARKED = 60  # points of a line with a mark each
MOST_ROWS = 24  # runs in a figure with a row each

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
) -> list[Card]:
    entries = []
    if best is not None:
        name = f"Best {_BEST_BY[by]}"
        entries.append((name, number_text(best.value), f"at step {best.step:,}"))
    if report is not None:
        others = f"on {count_text(report.episodes, 'other episode')}"
        if by == "mean":
            entries.append(_mean_card("Reported mean return", report, others))
        else:
            entries.append((f"Reported {_BEST_BY[by]}", number_text(report.iqm), others))
    if curve:
        last = curve[-1]
        entries.append(_mean_card("Last mean return", last, f"at step {last.step:,}"))
    failed = f"{sum(point.failed for point in curve)} failed"
    return [*entries, ("Test episodes", str(sum(point.episodes for point in curve)), failed)]


def _mean_card(name: str, point: Point, where: str) -> Card:
    mean, low, high = number_texts([point.mean, point.low, point.high])
    words = "" if point.low is None else f", {_INTERVAL} {low} to {high}"
    return name, mean, f"{where}{words}"


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
    marks = len(curve) <= MOST_MARKED
    metrics = _metric_curves(curve, marks)
    first, last = number_texts([float(mean[0]), float(mean[-1])])
    shows = (
        f"The mean return is {first} at step {curve[0].step:,} and {last} at step "
        f"{curve[-1].step:,}."
    )
    at = None
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
        drawing = plots.lines(
            [plots.Line(f"mean {name}", x, mean, low, high)],
            "training steps",
            name,
            band_name=_INTERVAL,
            marks=marks,
        )
        first, last = number_texts([float(mean[0]), float(mean[-1])])
        said = f"The mean is {first} at step {x[0]:,.0f} and {last} at step {x[-1]:,.0f}."
        yield Figure(f"metric_{place}", name, drawing, said)


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
    return write_page(directory / CURVES_REPORT, curves_page(found))


def curves_page(found: Curves) -> Page:
    """Return the page of the learning curves of several training runs."""
    runs = count_text(len(found.runs), "training run")
    episodes = count_text(found.episodes, "test episode")
    steps, middles, intervals, *values = zip(*found.step_rows(), strict=True)
    by_step = [
        Column("step", steps, "n"),
        Column("interquartile mean", middles, "n"),
        Column(found.interval, intervals, "n"),
        *(Column(name, cells, "n") for name, cells in zip(found.runs, values, strict=True)),
    ]
    labels, *numbers = zip(*found.run_rows(), strict=True)
    measures = [*found.measures.values()]
    by_run = [Column(m.name, cells, "n") for m, cells in zip(measures, numbers, strict=True)]
    drawn = [_over_runs(found), _each_run(found)]
    drawn += [_of_runs(found, name, one) for name, one in found.measures.items() if name != "last"]
    return Page(
        f"{found.env}: learning curves",
        f"{_title(found.what)} of {episodes} at each step, over {runs}",
        "Learning curves",
        [
            ("Figures", [Figures(drawn)]),
            ("Runs", [Table([Column("run", labels), *by_run], sort=False, name="Runs")]),
            ("Steps", [*found.notes(), Table(by_step, hint="words, or step>1000", name="Steps")]),
        ],
        [_measured(measure, found) for measure in measures],
    )


def _measured(measure: Measure, found: Curves) -> Card:
    estimate = measure.estimate
    value, remark = number_and_interval(estimate.value, estimate.interval, found.confidence)
    if measure is found.measures.get("steps"):
        reached = f"{len(found.runs) - len(found.never)} of {count_text(len(found.runs), 'run')}"
        remark = f"{reached} came there, {remark}"
    return _title(measure.name), value.replace("inf", "never"), remark.replace("inf", "never")


def _over_runs(found: Curves) -> Figure:
    x, bands = np.array(found.steps, np.float64), [one.interval for one in found.estimates]
    y = np.array([one.value for one in found.estimates])
    low, high = (
        np.array([getattr(band, name, np.nan) for band in bands], np.float64)
        for name in ("low", "high")
    )
    drawn = [plots.Line("interquartile mean", x, y, low, high)]
    title = f"Over {count_text(len(found.runs), 'run')}"
    first, last = number_texts([float(y[0]), float(y[-1])])
    shows = (
        f"The interquartile mean over runs is {first} at step {found.steps[0]:,} and {last} at "
        f"step {found.steps[-1]:,}."
    )
    note = f"The band is the {found.interval}." if len(found.runs) > 1 else ""
    if found.threshold is not None:
        flat = np.full(2, found.threshold)
        name = f"threshold {number_text(found.threshold)}"
        drawn.append(plots.Line(name, x[[0, -1]], flat, series=1))
    drawing = _lines(drawn, found)
    return Figure("curves", title, drawing, shows, note)


def _each_run(found: Curves) -> Figure:
    x, shown = np.array(found.steps, np.float64), [*found.runs.items()][:MOST_RUNS]
    drawn = [
        plots.Line(name, x, np.array(values), series=at) for at, (name, values) in enumerate(shown)
    ]
    drawing = _lines(drawn, found)
    texts = number_texts([values[-1] for _, values in shown])
    said = [f"{name} {text}" for (name, _), text in zip(shown, texts, strict=True)]
    shows = f"At step {found.steps[-1]:,}: {'; '.join(said)}."
    left = len(found.runs) - len(shown)
    note = f"The first {MOST_RUNS} runs are drawn; {left} more are in the tables." if left else ""
    return Figure("runs", "Each run", drawing, shows, note)


def _of_runs(found: Curves, key: str, measure: Measure) -> Figure:
    one = measure.estimate
    rows = [plots.Estimate("interquartile mean", one.value, ends(one.interval))]
    rows += [plots.Estimate(name, value, None, 1) for name, value in measure.runs.items()]
    drawing = plots.intervals(rows[:MOST_ROWS], measure.name)
    said = intervals_sentence([("Interquartile mean", one.value, one.interval)], found.confidence)
    shows = said.replace("inf", "never")
    never = found.never if key == "steps" else []
    note = f"Never there, and not drawn: {listed_text(never, MOST_ROWS)}." if never else ""
    return Figure(f"measure_{key}", _title(measure.name), drawing, shows, note)


def _lines(drawn: Sequence[plots.Line], found: Curves) -> plots.Drawing:
    marks = len(found.steps) <= MOST_MARKED
    return plots.lines(drawn, "training steps", plots.short(found.what), marks=marks)


def _title(words: str) -> str:
    return words[0].upper() + words[1:]
