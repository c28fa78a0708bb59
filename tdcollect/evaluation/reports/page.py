"""A page of HTML that needs no other file.

Every text given to these functions is escaped, control characters in it too.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from tdcollect.display import html_escaped as escape

STYLE = """
:root { color-scheme: light dark; --line: #d5d9df; --soft: #f5f7fa; --muted: #5b6470; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a414b; --soft: #1d2229; --muted: #a3adba; }
  body { background: #14181d; color: #e4e8ee; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.lead, figcaption, caption, .note { color: var(--muted); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: 1rem;
  margin: 1.5rem 0; padding: 0; }
.cards div { background: var(--soft); border: 1px solid var(--line); border-radius: 8px;
  padding: 0.8rem 1rem; }
.cards dt { color: var(--muted); font-size: 0.9rem; }
.cards dd { margin: 0; }
.cards .value { font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.92rem; }
caption { text-align: left; padding-bottom: 0.4rem; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
td { overflow-wrap: anywhere; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th[scope=row] { font-weight: 500; white-space: pre; }
figure { margin: 1.2rem 0; }
img { max-width: 100%; height: auto; background: white; border-radius: 8px; }
code { font-size: 0.92em; white-space: nowrap; }
"""


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the format of its cells."""

    heading: str
    number: bool = False
    code: bool = False


def page(title: str, lead: str, sections: Sequence[str]) -> bytes:
    """Return a page as UTF-8. Sections are HTML, made by the functions below."""
    body = "\n".join(sections)
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}
</main>
</body>
</html>
"""
    return text.encode()


def section(heading: str, *parts: str) -> str:
    """Return a section with its heading; parts are HTML."""
    return "\n".join(["<section>", f"<h2>{escape(heading)}</h2>", *parts, "</section>"])


def cards(entries: Sequence[tuple[str, str, str]]) -> str:
    """Return cards with the main numbers, each with its name and a remark."""
    items = "\n".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f"<dd>{escape(remark)}</dd></div>"
        for name, value, remark in entries
    )
    return f'<dl class="cards">\n{items}\n</dl>'


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return a table whose first column heads its rows."""
    heads = "".join(
        f'<th scope="col"{_class(column)}>{escape(column.heading)}</th>' for column in columns
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            _cell(column, text, first=not position)
            for position, (column, text) in enumerate(zip(columns, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    heading = f"<caption>{escape(caption)}</caption>\n" if caption else ""
    return (
        f'<div class="wide"><table>\n{heading}<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def figure(png: bytes, description: str) -> str:
    """Return a picture inside the page, with its description as alternative text."""
    data = base64.b64encode(png).decode()
    return (
        f'<figure><img alt="{escape(description)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(description)}</figcaption></figure>"
    )


def paragraphs(texts: Sequence[str]) -> str:
    """Return one paragraph per text."""
    return "\n".join(f'<p class="note">{escape(text)}</p>' for text in texts)


def _cell(column: Column, text: str, first: bool) -> str:
    content = f"<code>{escape(text)}</code>" if column.code else escape(text)
    if first:
        return f'<th scope="row"{_class(column)}>{content}</th>'
    return f"<td{_class(column)}>{content}</td>"


def _class(column: Column) -> str:
    return ' class="number"' if column.number else ""
