"""Plots of plain numbers: the same drawing for the same numbers, of bounded size for any number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tdcollect.display import number_text
from tdcollect.pages.drawing import HEIGHT, Canvas, Drawing, canvas, short
from tdcollect.pages.palette import light, series

Values = npt.NDArray[np.float64]
Ends = tuple[float, float]

MOST_BARS = 40
MOST_POINTS = 600  # of a line: more than a drawing this wide can show
MOST_PAIRS = 1000  # of a cloud
_ROW = 0.34  # inches per row of a plot with names at its left
_MARGIN = 0.78


class Bar(NamedTuple):
    """A bar: its name, its length, the text at its end, and its colour's role."""

    name: str
    value: float
    text: str
    role: str = "bar"


class Estimate(NamedTuple):
    """An estimate with the ends of its interval, and the place of its colour in the series."""

    name: str
    value: float | None
    interval: Ends | None
    series: int = 0


class Line(NamedTuple):
    """A line x, y ``[E]`` with a band: its ends ``[E]``, NaN where there is none."""

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    series: int = 0


def histogram(
    values: Sequence[float],
    x_label: str,
    *,
    mean: float | None = None,
    interval: Ends | None = None,
    interval_name: str = "interval",
    zero: bool = False,
    y_label: str = "episodes",
) -> Drawing:
    """Draw how many values lie in each of some bars; NaN and infinite ones are left out.

    Args:
        values: the values ``[E]``.
        x_label: their name.
        mean: marked by a line.
        interval: of the mean, marked by a band.
        interval_name: for the legend.
        zero: mark zero too, by a dashed line.
        y_label: the name of what is counted.
    """
    found = finite(values)
    with canvas(x_label, y_label) as drawn:
        axes = drawn.axes
        if len(found):
            edges = bin_edges(found)
            counts, _ = np.histogram(found, edges)
            there = counts > 0
            axes.bar(
                edges[:-1][there],
                counts[there],
                np.diff(edges)[there],
                align="edge",
                color=light("bar"),
                edgecolor=light("paper"),
                linewidth=0.5,
            )
            if len(edges) == 2:  # one bar as wide as the plot would show a spread
                axes.set_xlim(edges[0] - 4 * np.ptp(edges), edges[1] + 4 * np.ptp(edges))
            else:
                axes.set_xlim(edges[0], edges[-1])
        if zero:
            _zero_line(axes)
        if interval is not None:
            axes.axvspan(*interval, color=light("series1"), alpha=0.2, lw=0, label=interval_name)
        if mean is not None:
            name = f"mean {number_text(mean)}"
            axes.axvline(mean, color=light("series1"), linewidth=1.6, label=name)
        axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
        axes.xaxis.get_major_locator().set_params(nbins=6)
        _legend(drawn)
    return drawn.drawing


def lines(
    drawn_lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    band_name: str = "",
    y_limits: Ends | None = None,
    marks: bool = False,
    best: tuple[float, float] | None = None,
    integer_x: bool = True,
    height: float = HEIGHT,
) -> Drawing:
    """Draw lines with bands.

    Args:
        drawn_lines: the lines; each is drawn at no more than 600 of its points.
        x_label: below the plot.
        y_label: above the plot.
        band_name: the bands' name in the legend, if there is a single line.
        y_limits: the range of y.
        marks: mark each point.
        best: a point to mark, x and y.
        integer_x: x counts something.
        height: in inches.
    """
    with canvas(x_label, y_label, height=height) as drawn:
        axes = drawn.axes
        for line in drawn_lines:
            points = some_points(len(line.x))
            colour = series(line.series)
            x, y = line.x[points], line.y[points]
            style: dict[str, Any] = {"marker": "o", "markersize": 3.5} if marks else {}
            axes.plot(x, y, color=colour, linewidth=1.6, label=short(line.name), **style)
            if line.low is not None and line.high is not None:
                low, high = line.low[points], line.high[points]
                there = np.isfinite(low) & np.isfinite(high)
                if there.any():
                    label = band_name if len(drawn_lines) == 1 else None
                    axes.fill_between(
                        x[there], low[there], high[there], color=colour, alpha=0.18, lw=0,
                        label=label,
                    )  # fmt: skip
        if best is not None:
            axes.plot(
                *([value] for value in best), "o", markersize=8, markerfacecolor="none",
                markeredgecolor=light("series2"), markeredgewidth=1.8, label="best",
            )  # fmt: skip
        if y_limits is not None:
            axes.set_ylim(*y_limits)
        if integer_x:
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.get_major_locator().set_params(nbins=5)
        axes.margins(x=0.02)
        _legend(drawn)
    return drawn.drawing


def bars(rows: Sequence[Bar], x_label: str) -> Drawing:
    """Draw a horizontal bar per row, with a text at its end."""
    with canvas(x_label, height=_MARGIN + _ROW * len(rows)) as drawn:
        axes = drawn.axes
        for place, row in enumerate(rows):
            axes.barh(place, row.value, 0.62, color=light(row.role))
            axes.annotate(
                row.text, (row.value, place), (4, 0), textcoords="offset points", va="center"
            )
        _named_rows(axes, [row.name for row in rows])
        most = max((row.value for row in rows), default=1) or 1
        axes.set_xlim(0, most * 1.25)
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    return drawn.drawing


def cloud(x: Values, y: Values, x_label: str, y_label: str) -> Drawing:
    """Draw pairs of values, on equal axes, with the line on which both are equal.

    Of more than 1,000 pairs, 1,000 at even distances of their places are drawn.
    """
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    points = some_points(len(x), MOST_PAIRS)
    with canvas(x_label, y_label, height=HEIGHT * 1.3) as drawn:
        axes = drawn.axes
        axes.grid(True, axis="both")
        if len(x):
            both = np.concatenate([x, y])
            low, high = float(both.min()), float(both.max())
            margin = 0.05 * (high - low) or max(0.5, 0.05 * abs(high))
            ends = (low - margin, high + margin)
            axes.plot(ends, ends, color=light("muted"), linewidth=1, linestyle=(0, (4, 3)))
            opacity = 0.75 if len(points) <= 200 else 0.4
            axes.plot(
                x[points], y[points], "o", markersize=3.6 if len(points) <= 200 else 2.6,
                color=light("series1"), alpha=opacity, markeredgewidth=0,
            )  # fmt: skip
            axes.set(xlim=ends, ylim=ends)
        axes.set_aspect("equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(nbins=5)
    return drawn.drawing


def ridges(rows: Sequence[tuple[str, Sequence[float]]], x_label: str) -> Drawing:
    """Draw the distribution of the values of each row, on one axis, with its mean as a dot.

    A thin line reaches from the lowest to the highest value, a thick one over the middle half.
    """
    cleaned = [finite(values) for _, values in rows]
    with canvas(x_label, height=_MARGIN + 1.75 * _ROW * len(rows)) as drawn:
        axes = drawn.axes
        together = np.concatenate([*cleaned, np.empty(0)])
        edges = bin_edges(together) if len(together) else np.array([0.0, 1.0])
        for place, values in enumerate(cleaned):
            if not len(values):
                continue
            colour = series(place)
            counts, _ = np.histogram(values, edges)
            tops = place - 0.62 * counts / counts.max()
            axes.stairs(tops, edges, baseline=place, fill=True, color=colour, alpha=0.3, lw=0)
            low, first, third, high = np.quantile(values, [0, 0.25, 0.75, 1])
            axes.plot([low, high], [place + 0.14] * 2, color=colour, linewidth=1)
            axes.plot([first, third], [place + 0.14] * 2, color=colour, linewidth=4)
            axes.plot(
                [values.mean()], [place + 0.14], "o", color=light("paper"),
                markeredgecolor=colour, markeredgewidth=1.6, markersize=5.5,
            )  # fmt: skip
        _named_rows(axes, [name for name, _ in rows], above=0.72)
        axes.xaxis.get_major_locator().set_params(nbins=6)
    return drawn.drawing


def intervals(rows: Sequence[Estimate], x_label: str, *, zero: bool = False) -> Drawing:
    """Draw an estimate with its interval per row, in the order given."""
    with canvas(x_label, height=_MARGIN + _ROW * max(len(rows), 2)) as drawn:
        axes = drawn.axes
        if zero:
            _zero_line(axes)
        for place, row in enumerate(rows):
            colour = series(row.series)
            if row.interval is not None:
                axes.plot(row.interval, [place] * 2, color=colour, linewidth=3.2, alpha=0.45)
            if row.value is not None:
                axes.plot([row.value], [place], "o", color=colour, markersize=6)
        _named_rows(axes, [row.name for row in rows])
        axes.xaxis.get_major_locator().set_params(nbins=6)
    return drawn.drawing


def finite(values: Sequence[float] | Values) -> Values:
    """Return the finite values, float64."""
    found = np.array(values, np.float64)
    return found[np.isfinite(found)]


def some_points(count: int, most: int = MOST_POINTS) -> npt.NDArray[np.int64]:
    """Return at most ``most`` of ``count`` places, at even distances, first and last among them."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))


def bin_edges(values: Values) -> Values:
    """Return the edges of the bars: one bar per integer for few integers; else Rice's rule."""
    low, high = float(values.min()), float(values.max())
    integers = bool((values == np.round(values)).all())
    if integers and high - low < MOST_BARS:
        return np.arange(low - 0.5, high + 1.0)
    if low == high:
        half = max(0.5, 0.005 * abs(low))
        return np.array([low - half, low + half])
    count = min(MOST_BARS, max(10, math.ceil(2 * len(values) ** (1 / 3))))
    return np.linspace(low, high, count + 1)


def _named_rows(axes: Any, names: Sequence[str], above: float = 0.5) -> None:
    """Name the rows at the left, the first at the top; grid lines go up."""
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.tick_params(axis="y", labelcolor=light("ink"))
    axes.set_ylim(len(names) - 0.5, -above)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")


def _zero_line(axes: Any) -> None:
    axes.axvline(0.0, color=light("muted"), linewidth=1.2, linestyle=(0, (4, 3)))


def _legend(drawn: Canvas) -> None:
    """Put the legend above the plot, so that it covers no data."""
    handles, names = drawn.axes.get_legend_handles_labels()
    if handles:
        drawn.axes.figure.legend(
            handles,
            names,
            loc="outside upper left",
            ncols=3,
            handlelength=1.3,
            columnspacing=1.3,
            borderaxespad=0.0,
            borderpad=0.1,
        )
