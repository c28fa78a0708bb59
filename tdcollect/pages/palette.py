"""The colours of pages and figures, by role, in light and in dark."""

from __future__ import annotations

# Text of any role has a contrast of 4.5:1 or more on `paper` and on `panel`. The series are told
# apart by people who see red and green alike: they differ in lightness and in blue.
COLOURS: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#12161c"),
    "panel": ("#f6f8fa", "#1a2028"),
    "ink": ("#1a1f26", "#e6eaf0"),
    "muted": ("#57606b", "#a1abb8"),
    "grid": ("#e3e7ec", "#2b333e"),
    "line": ("#c9d0d8", "#3b4552"),
    "bar": ("#a9c6e8", "#3a6390"),
    "series1": ("#1d5fa8", "#74b3f2"),
    "series2": ("#b8500f", "#f2a35e"),
    "series3": ("#0b7a68", "#4fcfb5"),
    "series4": ("#7a3fb0", "#c39bf5"),
    "series5": ("#8a6400", "#e3c04f"),
    "series6": ("#a8326b", "#f28db8"),
    "good": ("#0b7a50", "#52d39b"),
    "bad": ("#b3261e", "#ff8f85"),
}
SERIES = [name for name in COLOURS if name.startswith("series")]


def light(role: str) -> str:
    """Return the colour of a role in light, which figures are drawn with."""
    return COLOURS[role][0]


def series(place: int) -> str:
    """Return the colour in light of a series, by its place; seven and more begin anew."""
    return light(SERIES[place % len(SERIES)])


def variables() -> str:
    """Return the colours as CSS variables, which follow light and dark."""
    one, other = (
        "".join(f"--{role}:{colours[dark]};" for role, colours in COLOURS.items())
        for dark in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{one}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{other}}}}}\n"
        f"@media print{{:root{{color-scheme:light;{one}}}}}\n"
    )


def classes() -> str:
    """Return the CSS classes that figures use: ``f-bar`` fills, ``s-bar`` strokes."""
    return "".join(
        f".f-{role}{{fill:var(--{role})}}.s-{role}{{stroke:var(--{role})}}\n" for role in COLOURS
    )
