"""Drawings: of any numbers and names, with nothing in them but shapes and text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from tdcollect.pages import plots
from tdcollect.pages.build import Figure
from tdcollect.pages.plots import Drawing

SVG = "{http://www.w3.org/2000/svg}"
VALUES = {
    "huge": [1e308, -1e308, 1.0],
    "wide": [1e300, 1.0, -3.0],
    "tiny": [5e-324, 0.0],
    "near": [1e15, 1e15 + 0.125],
    "infinite": [np.inf, -np.inf, 1.0],
    "NaN": [np.nan, np.nan],
    "none": [],
    "one": [-0.0],
}


def drawings(values: list[float], name: str) -> list[Drawing]:
    """One of each plot."""
    array = np.array(values)
    line = plots.Line(name, np.arange(len(array)), array, array - 1, array + 1)
    mean = values[0] if values else None
    ends = None if mean is None else (mean, mean)
    return [
        plots.histogram(values, name, mean=mean, interval=ends, zero=name),
        plots.lines([line, line._replace(series=8)], name, name, levels={1.0: name}),
        plots.lines([line, line], name, name, steps=True, band_name=name, best=(0.0, 1.0)),
        plots.bars([plots.Bar(name, 3, name), plots.Bar(name, 0, "")], name, 3),
        plots.cloud(array, array[::-1], name, name),
        plots.ridges([(name, values), (name, [1.0])], name),
        plots.intervals([plots.Mark(name, mean, ends)], name, line_at=0.0),
        plots.intervals([plots.Mark(name, mean, ends, 7, name)], name, unit=True),
    ]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.filterwarnings("error")
def test_any_values_are_drawn(values: list[float]) -> None:
    for drawing in drawings(values, "x"):
        assert "nan" not in drawing.content
        ElementTree.fromstring(Figure("a", "a", drawing, "b").file())


@pytest.mark.parametrize(
    "name", ["$x^2$ {} </svg><script>", "\ufffe\uffff\x00\x1b\ud800", "日本 😀 עברית \u202e"]
)
def test_any_name_is_text(name: str) -> None:
    for drawing in drawings([1.0, 2.0], name):
        root = ElementTree.fromstring(Figure("f", name, drawing, name).file())
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {"svg", "title", "desc", "style", "rect", "path", "text"}
        names = {attribute for element in root.iter() for attribute in element.attrib}
        assert not {n for n in names if n.startswith("on") or n in ("style", "id", "href")}


def test_drawings_are_fixed_and_their_colours_are_roles() -> None:
    drawn = drawings([1.0, 2.0], "x")
    assert drawn == drawings([1.0, 2.0], "x")
    first = "".join(one.content for one in drawn)
    assert not re.search(r"=\"#[0-9a-f]{6}|style=", first)
    file = Figure("a", "a", drawn[0], "").file().decode()
    assert {*re.findall(r"var\((--[a-z0-9]+)\)", first)} <= {*re.findall("(--[a-z0-9]+):", file)}


def ticks(drawing: Drawing) -> list[float]:
    """The numbers at the axes."""
    found = re.findall(">(-?[0-9.]+)</text>", drawing.content)
    return [*map(float, found)]


def test_the_axis_of_bars_ends_at_the_whole() -> None:
    rows = [plots.Bar("x", count, f"({count})") for count in (3, 0)]
    assert max(ticks(plots.bars(rows, "episodes", 100))) == 100
    assert 3 <= max(ticks(plots.bars(rows, "episodes", 7))) <= 7


def test_scores_are_on_an_axis_from_zero_to_one_or_wider() -> None:
    for scores, shown in [
        ((0.0150, 0.0165), (0, 1)),
        ((0.2, 3.7), (0, 3)),
        ((-0.8, 0.1), (-0.5, 1)),
    ]:
        rows = [plots.Mark("x", score, (score, score)) for score in scores]
        found = ticks(plots.intervals(rows, "score", unit=True))
        assert (min(found), max(found)) == shown
    rows = [plots.Mark("x", 0.0150, None)]
    assert max(ticks(plots.intervals(rows, "score"))) < 0.02


def test_equal_lines_are_both_seen() -> None:
    """Their dashes fill each other's gaps; the legend has both in full."""
    x, y = np.arange(5.0), np.arange(5.0)
    equal = [plots.Line(name, x, y, series=place) for place, name in enumerate("abc")]
    other = plots.Line("d", x, y + 1, series=3)
    assert plots.equal_lines([*equal, other]) == [[0, 1, 2]]
    assert plots.equal_lines([equal[0], other]) == []
    drawing = plots.lines([*equal, other], "x", "y")
    drawn = drawing.content
    dashed = re.findall('<path[^>]*stroke-dasharray="(.*?)"[^>]*dashoffset="(.*?)"', drawn)
    turns = [(float(offset), *map(float, pattern.split())) for pattern, offset in dashed]
    on, off = turns[0][1:]
    assert off == pytest.approx(2 * on)
    assert turns == [(pytest.approx(-turn * on % (on + off)), on, off) for turn in range(3)]
    assert [name for _, name in drawing.signs] == [*"abcd"]
    assert not [sign for sign, _ in drawing.signs if "dashoffset" in sign]
    steps = plots.lines(equal, "x", "y", steps=True).content  # beside each other, not dashed
    assert len({*re.findall('<path d="(.*?)"[^>]*series', steps)}) == 3


def test_an_axis_says_no_more_than_the_values() -> None:
    """One value has one tick; whole numbers have no halves between them."""
    x = np.arange(3.0)
    for y, expected in [([1.0] * 3, [1]), ([0.0, 1.0, 0.0], [0, 1]), ([0.5, 0.5, 0.5], [0.5])]:
        drawing = plots.lines([plots.Line("a", x, np.array(y))], "x", "y", steps=True)
        assert ticks(drawing) == [*expected, 0, 1, 2]
    assert ticks(plots.histogram([500.0] * 9, "x"))[-1:] == [500]
    assert plots.histogram([1e30], "x").content  # whole numbers without halves between them
    found = plots.lines([plots.Line("a", np.array([0.0, 1e5]), x[:2] / 3)], "x", "y").content
    assert ">100,000<" in found and ">0.1<" in found  # noqa: PT018


def test_a_line_of_no_difference_is_named_where_it_is_in_sight() -> None:
    for values, seen in [([1.0, 9.0], False), ([-1.0, 9.0], True)]:
        drawing = plots.histogram(values, "x", mean=4.0, zero="no difference")
        assert ("no difference" in dict(map(reversed, drawing.signs))) == seen
        assert ("dasharray" in drawing.content) == seen
