"""Figures as PNG: the same bytes for the same values, whatever matplotlib's settings."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tdcollect.display import number_text, percent_text
from tdcollect.evaluation.imports import extra_module
from tdcollect.evaluation.reports.intervals import Interval, Values
from tdcollect.text import visible

SIZE = (7.0, 3.6)  # inches
DOTS_PER_INCH = 144
BAR, LINE, BAND, ZERO = "#8fb3d9", "#1b4f8a", "#1b4f8a", "#555555"
MOST_BARS = 40
MOST_POINTS = 2000  # of a line: more than a picture this wide has dots across


class Canvas:
    """A plot being drawn; ``png`` holds its bytes once :func:`canvas` ends."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        self.png = b""


@contextmanager
def canvas(title: str, x_label: str, y_label: str) -> Iterator[Canvas]:
    """Draw a plot with matplotlib's own defaults and without pyplot's global figures."""
    matplotlib = extra_module("matplotlib", "a figure")
    backend = extra_module("matplotlib.backends.backend_agg", "a figure")
    figures = extra_module("matplotlib.figure", "a figure")
    own = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "font.size": 9.0,
        "legend.frameon": False,
        "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    }
    kept = {name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"}
    with matplotlib.rc_context(kept | own):
        figure = figures.Figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
        backend.FigureCanvasAgg(figure)
        drawn = Canvas(figure.add_subplot())
        drawn.axes.set_title(visible(title), pad=24)  # the legend stands between title and plot
        drawn.axes.set(xlabel=x_label, ylabel=y_label)
        yield drawn
        file = io.BytesIO()
        # The version of matplotlib would be written into the file.
        figure.savefig(file, format="png", metadata={"Software": None})
        drawn.png = file.getvalue()


def histogram(
    values: Sequence[float],
    *,
    title: str,
    x_label: str,
    mean: float | None,
    interval: Interval | None,
    confidence: float,
    zero: bool = False,
) -> bytes:
    """Draw a histogram, with the mean and its interval; ``zero`` marks zero."""
    finite = _finite(values)
    with canvas(title, x_label, "episodes") as drawn:
        axes = drawn.axes
        if len(finite):
            edges = _edges(finite)
            axes.hist(finite, edges, color=BAR, edgecolor="white", linewidth=0.5)
            if len(edges) == 2:  # one bar as wide as the plot would show a spread
                axes.set_xlim(edges[0] - 4 * np.ptp(edges), edges[1] + 4 * np.ptp(edges))
        if zero:
            axes.axvline(0.0, color=ZERO, linewidth=1.0, linestyle=":", label="no difference")
        if mean is not None:
            axes.axvline(mean, color=LINE, linewidth=1.5, label=f"mean {number_text(mean)}")
        if interval is not None:
            label = f"{percent_text(confidence)} interval {interval}"
            axes.axvspan(interval.low, interval.high, color=BAND, alpha=0.18, lw=0, label=label)
        axes.yaxis.get_major_locator().set_params(integer=True)
        _legend_above(axes)
    return drawn.png


def cumulative_mean(values: Sequence[float], *, title: str, confidence: float) -> bytes:
    """Draw the mean over the first 1, 2, ... of ``values [E]``, with Student's t intervals.

    Of more than 2,000 values, at 2,000 points.
    """
    finite = _finite(values)
    stats = extra_module("scipy.stats", "the interval of a cumulative mean")
    points = np.unique(np.linspace(0, len(finite) - 1, MOST_POINTS).astype(np.int64))
    points = np.arange(len(finite)) if len(finite) <= MOST_POINTS else points
    count = points + 1
    with canvas(title, "completed episodes, by index", "mean return") as drawn:
        axes = drawn.axes
        if len(finite):
            mean, deviation = (line[points] for line in _running(finite))
            axes.plot(count, mean, color=LINE, linewidth=1.5, label="mean so far")
        if len(finite) > 1:
            reach = stats.t.ppf(0.5 + confidence / 2, count[1:] - 1) * deviation[1:]
            reach = reach / np.sqrt(count[1:])
            low, high = mean[1:] - reach, mean[1:] + reach
            label = f"{percent_text(confidence)} interval (Student's t)"
            axes.fill_between(count[1:], low, high, color=BAND, alpha=0.18, lw=0, label=label)
            # The first few intervals are so wide that they would hide the rest.
            later = slice(min(len(low) - 1, max(3, len(low) // 20)), None)
            bottom, top = low[later].min(), high[later].max()
            if top > bottom:
                margin = 0.1 * (top - bottom)
                axes.set_ylim(
                    min(bottom, mean[1:][later].min()) - margin,
                    max(top, mean[1:][later].max()) + margin,
                )
            axes.set_xlim(1, len(finite))
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend_above(axes)
    return drawn.png


def _legend_above(axes: Any) -> None:
    """Put the legend above the plot, so that it covers no data."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, borderaxespad=0.2)


def _finite(values: Sequence[float]) -> Values:
    found = np.array(values, np.float64)
    return found[np.isfinite(found)]


def _edges(values: Values) -> Values:
    """Return the edges of the bars: one bar per integer for few integers; else Rice's rule."""
    low, high = float(values.min()), float(values.max())
    integers = bool((values == np.round(values)).all())
    if integers and high - low < MOST_BARS:
        return np.arange(low - 0.5, high + 1.0)
    if low == high:
        half = max(0.5, 0.005 * abs(low))
        return np.array([low - half, low + half])
    bars = min(MOST_BARS, max(10, math.ceil(2 * len(values) ** (1 / 3))))
    return np.linspace(low, high, bars + 1)


def _running(values: Values) -> tuple[Values, Values]:
    """Return mean and standard deviation of the first 1, 2, ... values; the first one is zero."""
    count = np.arange(1, len(values) + 1)
    mean = np.cumsum(values) / count
    before = np.concatenate([[0.0], mean[:-1]])
    # Welford's recurrence: a difference of two sums of squares would lose digits.
    squares = np.cumsum(np.where(count > 1, (values - before) * (values - mean), 0.0))
    return mean, np.sqrt(np.maximum(squares, 0.0) / np.maximum(count - 1, 1))
