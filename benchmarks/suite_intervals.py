"""Simulate how often the intervals of a suite's aggregates hold the truth.

    python benchmarks/suite_intervals.py

Prints the tables of docs/statistics.md, section "Suites"; the same versions give the same tables.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from intervals import holds, markdown, percent

from tdcollect.lab.aggregates import LABELS, METRICS, DrawnRuns, aggregate

RESAMPLES = 500
TASKS = (5, 26)
RUNS: dict[DrawnRuns, tuple[int, ...]] = {"n": (2, 3, 4, 5, 10, 20), "n-1": (2, 3, 4, 5)}
Draw = Callable[[np.random.Generator, Any, tuple[int, ...]], Any]

# Scores of runs around a task's level. The levels of tasks are spread evenly from 0.1 to 1.2.
SCORES: dict[str, Draw] = {
    "normal": lambda rng, level, shape: level + rng.normal(0, 0.2, shape),
    "exponential": lambda rng, level, shape: level * rng.exponential(1, shape),
    "normal, cut to 0 to 1": lambda rng, level, shape: np.clip(
        level + rng.normal(0, 0.3, shape), 0, 1
    ),
}
IMPROVEMENT = "improvement"
WORSE = 0.1  # the other policy's levels lie lower


def levels_of(tasks: int) -> Any:
    return np.linspace(0.1, 1.2, tasks)


@functools.cache
def truths(scores: str, tasks: int, many: int) -> dict[str, float]:
    """Return each metric of very many runs."""
    draw, levels = SCORES[scores], levels_of(tasks)
    rng = np.random.default_rng(0)
    shape = (many, tasks)
    first, second = draw(rng, levels, shape), draw(rng, levels - WORSE, shape)
    second.sort(axis=0)
    above = [
        np.searchsorted(ordered, values, side).mean() / many
        for values, ordered in zip(first.T, second.T, strict=True)
        for side in ("left", "right")
    ]
    found = {name: float(metric(first, 1.0)) for name, metric in METRICS.items()}
    return found | {IMPROVEMENT: float(np.mean(above))}


def coverage(drawn_runs: DrawnRuns, runs: Sequence[int], suites: int, many: int) -> str:
    rows = []
    for number, (name, draw) in enumerate(SCORES.items()):
        for tasks in TASKS:
            levels, truth = levels_of(tasks), truths(name, tasks, many)
            shares: dict[str, list[float]] = {metric: [] for metric in truth}
            for count in runs:
                hits = dict.fromkeys(truth, 0)
                rng = np.random.default_rng([number, tasks, count])
                for suite in range(suites):
                    shape = (count, tasks)
                    found = aggregate(
                        {"a": draw(rng, levels, shape), "b": draw(rng, levels - WORSE, shape)},
                        thresholds=[0.5],
                        drawn_runs=drawn_runs,
                        resamples=RESAMPLES,
                        seed=suite,
                    )
                    estimates = found.estimates["a"] | {IMPROVEMENT: found.improvement["a"]["b"]}
                    for metric, estimate in estimates.items():
                        hits[metric] += holds(estimate.interval, truth[metric])
                for metric, count_held in hits.items():
                    shares[metric].append(count_held / suites)
            labels = LABELS | {IMPROVEMENT: "probability of improvement"}
            rows += [
                [f"{name}, {tasks} tasks", labels[metric], *map(percent, shares[metric])]
                for metric in truth
            ]
    header = [f'scores, drawn_runs="{drawn_runs}"', "interval of"]
    return markdown([*header, *(f"{count} runs" for count in runs)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", type=int, default=1000, help="simulated suites per cell")
    parser.add_argument("--runs", type=int, nargs="+", help="training runs of each policy")
    parser.add_argument("--many", type=int, default=200_000, help="runs that give the truth")
    arguments = parser.parse_args()
    for drawn_runs, runs in RUNS.items():
        print(
            coverage(drawn_runs, arguments.runs or runs, arguments.suites, arguments.many),
            end="\n\n",
        )


if __name__ == "__main__":
    main()
