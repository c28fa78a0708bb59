"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

from tdcollect.text import visible


def number_text(value: float | None) -> str:
    """Five significant digits, or all before the point; "-" where there is no number."""
    if value is None:
        return "-"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.5g}"


def count_text(count: int, thing: str) -> str:
    """A count with its noun: ``1 episode``, ``2 episodes``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def interval_text(low: float, high: float) -> str:
    """An interval as ``[low, high]``."""
    return f"[{number_text(low)}, {number_text(high)}]"


def percent_text(share: float) -> str:
    """A share as percent: 0.95 as ``95%``."""
    return f"{100 * share:.6g}%"


def text_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns under their header: the first flush left, the others flush right.

    Control characters in cells are written out.
    """
    lines = [[visible(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def line_text(line: list[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join(line_text(line) for line in lines)
