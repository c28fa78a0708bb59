"""Tables of pages: they sort, filter and scroll by themselves, and are whole without a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tdcollect.display import html_escaped as escape
from tdcollect.display import number_columns
from tdcollect.pages.html import address

FILTERED = 8  # rows from which a table has a filter field
TALL = 16  # rows from which it scrolls


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the format of its cells."""

    heading: str
    number: bool = False
    text: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with links, or with a colour.

    Attributes:
        text: its text.
        path: the file that it leads to, relative to the page.
        kind: ``"good"``, ``"bad"``, a role of :data:`tdcollect.pages.palette.HEAT`, or nothing.
        more: smaller texts below it, each with the file that it leads to.
    """

    text: str
    path: str | None = None
    kind: str = ""
    more: tuple[tuple[str, str | None], ...] = ()


Value = str | float | tuple[float, float] | Cell | None
"""A cell of a row of a table; None is shown as a dash."""


@dataclass(frozen=True)
class Commands:
    """The commands of the rows of a table: the text of a row's first cell between two halves."""

    before: str
    after: str

    @classmethod
    def of(cls, one: str, other: str) -> Commands:
        """Return the halves of two commands, one for ``1`` and one for ``2``."""
        place = next(place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        return cls(one[:place], one[place + 1 :])

    def of_row(self, text: str) -> str:
        """Return the command of a row."""
        return f"{self.before}{text}{self.after}"


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Value]],
    caption: str = "",
    *,
    sort: bool = True,
    commands: Commands | None = None,
    hint: str = "words",
    name: str = "",
    heat: bool = False,
) -> str:
    """Return a table whose first column heads its rows.

    Args:
        columns: the columns.
        rows: their cells, of plain text or with a link; those that start with spaces are indented.
            Numbers and pairs of them, the ends of intervals, get the decimals of their column.
        caption: above the table.
        sort: let it sort; else its order says something.
        commands: a command per row, to be copied.
        hint: for the filter field.
        heat: it is a heat map: its cells are coloured.
        name: for readers that do not see it, if there is no caption.
    """
    marks = [f"n{place}" for place, column in enumerate(columns, 1) if column.number]
    marks += [f"t{place}" for place, column in enumerate(columns, 1) if column.text]
    marks += ["heat"] if heat else []
    data = f' class="{" ".join(marks)}"' if marks else ""
    if sort and len(rows) > 1:
        data += " data-sort"
    if len(rows) >= FILTERED and sort:
        data += f' data-filter="{escape(hint)}"'
    if commands is not None:
        data += f' data-before="{escape(commands.before)}" data-after="{escape(commands.after)}"'
    heads = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in columns)
    body = "\n".join(f"<tr>{''.join(_cells(row))}</tr>" for row in number_columns(rows))
    above = f'<p class="caption">{escape(caption)}</p>\n' if caption else ""
    named = escape(name or caption or "table")
    tall = " tall" if len(rows) > TALL else ""
    return (
        f'{above}<div class="wide{tall}" tabindex="0" role="region" aria-label="{named}">'
        f"<table{data}>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cells(row: Sequence[str | Cell]) -> Iterable[str]:
    first, *rest = row
    kind = ' class="indent"' if isinstance(first, str) and first.startswith(" ") else ""
    yield f'<th scope="row"{kind}>{_content(first)}</th>'
    for cell in rest:
        mark = f' class="{cell.kind}"' if isinstance(cell, Cell) and cell.kind else ""
        yield f"<td{mark}>{_content(cell)}</td>"


def _content(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return escape(cell.strip())
    text = _linked(cell.text, cell.path)
    if cell.more:
        text += f" <small>{' '.join(_linked(*part) for part in cell.more)}</small>"
    return text


def _linked(text: str, path: str | None) -> str:
    return escape(text) if path is None else f'<a href="{address(path)}">{escape(text)}</a>'
