"""Aggregates of the scores of policies over training runs and tasks, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tdcollect.display import listed_text
from tdcollect.evaluation.reports.intervals import Interval, check_settings
from tdcollect.suites.estimates import Aggregates, DrawnRuns, Estimate, Profile
from tdcollect.suites.metrics import (
    METRICS,
    Scores,
    check_scores,
    probability_of_improvement,
    profile,
)
from tdcollect.suites.resampling import (
    percentile_interval,
    policy_generator,
    resampled_improvements,
    resampled_metrics,
)

RESAMPLES = 10_000
THRESHOLDS = 101


def aggregate(
    scores: Mapping[str, npt.ArrayLike],
    *,
    tasks: Sequence[str] | None = None,
    metrics: Sequence[str] = tuple(METRICS),
    groups: Mapping[str, Sequence[str]] | None = None,
    thresholds: npt.ArrayLike | None = None,
    gamma: float = 1.0,
    drawn_runs: DrawnRuns = "n",
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Aggregates:
    """Return aggregates of scores, with percentile intervals of the stratified bootstrap.

    Definitions are those of rliable (Agarwal et al. 2021); ``docs/statistics.md`` has them, and the
    measured coverage of each interval. Numbers of a policy do not depend on other policies, nor on
    the order of policies, named tasks and runs, to the bit. Only default ``thresholds`` do.

    Args:
        scores: by policy, normalised scores ``[runs, tasks]``, a row per training run. Policies may
            have different numbers of runs.
        tasks: the names of the tasks, one per column; by default their positions.
        metrics: among ``iqm``, ``mean``, ``median`` and ``optimality_gap``, the one that ranks
            policies first.
        groups: names of tasks by the name of a group, to aggregate each group alone as well.
        thresholds: the scores at which profiles are evaluated, ascending; by default 101 from 0, or
            the lowest 5% of scores, to 1, or the highest 5%.
        gamma: the score from which on the optimality gap is zero.
        drawn_runs: the number of runs in a resample of each task. ``"n"`` draws as many as there
            are, as rliable does. ``"n-1"`` draws one fewer, which makes the variance of a mean
            unbiased: intervals of few runs are then wider, and hold the truth more often.
        confidence: of every interval, between 0 and 1.
        resamples: the number of bootstrap resamples.
        seed: the seed of the generators.

    Raises:
        ValueError: no policy, run or task; a score that is missing or not finite; names that are
            unknown or not distinct; a number out of range.
    """
    arrays, names = check_scores(scores, tasks)
    check_settings(confidence, resamples, seed, 0)
    _check_metrics(metrics)
    if drawn_runs not in ("n", "n-1"):
        raise ValueError(f'expected drawn_runs to be "n" or "n-1", got {drawn_runs!r}')
    if not math.isfinite(gamma):
        raise ValueError(f"expected a finite gamma, got {gamma}")
    levels = _thresholds(arrays, thresholds)

    def over(columns: Sequence[int]) -> Aggregates:
        return _aggregate(
            {policy: array[:, columns] for policy, array in arrays.items()},
            tuple(names[column] for column in columns),
            levels,
            tuple(metrics),
            gamma=gamma,
            drawn_runs=drawn_runs,
            confidence=confidence,
            resamples=resamples,
            seed=seed,
        )

    members = {name: _columns(name, group, names) for name, group in (groups or {}).items()}
    parts = {name: over(columns) for name, columns in members.items()}
    return replace(over(range(len(names))), groups=parts)


def _aggregate(
    arrays: Mapping[str, Scores],
    tasks: tuple[str, ...],
    thresholds: Scores,
    metrics: tuple[str, ...],
    *,
    gamma: float,
    drawn_runs: DrawnRuns,
    confidence: float,
    resamples: int,
    seed: int,
) -> Aggregates:
    # Runs of a task are exchangeable, and tasks are a set: in one order, sums round alike and the
    # same runs are drawn, however the caller orders them.
    by_name = sorted(range(len(tasks)), key=tasks.__getitem__)
    ordered = {policy: np.sort(arrays[policy][:, by_name], axis=0) for policy in sorted(arrays)}
    drawn = {p: max(1, len(a) - (drawn_runs == "n-1")) for p, a in ordered.items()}

    estimates, profiles = {}, {}
    for policy in arrays:
        scores = ordered[policy]
        ends: dict[str, Scores] = {}
        if len(scores) > 1:
            rng = policy_generator(seed, policy)
            found = resampled_metrics(
                scores, metrics, thresholds, gamma, drawn[policy], resamples, rng
            )
            ends = {name: percentile_interval(v, confidence) for name, v in found.items()}
        estimates[policy] = {
            metric: _estimate(METRICS[metric](scores, gamma), ends.get(metric))
            for metric in metrics
        }
        profiles[policy] = _profile(profile(scores, thresholds), ends.get("profile"))
    means = {policy: ordered[policy].mean(0)[np.argsort(by_name)].tolist() for policy in arrays}
    return Aggregates(
        tasks=tasks,
        runs={policy: len(array) for policy, array in arrays.items()},
        metrics=metrics,
        estimates=estimates,
        improvement=_improvement(list(arrays), ordered, drawn, confidence, resamples, seed),
        thresholds=tuple(thresholds.tolist()),
        profiles=profiles,
        task_means={p: dict(zip(tasks, values, strict=True)) for p, values in means.items()},
        groups={},
        gamma=gamma,
        drawn_runs=drawn_runs,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def _improvement(
    policies: list[str],
    ordered: Mapping[str, Scores],
    drawn: Mapping[str, int],
    confidence: float,
    resamples: int,
    seed: int,
) -> dict[str, dict[str, Estimate]]:
    # The generators that the metrics had: a pair sees the same runs drawn.
    rngs = {policy: policy_generator(seed, policy) for policy in ordered}
    found: dict[str, dict[str, Estimate]] = {policy: {} for policy in policies}
    for (a, b), values in resampled_improvements(ordered, drawn, resamples, rngs):
        value = float(probability_of_improvement(ordered[a], ordered[b]))
        if len(ordered[a]) == len(ordered[b]) == 1:
            found[a][b], found[b][a] = Estimate(value, None), Estimate(1 - value, None)
            continue
        low, high = percentile_interval(values, confidence).tolist()
        found[a][b] = Estimate(value, Interval(low, high))
        found[b][a] = Estimate(1 - value, Interval(1 - high, 1 - low))
    return {p: {q: found[p][q] for q in policies if q != p} for p in policies}


def _estimate(value: Any, ends: Scores | None) -> Estimate:
    return Estimate(float(value), None if ends is None else Interval(*ends.tolist()))


def _profile(values: Scores, ends: Scores | None) -> Profile:
    low, high = (None, None) if ends is None else map(tuple, ends.tolist())
    return Profile(tuple(values.tolist()), low, high)


def _check_metrics(metrics: Sequence[str]) -> None:
    wrong = [metric for metric in metrics if metric not in METRICS]
    if wrong or not metrics or len(set(metrics)) < len(metrics):
        raise ValueError(
            f"expected distinct metrics among {', '.join(METRICS)}, at least one, got "
            f"{list(metrics)}"
        )


def _thresholds(arrays: Mapping[str, Scores], given: npt.ArrayLike | None) -> Scores:
    if given is None:
        low = min(np.quantile(array, 0.05) for array in arrays.values())
        high = max(np.quantile(array, 0.95) for array in arrays.values())
        return np.linspace(min(0.0, low), max(1.0, high), THRESHOLDS)
    thresholds = np.array(given, dtype=np.float64)
    rising = thresholds.ndim == 1 and thresholds.size and (np.diff(thresholds) > 0).all()
    if not (rising and np.isfinite(thresholds).all()):
        raise ValueError(f"expected thresholds as a list of finite, rising scores, got {given}")
    return thresholds


def _columns(group: str, members: Sequence[str], tasks: tuple[str, ...]) -> list[int]:
    unknown = [task for task in members if task not in tasks]
    if unknown or not members or len(set(members)) < len(members):
        raise ValueError(
            f"expected group {group!r} to name distinct tasks of the suite, at least one, got "
            f"{list(members)}; the tasks are {listed_text(tasks, 10)}"
        )
    return [tasks.index(task) for task in members]
