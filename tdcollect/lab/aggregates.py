"""Aggregates of the scores of policies over training runs and tasks, with intervals.

Metrics are those of rliable: Agarwal et al., *Deep Reinforcement Learning at the Edge of the
Statistical Precipice*, NeurIPS 2021. Scores are arrays ``[..., runs, tasks]``; the axes before, as
of resamples, stay. Intervals are of the stratified bootstrap: the runs are resampled within each
task, and the tasks stay. So they tell what other training runs on the same tasks would give, and
nothing about other tasks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tdcollect import check, display
from tdcollect.display import count_text, listed_text, number_text, number_texts, one_line
from tdcollect.evaluation import statistics
from tdcollect.evaluation.statistics import BATCH_VALUES, Interval, check_settings, generator

RESAMPLES = 10_000
THRESHOLDS = 101

Scores = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
DrawnRuns = Literal["n", "n-1"]

LABELS = {
    "iqm": "interquartile mean",
    "mean": "mean",
    "median": "median",
    "optimality_gap": "optimality gap",
}
LOWER_IS_BETTER = frozenset({"optimality_gap"})

# The coverage of 95% intervals of the interquartile mean from few runs, in percent, lowest and
# highest of the simulations in docs/statistics.md.
COVERAGE = {
    "n": {2: (72, 83), 3: (81, 88), 4: (87, 90)},
    "n-1": {2: (78, 94), 3: (88, 94), 4: (91, 95)},
}


METRICS: dict[str, Callable[[Scores, float], Any]] = {
    "iqm": lambda scores, _: statistics.interquartile_mean(_together(scores)),
    "mean": lambda scores, _: scores.mean(-2).mean(-1),
    "median": lambda scores, _: np.median(scores.mean(-2), -1),
    "optimality_gap": lambda scores, gamma: gamma - np.minimum(scores, gamma).mean((-2, -1)),
}
"""The metrics by name, called with scores and gamma."""


def shares_above(ranks: npt.NDArray[np.int64], count: int) -> Any:
    """Return the share of scores, of all runs and tasks, above each of ``count`` rising thresholds.

    rliable's run-score distribution, from the number of thresholds below each score, ``[..., runs,
    tasks]``, as ``[..., count]``.
    """
    ranks = _together(ranks)
    before, values = ranks.shape[:-1], ranks.shape[-1]
    rows = ranks.reshape(-1, values)
    places = np.arange(len(rows))[:, None] * (count + 1) + rows
    counts = np.bincount(places.ravel(), minlength=len(rows) * (count + 1))
    above = counts.reshape(-1, count + 1)[:, :0:-1].cumsum(1)[:, ::-1]
    return (above / values).reshape(*before, count)


def probability_of_improvement(first: Scores, second: Scores) -> Any:
    """Return the probability that a run of ``first`` scores above one of ``second``.

    The Mann-Whitney statistic of scores ``[..., runs, tasks]`` over the number of pairs of runs,
    averaged over tasks: equal scores count half, and 0.5 means that neither is better.
    """
    return wins(first, second).mean((-3, -2, -1))


def wins(first: Scores, second: Scores) -> Scores:
    """Return 1 where a run scores above another, 0.5 where equal: ``[..., tasks, runs, runs]``."""
    a = np.swapaxes(first, -1, -2)[..., :, None]
    b = np.swapaxes(second, -1, -2)[..., None, :]
    return (a > b) + 0.5 * (a == b)


def _together(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``[..., runs, tasks]`` as ``[..., runs * tasks]``."""
    return values.reshape(*values.shape[:-2], -1)


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
    if not distinct(metrics, METRICS):
        raise ValueError(
            f"expected distinct metrics among {', '.join(METRICS)}, at least one, got "
            f"{list(metrics)}"
        )
    check.one_of(("n", "n-1"), drawn_runs=drawn_runs)
    if not math.isfinite(gamma):
        raise ValueError(f"expected a finite gamma, got {gamma}")
    for name, members in (groups or {}).items():
        if not distinct(members, names):
            raise ValueError(
                f"expected group {name!r} to name distinct tasks of the suite, at least one, got "
                f"{list(members)}; the tasks are {listed_text(names, 10)}"
            )
    empty = Aggregates(
        tasks=names,
        runs={policy: len(array) for policy, array in arrays.items()},
        metrics=tuple(metrics),
        thresholds=tuple(_thresholds(arrays, thresholds).tolist()),
        gamma=gamma,
        drawn_runs=drawn_runs,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )

    def over(tasks: tuple[str, ...]) -> Aggregates:
        # Runs of a task are exchangeable, and tasks are a set: in one order, sums round alike and
        # the same runs are drawn, however the caller orders them.
        columns = [names.index(task) for task in sorted(tasks)]
        ordered = {p: np.sort(arrays[p][:, columns], axis=0) for p in sorted(arrays)}
        return _aggregated(ordered, replace(empty, tasks=tasks))

    return replace(over(names), groups={name: over(tuple(g)) for name, g in (groups or {}).items()})


def distinct(chosen: Sequence[str], known: Container[str]) -> bool:
    """Tell whether names are known, at least one, and none twice."""
    return bool(chosen) and len(set(chosen)) == len(chosen) and all(one in known for one in chosen)


def _aggregated(ordered: Mapping[str, Scores], empty: Aggregates) -> Aggregates:
    """Return aggregates as they are asked for, of sorted policies, tasks and runs."""
    drawn = {p: max(1, len(a) - (empty.drawn_runs == "n-1")) for p, a in ordered.items()}
    thresholds = np.array(empty.thresholds)

    def interval(values: Scores) -> Interval:
        return Interval(*percentiles(values, empty.confidence).tolist())

    estimates: dict[str, dict[str, Estimate]] = {}
    profiles, task_means = {}, {}
    for policy in empty.runs:
        scores = ordered[policy]
        ranks = np.searchsorted(thresholds, scores)
        shares = tuple(shares_above(ranks, len(thresholds)).tolist())
        drawn_metrics = {}
        if len(scores) > 1:
            rng = policy_generator(empty.seed, policy)
            drawn_metrics = resampled_metrics(scores, ranks, empty, drawn[policy], rng)
        estimates[policy] = {
            metric: Estimate(
                float(METRICS[metric](scores, empty.gamma)),
                interval(drawn_metrics[metric]) if drawn_metrics else None,
            )
            for metric in empty.metrics
        }
        band = map(
            tuple,
            percentiles(drawn_metrics["profile"], empty.confidence).tolist()
            if drawn_metrics
            else (),
        )
        profiles[policy] = Profile(shares, *band)
        means = dict(zip(sorted(empty.tasks), scores.mean(0).tolist(), strict=True))
        task_means[policy] = {task: means[task] for task in empty.tasks}

    improvement: dict[str, dict[str, Estimate]] = {policy: {} for policy in ordered}
    # The generators that the metrics had: a pair sees the same runs drawn.
    rngs = {policy: policy_generator(empty.seed, policy) for policy in ordered}
    for (a, b), values in resampled_improvements(ordered, drawn, empty.resamples, rngs):
        value = float(probability_of_improvement(ordered[a], ordered[b]))
        there = back = None
        if len(ordered[a]) > 1 or len(ordered[b]) > 1:
            there = interval(values)
            back = Interval(1 - there.high, 1 - there.low)
        improvement[a][b], improvement[b][a] = Estimate(value, there), Estimate(1 - value, back)
    return replace(
        empty,
        estimates=estimates,
        improvement={p: {q: improvement[p][q] for q in empty.runs if q != p} for p in empty.runs},
        profiles=profiles,
        task_means=task_means,
    )


def _thresholds(arrays: Mapping[str, Scores], values: npt.ArrayLike | None) -> Scores:
    if values is None:
        low = min(np.quantile(array, 0.05) for array in arrays.values())
        high = max(np.quantile(array, 0.95) for array in arrays.values())
        return np.linspace(min(0.0, low), max(1.0, high), THRESHOLDS)
    thresholds = np.array(values, dtype=np.float64)
    rising = thresholds.ndim == 1 and thresholds.size and (np.diff(thresholds) > 0).all()
    if not (rising and np.isfinite(thresholds).all()):
        raise ValueError(f"expected thresholds as a list of finite, rising scores, got {values}")
    return thresholds


def check_scores(
    scores: Mapping[str, npt.ArrayLike], tasks: Sequence[str] | None
) -> tuple[dict[str, Scores], tuple[str, ...]]:
    """Return scores as float64 arrays ``[runs, tasks]``, and the tasks' names."""
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


@dataclass(frozen=True)
class Estimate:
    """A number with its confidence interval.

    Attributes:
        value: computed from the scores as they are.
        interval: bootstrap interval; None if there is only one run.
    """

    value: float
    interval: Interval | None

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        if self.interval is None:
            return number_text(self.value)
        value, low, high = number_texts([self.value, self.interval.low, self.interval.high])
        return f"{value} [{low}, {high}]"


@dataclass(frozen=True)
class Profile:
    """A performance profile: the share of scores above each threshold.

    Attributes:
        values: one share per threshold, falling.
        low, high: the ends of each share's own interval; None if there is only one run.
    """

    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    def __repr__(self) -> str:
        ends = f"{number_text(self.values[0])} to {number_text(self.values[-1])}"
        band = "no band" if self.low is None else "with band"
        return one_line(self, count_text(len(self.values), "threshold"), ends, band)


@dataclass(frozen=True, kw_only=True)
class Aggregates(display.ShownAsTable):
    """Aggregates of policies over the same tasks; print them to see a table.

    Attributes:
        tasks: the names of the tasks.
        runs: the number of training runs of each policy.
        metrics: the names of the metrics, the one that ranks policies first.
        estimates: by policy and metric.
        improvement: by two policies, the probability that a run of the first scores above a run
            of the second on the same task. The two directions add up to one.
        thresholds: the scores at which profiles are evaluated, ascending.
        profiles: by policy, the share of scores above each threshold, over all runs and tasks.
        task_means: by policy and task, the mean over runs.
        groups: by name, the aggregates over the tasks of a group alone.
        gamma, drawn_runs, confidence, resamples, seed: as for :func:`aggregate`.
    """

    tasks: tuple[str, ...]
    runs: Mapping[str, int]
    metrics: tuple[str, ...]
    estimates: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    improvement: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    thresholds: tuple[float, ...]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    task_means: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    groups: Mapping[str, Aggregates] = field(default_factory=dict)
    gamma: float
    drawn_runs: DrawnRuns
    confidence: float
    resamples: int
    seed: int

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies, in the order of the scores."""
        return tuple(self.runs)

    def ranking(self) -> list[tuple[int, str]]:
        """Return the policies with their ranks in the first of ``metrics``, the best first.

        Equal ones share a rank.
        """
        metric = self.metrics[0]
        sign = 1 if metric in LOWER_IS_BETTER else -1
        order = sorted((sign * self.estimates[p][metric].value, p) for p in self.runs)
        values = [value for value, _ in order]
        return [(values.index(value) + 1, policy) for value, policy in order]

    def to_dict(self) -> dict[str, Any]:
        """Return the aggregates as plain dicts, lists, numbers and None, for JSON."""
        return dict(json.loads(json.dumps(asdict(self))))

    def __repr__(self) -> str:
        best = [
            f"{policy} {LABELS[self.metrics[0]]} {self.estimates[policy][self.metrics[0]]}"
            for _, policy in self.ranking()
        ]
        return one_line(self, self._head(), *best)

    def _head(self) -> str:
        return f"{count_text(len(self.runs), 'policy')} on {count_text(len(self.tasks), 'task')}"

    def _tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        tables = [(self._head(), self.header(), self.rows())]
        if len(self.runs) > 1:
            best, *others = (policy for _, policy in self.ranking())
            rows = [[f"{best} over {p}", str(self.improvement[best][p])] for p in others]
            tables.append(("", ["probability of improvement", ""], rows))
        for name, group in self.groups.items():
            title = f"{name}: {', '.join(group.tasks)}"
            tables.append((title, group.header(), group.rows()))
        return tables

    def header(self) -> list[str]:
        """Return the headings of :meth:`rows`."""
        return ["", "runs", *(LABELS[metric] for metric in self.metrics)]

    def rows(self) -> list[list[str]]:
        """Return the table's rows, the best policy first: name, runs, a cell per metric."""
        return [
            [policy, str(self.runs[policy])]
            + [str(self.estimates[policy][metric]) for metric in self.metrics]
            for _, policy in self.ranking()
        ]

    def notes(self) -> list[str]:
        """Return the notes to the tables, one sentence each."""
        by_runs: dict[int, list[str]] = {}
        for policy, runs in self.runs.items():
            by_runs.setdefault(runs, []).append(policy)
        single = by_runs.pop(1, [])
        notes = []
        if by_runs:
            notes.append(
                f"{display.percent_text(self.confidence)} intervals: training runs drawn anew "
                "within each task. They are about other training runs on the same tasks, not about "
                "other tasks."
            )
        if single:
            notes.append(
                f"One run of {listed_text(single)}: no interval. One run cannot show how much "
                "another training run would differ."
            )
        if single and by_runs:
            notes.append(
                "Intervals of a probability of improvement against one run take that run as it is."
            )
        for runs, policies in sorted(by_runs.items()):
            if runs in COVERAGE[self.drawn_runs]:
                low, high = COVERAGE[self.drawn_runs][runs]
                notes.append(
                    f"{runs} runs of {listed_text(policies)}: too few for the intervals. In "
                    f"simulations, 95% intervals of the interquartile mean from {runs} runs held "
                    f"the truth in {low}% to {high}% of cases."
                )
        if len(self.tasks) == 1:
            notes.append("One task: the numbers say nothing about others.")
        equal = [p for p in self.runs if all(map(_of_no_width, self.estimates[p].values()))]
        if equal:
            notes.append(
                f"All runs of {listed_text(equal)} give the same: their intervals say nothing "
                "about how runs differ."
            )
        if any(_of_no_width(one) for of in self.improvement.values() for one in of.values()):
            notes.append(
                "A probability of improvement of 0 or 1 has an interval of no width, which does "
                "not make it certain."
            )
        if "optimality_gap" in self.metrics:
            notes.append(
                f"Optimality gap: the mean shortfall from a score of {number_text(self.gamma)}; "
                "lower is better."
            )
        return notes


def _of_no_width(estimate: Estimate) -> bool:
    return estimate.interval is not None and estimate.interval.low == estimate.interval.high


def policy_generator(seed: int, policy: str) -> np.random.Generator:
    """Return the generator of a policy, independent of those of other names."""
    digest = hashlib.sha256(policy.encode("utf-8", "surrogatepass")).digest()
    return generator(seed, *np.frombuffer(digest, "<u4", count=4).tolist())


def draw_runs(
    rng: np.random.Generator, resamples: int, scores: Scores, drawn: int, block: int
) -> Iterator[Indices]:
    """Yield indices of runs, ``[resamples, drawn, tasks]`` in blocks along the first axis.

    The draws are the same for any ``block``.
    """
    runs, tasks = scores.shape
    for first in range(0, resamples, block):
        yield rng.integers(0, runs, (min(block, resamples - first), drawn, tasks))


def resampled(values: npt.NDArray[Any], indices: Indices) -> npt.NDArray[Any]:
    """Return resamples of ``values [runs, tasks]`` by runs, both ``[resamples, drawn, tasks]``."""
    return values[indices, np.arange(values.shape[1])]


def resampled_metrics(
    scores: Scores, ranks: Indices, settings: Aggregates, drawn: int, rng: np.random.Generator
) -> dict[str, Scores]:
    """Return metrics ``[resamples]`` and ``profile [resamples, thresholds]`` of resamples."""
    blocks: dict[str, list[Scores]] = {}
    block = max(1, BATCH_VALUES // scores.size)
    for indices in draw_runs(rng, settings.resamples, scores, drawn, block):
        sample = resampled(scores, indices)
        for name in settings.metrics:
            blocks.setdefault(name, []).append(METRICS[name](sample, settings.gamma))
        shares = shares_above(resampled(ranks, indices), len(settings.thresholds))
        blocks.setdefault("profile", []).append(shares)
    return {name: np.concatenate(parts) for name, parts in blocks.items()}


def resampled_improvements(
    scores: Mapping[str, Scores],
    drawn: Mapping[str, int],
    resamples: int,
    rngs: Mapping[str, np.random.Generator],
) -> Iterator[tuple[tuple[str, str], Scores]]:
    """Yield each pair of policies with its probability of improvement, ``[resamples]``."""
    won = {(a, b): wins(scores[a], scores[b]) for a, b in combinations(scores, 2)}
    sums: dict[tuple[str, str], list[Scores]] = {pair: [] for pair in won}
    block = max(1, BATCH_VALUES // sum(array.size for array in scores.values()))
    draws = (draw_runs(rngs[p], resamples, array, drawn[p], block) for p, array in scores.items())
    for blocks in zip(*draws, strict=True):
        counts = {
            p: _counts(drawn, len(scores[p])) for p, drawn in zip(scores, blocks, strict=True)
        }
        for (a, b), of in sums.items():
            # Counts and halves: the sums are exact, in any order and with any number of threads.
            of.append((counts[a] @ won[a, b] * counts[b]).sum((0, 2)))
    for (a, b), of in sums.items():
        yield (a, b), np.concatenate(of) / (len(won[a, b]) * drawn[a] * drawn[b])


def percentiles(values: Scores, confidence: float) -> Scores:
    """Return the low and the high percentile of resamples ``[resamples, ...]``, ``[2, ...]``."""
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    return np.quantile(values, ends, axis=0)


def _counts(indices: Indices, runs: int) -> Scores:
    """Return how often each run was drawn, ``[tasks, resamples, runs]``."""
    resamples, _, tasks = indices.shape
    rows = np.arange(tasks) * resamples + np.arange(resamples)[:, None]
    places = rows[:, None] * runs + indices
    counts = np.bincount(places.ravel(), minlength=tasks * resamples * runs)
    return counts.reshape(tasks, resamples, runs).astype(np.float64)
