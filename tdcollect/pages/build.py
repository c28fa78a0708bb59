"""Pages of one HTML file: plain data, shown by one template that escapes every text.

A page needs no other file and no network. Its Content-Security-Policy lets nothing load but films
that the page itself holds, and only the package's own style and script run: whatever a text holds,
it stays text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

from tdcollect.display import column_texts, visible
from tdcollect.files import check_no_links, write_atomically
from tdcollect.pages.plots import Drawing, plain_text

REPORT = "report.html"
FIGURES = "figures"
FILTERED = 8  # rows from which a table has a filter field
TALL = 16  # rows from which it scrolls
ALIGNED = 40  # columns of a table whose numbers stand at the right
_FILM = "data:"  # the scheme of films


class Paragraph(NamedTuple):
    """A paragraph that stands out: ``"warn"``, or a ``"command"`` to copy. A str is plain."""

    part: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A drawing with its words.

    Its name is that of its file: letters, digits, ``-`` and ``_``. What it shows, in numbers, is
    the alternative text; a note is the caption.
    """

    name: str
    title: str
    drawing: Drawing
    shows: str
    note: str = ""

    def file(self) -> bytes:
        """Return the SVG file of the drawing, with the colours and its paper in it."""
        told = {"title": plain_text(self.title), "shows": plain_text(self.shows)}
        return _rendered("figure.svg", figure=self, style=_package_text("figures.css"), **told)


@dataclass(frozen=True)
class Figures:
    """Figures side by side where there is room, two at most, or more narrow ones in a row."""

    part: ClassVar = "figures"
    figures: Sequence[Figure]
    row: bool = False


@dataclass(frozen=True)
class Film:
    """A film, as the bytes of an MP4 file, with its title; the page holds it."""

    part: ClassVar = "film"
    title: str
    content: bytes

    def address(self) -> str:
        """Return the film as an address that is its own content."""
        return f"{_FILM}video/mp4;base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell that leads to a file beside the page, or with a colour; smaller texts lie below it.

    Its kind is ``"good"``, ``"bad"``, a result of :func:`heat`, or nothing.
    """

    text: str
    path: str | None = None
    kind: str = ""
    more: tuple[tuple[str, str | None], ...] = ()


class Column(NamedTuple):
    """A column of a table: texts, numbers, pairs of them (intervals), None for a dash, or cells.

    Its numbers have the same decimals. Its kind is ``"n"`` for numbers, which stand at the right,
    or ``"t"`` for long texts.
    """

    heading: str
    cells: Sequence[str | float | tuple[float, float] | Cell | None]
    kind: str = ""


def columns_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Column]:
    """Return the columns of rows of texts: a label, then numbers."""
    columns = [Column(head, cells, "n") for head, *cells in zip(header, *rows, strict=True)]
    return [columns[0]._replace(kind=""), *columns[1:]]


class Commands(NamedTuple):
    """The commands of the rows of a table: a row's first cell between two halves; and their use."""

    before: str
    after: str
    how: str = ""

    def of_row(self, text: str) -> str:
        """Return the command of a row."""
        return f"{self.before}{text}{self.after}"


@dataclass(frozen=True)
class DataTable:
    """A table that sorts, filters and scrolls by itself; without the script it is whole.

    The first column heads its rows. ``hint`` is for the filter field, ``name`` for readers that do
    not see the table. One with ``heat`` has coloured cells, and a legend above it.
    """

    part: ClassVar = "table"
    columns: Sequence[Column]
    caption: str = ""
    sort: bool = True
    commands: Commands | None = None
    hint: str = "words"
    name: str = "table"
    heat: bool = False

    def rows(self) -> list[tuple[str | Cell, ...]]:
        """Return the rows, with their numbers as text."""
        return [*zip(*(column_texts(column.cells) for column in self.columns), strict=True)]

    def marks(self) -> str:
        """Return the classes by which the style sheet aligns columns: so rows need none."""
        marks = [f"{column.kind}{at}" for at, column in enumerate(self.columns, 1) if column.kind]
        return " ".join([*marks, *["heat"] * self.heat])


Part = str | Paragraph | Figures | Film | DataTable
Card = tuple[str, str, str]
"""A main number with its name before it, and a remark."""


@dataclass(frozen=True)
class Page:
    """A page as plain data; a section without parts is left out.

    ``kicker`` is the kind of the page, above the heading, and ``lead`` the sentence below. Plain
    text in a section is a paragraph. ``links`` are above all: their texts and relative paths.
    """

    title: str
    lead: str
    kicker: str
    sections: Sequence[tuple[str, Sequence[Part]]]
    cards: Sequence[Card] = ()
    footer: str = ""
    links: Sequence[tuple[str, str]] = ()

    def figures(self) -> list[Figure]:
        """Return the figures of all sections."""
        parts = [part for _, parts in self.sections for part in parts]
        return [one for part in parts if isinstance(part, Figures) for one in part.figures]

    def html(self) -> bytes:
        """Return the page as UTF-8, the same bytes for the same data."""
        films = any(isinstance(part, Film) for _, parts in self.sections for part in parts)
        policy = content_policy(films)
        script = _package_text("page.js")
        return _rendered("page.html", page=self, policy=policy, style=_style(), script=script)


def write_page(path: Path, page: Page) -> list[Path]:
    """Write a page, and its figures beside it; return the files, the page last."""
    check_no_links(path.parent, FIGURES)
    folder = path.with_name(FIGURES)
    written = [write_atomically(folder / f"{f.name}.svg", f.file()) for f in page.figures()]
    return [*written, write_atomically(path, page.html())]


def heat(score: float | None) -> str:
    """Return the class of the colour behind a score: zero is pale, one full, below is another."""
    if score is None or score != score:
        return ""
    if score < 0:
        return "heat-1" if score > -0.25 else "heat-2"
    return f"heat{min(6, round(min(score, 2.0) * 6))}"


@functools.cache
def content_policy(films: bool = False) -> str:
    """Return the Content-Security-Policy of a page; one with films may play those that it holds."""
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (_style(), _package_text("page.js"))
    ]
    return (
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; base-uri 'none'; "
        "form-action 'none'".format(*hashes)
    ) + f"; media-src {_FILM}" * films


@functools.cache
def _style() -> str:
    places = range(1, ALIGNED + 1)
    numbers, texts = (
        ",".join(f".{kind}{place} tr>:nth-child({place})" for place in places) for kind in "nt"
    )
    return (
        f"{_package_text('figures.css')}{_package_text('style.css')}"
        f"{numbers}{{text-align:right;white-space:nowrap}}\n"
        f"{texts}{{white-space:pre-wrap;overflow-wrap:anywhere;min-width:9rem}}\n"
    )


@functools.cache
def _package_text(name: str) -> str:
    return importlib.resources.files("tdcollect.pages").joinpath(name).read_text("utf-8")


def _rendered(template: str, **context: Any) -> bytes:
    return _environment().get_template(template).render(context).encode()


@functools.cache
def _environment() -> Any:
    import jinja2  # only by those who write a page

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tdcollect.pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        # Before a text is escaped; what has been escaped is Markup.
        finalize=lambda value: (
            value if hasattr(value, "__html__") else visible(str(value), lines=True)
        ),
    )
    environment.filters["address"] = _address
    environment.globals.update(FILTERED=FILTERED, TALL=TALL)
    return environment


def _address(path: str) -> str:
    """Return the address of a relative path; no path leads to another scheme or host."""
    return "./" + quote(path.lstrip("/"), errors="replace")
