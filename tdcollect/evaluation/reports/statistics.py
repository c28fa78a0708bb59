"""Statistics of a ledger, with confidence intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tdcollect.display import (
    count_text,
    html_table,
    number_columns,
    number_text,
    one_line,
    percent_text,
    text_table,
)
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.reports.intervals import (
    Interval,
    Values,
    check_settings,
    ends,
    exact_mean,
    generator,
    interquartile_mean_interval,
    mean_interval,
)
from tdcollect.extras import extra_module

_HEADER = ["", "return", "length (steps)"]
FEW = 20  # below it, intervals are too narrow: docs/statistics.md has the measurement


@dataclass(frozen=True)
class Quantity:
    """Statistics of one value per completed episode, its return or its length.

    All but ``count`` and ``not_finite`` are None if no episode completed, or if some value is not
    finite, as a return with a NaN reward.

    Attributes:
        count: the number of values.
        not_finite: the number of values that are NaN or infinite.
        mean: arithmetic mean, from the exactly rounded sum.
        std: standard deviation, with ``count - 1`` in the denominator; None for one value.
        standard_error: ``std / sqrt(count)``.
        median: the middle value, or the mean of the two middle ones.
        interquartile_mean: the mean without a quarter of the values, rounded down, at each end.
        min: the lowest value.
        max: the highest value.
        mean_interval: bootstrap interval of the mean; None for one value. Of no width if all
            values are equal: the sample then tells nothing about their spread.
        interquartile_mean_interval: bootstrap interval of the interquartile mean, likewise.
    """

    count: int
    not_finite: int = 0
    mean: float | None = None
    std: float | None = None
    standard_error: float | None = None
    median: float | None = None
    interquartile_mean: float | None = None
    min: float | None = None
    max: float | None = None
    mean_interval: Interval | None = None
    interquartile_mean_interval: Interval | None = None

    def __repr__(self) -> str:
        return one_line(self, count_text(self.count, "value"), mean_text(self))


@dataclass(frozen=True)
class Success:
    """The success rate, as reported by the env.

    Attributes:
        successes: the number of successful episodes.
        count: the number of episodes that the rate is over: those with a report, and the failed
            ones, which count as not successful.
        unknown: the number of completed episodes without a report; they are not in ``count``.
        rate: ``successes / count``.
        interval: Wilson's score interval of the rate.
    """

    successes: int
    count: int
    unknown: int
    rate: float
    interval: Interval

    def __repr__(self) -> str:
        rate = f"rate {number_text(self.rate)} {self.interval}"
        return one_line(self, f"{self.successes} of {self.count}", rate)


@dataclass(frozen=True)
class Summary:
    """The statistics of an evaluation; print it to see a table.

    Attributes:
        episodes: the number of episodes in the ledger.
        completed: the number that ran to their end. Returns and lengths are over these.
        failed: the number without a return, because the env raised at every try.
        restarted: the number that were started more than once.
        distinct: the number of completed episodes that differ from each other, by digest.
        returns: the statistics of their returns.
        lengths: the statistics of their lengths, in steps.
        success: the success rate; None if the env does not report success.
        confidence: the confidence of every interval here.
        resamples: the number of bootstrap resamples.
        seed: the seed of the bootstrap's generators.
        lost: the number that were given up because their workers ended.
    """

    episodes: int
    completed: int
    failed: int
    restarted: int
    distinct: int
    returns: Quantity
    lengths: Quantity
    success: Success | None
    confidence: float
    resamples: int
    seed: int
    lost: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain dicts, numbers and None, for JSON; ``lost`` if there are."""
        found = asdict(self)
        if not self.lost:
            del found["lost"]
        return found

    def __repr__(self) -> str:
        return one_line(self, self._counts(), f"{mean_text(self.returns)} of returns")

    def __str__(self) -> str:
        lines = [self._counts(), "", text_table(self.rows(), header=_HEADER)]
        notes = self.notes()
        return "\n".join([*lines, "", *notes] if notes else lines)

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self.rows(), before=[self._counts()], after=self.notes())

    def _counts(self) -> str:
        return (
            f"{count_text(self.episodes, 'episode')}: {self.completed} completed, "
            f"{self.failed} failed, {lost_words(self.lost)}{self.restarted} restarted"
        )

    def rows(self) -> list[list[str]]:
        """Return the table's rows: a label, then a cell for returns and one for lengths.

        The numbers of a column have the same decimals.
        """
        over = f"mean over {self.completed} completed of {self.episodes}"
        percent = percent_text(self.confidence)
        quantities = (self.returns, self.lengths)
        rows = [
            (over, "mean"),
            (f"  {percent} interval", "mean_interval"),
            ("standard deviation", "std"),
            ("standard error", "standard_error"),
            ("median", "median"),
            ("interquartile mean", "interquartile_mean"),
            (f"  {percent} interval", "interquartile_mean_interval"),
            ("minimum", "min"),
            ("maximum", "max"),
        ]
        return number_columns(
            [label, *(ends(getattr(quantity, name)) for quantity in quantities)]
            for label, name in rows
        )

    def notes(self) -> list[str]:
        """Return the notes to the table, one sentence each."""
        notes = []
        if self.success is not None:
            s = self.success
            none = " and ".join(["failed"] * bool(self.failed) + ["lost"] * bool(self.lost))
            notes.append(
                f"Success rate {number_text(s.rate)} {s.interval}: {s.successes} of {s.count} "
                "episodes" + (f", {none} ones counted as no success." if none else ".")
            )
            if s.unknown:
                notes.append(f"Of {s.unknown} completed episodes the env did not say.")
        for count, how in ((self.failed, "failed"), (self.lost, "were lost with their workers")):
            if count:
                notes.append(
                    f"{count} of {self.episodes} episodes {how} and have no return: the "
                    "statistics of returns and lengths are over the completed ones."
                )
        if self.lost:
            notes.append("The same command with --retry-lost (retry_lost=True) runs those again.")
        if self.returns.not_finite:
            notes.append(
                f"{self.returns.not_finite} returns are NaN or infinite: no statistics of returns."
            )
        if self.distinct < self.completed:
            others = self.completed - self.distinct
            notes.append(
                f"Only {self.distinct} of {self.completed} completed episodes "
                f"{'is' if self.distinct == 1 else 'are'} distinct: {others} repeat another one to "
                "the bit. Intervals count each repeat as new evidence, and so claim too much."
            )
        if self.returns.std == 0:
            notes.append("All returns are equal: their intervals say nothing about how they vary.")
        elif 2 <= self.completed < FEW:
            notes.append(
                f"Intervals of fewer than {FEW} episodes hold the truth less often than they say."
            )
        return notes


def summarize(
    episodes: Sequence[Episode],
    *,
    confidence: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
) -> Summary:
    """Return the statistics of a ledger, the same bits for the same records in any order.

    The interval of the mean is the bias-corrected and accelerated bootstrap (Efron 1987), that of
    the interquartile mean the percentile bootstrap (Agarwal et al. 2021), both over episodes, by
    ``scipy.stats.bootstrap``; that of the success rate is Wilson's (1927).
    ``docs/statistics.md`` has the formulas, and the measured coverage of each interval.

    Args:
        episodes: the records, completed or not.
        confidence: of every interval, between 0 and 1.
        resamples: bootstrap resamples per interval; by default 10,000, and fewer for more than
            2,000 episodes, down to 1,000.
        seed: the seed of the resamples' generators.

    Raises:
        ValueError: if a number is out of range, two records have one index, or a completed episode
            has no return.
        ModuleNotFoundError: without scipy, which the extra ``evaluate`` brings.
    """
    resamples = check_settings(confidence, resamples, seed, len(episodes))
    records = in_order(episodes)
    completed = [episode for episode in records if episode.completed]
    returns = np.array([e.episode_return for e in completed], dtype=np.float64)
    lengths = np.array([e.length for e in completed], dtype=np.float64)
    generators = [generator(seed, stream) for stream in range(4)]
    lost = sum(episode.lost for episode in records)
    return Summary(
        episodes=len(records),
        completed=len(completed),
        failed=len(records) - len(completed) - lost,
        restarted=sum(episode.restarts > 0 for episode in records),
        distinct=_distinct(completed),
        returns=describe(returns, confidence, resamples, generators[:2]),
        lengths=describe(lengths, confidence, resamples, generators[2:]),
        success=_success(records, confidence),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
        lost=lost,
    )


def in_order(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the records by index, each checked."""
    records = sorted(episodes, key=lambda episode: episode.index)
    for first, second in itertools.pairwise(records):
        if first.index == second.index:
            raise ValueError(f"expected one record per index, got two of index {first.index}")
    for episode in records:
        if episode.completed and (episode.episode_return is None or episode.length is None):
            raise ValueError(
                f"expected a return and a length of each completed episode, got "
                f"return {episode.episode_return} and length {episode.length} of index "
                f"{episode.index}"
            )
    return records


def describe(
    values: Values, confidence: float, resamples: int, rngs: Sequence[np.random.Generator]
) -> Quantity:
    """Return the statistics of ``values [E]``, with a generator for each of the two intervals."""
    count = len(values)
    not_finite = int(np.count_nonzero(~np.isfinite(values)))
    if not count or not_finite:
        return Quantity(count, not_finite)
    mean = exact_mean(values)
    std = math.sqrt(math.fsum((values - mean) ** 2) / (count - 1)) if count > 1 else None
    middle = np.sort(values)[count // 4 : count - count // 4]
    return Quantity(
        count=count,
        mean=mean,
        std=std,
        standard_error=None if std is None else std / math.sqrt(count),
        median=float(np.median(values)),
        interquartile_mean=exact_mean(middle),
        min=float(values.min()),
        max=float(values.max()),
        mean_interval=mean_interval(values, confidence, resamples, rngs[0]),
        interquartile_mean_interval=interquartile_mean_interval(
            values, confidence, resamples, rngs[1]
        ),
    )


def alike(value: Any, other: Any) -> bool:
    """Tell whether two values of a summary are the same, except for rounding."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(alike(value[k], other[k]) for k in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(alike, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return abs(value - other) <= 1e-9 * max(abs(value), abs(other)) or value == other
    return type(value) is type(other) and bool(value == other)


def _distinct(completed: Sequence[Episode]) -> int:
    """Return the number of distinct episodes; one without a digest counts as distinct."""
    digests = {episode.digest for episode in completed if episode.digest is not None}
    return len(digests) + sum(episode.digest is None for episode in completed)


def _success(records: Sequence[Episode], confidence: float) -> Success | None:
    said = [e.success for e in records if e.completed and e.success is not None]
    if not said:
        return None
    failed = sum(not episode.completed for episode in records)
    successes, count = sum(said), len(said) + failed
    stats = extra_module("scipy.stats", "the interval of a success rate")
    found = stats.binomtest(successes, count).proportion_ci(confidence, method="wilson")
    return Success(
        successes=successes,
        count=count,
        unknown=len(records) - count,
        rate=successes / count,
        interval=Interval(float(found.low), float(found.high)),
    )


def lost_words(lost: int) -> str:
    """Return the words for lost episodes in a list of counts; empty if there are none."""
    return f"{lost} lost, " if lost else ""


def mean_text(quantity: Quantity) -> str:
    """Return the mean with its interval as text."""
    interval = quantity.mean_interval
    return f"mean {number_text(quantity.mean)}" + ("" if interval is None else f" {interval}")
