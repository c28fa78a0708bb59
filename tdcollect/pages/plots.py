"""Plots of plain numbers: the same drawing for the same numbers, of bounded size for any number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tdcollect.display import number_texts
from tdcollect.pages.drawing import HEIGHT, WIDTH, Canvas, Drawing, canvas, plain_text, short
from tdcollect.pages.palette import SERIES, light, series

Values = npt.NDArray[np.float64]
Ends = tuple[float, float]

MOST_BARS = 40
MOST_POINTS = 600  # of a line: more than a drawing this wide can show
MOST_PAIRS = 1000  # of a cloud
LARGEST = 1e150
_STYLES = ("-", "--", ":")  # of series whose colours begin anew
_DASH = 6  # points, of lines that are the same
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
    """Draw how many values lie in each of some bars; those beyond 1e150 are left out.

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
            _dashed_line(axes, 0.0)
        if interval is not None and all(map(_drawable, interval)):
            axes.axvspan(
                *interval, color=light("series1"), alpha=0.2, lw=0, label=plain_text(interval_name)
            )
        if mean is not None and _drawable(mean):
            name = f"mean {number_texts([mean])[0]}"
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
        dashes: dict[int, Any] = {}  # of lines that are the same: by turns, so that each is seen
        for equal in equal_lines(drawn_lines):
            gap = _DASH * (len(equal) - 1)
            dashes |= {place: (-_DASH * turn, (_DASH, gap)) for turn, place in enumerate(equal)}
        for place, line in enumerate(drawn_lines):
            points = some_points(len(line.x))
            colour = series(line.series)
            x, y = line.x[points], line.y[points]
            y = np.where(_drawable(y), y, np.nan)
            style: dict[str, Any] = {"marker": "o", "markersize": 3.5} if marks else {}
            style |= {"color": colour, "linewidth": 1.6, "label": short(line.name)}
            style["linestyle"] = _STYLES[line.series // len(SERIES) % len(_STYLES)]
            (drawn_line,) = axes.plot(x, y, **style)
            if place in dashes:
                drawn_line.set(linestyle=dashes[place], label="")
                axes.plot([], [], **style)  # for the legend, which would show a gap
            if line.low is not None and line.high is not None:
                low, high = line.low[points], line.high[points]
                there = _drawable(low) & _drawable(high)
                if there.any():
                    label = plain_text(band_name) if len(drawn_lines) == 1 else None
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


def equal_lines(drawn_lines: Sequence[Line]) -> list[list[int]]:
    """Return the places of lines that are the same, of two or more each."""
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for place, line in enumerate(drawn_lines):
        groups.setdefault((line.x.tobytes(), line.y.tobytes()), []).append(place)
    return [places for places in groups.values() if len(places) > 1]


def bars(rows: Sequence[Bar], x_label: str, most: float) -> Drawing:
    """Draw a horizontal bar per row, with a text at the right; ``most`` is a whole bar."""
    with canvas(x_label, height=_MARGIN + _ROW * len(rows)) as drawn:
        axes = drawn.axes
        for place, row in enumerate(rows):
            axes.barh(place, row.value, 0.62, color=light(row.role))
            axes.annotate(
                plain_text(row.text),
                (1, place),
                (8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
            )
        _named_rows(axes, [row.name for row in rows])
        axes.set_xlim(0, most or 1)
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    return drawn.drawing


def cloud(x: Values, y: Values, x_label: str, y_label: str) -> Drawing:
    """Draw pairs of values, on equal axes, with the line on which both are equal.

    Of more than 1,000 pairs, 1,000 at even distances of their places are drawn.
    """
    there = _drawable(x) & _drawable(y)
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


def intervals(
    rows: Sequence[Estimate],
    x_label: str,
    *,
    line_at: float | None = None,
    unit: bool = False,
    narrow: bool = False,
) -> Drawing:
    """Draw an estimate with its interval per row, in the order given.

    Args:
        rows: the estimates.
        x_label: their name.
        line_at: where a dashed line is.
        unit: have the axis reach from 0 to 1 at least, so that no small difference looks large.
        narrow: half as wide, with the names above the rows.
    """
    width = WIDTH * (0.55 if narrow else 1)
    row_height = _ROW * (1.4 if narrow else 1)
    with canvas(x_label, height=_MARGIN + row_height * max(len(rows), 2), width=width) as drawn:
        axes = drawn.axes
        if line_at is not None:
            _dashed_line(axes, line_at)
        for place, row in enumerate(rows):
            colour = series(row.series)
            if row.interval is not None and all(map(_drawable, row.interval)):
                axes.plot(row.interval, [place] * 2, color=colour, linewidth=3.2, alpha=0.45)
            if row.value is not None and _drawable(row.value):
                axes.plot([row.value], [place], "o", color=colour, markersize=6)
        _named_rows(axes, [row.name for row in rows], inside=narrow)
        axes.xaxis.get_major_locator().set_params(nbins=4 if narrow else 6)
        if unit:
            low, high = axes.get_xlim()
            axes.set_xlim(low if low < -0.04 else -0.02, max(high, 1.02))
    return drawn.drawing


def finite(values: Sequence[float] | Values) -> Values:
    """Return the values that can be drawn, float64: finite, and no larger than 1e150."""
    found = np.array(values, np.float64)
    return found[_drawable(found)]


def _drawable(values: Values | float) -> Any:
    """Tell which values leave room for their squares."""
    return np.abs(values) <= LARGEST  # NaN is not


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


def _named_rows(axes: Any, names: Sequence[str], above: float = 0.5, inside: bool = False) -> None:
    """Name the rows at the left, or in the plot above them; the first is at the top."""
    axes.set_yticks(range(len(names)), ["" if inside else short(name) for name in names])
    for place, name in enumerate(names if inside else ()):
        at = ("axes fraction", "data")
        axes.annotate(short(name), (0, place), (0, 6), xycoords=at, textcoords="offset points")
    axes.tick_params(axis="y", labelcolor=light("ink"))
    axes.set_ylim(len(names) - 0.5, -above)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")


def _dashed_line(axes: Any, at: float) -> None:
    axes.axvline(at, color=light("muted"), linewidth=1.2, linestyle=(0, (4, 3)))


def _legend(drawn: Canvas) -> None:
    """Put the legend above the plot, so that it covers no data."""
    handles, names = drawn.axes.get_legend_handles_labels()
    if handles:
        drawn.axes.figure.legend(
            handles,
            names,
            loc="outside upper left",
            ncols=_columns(names),
            handlelength=1.3,
            columnspacing=1.3,
            borderaxespad=0.0,
            borderpad=0.1,
        )


def _columns(names: Sequence[str]) -> int:
    """Return the number of columns of a legend, by the rough widths of its entries in points."""
    widths = [5 * len(name) + 36 for name in names]
    room = 72 * WIDTH
    return len(names) if sum(widths) <= room else max(1, int(room / max(widths)))
