"""Draw the speed table of README.md, beside this file, as a picture: docs/_static/speed.svg.

python benchmarks/picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "_static" / "speed.svg"
PROGRAMS = {
    "hand-written": "loop by hand",
    "TorchRL Collector": "TorchRL, fastest env",
    "Stable-Baselines3": "Stable-Baselines3",
    "Tianshou 2": "Tianshou 2",
}
WORKLOADS = ("CartPole-v1, N=1", "CartPole-v1, N=8", "CartPole-v1, N=64", "HalfCheetah-v5, N=8")
COLOURS = ("#a9c5e8", "#1f5fa8", "#c9ccd1", "#8a9099")


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


def main() -> None:
    """Draw the picture."""
    found = ratios()
    mpl.rcParams.update({"svg.hashsalt": "tdcollect", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    axes = figure.subplots()
    for place, (name, colour) in enumerate(zip(PROGRAMS.values(), COLOURS, strict=True)):
        at = [row + (place - 1.5) * 0.2 for row in range(len(found))]
        bars = axes.barh(at, [row[place] for row in found.values()], 0.18, label=name, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), found)
    axes.invert_yaxis()
    axes.set_xlabel("time for the same frames, tdcollect = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
