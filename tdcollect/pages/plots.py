"""Plots of plain numbers as SVG: bounded in size, of fixed bytes, with colours as CSS variables.

A plot is as wide as its place: shapes stretch with it, text and lines keep their sizes. The text
may come from anybody: it is escaped, and no drawing holds a style, a script, an id or a reference.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tdcollect.display import number_text, number_texts, visible

Values = npt.NDArray[np.float64]
Ends = tuple[float, float]

HEIGHT = 190  # pixels of what lies within the axes
LONGEST = 28  # characters of a name in a drawing
MOST_BARS = 40
MOST_POINTS = 600  # of a line: about as many as a drawing can show
MOST_PAIRS = 1000  # of a cloud
MARKED, THIN = 60, 200  # points of a line that have a dot each, and from which it is thin
LARGEST = 1e150
SERIES = 6  # colours of series; seven and more begin anew
_STYLES = ("none", "7 4", "2 3")  # of series whose colours begin anew
_DASH = 6  # pixels, of lines that are the same
_ROW = 38
_ACROSS = 1000  # units of the box that stretches

_SERIES = [f"series{place}" for place in range(1, SERIES + 1)]
_ROLES = {"paper", "ink", "muted", "grid", "line", "bar", "good", "bad", *_SERIES}


class Drawing(NamedTuple):
    """SVG elements without their root, for any width, and their height in pixels.

    Each sign is the SVG of a colour, 18 by 10 pixels, and its meaning. A drawing in ``rows`` needs
    no room for numbers at its left.
    """

    content: str
    height: int
    signs: tuple[tuple[str, str], ...]
    rows: bool


class Bar(NamedTuple):
    """A bar: its name, its length, the text at its end, and its colour's role."""

    name: str
    value: float
    text: str
    role: str = "bar"


class Mark(NamedTuple):
    """An estimate, the ends of its interval, its colour's place in the series, and its text."""

    name: str
    value: float | None
    interval: Ends | None
    series: int = 0
    text: str = ""


class Line(NamedTuple):
    """A line x, y ``[E]`` with a band: its ends ``[E]``, NaN where there is none."""

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    series: int = 0


class _Axis(NamedTuple):
    low: float
    high: float
    ticks: Mapping[float, str]

    def shares(self, values: Any) -> Values:
        """Return where values lie, from 0 to 1; some may lie outside."""
        return np.clip((np.array(values, np.float64) - self.low) / (self.high - self.low), -9, 9)


def _axis(values: Any, margin: float = 0.05, ends: Ends | None = None) -> _Axis:
    """Return an axis of some values, with a tick at whole numbers alone if they are whole."""
    values = finite(values)
    low, high = ends or ((values.min(), values.max()) if len(values) else (0.0, 1.0))
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-280):  # a range would show a spread
        half = abs(low) or 1.0
        return _Axis(low - half, high + half, {low: number_text(float(low))})
    room = margin * (high - low) * (ends is None)
    step = 10.0 ** math.floor(math.log10((high - low) / 5))
    step *= next(n for n in (1, 2, 5, 10) if n * step * 5 >= high - low)
    if (values == np.round(values)).all():
        step = max(step, 1.0)
    places = range(math.ceil((low - room) / step), math.floor((high + room) / step) + 1)
    decimals, exact = max(0, -math.floor(math.log10(step))), 1e-5 < step < 1e9
    texts = [f"{n * step:,.{decimals}f}" if exact else f"{n * step:.4g}" for n in places]
    ticks = dict(zip((n * step for n in places), texts, strict=True))
    return _Axis(low - room, high + room, ticks)


class _Plot:
    """Shapes in the units of two axes, and text beside them."""

    def __init__(self, x: _Axis, y: _Axis, x_label: str, y_label: str = "", height: int = HEIGHT):
        self.x, self.y, self.height, self.top = x, y, height, 24 if y_label else 6
        self.rows = not y.ticks
        self.shapes, self.texts, self.signs = list[str](), list[str](), dict[str, str]()
        below = self.top + height
        for at, text in y.ticks.items():
            self.path([x.low, x.high], [at, at], stroke="grid")
            level = below - height * float(y.shares(at))
            self.text(text, "-8", level + 4, text_anchor="end")
        for at, text in x.ticks.items():
            self.path([at, at], [y.low, y.high], stroke="grid" if self.rows else "none")
            self.text(text, f"{100 * x.shares(at):.4g}%", below + 17, text_anchor="middle")
        self.path([x.low, x.high], [y.low, y.low], stroke="line", stroke_width=2)
        self.text(x_label, "50%", below + 36, text_anchor="middle")
        self.text(y_label, "-44", 14)

    def text(self, text: str, x: str, y: float, **attributes: Any) -> None:
        """Write a text."""
        escaped = html.escape(plain_text(text))
        self.texts.append(_element("text", escaped, x=x, y=f"{y:.4g}", **attributes))

    def path(self, x: Any, y: Any, *, dots: bool = False, name: str = "", **style: Any) -> None:
        """Draw a line through points, or dots, up to each NaN; its sign is named, if it is."""
        style = {"fill": "none"} | style | ({"stroke_linecap": "round"} if dots else {})
        across, down = _ACROSS * self.x.shares(x), self.height * (1 - self.y.shares(y))
        steps, pen = [], "M"
        for a, b in zip(across.tolist(), down.tolist(), strict=True):
            there = a == a and b == b
            steps += [f"{pen}{a:.1f} {b:.1f}" + "h0" * dots] * there
            pen = "L" if there and not dots else "M"
        self.shapes.append(_element("path", d="".join(steps), **style))
        shape = "M9 5h0" if dots else "M0 5H18" if style["fill"] == "none" else "M1 1H17V9H1Z"
        self.sign(name, shape, style)

    def sign(self, name: str, shape: str, style: Mapping[str, Any]) -> None:
        """Explain a shape, or more of it, if it has a name."""
        if name := plain_text(name):
            self.signs[name] = self.signs.get(name, "") + _element("path", d=shape, **style)

    def boxes(self, left: Any, right: Any, low: Any, high: Any, **style: Any) -> None:
        """Draw filled boxes, one or ``[E]``."""
        ends = np.broadcast_arrays(*np.atleast_1d(left, right, low, high, np.nan))
        left, right, low, high, gap = ends
        across, down = (left, left, right, right, gap), (low, high, high, low, gap)
        self.path(np.stack(across, 1).ravel(), np.stack(down, 1).ravel(), **style)

    def dashed(self, x: Sequence[float], y: Sequence[float], name: str = "") -> None:
        """Draw a line that is no data."""
        self.path(x, y, name=name, stroke="muted", stroke_width=1.3, stroke_dasharray="5 4")

    def drawing(self) -> Drawing:
        """Return what was drawn; one sign alone says nothing that the title does not."""
        view, how = f"0 0 {_ACROSS} {self.height}", {"preserveAspectRatio": "none", "width": "100%"}
        how |= {"y": f"{self.top}", "height": f"{self.height}"}
        shapes = _element("svg", "".join(self.shapes), viewBox=view, **how)
        signs = tuple((sign, name) for name, sign in self.signs.items() if len(self.signs) > 1)
        return Drawing(shapes + "".join(self.texts), self.top + self.height + 44, signs, self.rows)


def _element(name: str, content: str = "", **attributes: Any) -> str:
    """Return an element; the role of a colour is a variable."""
    texts = (
        f' {key.replace("_", "-")}="{f"var(--{value})" if value in _ROLES else value}"'
        for key, value in attributes.items()
    )
    return f"<{name}{''.join(texts)}>{content}</{name}>"


def _in_rows(
    x: _Axis, names: Sequence[str], texts: Sequence[str], x_label: str, row: int = _ROW
) -> _Plot:
    """Return a plot of rows, 1 high each from 0 at the top, with a name and a text in each."""
    plot = _Plot(x, _Axis(len(names), 0, {}), x_label, height=row * max(len(names), 1))
    for place, (name, text) in enumerate(zip(names, texts, strict=True)):
        plot.text(short(name), "0", plot.top + row * place + 12, fill="ink")
        plot.text(text, "100%", plot.top + row * place + 12, text_anchor="end")
    return plot


def plain_text(text: str) -> str:
    """Return a text without control characters, and without those that XML cannot hold."""
    return re.sub("[\ufffe\uffff]", "\ufffd", visible(text))


def short(name: str) -> str:
    """Return a name for a row or a title: one line, cut if it is long."""
    name = plain_text(name)
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def histogram(
    values: Sequence[float],
    x_label: str,
    *,
    mean: float | None = None,
    interval: Ends | None = None,
    interval_name: str = "interval",
    zero: str = "",
) -> Drawing:
    """Draw how many values ``[E]`` lie in each bar, mean and interval, and zero by its name."""
    drawn = finite(values)
    edges = bin_edges(drawn) if len(drawn) else np.array([0.0, 1.0])
    counts, _ = np.histogram(drawn, edges)
    around = 4 * np.ptp(edges) if len(edges) == 2 else 0  # one bar alone would show a spread
    x = _axis(drawn, ends=(edges[0] - around, edges[-1] + around))
    if len(edges) == 2:
        x = x._replace(ticks={float(value): number_text(float(value)) for value in drawn[:1]})
    top = 1.05 * max(1, counts.max())
    plot = _Plot(x, _axis([0, 1], ends=(0.0, top)), x_label, "episodes")
    there, style = counts > 0, {"fill": "bar", "stroke": "paper"}
    plot.boxes(edges[:-1][there], edges[1:][there], 0, counts[there], **style)
    if interval is not None and all(map(_drawable, interval)):
        plot.boxes(*interval, 0, top, fill="series1", fill_opacity=0.25, name=interval_name)
    if mean is not None and _drawable(mean):
        name = f"mean {number_texts([mean])[0]}"
        plot.path([mean, mean], [0, top], name=name, stroke="series1", stroke_width=2)
    if zero and x.low <= 0 <= x.high:
        plot.dashed([0, 0], [0, top], zero)
    return plot.drawing()


def lines(
    drawn_lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    band_name: str = "",
    y_limits: Ends | None = None,
    best: Ends | None = None,
    dashed_at: float | None = None,
    levels: Mapping[float, str] | None = None,
    steps: bool = False,
) -> Drawing:
    """Draw lines with bands at no more than 600 points each; ``best``, an x, and named levels.

    Lines in ``steps`` are level at each point: they lie beside each other.
    """
    levels = levels or {}
    every = [y for line in drawn_lines for y in (line.y, line.low, line.high) if y is not None]
    x = _axis(np.concatenate([line.x for line in drawn_lines]), 0.02)
    y = _axis(np.concatenate([*every, np.array([*levels])]), 0.15 if steps else 0.05, y_limits)
    plot, longest = _Plot(x, y, x_label, y_label), max(len(line.x) for line in drawn_lines)
    dashes: dict[int, dict[str, Any]] = {}  # of lines that are the same: by turns, to be seen
    for equal in [] if steps else equal_lines(drawn_lines):
        gap = _DASH * (len(equal) - 1)
        for turn, place in enumerate(equal):
            turned = {"stroke_dashoffset": -_DASH * turn % (_DASH + gap)}
            dashes[place] = {"stroke_dasharray": f"{_DASH} {gap}", **turned}
    for place, line in enumerate(drawn_lines):
        points = some_points(len(line.x))
        colour, at = _SERIES[line.series % SERIES], line.x[points]
        style: dict[str, Any] = {"stroke": colour, "stroke_width": 1 if longest > THIN else 2}
        style["stroke_dasharray"] = _STYLES[line.series // SERIES % len(_STYLES)]
        plot.sign(line.name, "M0 5H18", style)
        if line.low is not None and line.high is not None:
            low, high = line.low[points], line.high[points]
            there = _drawable(low) & _drawable(high)
            around = np.concatenate([at[there], at[there][::-1]])
            band = np.concatenate([low[there], high[there][::-1]])
            plot.path(around, band, name=band_name, fill=colour, fill_opacity=0.2)
        values = np.where(_drawable(line.y[points]), line.y[points], np.nan)
        if steps:
            beside = 0.03 * (y.high - y.low) * (place - (len(drawn_lines) - 1) / 2)
            at, values = np.stack([at - 0.5, at + 0.5], 1).ravel(), values.repeat(2) - beside
        plot.path(at, values, **style | dashes.get(place, {}))
        if longest <= MARKED and not steps:
            plot.path(at, values, dots=True, name=line.name, stroke=colour, stroke_width=6)
    if best is not None:
        for width, colour in ((13, "series2"), (9, "paper"), (6, "series1")):
            style = {"stroke": colour, "stroke_width": width}
            plot.path([best[0]], [best[1]], dots=True, name="best", **style)
    for level, name in levels.items():
        plot.dashed([x.low, x.high], [level, level], name)
    if dashed_at is not None:
        plot.dashed([dashed_at, dashed_at], [y.low, y.high])
    return plot.drawing()


def equal_lines(drawn_lines: Sequence[Line]) -> list[list[int]]:
    """Return the places of lines that are the same, of two or more each."""
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for place, line in enumerate(drawn_lines):
        groups.setdefault((line.x.tobytes(), line.y.tobytes()), []).append(place)
    return [places for places in groups.values() if len(places) > 1]


def bars(rows: Sequence[Bar], x_label: str, most: float) -> Drawing:
    """Draw a horizontal bar per row, with a text at the right; ``most`` is a whole bar."""
    names, texts = [row.name for row in rows], [row.text for row in rows]
    plot = _in_rows(_axis([], ends=(0, most or 1)), names, texts, x_label)
    for place, row in enumerate(rows):
        plot.boxes(0, row.value, place + 0.45, place + 0.85, fill=row.role)
    return plot.drawing()


def cloud(x: Values, y: Values, x_label: str, y_label: str) -> Drawing:
    """Draw pairs of values on equal axes, at most 1,000 of them, with the line of equal ones."""
    there = _drawable(x) & _drawable(y)
    points = some_points(int(there.sum()), MOST_PAIRS)
    both = _axis(np.concatenate([x[there], y[there]]))
    plot = _Plot(both, both, x_label, y_label, HEIGHT * 3 // 2)
    plot.dashed([both.low, both.high], [both.low, both.high])
    few = len(points) <= 200
    width, opacity = (6, 0.75) if few else (4, 0.4)
    style = {"stroke": "series1", "stroke_width": f"{width}", "stroke_opacity": f"{opacity}"}
    plot.path(x[there][points], y[there][points], dots=True, **style)
    return plot.drawing()


def ridges(rows: Sequence[tuple[str, Sequence[float]]], x_label: str) -> Drawing:
    """Draw the distribution of the values of each row, on one axis, with its mean as a dot.

    A thin line reaches from the lowest to the highest value, a thick one over the middle half.
    """
    cleaned = [finite(values) for _, values in rows]
    together = np.concatenate([*cleaned, np.empty(0)])
    edges = bin_edges(together) if len(together) else np.array([0.0, 1.0])
    means = [values.mean() if len(values) else None for values in cleaned]
    texts = [f"mean {text}" for text in number_texts(means)]
    x = _axis(together, ends=(edges[0], edges[-1]))
    plot = _in_rows(x, [name for name, _ in rows], texts, x_label, 2 * _ROW)
    for place, (values, mean) in enumerate(zip(cleaned, means, strict=True)):
        if mean is None:
            continue
        colour, level = _SERIES[place % SERIES], [place + 0.86] * 2
        counts, _ = np.histogram(values, edges)
        tops = place + 0.76 - 0.52 * counts / counts.max()
        around = np.array([place + 0.76, *tops.repeat(2), place + 0.76])
        plot.path(edges.repeat(2), around, fill=colour, fill_opacity=0.35)
        low, first, third, high = np.quantile(values, [0, 0.25, 0.75, 1])
        plot.path([low, high], level, stroke=colour, stroke_width=1.3)
        plot.path([first, third], level, stroke=colour, stroke_width=5)
        for width, role in ((10, colour), (6, "paper")):
            plot.path([mean], level[:1], dots=True, stroke=role, stroke_width=width)
    return plot.drawing()


def intervals(
    rows: Sequence[Mark], x_label: str, *, line_at: float | None = None, unit: bool = False
) -> Drawing:
    """Draw an estimate with its interval per row, in the order given, and a dashed line.

    A ``unit`` axis reaches from 0 to 1 at least.
    """
    values = [at for row in rows for at in (row.value, *(row.interval or ())) if at is not None]
    values += [0.0, 1.0] * unit + [at for at in [line_at] if at is not None]
    names, texts = [row.name for row in rows], [row.text for row in rows]
    plot = _in_rows(_axis(values), names, texts, x_label)
    if line_at is not None:
        plot.dashed([line_at, line_at], [0, len(rows)])
    for place, row in enumerate(rows):
        colour, level = _SERIES[row.series % SERIES], [place + 0.65] * 2
        if row.interval is not None and all(map(_drawable, row.interval)):
            plot.path(row.interval, level, stroke=colour, stroke_width=4, stroke_opacity=0.45)
        if row.value is not None and _drawable(row.value):
            plot.path([row.value], level[:1], dots=True, stroke=colour, stroke_width=9)
    return plot.drawing()


def finite(values: Sequence[float] | Values) -> Values:
    """Return the values that can be drawn, float64: finite, and no larger than 1e150."""
    array = np.array(values, np.float64)
    return array[_drawable(array)]


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
    if integers and high - low < MOST_BARS and abs(low) < 2**52:  # else no halves between them
        return np.arange(low - 0.5, high + 1.0)
    if low == high:
        half = max(0.5, 0.005 * abs(low))
        return np.array([low - half, low + half])
    count = min(MOST_BARS, max(10, math.ceil(2 * len(values) ** (1 / 3))))
    return np.linspace(low, high, count + 1)
