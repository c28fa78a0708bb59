"""Draw the speed table of README.md, beside this file: docs/_static/speed-light.svg, and -dark.

python benchmarks/picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs" / "_static"
PROGRAMS = {
    "hand-written": "loop by hand",
    "TorchRL Collector": "TorchRL, fastest env",
    "Stable-Baselines3": "Stable-Baselines3",
    "Tianshou 2": "Tianshou 2",
}
WORKLOADS = ("CartPole-v1, N=1", "CartPole-v1, N=8", "CartPole-v1, N=64", "HalfCheetah-v5, N=8")
# Of text and lines, of the bars, of ours.
COLOURS = {
    "light": ("#57606b", ("#a9c6e8", "#1d5fa8", "#c9ccd1", "#8a9099"), "#1a1f26"),
    "dark": ("#a1abb8", ("#3a6390", "#74b3f2", "#4a5462", "#8a9099"), "#e6eaf0"),
}


def ratios() -> dict[str, list[float]]:
    """The medians of each program by workload, from the first table of the page."""
    lines = (HERE / "README.md").read_text().splitlines()
    rows = [
        [c.strip(" *") for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    header = rows[0]
    found = {}
    for workload in WORKLOADS:
        row = next(row for row in rows if row[0].startswith(workload))
        found[workload] = [
            float(re.match(r"[\d.]+", row[header.index(program)])[0])  # type: ignore[index]
            for program in PROGRAMS
        ]
    return found


def draw(scheme: str) -> None:
    """Draw the picture for readers of light or of dark pages, without a ground of its own."""
    found = ratios()
    text, colours, ours = COLOURS[scheme]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings = {"svg.hashsalt": "tdcollect", "svg.fonttype": "none", "font.size": 9}
    mpl.rcParams.update(settings | dict.fromkeys(names, text))
    figure = Figure(figsize=(7.2, 2.9), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    for place, (name, colour) in enumerate(zip(PROGRAMS.values(), colours, strict=True)):
        at = [row + (place - 1.5) * 0.2 for row in range(len(found))]
        bars = axes.barh(at, [row[place] for row in found.values()], 0.18, label=name, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.axvline(1, color=ours, linewidth=0.8)
    axes.set_yticks(range(len(found)), found)
    axes.invert_yaxis()
    axes.set_xlabel("time for the same frames, tdcollect = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(PICTURES / f"speed-{scheme}.svg", metadata={"Date": None})


if __name__ == "__main__":
    for each in COLOURS:
        draw(each)
