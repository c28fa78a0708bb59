"""Plots of plain numbers as SVG: bounded in size, of fixed bytes, with colours as CSS variables.

The text in them may come from anybody: it is escaped, and no drawing holds a style, a script or a
reference to anything outside it.
"""

from __future__ import annotations

import functools
import html
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import numpy.typing as npt

from tdcollect.display import number_texts, visible
from tdcollect.packages import extra_module

Values = npt.NDArray[np.float64]
Ends = tuple[float, float]
P = ParamSpec("P")

WIDTH = 4.3  # inches: text of this size can be read where a drawing fills a phone
HEIGHT = 2.55
LONGEST = 28  # characters of a name in a drawing
MOST_BARS = 40
MOST_POINTS = 600  # of a line: more than a drawing this wide can show
MOST_PAIRS = 1000  # of a cloud
LARGEST = 1e150
SERIES = 6  # colours of series; seven and more begin anew
_STYLES = ("-", "--", ":")  # of series whose colours begin anew
_DASH = 6  # points, of lines that are the same
_ROW = 0.34  # inches per row of a plot with names at its left
_MARGIN = 0.78

_SERIES = [f"series{place}" for place in range(1, SERIES + 1)]
_ROLES = ["paper", "ink", "muted", "grid", "line", "bar", "good", "bad", *_SERIES]
# matplotlib draws with a number in place of each colour, and figures.css has the colours.
_COLOURS = {role: f"#0000{number:02x}" for number, role in enumerate(_ROLES, 1)}
_VARIABLES = {number: f"var(--{role})" for role, number in _COLOURS.items()}


class Drawing(NamedTuple):
    """SVG elements without their root; ids start with ``@``, for a prefix. Sizes are in points."""

    content: str
    width: float
    height: float

    def named(self, name: str) -> str:
        """Return the elements with ids of their own: letters, digits, ``-`` and ``_``."""
        return re.sub(r'(id="|href="#|url\(#)@', rf"\g<1>{name}-", self.content)


class Bar(NamedTuple):
    """A bar: its name, its length, the text at its end, and its colour's role."""

    name: str
    value: float
    text: str
    role: str = "bar"


class Mark(NamedTuple):
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


def _plot(plot: Callable[P, Any]) -> Callable[P, Drawing]:
    """Run a plot with settings of our own, and without pyplot's global figures."""

    @functools.wraps(plot)
    def drawn(*args: P.args, **options: P.kwargs) -> Drawing:
        matplotlib = extra_module("matplotlib", "a figure")
        defaults = dict(matplotlib.rcParamsDefault)
        del defaults["backend"]
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with matplotlib.rc_context(defaults | _settings()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's fonts draw it
            file = io.StringIO()
            plot(*args, **options).figure.savefig(file, format="svg", metadata=nothing)
        return _cleaned(file.getvalue())

    return drawn


def _settings() -> dict[str, Any]:
    off = ["axes.spines.top", "axes.spines.right", "axes.spines.left", "legend.frameon"]
    off += ["axes.formatter.useoffset", "text.parse_math"]  # a dollar sign in a name is one
    colours = {
        "muted": ["axes.titlecolor", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"],
        "line": ["axes.edgecolor", "xtick.color", "ytick.color"],
        "grid": ["grid.color"],
        "ink": ["text.color"],
    }
    return {
        **dict.fromkeys(off, False),
        **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9.5),
        **{name: _COLOURS[role] for role, names in colours.items() for name in names},
        "svg.fonttype": "none",
        "svg.hashsalt": "tdcollect",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.titlepad": 7.0,
        "ytick.major.size": 0.0,
        "xtick.major.size": 3.0,
        "legend.fontsize": 9.0,
        "legend.handlelength": 1.3,
        "legend.columnspacing": 1.3,
        "legend.borderaxespad": 0.0,
        "legend.borderpad": 0.1,
    }


def _cleaned(svg: str) -> Drawing:
    """Return what matplotlib wrote with attributes in place of styles, which no page may have.

    No text has a ``<``: each one that is found begins a tag.
    """
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    body = re.sub(r"<!--.*?-->", "", svg.partition("</style>")[2], flags=re.DOTALL)
    body = body.partition("</defs>")[2].rpartition("</svg>")[0]
    # There may be thousands of marks in a group, all of one style: the group has it.
    body = re.sub(r'(<g[^>]*)>\s*(?=<use [^>]*?( style="[^"]*"))', r"\1\2>", body)
    body = re.sub(r'(<use [^>]*?) style="[^"]*"', r"\1", body)
    body = re.sub(r"<[^>]*>", _clean_tag, body)
    if colour := re.search(r'(?:fill|stroke)="(#[^"]*)"', body):
        raise ValueError(f"expected the number of a colour in a figure, got {colour[1]}")
    return Drawing(re.sub(r">\s+<", "><", body).strip(), float(width), float(height))


def _clean_tag(match: re.Match[str]) -> str:
    tag = re.sub(r'^<g id="[^"]*"', "<g", match[0])
    tag = re.sub(r' style="([^"]*)"', _attributes, tag).replace("xlink:href", "href")
    tag = re.sub(r'( id="|href="#|url\(#)', r"\g<1>@", tag)
    tag = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 2):g}", tag)
    return re.sub(r"\s+", " ", tag)


def _attributes(style: re.Match[str]) -> str:
    """Return a style as attributes, with variables as colours; the page chooses the font."""
    parts = (part.strip().partition(":") for part in html.unescape(style[1]).split(";"))
    attributes = {name: value.strip() for name, _, value in parts if name and name != "font-family"}
    if "font" in attributes:
        attributes["font-size"] = attributes.pop("font").partition("px")[0]
    return "".join(
        f' {name}="{_VARIABLES.get(value, value)}"' for name, value in attributes.items()
    )


def _axes(x_label: str, y_label: str = "", *, height: float = HEIGHT, width: float = WIDTH) -> Any:
    """Return the axes of a figure in inches, with a label below it, and one above at its left."""
    figures = extra_module("matplotlib.figure", "a figure")
    figure = figures.Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    for patch in (figure.patch, axes.patch):
        patch.set_visible(False)
    axes.set_xlabel(plain_text(x_label))
    axes.set_title(plain_text(y_label), loc="left")
    return axes


def plain_text(text: str) -> str:
    """Return a text without control characters, and without those that XML cannot hold."""
    return re.sub("[\ufffe\uffff]", "\ufffd", visible(text))


def short(name: str) -> str:
    """Return a name for a legend or a tick: one line, cut if it is long."""
    name = plain_text(name)
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def _series(place: int) -> str:
    return _COLOURS[_SERIES[place % SERIES]]


@_plot
def histogram(
    values: Sequence[float],
    x_label: str,
    *,
    mean: float | None = None,
    interval: Ends | None = None,
    interval_name: str = "interval",
    zero: bool = False,
) -> Any:
    """Draw how many values ``[E]`` lie in each bar; mark mean, interval and zero if asked."""
    drawn = finite(values)
    axes = _axes(x_label, "episodes")
    if len(drawn):
        edges = bin_edges(drawn)
        counts, _ = np.histogram(drawn, edges)
        there = counts > 0
        colours = {"color": _COLOURS["bar"], "edgecolor": _COLOURS["paper"]}
        lefts, widths = edges[:-1][there], np.diff(edges)[there]
        axes.bar(lefts, counts[there], widths, align="edge", linewidth=0.5, **colours)
        around = 4 * np.ptp(edges) if len(edges) == 2 else 0  # one bar alone would show a spread
        axes.set_xlim(edges[0] - around, edges[-1] + around)
    if zero:
        _dashed_line(axes, 0.0)
    if interval is not None and all(map(_drawable, interval)):
        axes.axvspan(
            *interval, color=_COLOURS["series1"], alpha=0.2, lw=0, label=plain_text(interval_name)
        )
    if mean is not None and _drawable(mean):
        name = f"mean {number_texts([mean])[0]}"
        axes.axvline(mean, color=_COLOURS["series1"], linewidth=1.6, label=name)
    axes.locator_params("y", integer=True, nbins=4)
    axes.locator_params("x", nbins=6)
    _legend(axes)
    return axes


@_plot
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
    dashed_at: float | None = None,
    line_width: float = 1.6,
    height: float = HEIGHT,
) -> Any:
    """Draw lines with bands at no more than 600 points each; mark each point, ``best``, or an x."""
    axes = _axes(x_label, y_label, height=height)
    dashes: dict[int, Any] = {}  # of lines that are the same: by turns, so that each is seen
    for equal in equal_lines(drawn_lines):
        gap = _DASH * (len(equal) - 1)
        dashes |= {place: (-_DASH * turn, (_DASH, gap)) for turn, place in enumerate(equal)}
    for place, line in enumerate(drawn_lines):
        points = some_points(len(line.x))
        colour = _series(line.series)
        x, y = line.x[points], line.y[points]
        y = np.where(_drawable(y), y, np.nan)
        style: dict[str, Any] = {"marker": "o", "markersize": 3.5} if marks else {}
        style |= {"color": colour, "linewidth": line_width, "label": short(line.name)}
        style["linestyle"] = _STYLES[line.series // SERIES % len(_STYLES)]
        (drawn_line,) = axes.plot(x, y, **style)
        if place in dashes:
            drawn_line.set(linestyle=dashes[place], label="")
            axes.plot([], [], **style)  # for the legend, which would show a gap
        if line.low is not None and line.high is not None:
            low, high = line.low[points], line.high[points]
            there = _drawable(low) & _drawable(high)
            if there.any():
                label = plain_text(band_name) if len(drawn_lines) == 1 else None
                band = {"color": colour, "alpha": 0.18, "lw": 0, "label": label}
                axes.fill_between(x[there], low[there], high[there], **band)
    if best is not None:
        edge = {"markeredgecolor": _COLOURS["series2"], "markeredgewidth": 1.8}
        axes.plot(*best, "o", markersize=8, markerfacecolor="none", label="best", **edge)
    if dashed_at is not None:
        _dashed_line(axes, dashed_at)
    if y_limits is not None:
        axes.set_ylim(*y_limits)
    if integer_x:
        axes.locator_params("x", integer=True, nbins=5)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params("y", nbins=5)
    axes.margins(x=0.02)
    _legend(axes)
    return axes


def equal_lines(drawn_lines: Sequence[Line]) -> list[list[int]]:
    """Return the places of lines that are the same, of two or more each."""
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for place, line in enumerate(drawn_lines):
        groups.setdefault((line.x.tobytes(), line.y.tobytes()), []).append(place)
    return [places for places in groups.values() if len(places) > 1]


@_plot
def bars(rows: Sequence[Bar], x_label: str, most: float) -> Any:
    """Draw a horizontal bar per row, with a text at the right; ``most`` is a whole bar."""
    axes = _axes(x_label, height=_MARGIN + _ROW * len(rows))
    for place, row in enumerate(rows):
        axes.barh(place, row.value, 0.62, color=_COLOURS[row.role])
        _beside(axes, row.text, (1, place), (8, 0), va="center")
    _named_rows(axes, [row.name for row in rows])
    axes.set_xlim(0, most or 1)
    axes.locator_params("x", integer=True, nbins=5)
    return axes


@_plot
def cloud(x: Values, y: Values, x_label: str, y_label: str) -> Any:
    """Draw pairs of values on equal axes, at most 1,000 of them, with the line of equal ones."""
    there = _drawable(x) & _drawable(y)
    x, y = x[there], y[there]
    points = some_points(len(x), MOST_PAIRS)
    axes = _axes(x_label, y_label, height=HEIGHT * 1.3)
    axes.grid(True, axis="both")
    if len(x):
        both = np.concatenate([x, y])
        low, high = float(both.min()), float(both.max())
        margin = 0.05 * (high - low) or max(0.5, 0.05 * abs(high))
        ends = (low - margin, high + margin)
        axes.plot(ends, ends, color=_COLOURS["muted"], linewidth=1, linestyle=(0, (4, 3)))
        few = len(points) <= 200
        colour = (_COLOURS["series1"], 0.75 if few else 0.4)  # alpha= would be the group's
        size = 3.6 if few else 2.6
        axes.plot(x[points], y[points], "o", markersize=size, color=colour, markeredgewidth=0)
        axes.set(xlim=ends, ylim=ends)
    axes.set_aspect("equal")
    axes.locator_params(nbins=5)
    return axes


@_plot
def ridges(rows: Sequence[tuple[str, Sequence[float]]], x_label: str) -> Any:
    """Draw the distribution of the values of each row, on one axis, with its mean as a dot.

    A thin line reaches from the lowest to the highest value, a thick one over the middle half.
    """
    cleaned = [finite(values) for _, values in rows]
    axes = _axes(x_label, height=_MARGIN + 1.75 * _ROW * len(rows))
    together = np.concatenate([*cleaned, np.empty(0)])
    edges = bin_edges(together) if len(together) else np.array([0.0, 1.0])
    for place, values in enumerate(cleaned):
        if not len(values):
            continue
        colour = _series(place)
        counts, _ = np.histogram(values, edges)
        tops = place - 0.62 * counts / counts.max()
        axes.stairs(tops, edges, baseline=place, fill=True, color=colour, alpha=0.3, lw=0)
        low, first, third, high = np.quantile(values, [0, 0.25, 0.75, 1])
        axes.plot([low, high], [place + 0.14] * 2, color=colour, linewidth=1)
        axes.plot([first, third], [place + 0.14] * 2, color=colour, linewidth=4)
        edge = {"markeredgecolor": colour, "markeredgewidth": 1.6}
        axes.plot(values.mean(), place + 0.14, "o", color=_COLOURS["paper"], markersize=5.5, **edge)
    _named_rows(axes, [name for name, _ in rows], above=0.72)
    axes.locator_params("x", nbins=6)
    return axes


@_plot
def intervals(
    rows: Sequence[Mark],
    x_label: str,
    *,
    line_at: float | None = None,
    unit: bool = False,
    narrow: bool = False,
) -> Any:
    """Draw an estimate with its interval per row, in the order given, and a dashed line.

    A ``unit`` axis reaches from 0 to 1 at least. A ``narrow`` drawing has the names above the rows.
    """
    width = WIDTH * (0.55 if narrow else 1)
    row_height = _ROW * (1.4 if narrow else 1)
    axes = _axes(x_label, height=_MARGIN + row_height * max(len(rows), 2), width=width)
    if line_at is not None:
        _dashed_line(axes, line_at)
    for place, row in enumerate(rows):
        colour = _series(row.series)
        if row.interval is not None and all(map(_drawable, row.interval)):
            axes.plot(row.interval, [place] * 2, color=colour, linewidth=3.2, alpha=0.45)
        if row.value is not None and _drawable(row.value):
            axes.plot([row.value], [place], "o", color=colour, markersize=6)
    _named_rows(axes, [row.name for row in rows], inside=narrow)
    axes.locator_params("x", nbins=4 if narrow else 6)
    if unit:
        low, high = axes.get_xlim()
        axes.set_xlim(low if low < -0.04 else -0.02, max(high, 1.02))
    return axes


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
        _beside(axes, short(name), (0, place), (0, 6))
    axes.tick_params(axis="y", labelcolor=_COLOURS["ink"])
    axes.set_ylim(len(names) - 0.5, -above)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")


def _beside(axes: Any, text: str, at: Ends, offset: Ends, **how: Any) -> None:
    """Write a text at an offset in points from the left (0) or the right (1) end of a row."""
    where = ("axes fraction", "data")
    axes.annotate(plain_text(text), at, offset, xycoords=where, textcoords="offset points", **how)


def _dashed_line(axes: Any, at: float) -> None:
    axes.axvline(at, color=_COLOURS["muted"], linewidth=1.2, linestyle=(0, (4, 3)))


def _legend(axes: Any) -> None:
    """Put the legend above the plot, so that it covers no data."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(handles, names, loc="outside upper left", ncols=_columns(names))


def _columns(names: Sequence[str]) -> int:
    """Return the number of columns of a legend, by the rough widths of its entries in points."""
    widths = [5 * len(name) + 36 for name in names]
    room = 72 * WIDTH
    return len(names) if sum(widths) <= room else max(1, int(room / max(widths)))
