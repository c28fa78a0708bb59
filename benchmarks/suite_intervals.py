"""Simulate how often the intervals of a suite's aggregates hold the truth.

    python benchmarks/suite_intervals.py

Prints the tables of docs/statistics.md, section "Suites"; the same versions give the same tables.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from intervals import holds, markdown, percent
from scipy import stats

from tdcollect.lab.aggregates import (
    LABELS,
    METRICS,
    DrawnRuns,
    aggregate,
    difference_freedom,
    resampled_spreads,
)

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

# Standard deviations of a policy's runs, of what an episode is for a policy, and of the remainder.
# Starts, which all policies share, have one of 0.3.
STARTS = 0.3
SUCCESSES = "successes, 0 or 1"  # where such a score is above 0.5
VARIES = {
    "mostly runs": (0.15, 0.1, 0.1),
    "runs and episodes": (0.05, 0.2, 0.2),
    "mostly the remainder": (0.03, 0.05, 0.6),
    SUCCESSES: (0.1, 0.2, 0.3),
}
SIZES = ((3, 20), (3, 100), (10, 20))  # tasks and episodes
RUNS_OF_DIFFERENCES = (2, 3, 5, 10)


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


def played(
    rng: np.random.Generator, name: str, levels: dict[str, Any], shape: tuple[int, int, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return scores ``[runs, tasks]`` of policies with levels of tasks, and those of episodes."""
    runs, tasks, episodes = shape
    of_runs, of_episodes, remainder = VARIES[name]
    starts = rng.normal(0, STARTS, (tasks, episodes))
    found = {
        policy: starts
        + level[:, None]
        + rng.normal(0, of_runs, (runs, tasks, 1))
        + rng.normal(0, of_episodes, (tasks, episodes))
        + rng.normal(0, remainder, shape)
        for policy, level in levels.items()
    }
    if name == SUCCESSES:
        found = {policy: (array > 0.5).astype(float) for policy, array in found.items()}
    return {policy: array.mean(-1) for policy, array in found.items()}, found


def many_runs(name: str, level: Any, many: int) -> Any:
    """Return the scores of very many runs over all episodes that there could be."""
    of_runs, *within = VARIES[name]
    found = level + np.random.default_rng(0).normal(0, of_runs, (many, len(level)))
    if name == SUCCESSES:
        found = stats.norm.cdf((found - 0.5) / np.linalg.norm([STARTS, *within]))
    return found


def differences(runs: Sequence[int], suites: int, many: int) -> str:
    """Coverage of the difference of two policies, if runs, episodes or both are drawn anew."""
    rows = []
    for number, name in enumerate(VARIES):
        for tasks, episodes in SIZES:
            levels = {"a": levels_of(tasks), "b": levels_of(tasks) - WORSE}
            alls = {policy: many_runs(name, level, many) for policy, level in levels.items()}
            level, truth, of_means = (
                float(METRICS[metric](alls["a"], 1.0))
                - ahead * float(METRICS[metric](alls["b"], 1.0))
                for metric, ahead in (("iqm", 0), ("iqm", 1), ("mean", 1))
            )
            for count in runs:
                rng = np.random.default_rng([number, tasks, episodes, count])
                hits = []
                for suite in range(suites):
                    scores, each = played(rng, name, levels, (count, tasks, episodes))
                    given: Any = {"thresholds": [0.5], "resamples": RESAMPLES, "seed": suite}
                    given |= {"episodes": each, "drawn_runs": "n-1"}
                    found = aggregate(scores, metrics=["iqm"], **given)
                    mean = aggregate(scores, metrics=["mean"], **given).differences["a"]["b"]
                    one = found.differences["a"]["b"]
                    (spread,) = resampled_spreads(each, found).values()
                    reach = stats.t.ppf(0.975, difference_freedom(each["a"], each["b"]))
                    alone = [reach * part**0.5 for part in (spread.runs, spread.episodes)]
                    hits.append(
                        [
                            *(abs(one.value - truth) <= at for at in alone),
                            holds(one.interval, truth),
                            holds(mean.interval, of_means),
                            holds(found.estimates["a"]["iqm"].interval, level),
                        ]
                    )
                shares = map(percent, np.mean(hits, axis=0))
                rows.append([name, str(tasks), str(episodes), str(count), *shares])
    header = ["what varies", "tasks", "episodes", "runs", "difference: runs", "episodes", "both"]
    return markdown([*header, "both, of means", "own score: runs"], rows)


def false_differences(suites: int) -> str:
    """Shares of suites with a p-value below 5% among five policies that are equally good."""
    rows = []
    for number, name in enumerate(VARIES):
        rng = np.random.default_rng(number)
        levels = {policy: levels_of(3) for policy in "abcde"}
        hits = []
        for suite in range(suites):
            scores, each = played(rng, name, levels, (3, 3, 20))
            found = aggregate(
                scores, episodes=each, thresholds=[0.5], resamples=RESAMPLES, seed=suite
            ).differences
            pairs = [found[a][b] for a, b in combinations(levels, 2)]
            p_values = np.array([[one.p_value, one.adjusted_p_value] for one in pairs])
            hits.append([p_values[0, 0] < 0.05, *(p_values.min(0) < 0.05)])
        rows.append([name, *map(percent, np.mean(hits, axis=0))])
    header = [
        "five equal policies",
        "one comparison",
        "any of ten",
        "any of ten, Holm's correction",
    ]
    return markdown(header, rows)


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
    print(differences(arguments.runs or RUNS_OF_DIFFERENCES, arguments.suites, arguments.many))
    print(f"\n{false_differences(arguments.suites)}")


if __name__ == "__main__":
    main()
