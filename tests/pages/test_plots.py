"""Drawings: of any numbers and names, with nothing in them but shapes and text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from tdcollect.pages import plots
from tdcollect.pages.drawing import Drawing
from tdcollect.pages.palette import COLOURS, HEAT
from tdcollect.pages.tables import Commands

pytest.importorskip("matplotlib.backends.backend_svg")  # before warnings are errors
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
        plots.histogram(values, name, mean=mean, interval=ends, zero=True),
        plots.lines([line, line._replace(series=8)], name, name, marks=True),
        plots.bars([plots.Bar(name, 3, name), plots.Bar(name, 0, "")], name),
        plots.cloud(array, array[::-1], name, name),
        plots.ridges([(name, values), (name, [1.0])], name),
        plots.intervals([plots.Estimate(name, mean, ends)], name, line_at=0.0),
    ]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.filterwarnings("error")
def test_any_values_are_drawn(values: list[float]) -> None:
    for drawing in drawings(values, "x"):
        assert "nan" not in drawing.content
        ElementTree.fromstring(drawing.file("a", "b"))


@pytest.mark.parametrize(
    "name", ["$x^2$ %s {}", "</svg><script>", "\ufffe\uffff\x00\x1b\ud800", "日本 😀 עברית \u202e"]
)
def test_any_name_is_text(name: str) -> None:
    for drawing in drawings([1.0, 2.0], name):
        root = ElementTree.fromstring(drawing.file(name, name))
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {
            *("svg", "title", "desc", "style", "rect", "g", "path", "use", "text", "defs"),
            "clipPath",
        }
        names = {attribute for element in root.iter() for attribute in element.attrib}
        assert not {n for n in names if n.startswith("on") or n == "style"}


def test_colours_are_roles_and_ids_are_distinct_in_a_page() -> None:
    first, second = (
        "".join(d.inline(f"{prefix}{n}", "") for n, d in enumerate(drawings([1.0, 2.0], "x")))
        for prefix in ("a", "b")
    )
    assert not re.search(r"#[0-9a-f]{6}|style=", first)
    roles = {role for found in re.findall('class="(.*?)"', first) for role in found.split()}
    assert {role[2:] for role in roles} <= {*COLOURS} - {*HEAT}
    ids = re.findall('id="(.*?)"', first + second)
    assert len(ids) == len({*ids})
    used = set(re.findall(r'href="#(.*?)"|url\(#(.*?)\)', first))
    assert {one or other for one, other in used} <= {*ids}


def test_the_same_numbers_give_the_same_drawing() -> None:
    assert drawings([1.0, 2.0], "x") == drawings([1.0, 2.0], "x")
    assert drawings([1.0, 2.0], "x")[0] != drawings([1.0, 3.0], "x")[0]


def test_the_halves_of_a_command_are_those_around_the_index() -> None:
    one, other = (f"replay . {index} --kwargs '{{1}} 2 {{}}'" for index in "12")
    found = Commands.of(one, other)
    assert found.of_row("1") == one
    assert found.of_row("37") == "replay . 37 --kwargs '{1} 2 {}'"
