"""Aggregate metrics of scores over training runs and tasks, as rliable defines them.

Agarwal et al., *Deep Reinforcement Learning at the Edge of the Statistical Precipice*, NeurIPS
2021. Scores are arrays ``[..., runs, tasks]``; the axes before, as of resamples, stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tdcollect.display import listed_text
from tdcollect.evaluation.reports import intervals

Scores = npt.NDArray[np.float64]


def mean(scores: Scores) -> Any:
    """Return the mean over tasks of the mean over runs."""
    return scores.mean(-2).mean(-1)


def median(scores: Scores) -> Any:
    """Return the median over tasks of the mean over runs."""
    return np.median(scores.mean(-2), -1)


def interquartile_mean(scores: Scores) -> Any:
    """Return the mean of all scores without a quarter of them, rounded down, at each end."""
    return intervals.interquartile_mean(_together(scores))


def optimality_gap(scores: Scores, gamma: float = 1.0) -> Any:
    """Return by how much scores fall short of ``gamma`` on average; lower is better.

    Scores above ``gamma`` count as ``gamma``.
    """
    return gamma - np.minimum(scores, gamma).mean((-2, -1))


METRICS: dict[str, Callable[[Scores, float], Any]] = {
    "iqm": lambda scores, _: interquartile_mean(scores),
    "mean": lambda scores, _: mean(scores),
    "median": lambda scores, _: median(scores),
    "optimality_gap": optimality_gap,
}
"""The metrics by name, called with scores and gamma."""


def profile(scores: Scores, thresholds: Scores) -> Any:
    """Return the share of scores, of all runs and tasks, above each of ``thresholds [H]``.

    rliable's run-score distribution: ``[..., H]``.
    """
    return shares_above(_together(np.searchsorted(thresholds, scores)), len(thresholds))


def shares_above(ranks: npt.NDArray[np.int64], count: int) -> Any:
    """Return the share of values above each of ``count`` ascending thresholds.

    Args:
        ranks: for each value, the number of thresholds below it, ``[..., values]``.
        count: the number of thresholds.

    Returns:
        Float64 ``[..., count]``.
    """
    before, values = ranks.shape[:-1], ranks.shape[-1]
    rows = ranks.reshape(-1, values)
    places = np.arange(len(rows))[:, None] * (count + 1) + rows
    counts = np.bincount(places.ravel(), minlength=len(rows) * (count + 1))
    above = counts.reshape(-1, count + 1)[:, :0:-1].cumsum(1)[:, ::-1]
    return (above / values).reshape(*before, count)


def probability_of_improvement(first: Scores, second: Scores) -> Any:
    """Return the probability that a run of ``first`` scores above one of ``second``.

    The Mann-Whitney statistic over the number of pairs of runs, averaged over tasks: pairs are of
    the same task, and equal scores count half. 0.5 means that neither is better.

    Args:
        first: scores ``[..., runs, tasks]`` of one policy.
        second: scores of another on the same tasks; its number of runs may differ.
    """
    won = wins(first, second)
    return won.mean((-3, -2, -1))


def wins(first: Scores, second: Scores) -> Scores:
    """Return 1 where a run scores above another, 0.5 where equal: ``[..., tasks, runs, runs]``."""
    a = np.swapaxes(first, -1, -2)[..., :, None]
    b = np.swapaxes(second, -1, -2)[..., None, :]
    return (a > b) + 0.5 * (a == b)


def _together(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``[..., runs, tasks]`` as ``[..., runs * tasks]``."""
    return values.reshape(*values.shape[:-2], -1)


def check_scores(
    scores: Mapping[str, npt.ArrayLike], tasks: Sequence[str] | None
) -> tuple[dict[str, Scores], tuple[str, ...]]:
    """Return scores as float64 arrays ``[runs, tasks]``, and the tasks' names.

    Args:
        scores: by policy.
        tasks: the names of the tasks; by default their positions.

    Raises:
        ValueError: no policy, run or task; arrays of another shape; a score that is missing or not
            finite; names that are empty or not distinct.
    """
    if not scores:
        raise ValueError("expected scores of at least one policy, as {policy: scores}, got none")
    if "" in scores:
        raise ValueError("expected policies with names, got one without: name it")
    arrays = {policy: _checked(policy, values) for policy, values in scores.items()}
    widths = {policy: array.shape[1] for policy, array in arrays.items()}
    count = next(iter(widths.values()))
    if set(widths.values()) != {count}:
        raise ValueError(
            f"expected scores of all policies on the same tasks, got, by policy, {widths} tasks: "
            "leave out tasks that a policy lacks"
        )
    names = tuple(map(str, range(count) if tasks is None else tasks))
    if len(names) != count or len(set(names)) < count or "" in names:
        raise ValueError(
            f"expected {count} distinct names of tasks, one per column of scores, got {list(names)}"
        )
    for policy, array in arrays.items():
        wrong = [names[task] for task in np.flatnonzero(~np.isfinite(array).all(axis=0))]
        if wrong:
            raise ValueError(
                f"expected a finite score of each run on each task, got NaN or infinite ones of "
                f"{policy!r} on {listed_text(wrong)}: leave out those tasks or those runs, and say "
                "so where you show the numbers"
            )
    return arrays, names


def _checked(policy: str, values: npt.ArrayLike) -> Scores:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected scores of {policy!r} as numbers [runs, tasks], got something else: {error}"
        ) from error
    if array.ndim != 2 or not array.size:
        raise ValueError(
            f"expected scores of {policy!r} as [runs, tasks], at least one of each, got shape "
            f"{list(array.shape)}" + (": for one run, pass [scores]" if array.ndim == 1 else "")
        )
    return array
