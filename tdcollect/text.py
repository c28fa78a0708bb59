"""Text from elsewhere, made safe to show in a terminal or a page."""

from __future__ import annotations

import re

# Control characters move a terminal's cursor and write its title; the others reorder or break what
# a reader sees. A lone surrogate cannot be written at all.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ud800-\udfff]"  # line and paragraph separators; surrogates
)


def visible(text: str, *, lines: bool = False) -> str:
    r"""Escape the control characters of a text as Python does: ``\x1b``, ``\u202e``.

    Args:
        text: from any source: a name, a message, a table.
        lines: keep line feeds and tabs.
    """
    return _UNSEEN.sub(lambda found: _written(found[0], lines), text)


def _written(character: str, lines: bool) -> str:
    return character if lines and character in "\n\t" else ascii(character)[1:-1]
