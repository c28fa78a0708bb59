"""Simulate how often the intervals of learning curves over training runs hold the truth.

    python benchmarks/curve_intervals.py

Prints the table of docs/beside-training.md, section "Over several training runs"; the same
versions give the same table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from intervals import holds, markdown, percent

from tdcollect.lab.curves import together

RUNS = (2, 3, 4, 5, 10, 20)
Draw = Callable[[np.random.Generator, tuple[int, ...]], Any]

# Means of training runs at one step.
MEANS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(300, 50, shape),
    "exponential": lambda rng, shape: rng.exponential(100, shape),
    "500 in 3 of 5 runs, else about 150": lambda rng, shape: np.where(
        rng.random(shape) < 0.6, 500, rng.normal(150, 30, shape)
    ),
}


def coverage(runs: Sequence[int], steps: int) -> str:
    rows = []
    for number, (name, draw) in enumerate(MEANS.items()):
        many = np.sort(draw(np.random.default_rng(0), (4_000_000,)))
        truth = float(many[len(many) // 4 : -len(many) // 4].mean())
        shares = []
        for count in runs:
            held = 0
            rng = np.random.default_rng([number, count])
            for step in range(steps):
                means = {str(run): {0: mean} for run, mean in enumerate(draw(rng, (count,)))}
                found = together(means, env="", episodes=1, resamples=1000, seed=step)
                held += holds(found.points[0].estimate.interval, truth)
            shares.append(percent(held / steps))
        rows.append([name, *shares])
    return markdown(["means of runs", *(f"{count} runs" for count in runs)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help="simulated steps per cell")
    parser.add_argument("--runs", type=int, nargs="+", default=RUNS, help="training runs")
    arguments = parser.parse_args()
    print(coverage(arguments.runs, arguments.steps))


if __name__ == "__main__":
    main()
