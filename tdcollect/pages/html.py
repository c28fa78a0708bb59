"""A page of HTML that needs no other file and no network.

Every text given to these functions is escaped, control characters in it too. The page's
Content-Security-Policy lets nothing load, and only the package's own style and script run: whatever
a text holds, it stays text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from tdcollect.display import html_escaped as escape
from tdcollect.pages.drawing import Drawing
from tdcollect.pages.style import package_text, style_sheet


@dataclass(frozen=True)
class Figure:
    """A drawing with its words.

    Attributes:
        name: a prefix for ids, and the name of its file: letters, digits, ``-`` and ``_``.
        title: the heading.
        drawing: the drawing.
        shows: what it shows, in numbers: the alternative text, and the caption.
        note: more for the caption.
    """

    name: str
    title: str
    drawing: Drawing
    shows: str
    note: str = ""

    def file(self) -> bytes:
        """Return the SVG file of the drawing."""
        return self.drawing.file(self.title, self.shows)


def page(
    title: str, lead: str, parts: Sequence[str], *, kicker: str = "", footer: str = ""
) -> bytes:
    """Return a page as UTF-8.

    Args:
        title: the heading, and the window's title.
        lead: the sentence below the heading.
        parts: HTML, made by the functions of this package.
        kicker: the kind of the page, above the heading.
        footer: the last line.
    """
    body = "\n".join(parts)
    above = f'<p class="kicker">{escape(kicker)}</p>\n' if kicker else ""
    below = f"<footer>{escape(footer)}</footer>\n" if footer else ""
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{content_policy()}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="tdcollect">
<title>{escape(title)}</title>
<style>{style_sheet()}</style>
</head>
<body>
<main>
<header>
{above}<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
</header>
{body}
{below}</main>
<script>{package_text("page.js")}</script>
</body>
</html>
"""
    return text.encode()


@functools.cache
def content_policy() -> str:
    """Return the Content-Security-Policy of every page."""
    return (
        f"default-src 'none'; style-src {_hash(style_sheet())}; "
        f"script-src {_hash(package_text('page.js'))}; base-uri 'none'; form-action 'none'"
    )


def section(heading: str, *parts: str) -> str:
    """Return a section with its heading; parts are HTML."""
    return "\n".join(["<section>", f"<h2>{escape(heading)}</h2>", *parts, "</section>"])


def cards(entries: Sequence[tuple[str, str, str]]) -> str:
    """Return cards with the main numbers, each with its name and a remark."""
    items = "\n".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="remark">{escape(remark)}</dd></div>'
        for name, value, remark in entries
    )
    return f'<dl class="cards">\n{items}\n</dl>'


def figures(shown: Sequence[Figure], row: bool = False) -> str:
    """Return figures side by side where there is room; a row of narrow ones shows notes alone."""
    drawn = "\n".join(_figure(figure, "" if row else figure.shows) for figure in shown)
    return f'<div class="figures{" row" if row else ""}">\n{drawn}\n</div>'


def _figure(figure: Figure, shows: str) -> str:
    caption = " ".join(filter(None, [shows, figure.note]))
    return (
        f"<figure>\n<h3>{escape(figure.title)}</h3>\n"
        f"{figure.drawing.inline(figure.name, f'{figure.title}. {figure.shows}')}\n"
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def paragraphs(texts: Sequence[str], kind: str = "note") -> str:
    """Return one paragraph per text; ``kind`` is ``"note"`` or ``"warn"``."""
    return "\n".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts)


def heat_legend(low: str, high: str, below: str) -> str:
    """Return the legend of a heat map: the colours between two texts, and those below."""
    steps = "".join(f'<i class="heat{step}"></i>' for step in range(7))
    return (
        f'<p class="legend"><span>{escape(low)}</span>{steps}<span>{escape(high)}</span>'
        f'<i class="heat-1"></i><i class="heat-2"></i><span>{escape(below)}</span></p>'
    )


def command(text: str) -> str:
    """Return a command in a block of its own, which can be copied."""
    return f'<p class="command"><code>{escape(text)}</code></p>'


def link(path: str, text: str) -> str:
    """Return a link to a file beside the page: a relative path, whatever is in it."""
    return f'<a href="{address(path)}">{escape(text)}</a>'


def address(path: str) -> str:
    """Return the address of a relative path; no path leads to another scheme or host."""
    return escape("./" + quote(path.lstrip("/"), errors="replace"))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
