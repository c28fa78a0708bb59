"""A page of HTML that needs no other file and no network.

Every text given to these functions is escaped, control characters in it too. The page's
Content-Security-Policy lets nothing load, and only the package's own style and script run: whatever
a text holds, it stays text.
"""

from __future__ import annotations

import base64
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
    style, script = style_sheet(), package_text("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(parts)
    above = f'<p class="kicker">{escape(kicker)}</p>\n' if kicker else ""
    below = f"<footer>{escape(footer)}</footer>\n" if footer else ""
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="tdcollect">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
{above}<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
</header>
{body}
{below}</main>
<script>{script}</script>
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
        f'<dd class="remark">{escape(remark)}</dd></div>'
        for name, value, remark in entries
    )
    return f'<dl class="cards">\n{items}\n</dl>'


def figures(shown: Sequence[Figure]) -> str:
    """Return figures side by side where there is room."""
    return "\n".join(['<div class="figures">', *map(_figure, shown), "</div>"])


def _figure(figure: Figure) -> str:
    caption = " ".join(filter(None, [figure.shows, figure.note]))
    return (
        f"<figure>\n<h3>{escape(figure.title)}</h3>\n"
        f"{figure.drawing.inline(figure.name, f'{figure.title}. {figure.shows}')}\n"
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def paragraphs(texts: Sequence[str], kind: str = "note") -> str:
    """Return one paragraph per text; ``kind`` is ``"note"`` or ``"warn"``."""
    return "\n".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts)


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
