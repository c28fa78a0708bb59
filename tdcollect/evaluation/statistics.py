"""Statistics of a ledger: estimates, bootstrap intervals, sign flips."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tdcollect import check, display
from tdcollect.display import count_text, number_text, number_texts, one_line
from tdcollect.packages import extra_module

if TYPE_CHECKING:
    from tdcollect.evaluation.ledger import Episode

Values = npt.NDArray[np.float64]

MOST_RESAMPLES = 10_000
RESAMPLED_VALUES = 20_000_000  # a second or so of work
FEWEST_RESAMPLES = 1000
DRAWN_SINGLY = RESAMPLED_VALUES // FEWEST_RESAMPLES  # longer samples are not resampled
BATCH_VALUES = 1_000_000  # held at once: 8 MB


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Return an independent generator for each use of one seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


class Resampling(NamedTuple):
    """Draws for intervals and p-values, each from a stream of the seed."""

    confidence: float
    resamples: int
    seed: tuple[int, ...]

    def drawing(self, stream: int) -> tuple[int, np.random.Generator]:
        """Return the last arguments of a function that draws resamples."""
        return self.resamples, generator(*self.seed, stream)


def in_units(values: Values) -> tuple[Values, float]:
    """Return values ``[E]`` in units of a power of two near the largest finite one, and the unit.

    Sums and squares of them stay in range, and have the bits of those of the values themselves.
    """
    largest = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    unit = 2.0 ** (math.frexp(largest)[1] - 1)
    return values / unit, unit


def sign_flip_p_value(values: Values, resamples: int, rng: np.random.Generator) -> float:
    """Return the two-sided p-value of a mean of zero of ``values [E]``, by flipping signs.

    The permutation test of one paired sample, as ``scipy.stats.permutation_test`` with
    ``permutation_type="samples"`` does it: the share of flips with a sum as extreme as the one
    observed. All flips are tried if there are at most ``resamples``; else that many random ones,
    with the sample itself counted among them (Phipson and Smyth, *Permutation P-values Should
    Never Be Zero*, 2010).
    """
    (values, _), count = in_units(values), len(values)
    if count == 1 or not values.any():
        return 1.0  # flips give the same mean, up to its sign
    exact = flips_are_exact(count, resamples)
    tried = 2**count if exact else resamples
    observed = values.sum()
    slack = 100 * np.finfo(np.float64).eps * np.abs(values).sum()  # more than sums round
    rows = max(1, BATCH_VALUES // count)
    below = above = 0 if exact else 1
    flipped: npt.NDArray[Any]
    for first in range(0, tried, rows):
        size = min(rows, tried - first)
        if exact:
            flipped = np.arange(first, first + size)[:, None] >> np.arange(count) & 1
        else:
            octets = rng.integers(0, 256, (size, -(-count // 8)), np.uint8)
            flipped = np.unpackbits(octets, axis=1, count=count)
        sums = observed - 2 * (flipped * values).sum(1)
        below += int(np.count_nonzero(sums <= observed + slack))
        above += int(np.count_nonzero(sums >= observed - slack))
    return min(1.0, 2 * min(below, above) / (tried if exact else tried + 1))


def flips_are_exact(count: int, resamples: int) -> bool:
    """Return whether ``count`` values have no more sign flips than ``resamples``."""
    return count < 63 and 2**count <= resamples


@dataclass(frozen=True)
class Interval:
    """A confidence interval: both ends belong to it."""

    low: float
    high: float

    def __str__(self) -> str:
        return "[{}, {}]".format(*number_texts([self.low, self.high]))


def ends(value: Any) -> Any:
    """Return the ends of an interval as a pair; anything else as it is."""
    return (value.low, value.high) if isinstance(value, Interval) else value


def check_settings(confidence: float, resamples: int | None, seed: int, episodes: int) -> int:
    """Return the number of resamples, given or by default; refuse settings without an interval."""
    check.share(confidence=confidence)
    if resamples is None:
        wanted = min(MOST_RESAMPLES, RESAMPLED_VALUES // max(1, episodes))
        resamples = max(FEWEST_RESAMPLES, wanted)
    check.positive_int(resamples=resamples)
    check.count(seed=seed)
    return resamples


def mean_interval(
    values: Values,
    confidence: float,
    resamples: int,
    rng: np.random.Generator,
    mean: Callable[..., Any] = np.mean,
) -> Interval | None:
    """Return the bootstrap interval of the mean of ``values [E]``, or of their interquartile mean.

    Of the mean the bias-corrected and accelerated one: Efron, *Better Bootstrap Confidence
    Intervals*, JASA 82, 1987: between those quantiles of the resampled means that make up for their
    bias and for the skew of the sample. Of :func:`interquartile_mean` the percentile one, as the
    jackknife fails for statistics that ignore the tails. The same as ``scipy.stats.bootstrap`` with
    the same generator, but for rounding, and in linear time.

    That of more than 20,000 values is Student's, of a mean without those that are left out at each
    end (Tukey and McLaughlin, Less Vulnerable Confidence and Significance Procedures for Location
    Based on a Single Sample, Sankhya A 25, 1963).

    None for fewer than two values; of no width if all are equal.
    """
    count = len(values)
    if count < 2:
        return None
    if (values == values[0]).all():
        return Interval(float(values[0]), float(values[0]))
    scaled, unit = in_units(values)
    shares = [(1 - confidence) / 2, (1 + confidence) / 2]
    if count > DRAWN_SINGLY:
        stats = extra_module("scipy.stats", "the interval of a mean")
        cut = 0 if mean is np.mean else count // 4
        ordered = np.sort(scaled)
        middle = ordered[cut : count - cut]
        error = ordered.clip(middle[0], middle[-1]).std(ddof=1) * math.sqrt(count)
        ends = stats.t.interval(confidence, len(middle) - 1, middle.mean(), error / len(middle))
    else:
        rows = BATCH_VALUES // count
        sizes = (min(rows, resamples - first) for first in range(0, resamples, rows))
        drawn = [mean(scaled[rng.integers(0, count, (size, count))], axis=-1) for size in sizes]
        means = np.concatenate(drawn)
        ends = np.quantile(means, _corrected(shares, scaled, means) if mean is np.mean else shares)
    return Interval(
        *np.clip([unit * float(end) for end in ends], values.min(), values.max()).tolist()
    )


def _corrected(shares: Sequence[float], values: Values, means: Values) -> Any:
    """Return shares of resampled means, corrected for their bias and the skew of the values.

    The acceleration is that of the jackknife, equation 14.15 of Efron and Tibshirani, *An
    Introduction to the Bootstrap*, 1993, of which ``sum(d**3) / (6 sum(d**2)**1.5)`` is left for a
    mean, with ``d = x - mean``.
    """
    special = extra_module("scipy.special", "a bootstrap interval")
    offsets = values - (mean := values.mean())
    below = np.count_nonzero(means < mean) + np.count_nonzero(means <= mean)
    bias = special.ndtri(below / (2 * len(means)))
    if not np.isfinite(bias):  # only rounding errors vary: the percentiles as they are
        return shares
    offsets /= np.abs(offsets).max()  # their third powers overflow later
    acceleration = (offsets**3).sum() / (6 * (offsets**2).sum() ** 1.5)
    shifted = bias + special.ndtri(shares)
    with np.errstate(divide="ignore"):
        return special.ndtr(bias + shifted / (1 - acceleration * shifted))


def interquartile_mean(values: Values, axis: int = -1) -> Any:
    """Return the mean along ``axis`` without a quarter of the values at each end, rounded down.

    ``scipy.stats.trim_mean(values, 0.25)``, which rliable calls the interquartile mean.
    """
    count = values.shape[axis]
    middle = np.arange(count // 4, count - count // 4)
    return np.sort(values, axis).take(middle, axis).mean(axis)


def exact_mean(values: Values) -> float:
    """Return the mean from the exactly rounded sum, the same in any order and on any machine.

    It lies between the extremes even if the division rounds, so equal values are their mean. NaN
    or infinite if the sum of the values is.
    """
    scaled, unit = in_units(values)
    if not np.isfinite(values).all():
        return sum(values.tolist())
    mean = unit * (math.fsum(scaled) / len(values))
    return float(min(max(mean, values.min()), values.max()))


class Running(NamedTuple):
    """The mean over the first 1, 2, ... values ``[E]``, with the ends of Student's t intervals.

    Those of the first one are NaN.
    """

    mean: Values
    low: Values
    high: Values

    def limits(self, *levels: float) -> tuple[float, float] | None:
        """Return a range that shows later intervals, which are narrow, and levels; None if none."""
        count = len(self.mean)
        later = slice(min(count - 1, max(4, count // 20)), None)
        bottom = min([float(self.low[later].min()), *levels])
        top = max([float(self.high[later].max()), *levels])
        if not top > bottom:
            return None
        margin = 0.1 * (top - bottom)
        return bottom - margin, top + margin


def running_mean(values: Values, confidence: float) -> Running:
    """Return the running mean of finite values ``[E]``, with Student's t intervals."""
    stats = extra_module("scipy.stats", "the interval of a cumulative mean")
    mean, deviation = mean_and_deviation(values)
    count = np.arange(1, len(values) + 1)
    reach = np.full(len(values), np.nan)
    if len(values) > 1:
        quantile = stats.t.ppf(0.5 + confidence / 2, count[1:] - 1)
        reach[1:] = quantile * deviation[1:] / np.sqrt(count[1:])
    return Running(mean, mean - reach, mean + reach)


def mean_and_deviation(values: Values) -> tuple[Values, Values]:
    """Return mean and standard deviation of the first 1, 2, ... values; the first one is zero."""
    count = np.arange(1, len(values) + 1)
    mean = np.cumsum(values) / count
    before = np.concatenate([[0.0], mean[:-1]])
    # Welford's recurrence: a difference of two sums of squares would lose digits.
    squares = np.cumsum(np.where(count > 1, (values - before) * (values - mean), 0.0))
    return mean, np.sqrt(np.maximum(squares, 0.0) / np.maximum(count - 1, 1))


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
        std: standard deviation, with ``count - 1`` in the denominator; None for one value, and if
            it is beyond the largest float.
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
class SuccessDifference:
    """The success rate of one policy minus that of a baseline, on the same episodes.

    Attributes:
        count: the number of episodes that the rates are over: those of which the env said in both
            whether they were a success. One that did not complete counts as no success.
        unknown: the number of the other episodes.
        rate: the policy's success rate over them.
        baseline_rate: the baseline's.
        gained: the number of episodes with a success of the policy alone.
        lost: the number of episodes with a success of the baseline alone.
        difference: ``(gained - lost) / count``.
        interval: Tango's score interval of it; with groups, by the clustered standard error.
        p_value: of McNemar's exact test that neither is better, two-sided; with groups, by flipping
            the signs of their sums.
        adjusted_p_value: the same by Holm's correction over all policies compared.
    """

    count: int
    unknown: int
    rate: float
    baseline_rate: float
    gained: int
    lost: int
    difference: float
    interval: Interval | None
    p_value: float
    adjusted_p_value: float | None = None

    def __repr__(self) -> str:
        counts = f"{self.gained} gained, {self.lost} lost of {self.count}"
        return one_line(self, counts, f"difference {number_text(self.difference)} {self.interval}")


@dataclass(frozen=True)
class MetricDifference:
    """A metric of one policy minus that of a baseline, on the episodes where both have a value.

    Attributes:
        mean: the policy's mean over these episodes; None if there are none.
        baseline_mean: the baseline's.
        difference: the statistics of the differences, with their intervals.
        p_value: of the sign-flip permutation test of a mean difference of zero, two-sided.
        adjusted_p_value: the same by Holm's correction over all policies compared.
    """

    mean: float | None
    baseline_mean: float | None
    difference: Quantity
    p_value: float | None
    adjusted_p_value: float | None = None

    def __repr__(self) -> str:
        count = count_text(self.difference.count, "episode")
        return one_line(self, count, mean_text(self.difference))


@dataclass(frozen=True)
class Summary(display.ShownAsTable):
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
        metrics: the statistics of each metric, by name, over the completed episodes that have it.
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
    metrics: dict[str, Quantity] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain dicts, numbers and None, for JSON.

        ``lost`` and ``metrics`` are there if there are any.
        """
        told = asdict(self)
        return {key: told[key] for key in told if told[key] or key not in ("lost", "metrics")}

    def __repr__(self) -> str:
        return one_line(self, self._head(), f"{mean_text(self.returns)} of returns")

    def _head(self) -> str:
        rate = self.success and f"{number_text(self.success.rate)} {self.success.interval}"
        return (f"Success rate {rate}. " if rate else "") + (
            f"{count_text(self.episodes, 'episode')}: {self.completed} completed, "
            f"{self.failed} failed, {lost_words(self.lost)}{self.restarted} restarted"
        )

    def header(self) -> list[str]:
        return ["", "return", "length (steps)", *self.metrics]

    def rows(self) -> list[list[str]]:
        """Return the table's rows: a label, then a cell for returns, for lengths and each metric.

        The numbers of a column have the same decimals.
        """
        over = f"mean over {self.completed} completed of {self.episodes}"
        percent = display.percent_text(self.confidence)
        quantities = (self.returns, self.lengths, *self.metrics.values())
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
        return display.number_columns(
            [label, *(ends(getattr(quantity, name)) for quantity in quantities)]
            for label, name in rows
        )

    def notes(self) -> list[str]:
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
            notes.append("The same command, or call, runs those again.")
        if self.returns.not_finite:
            notes.append(
                f"{self.returns.not_finite} returns are NaN or infinite: no statistics of returns."
            )
        for name, metric in self.metrics.items():
            if metric.count < self.completed:
                of = count_text(self.completed, "completed episode")
                notes.append(
                    f"{name}: {self.completed - metric.count} of {of} without a value; its "
                    "statistics are over the others."
                )
            if metric.not_finite:
                notes.append(
                    f"{name}: {metric.not_finite} values are NaN or infinite: no statistics."
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
    the interquartile mean the percentile bootstrap (Agarwal et al. 2021), both over episodes, as in
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
    metrics = metrics_of(completed)
    columns: list[list[float | None]]
    columns = [[e.episode_return for e in completed], [e.length for e in completed]]
    how = Resampling(confidence, resamples, (seed,))
    returns, lengths, *others = (
        describe([value for value in column if value is not None], how, 2 * place)
        for place, column in enumerate([*columns, *metrics.values()])
    )
    lost = sum(episode.lost for episode in records)
    return Summary(
        episodes=len(records),
        completed=len(completed),
        failed=len(records) - len(completed) - lost,
        restarted=sum(episode.restarts > 0 for episode in records),
        distinct=len({episode.digest or episode.index for episode in completed}),
        returns=returns,
        lengths=lengths,
        success=_success(records, confidence),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
        lost=lost,
        metrics=dict(zip(metrics, others, strict=True)),
    )


def metrics_of(completed: Sequence[Episode]) -> dict[str, list[float | None]]:
    """Return the values of each metric in records of completed episodes, by name."""
    metrics = [episode.metrics or {} for episode in completed]
    return {name: [one.get(name) for one in metrics] for name in (metrics[0] if metrics else ())}


def metric_difference(
    pairs: Sequence[tuple[float | None, float | None]],
    how: Resampling,
    stream: int,
    labels: Sequence[str] | None = None,
) -> MetricDifference:
    """Return the difference of a metric, of pairs of a baseline's value and another's.

    With ``labels``, the group of each pair, only groups are taken for independent.
    """
    there = [at for at, pair in enumerate(pairs) if None not in pair]
    baseline, own = np.array([pairs[at] for at in there], np.float64).reshape(-1, 2).T
    values = minus(own, baseline)
    difference = describe(values, how, stream)
    if difference.mean is None:
        return MetricDifference(None, None, difference, None)
    if labels is not None:
        _, places = np.unique([labels[at] for at in there], return_inverse=True)
        difference = clustered(difference, values, places, how.confidence)
        values = np.bincount(places, in_units(values)[0]).astype(np.float64)
    p_value = sign_flip_p_value(values, *how.drawing(stream + 2))
    return MetricDifference(exact_mean(own), exact_mean(baseline), difference, p_value)


def clustered(
    quantity: Quantity, values: Values, places: npt.NDArray[np.intp], confidence: float
) -> Quantity:
    """Return the statistics of values ``[E]`` with the error of a mean of groups, or clusters.

    The clustered standard error (Liang and Zeger, Longitudinal Data Analysis Using Generalized
    Linear Models, Biometrika 73, 1986): the root of ``G / (G - 1)`` times the sum of the squares
    of the G groups' sums of ``value - mean``, over E. The interval is Student's t with G - 1
    degrees of freedom. The deviation is that of E independent values with this error. None for one
    group. ``places`` is the number of each value's group.
    """
    scaled, unit = in_units(values)
    sums = np.bincount(places, scaled - exact_mean(scaled))
    error, interval, count, mean = None, None, len(sums), quantity.mean
    if count > 1 and mean is not None:
        stats = extra_module("scipy.stats", "the interval of a mean of groups")
        error = unit * math.sqrt(count / (count - 1) * (sums**2).sum()) / len(values)
        reach = float(stats.t.ppf(0.5 + confidence / 2, count - 1)) * error
        interval = Interval(mean - reach, mean + reach)
    return replace(
        quantity,
        std=None if error is None else error * math.sqrt(len(values)),
        standard_error=error,
        mean_interval=interval,
        interquartile_mean_interval=None,
    )


def minus(values: Values, baseline: Values) -> Values:
    """Return differences: NaN or infinite where the values are, and beyond the largest float."""
    with np.errstate(invalid="ignore", over="ignore"):
        return values - baseline


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


def describe(sample: Sequence[float] | Values, how: Resampling, stream: int) -> Quantity:
    """Return the statistics of a sample; ``stream`` is that of the first of two intervals."""
    values, count = np.array(sample, np.float64), len(sample)
    not_finite = int(np.count_nonzero(~np.isfinite(values)))
    if not count or not_finite:
        return Quantity(count, not_finite)
    scaled, unit = in_units(values)
    squares = (scaled - exact_mean(scaled)) ** 2
    std = unit * math.sqrt(math.fsum(squares) / (count - 1)) if count > 1 else math.inf
    middle = np.sort(values)[count // 4 : count - count // 4]
    return Quantity(
        count=count,
        mean=exact_mean(values),
        std=std if std < math.inf else None,
        standard_error=std / math.sqrt(count) if std < math.inf else None,
        median=unit * float(np.median(scaled)),
        interquartile_mean=exact_mean(middle),
        min=float(values.min()),
        max=float(values.max()),
        mean_interval=mean_interval(values, how.confidence, *how.drawing(stream)),
        interquartile_mean_interval=mean_interval(
            values, how.confidence, *how.drawing(stream + 1), interquartile_mean
        ),
    )


def alike(value: Any, other: Any) -> bool:
    """Return whether two values of a summary are the same, except for rounding."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(alike(value[k], other[k]) for k in value)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(alike, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return abs(value - other) <= 1e-9 * max(abs(value), abs(other)) or value == other
    return type(value) is type(other) and bool(value == other)


def _success(records: Sequence[Episode], confidence: float) -> Success | None:
    said = [e.success for e in records if e.completed and e.success is not None]
    if not said:
        return None
    failed = sum(not episode.completed for episode in records)
    successes, count = sum(said), len(said) + failed
    stats = extra_module("scipy.stats", "the interval of a success rate")
    interval = stats.binomtest(successes, count).proportion_ci(confidence, method="wilson")
    return Success(
        successes=successes,
        count=count,
        unknown=len(records) - count,
        rate=successes / count,
        interval=Interval(float(interval.low), float(interval.high)),
    )


def _succeeded(episode: Episode) -> bool | None:
    return episode.success if episode.completed else False


def success_difference(
    pairs: Sequence[tuple[Episode, Episode]], how: Resampling, labels: Sequence[str] | None = None
) -> SuccessDifference | None:
    """Return the difference of two success rates, of pairs of a baseline's record and another."""
    if all(e.success is None for pair in pairs for e in pair):
        return None
    said = [(_succeeded(a), _succeeded(b)) for a, b in pairs]
    known = [pair for pair in said if None not in pair]
    if not known:
        return None
    count, gained, lost = len(known), known.count((False, True)), known.count((True, False))
    stats = extra_module("scipy.stats", "the exact test of success rates")
    interval: Interval | None = paired_rates_interval(gained, lost, count, how.confidence)
    # McNemar, Psychometrika 12, 1947: of the pairs that differ, each way is as likely.
    p_value = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    if labels is not None:
        of_groups = metric_difference(
            [p if None not in p else (None, None) for p in said], how, 1, labels
        )
        interval, p_value = of_groups.difference.mean_interval, of_groups.p_value or 1.0
    return SuccessDifference(
        count=count,
        unknown=len(pairs) - count,
        rate=sum(bool(b) for _, b in known) / count,
        baseline_rate=sum(bool(a) for a, _ in known) / count,
        gained=gained,
        lost=lost,
        difference=(gained - lost) / count,
        interval=interval,
        p_value=p_value,
    )


def paired_rates_interval(gained: int, lost: int, count: int, confidence: float) -> Interval:
    """Return the score interval of the difference of two rates on the same ``count`` episodes.

    The differences that a score test does not reject: Tango, Equivalence Test and Confidence
    Interval for the Difference in Proportions for the Paired-Sample Design, Statistics in Medicine
    17, 1998, equations 8 to 11.

    The first alone succeeds in ``gained`` of the episodes, the second alone in ``lost``.
    """
    special = extra_module("scipy.special", "the interval of a difference of success rates")
    z = float(special.ndtri(0.5 + confidence / 2))

    def rejected(difference: float) -> bool:
        # The most likely probability of a loss, if this is the true difference.
        linear = (2 * count - gained + lost) * difference - gained - lost
        constant = -lost * difference * (1 - difference)
        root = math.sqrt(max(0.0, linear**2 - 8 * count * constant))
        variance = (root - linear) / (2 * count) + difference * (1 - difference)
        return (gained - lost - count * difference) ** 2 > z**2 * count * max(0.0, variance)

    def end(outside: float) -> float:
        inside = (gained - lost) / count
        if inside == outside:
            return outside
        for _ in range(60):  # halves the distance each time, down to the last bit
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if rejected(middle) else (middle, outside)
        return inside

    return Interval(end(-1.0), end(1.0))


def lost_words(lost: int) -> str:
    """Return the words for lost episodes in a list of counts; empty if there are none."""
    return f"{lost} lost, " if lost else ""


def mean_text(quantity: Quantity) -> str:
    """Return the mean with its interval as text."""
    interval = quantity.mean_interval
    return f"mean {number_text(quantity.mean)}" + ("" if interval is None else f" {interval}")
