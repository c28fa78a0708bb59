"""Drawings by matplotlib as SVG: small, of fixed bytes, in colours that follow light and dark.

The text in them may come from anybody: it is escaped, and no drawing holds a style, a script or a
reference to anything outside it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from tdcollect.display import html_escaped, visible
from tdcollect.extras import extra_module
from tdcollect.pages.palette import COLOURS, HEAT, classes, light, variables

WIDTH = 4.3  # inches: text of this size can be read where a drawing fills a phone
HEIGHT = 2.55
LONGEST = 28  # characters of a name in a drawing

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_ROLES = {colours[0]: role for role, colours in COLOURS.items() if role not in HEAT}
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


@dataclass(frozen=True)
class Drawing:
    """A drawing as SVG.

    Attributes:
        content: the elements, without the root; ids start with ``@``, which stands for a prefix.
        size: width and height, in points.
    """

    content: str
    size: tuple[float, float]

    def inline(self, name: str, description: str) -> str:
        """Return the element for a page, whose style sheet has the colours.

        Args:
            name: a prefix for ids: letters, digits, ``-`` and ``_``, distinct in a page.
            description: the alternative text.
        """
        return (
            f'<svg {self._box()} role="img" aria-label="{html_escaped(description)}">'
            f"{self._named(name)}</svg>"
        )

    def file(self, title: str, description: str) -> bytes:
        """Return a file of its own, which has the colours and its paper in it."""
        width, height = self.size
        style = variables() + classes() + f"text{{font-family:{_FONT}}}"
        return (
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}pt" height="{height:g}pt" '
            f'{self._box()} role="img">\n<title>{html_escaped(plain_text(title))}</title>\n'
            f"<desc>{html_escaped(plain_text(description))}</desc>\n<style>\n{style}</style>\n"
            f'<rect class="f-paper" width="100%" height="100%"/>{self._named("f")}</svg>\n'
        ).encode()

    def _box(self) -> str:
        return 'viewBox="0 0 {:g} {:g}"'.format(*self.size)

    def _named(self, name: str) -> str:
        return re.sub(r'(id="|href="#|url\(#)@', rf"\g<1>{name}-", self.content)


class Canvas:
    """A plot being drawn; ``drawing`` is there once :func:`canvas` ends."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        self.drawing = Drawing("", (1, 1))


@contextmanager
def canvas(
    x_label: str, y_label: str = "", *, height: float = HEIGHT, width: float = WIDTH
) -> Iterator[Canvas]:
    """Draw a plot with settings of our own and without pyplot's global figures.

    Args:
        x_label: below the plot.
        y_label: above the plot, at its left.
        height: in inches.
        width: in inches.
    """
    matplotlib = extra_module("matplotlib", "a figure")
    backend = extra_module("matplotlib.backends.backend_svg", "a figure")
    figures = extra_module("matplotlib.figure", "a figure")
    kept = {name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"}
    with matplotlib.rc_context(kept | _settings()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's fonts draw it
        figure = figures.Figure(figsize=(width, height), layout="constrained")
        backend.FigureCanvasSVG(figure)
        drawn = Canvas(figure.add_subplot())
        for patch in (figure.patch, drawn.axes.patch):
            patch.set_visible(False)
        drawn.axes.set_xlabel(plain_text(x_label))
        if y_label:
            drawn.axes.set_title(plain_text(y_label), loc="left")
        yield drawn
        file = io.BytesIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
        drawn.drawing = _cleaned(file.getvalue())


def plain_text(text: str) -> str:
    """Return a text without control characters, and without those that XML cannot hold."""
    return re.sub("[\ufffe\uffff]", "\ufffd", visible(text))


def short(name: str) -> str:
    """Return a name for a legend or a tick: one line, cut if it is long."""
    name = plain_text(name)
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def _settings() -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "tdcollect",
        "font.size": 9.5,
        "axes.titlesize": 9.5,
        "axes.labelsize": 9.5,
        "axes.titlecolor": light("muted"),
        "axes.labelcolor": light("muted"),
        "axes.edgecolor": light("line"),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.titlepad": 7.0,
        "grid.color": light("grid"),
        "text.color": light("ink"),
        "xtick.color": light("line"),
        "ytick.color": light("line"),
        "xtick.labelcolor": light("muted"),
        "ytick.labelcolor": light("muted"),
        "ytick.major.size": 0.0,
        "xtick.major.size": 3.0,
        "legend.frameon": False,
        "legend.fontsize": 9.0,
        "axes.formatter.useoffset": False,
        "text.parse_math": False,  # a dollar sign in a name is a dollar sign
        "path.simplify": True,
    }


def _cleaned(svg: bytes) -> Drawing:
    """Return matplotlib's SVG without styles and metadata, with roles as classes."""
    root = ElementTree.fromstring(svg)
    box = [float(number) for number in root.attrib["viewBox"].split()]
    used = set(re.findall(rb'(?:href="#|url\(#)([\w.-]+)', svg))
    ids = {name.decode(): f"@{number}" for number, name in enumerate(sorted(used))}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{_SVG}metadata" or child.tag == f"{_SVG}style":
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.tail = None
        if element.tag != "text" and element.tag != "tspan":
            element.text = None
        _plain(element, ids)
    _unwrap(root)
    inside = "".join(ElementTree.tostring(child, encoding="unicode") for child in root)
    content = f'<g stroke-linejoin="round" stroke-linecap="butt">{inside}</g>'
    content = content.replace(" />", "/>")
    return Drawing(content, (round(box[2], 2), round(box[3], 2)))


def _plain(element: ElementTree.Element, ids: dict[str, str]) -> None:
    """Replace the style of an element by classes and attributes, and its id by a short one."""
    given = dict(element.attrib)
    element.attrib.clear()
    roles = []
    style = [part.partition(":") for part in given.pop("style", "").split(";") if part.strip()]
    for name, _, value in ((name.strip(), "", value.strip()) for name, _, value in style):
        if name in ("fill", "stroke") and value in _ROLES:
            roles.append(f"{name[0]}-{_ROLES[value]}")
        elif name == "font-size" or name == "font":
            (size,) = re.findall(r"([\d.]+)px", value)
            element.set("font-size", size)
        elif name in ("fill", "stroke") and value != "none":
            raise ValueError(f"expected a colour of the palette, got {name} {value}")
        elif name != "font-family":
            element.set(name, value)
    if roles:
        element.set("class", " ".join(roles))
    for name, value in given.items():
        if name == "id":
            if value in ids:
                element.set("id", ids[value])
        elif name == _LINK:
            element.set("href", "#" + ids[value[1:]])
        elif name == "clip-path":
            element.set(name, f"url(#{ids[value[5:-1]]})")
        elif name == "transform" and value.startswith("rotate(-0 "):
            continue
        else:
            element.set(name, _NUMBER.sub(_rounded, value.replace(" \n", " ").strip()))
    if element.get("d"):
        element.set("d", " ".join(element.attrib["d"].split()))


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _unwrap(parent: ElementTree.Element) -> None:
    """Put the children of groups that have no attribute in the place of the group."""
    children: list[ElementTree.Element] = []
    for child in parent:
        _unwrap(child)
        if child.tag == "g" and not child.attrib:
            children += list(child)
        elif child.tag in ("g", "defs") and not len(child):
            continue
        else:
            children.append(child)
    parent[:] = children
    _hoist(parent)


def _hoist(group: ElementTree.Element) -> None:
    """Move the attributes that all marks of a group have to the group: there may be thousands."""
    if group.tag != "g" or len(group) < 3 or any(mark.tag != "use" for mark in group):
        return
    for name, value in list(group[0].attrib.items()):
        inherited = name not in ("href", "x", "y", "opacity", "transform")
        shared = all(mark.get(name) == value for mark in group)
        if inherited and shared and name not in group.attrib:
            group.set(name, value)
            for mark in group:
                del mark.attrib[name]
