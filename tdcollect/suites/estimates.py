"""Results of an aggregation: estimates, profiles, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tdcollect.display import (
    count_text,
    html_table,
    listed_text,
    number_text,
    number_texts,
    one_line,
    percent_text,
    text_table,
    visible,
)
from tdcollect.evaluation.reports.intervals import Interval

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

DrawnRuns = Literal["n", "n-1"]


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
        return "{} [{}, {}]".format(
            *number_texts([self.value, self.interval.low, self.interval.high])
        )


@dataclass(frozen=True)
class Profile:
    """A performance profile: the share of scores above each threshold.

    Attributes:
        values: one share per threshold, falling.
        low: the lower end of each share's own interval; None if there is only one run.
        high: the upper end, likewise.
    """

    values: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None

    def __repr__(self) -> str:
        ends = f"{number_text(self.values[0])} to {number_text(self.values[-1])}"
        band = "no band" if self.low is None else "with band"
        return one_line(self, count_text(len(self.values), "threshold"), ends, band)


@dataclass(frozen=True)
class Aggregates:
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
        gamma: the score from which on the optimality gap is zero.
        drawn_runs: the number of runs in a resample of each task: ``n`` or ``n-1``.
        confidence: of every interval.
        resamples: the number of bootstrap resamples.
        seed: the seed of the generators.
    """

    tasks: tuple[str, ...]
    runs: Mapping[str, int]
    metrics: tuple[str, ...]
    estimates: Mapping[str, Mapping[str, Estimate]]
    improvement: Mapping[str, Mapping[str, Estimate]]
    thresholds: tuple[float, ...]
    profiles: Mapping[str, Profile]
    task_means: Mapping[str, Mapping[str, float]]
    groups: Mapping[str, Aggregates]
    gamma: float
    drawn_runs: DrawnRuns
    confidence: float
    resamples: int
    seed: int

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies, in the order of the scores."""
        return tuple(self.runs)

    def ranking(self, metric: str | None = None) -> list[tuple[int, str]]:
        """Return the policies with their ranks, the best first; equal ones share a rank.

        Args:
            metric: the metric to rank by; by default the first of ``metrics``.
        """
        metric = self.metrics[0] if metric is None else metric
        if metric not in self.metrics:
            raise ValueError(f"expected one of the metrics {list(self.metrics)}, got {metric!r}")
        sign = 1 if metric in LOWER_IS_BETTER else -1
        order = sorted((sign * self.estimates[p][metric].value, p) for p in self.runs)
        values = [value for value, _ in order]
        return [(values.index(value) + 1, policy) for value, policy in order]

    def to_dict(self) -> dict[str, Any]:
        """Return the aggregates as plain dicts, lists, numbers and None, for JSON."""
        return {name: _plain(value) for name, value in asdict(self).items()} | {
            "groups": {name: group.to_dict() for name, group in self.groups.items()}
        }

    def __repr__(self) -> str:
        best = [
            f"{policy} {LABELS[self.metrics[0]]} {self.estimates[policy][self.metrics[0]]}"
            for _, policy in self.ranking()
        ]
        return one_line(self, self._head(), *best)

    def __str__(self) -> str:
        parts = []
        for title, header, rows in self._tables():
            table = text_table(rows, header=header)
            parts.append(f"{visible(title)}\n\n{table}" if title else table)
        return "\n\n".join([*parts, "\n".join(map(visible, self.notes()))])

    def _repr_html_(self) -> str:
        tables = self._tables()
        return "\n".join(
            html_table(
                header,
                rows,
                before=[title] if title else [],
                after=self.notes() if place == len(tables) - 1 else [],
            )
            for place, (title, header, rows) in enumerate(tables)
        )

    def _head(self) -> str:
        policies = "1 policy" if len(self.runs) == 1 else f"{len(self.runs)} policies"
        return f"{policies} on {count_text(len(self.tasks), 'task')}"

    def _tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return title, header and rows of each table."""
        tables = [(self._head(), self.header(), self.rows())]
        if len(self.runs) > 1:
            tables.append(("", ["probability of improvement", ""], self.improvement_rows()))
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

    def improvement_rows(self) -> list[list[str]]:
        """Return the probability of improvement of the best policy over each other one."""
        best, *others = (policy for _, policy in self.ranking())
        return [[f"{best} over {other}", str(self.improvement[best][other])] for other in others]

    def notes(self) -> list[str]:
        """Return the notes to the tables, one sentence each."""
        return _notes(self)


def _notes(found: Aggregates) -> list[str]:
    by_runs: dict[int, list[str]] = {}
    for policy, runs in found.runs.items():
        by_runs.setdefault(runs, []).append(policy)
    single = by_runs.pop(1, [])
    notes = []
    if by_runs:
        notes.append(
            f"{percent_text(found.confidence)} intervals: training runs drawn anew within each "
            "task. They are about other training runs on the same tasks, not about other tasks."
        )
    if single:
        notes.append(
            f"One run of {listed_text(single)}: no interval. One run cannot show how much another "
            "training run would differ."
        )
        if by_runs:
            notes.append(
                "Intervals of a probability of improvement against one run take that run as it is."
            )
    for runs, policies in sorted(by_runs.items()):
        low_high = COVERAGE[found.drawn_runs].get(runs)
        if low_high is not None:
            low, high = low_high
            notes.append(
                f"{runs} runs of {listed_text(policies)}: too few for the intervals. In "
                f"simulations, 95% intervals of the interquartile mean from {runs} runs held the "
                f"truth in {low}% to {high}% of cases."
            )
    if len(found.tasks) == 1:
        notes.append("One task: the numbers say nothing about others.")
    equal = [p for p in found.runs if all(map(_of_no_width, found.estimates[p].values()))]
    if equal:
        notes.append(
            f"All runs of {listed_text(equal)} give the same: their intervals say nothing about "
            "how runs differ."
        )
    pairs = [estimate for others in found.improvement.values() for estimate in others.values()]
    if any(_of_no_width(estimate) for estimate in pairs):
        notes.append(
            "A probability of improvement of 0 or 1 has an interval of no width, which does not "
            "make it certain."
        )
    if "optimality_gap" in found.metrics:
        notes.append(
            f"Optimality gap: the mean shortfall from a score of {number_text(found.gamma)}; lower "
            "is better."
        )
    return notes


def _of_no_width(estimate: Estimate) -> bool:
    return estimate.interval is not None and estimate.interval.low == estimate.interval.high


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
