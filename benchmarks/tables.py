"""Numbers and tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first is aligned left."""
    widths = [max(2, *(len(row[i]) for row in [head, *rows])) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        " | ".join(
            [row[0].ljust(widths[0])]
            + [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in [head, rule, *rows]
    ]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def number(value: float) -> str:
    """A number as text, to three digits."""
    return f"{value:.3g}" if value >= 1 else f"{value:.2f}"


def with_spread(value: dict[str, float]) -> str:
    """The median as text, with the quartiles in brackets."""
    return f"{number(value['median'])} ({number(value['low'])} to {number(value['high'])})"
