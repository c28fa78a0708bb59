"""Objects as text: one line at a prompt, tables, numbers and counts, safe to show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Protocol

# Control characters move a terminal's cursor and write its title; the others reorder or break what
# a reader sees. A lone surrogate cannot be written at all.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ud800-\udfff]"  # line and paragraph separators; surrogates
)


def visible(text: str, *, lines: bool = False) -> str:
    """Escape control characters as Python does; keep line feeds and tabs with ``lines``."""
    unchanged = "\n\t" if lines else ""
    return _UNSEEN.sub(lambda at: at[0] if at[0] in unchanged else ascii(at[0])[1:-1], text)


LONGEST_LINE = 200  # characters


def one_line(thing: Any, *parts: str) -> str:
    """Return ``Name(part, part)`` for a ``__repr__``: one line, cut if it is too long."""
    text = visible(re.sub(r"[ \n\t]+", " ", f"{type(thing).__name__}({', '.join(parts)})"))
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 4] + "...)"


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    before: Iterable[str] = (),
    after: Iterable[str] = (),
) -> str:
    """Return a table for a ``_repr_html_``, between paragraphs. Every text is escaped.

    The first cell of each row is its heading.
    """
    heads = "".join(f"<th>{html_escaped(text)}</th>" for text in header)
    lines = "\n".join(
        "<tr>"
        + f'<th style="text-align: left; white-space: pre">{html_escaped(first)}</th>'
        + "".join(f"<td>{html_escaped(text)}</td>" for text in rest)
        + "</tr>"
        for first, *rest in rows
    )
    table = f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>"
    above, below = ([f"<p>{html_escaped(text)}</p>" for text in part] for part in (before, after))
    return "\n".join([*above, table, *below])


def html_text(text: str) -> str:
    """Return lines as they are, escaped, for a ``_repr_html_``."""
    return f"<pre>{html_escaped(text)}</pre>"


def html_escaped(text: str) -> str:
    """Return text as HTML, with control characters written out."""
    return escape(visible(text, lines=True))


def number_text(value: float | None) -> str:
    """Return a number with five significant digits, or all before the point; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.5g}"


def number_texts(values: Sequence[float | None]) -> list[str]:
    """Return numbers with the same decimals, as a column or an interval has them.

    One that is larger than three quarters of them has four or five significant digits; decimals
    that none needs are left out. One that would be rounded by more than 5% keeps two digits of its
    own. NaN, infinities and numbers from 1e9 on are as :func:`number_text` has them.
    """
    usual = [value for value in values if value is not None and abs(value) < 1e9]
    sizes = sorted(filter(None, map(abs, usual)))
    large = sizes[3 * len(sizes) // 4] if sizes else 1.0
    whole = math.floor(math.log10(large)) + 1  # digits before the point
    most = min(6, max(0, 4 - whole + (whole > 2)))
    exact = (n for n in range(most) if all(math.isclose(round(v, n), v) for v in usual))
    count = next(exact, most)

    def text(value: float | None) -> str:
        if value is None or not abs(value) < 1e9:
            return number_text(value)
        shown = round(value, count) + 0.0  # no -0
        return f"{value:.2g}" if abs(shown - value) > 0.05 * abs(value) else f"{shown:.{count}f}"

    return [*map(text, values)]


def column_texts(cells: Iterable[Any]) -> list[Any]:
    """Return a column with numbers, pairs of them and None as text, with the same decimals."""
    cells = [*cells]
    numbers: list[float | None] = []
    for cell in cells:
        numbers += cell if isinstance(cell, tuple) else [cell] * isinstance(cell, (int, float))
    texts = iter(number_texts(numbers))

    def text(cell: Any) -> Any:
        if isinstance(cell, tuple):
            return f"[{next(texts)}, {next(texts)}]"
        if isinstance(cell, (int, float)):
            return next(texts)
        return "-" if cell is None else cell

    return [*map(text, cells)]


def number_columns(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Return rows with their numbers as text, each column as :func:`column_texts` has it."""
    columns = zip(*rows, strict=True)
    return [*map(list, zip(*map(column_texts, columns), strict=True))]


def count_text(count: int, thing: str) -> str:
    """Return a count with its noun: ``1 episode``, ``2 episodes``, ``2 policies``."""
    if count == 1:
        return f"{count} {thing}"
    return f"{count} {thing[:-1]}ies" if thing.endswith("y") else f"{count} {thing}s"


def listed_text(items: Sequence[Any], most: int = 3) -> str:
    """Return items as ``2, 6 and 10``, or the first of many: ``2, 6, 10 and 22 more``."""
    texts = list(map(str, items[:most]))
    if len(items) > most:
        return f"{', '.join(texts)} and {len(items) - most} more"
    return " and ".join([", ".join(texts[:-1]), *texts[-1:]] if len(texts) > 1 else texts)


def without_process_ids(text: str) -> str:
    """Return a message without the ids of processes, which are others at each run."""
    return re.sub(r"\(process \d+ on ", "(on ", re.sub(r" \(process \d+\)", "", text))


def p_text(value: float | None) -> str:
    """Return a p-value with two digits, none below a millionth; a dash for None."""
    return "-" if value is None else "< 1e-6" if value < 1e-6 else f"{value:.2g}"


def percent_text(share: float) -> str:
    """Return a share as percent: 0.95 as ``95%``."""
    return f"{100 * share:.6g}%"


def text_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Return columns under their header: the first flush left, the others flush right; escaped."""
    lines = [[visible(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def line_text(line: list[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join(line_text(line) for line in lines)


class ShownAsTable(Protocol):
    """Shown as a table, between a headline and notes; without rows there is no table."""

    def _head(self) -> str:
        """Return the headline."""

    def header(self) -> list[str]:
        """Return the heads of the table's columns."""

    def rows(self) -> list[list[str]]:
        """Return the table's rows: a label, then a cell for each column."""

    def notes(self) -> list[str]:
        """Return the notes to the table, one sentence each."""

    def _tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return headline, heads and rows of each table; of one, unless there are more."""
        return [(self._head(), self.header(), self.rows())]

    def __str__(self) -> str:
        parts = []
        for head, header, rows in self._tables():
            parts += [visible(head), text_table(rows, header) if rows else ""]
        return "\n\n".join(filter(None, [*parts, "\n".join(map(visible, self.notes()))]))

    def _repr_html_(self) -> str:
        tables = self._tables()
        notes = [*[list[str]()] * (len(tables) - 1), self.notes()]
        parts = zip(tables, notes, strict=True)
        return "\n".join(
            html_table(header, rows, [head] * bool(head), after)
            for (head, header, rows), after in parts
        )
