"""The style sheet and the script of every page, from the files of this package."""

from __future__ import annotations

import functools
import importlib.resources

from tdcollect.pages.palette import backgrounds, classes, variables

ALIGNED = 40  # columns of a table whose numbers stand at the right


@functools.cache
def style_sheet() -> str:
    """Return the style sheet of a page."""
    return variables() + classes() + package_text("style.css") + backgrounds() + _alignment()


@functools.cache
def package_text(name: str) -> str:
    """Return the text of a file of this package."""
    return importlib.resources.files("tdcollect.pages").joinpath(name).read_text("utf-8")


def _alignment() -> str:
    """Return rules that align columns by the class of the table: so rows need none of their own."""
    places = range(1, ALIGNED + 1)
    numbers, texts = (
        ",".join(f".{kind}{place} tr>:nth-child({place})" for place in places) for kind in "nt"
    )
    return (
        f"{numbers}{{text-align:right;white-space:nowrap}}\n"
        f"{texts}{{white-space:normal;overflow-wrap:anywhere;min-width:9rem}}\n"
    )
