"""Objects as text at a prompt, and as tables in a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tdcollect.text import visible

LONGEST_LINE = 200  # characters


def one_line(thing: Any, *parts: str) -> str:
    """``Name(part, part)`` for a ``__repr__``: always one line, cut if it is long."""
    text = re.sub(r"[ \n\t]+", " ", f"{type(thing).__name__}({', '.join(parts)})")
    text = visible(text)
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 4] + "...)"


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    before: Iterable[str] = (),
    after: Iterable[str] = (),
) -> str:
    """A table for a ``_repr_html_``, between paragraphs. Every text is escaped.

    Args:
        header: the columns' headings.
        rows: the cells of each row; the first one is its heading.
        before: paragraphs above the table.
        after: paragraphs below it.
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
    return "\n".join([*_paragraphs(before), table, *_paragraphs(after)])


def html_text(text: str) -> str:
    """Preformatted text, escaped, for a ``_repr_html_``."""
    return f"<pre>{html_escaped(text)}</pre>"


def html_escaped(text: str) -> str:
    """Text as HTML; control characters are written out, as no page shows them."""
    return escape(visible(text, lines=True))


def _paragraphs(texts: Iterable[str]) -> list[str]:
    return [f"<p>{html_escaped(text)}</p>" for text in texts]
