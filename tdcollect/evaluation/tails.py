"""The bad end of an evaluation: quantiles, means of the worst part, failures, worst episodes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tdcollect import check, display
from tdcollect.evaluation.ledger import FAILED, Episode
from tdcollect.evaluation.statistics import FEW, Interval, Values, ends, in_order, in_units
from tdcollect.packages import extra_module

QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
WORST_PARTS = (0.05, 0.1, 0.25)
WHICH = "worst:3, failed, or indices such as 1,5"
_WHICH = re.compile("worst:([1-9][0-9]{0,8})|failed|[0-9]{1,18}(,[0-9]{1,18})*")


@dataclass(frozen=True)
class Quantile:
    """A quantile of returns.

    Attributes:
        share: the share of episodes with a lower return.
        value: the quantile, between two returns where it must be.
        interval: between two returns, for any distribution; an end is infinite if there are too
            few episodes for one.
    """

    share: float
    value: float
    interval: Interval


@dataclass(frozen=True)
class Failures:
    """The episodes that count as failures, and a bound of their rate.

    Attributes:
        what: the failures, in words.
        failures: their number.
        count: the number of episodes that may be one: all, but for those of which an env that
            reports success does not say.
        rate: ``failures / count``.
        bound: the highest rate that is likely: the true one is not above it with the confidence.
    """

    what: str
    failures: int
    count: int
    rate: float
    bound: float


@dataclass(frozen=True)
class Tails(display.Table):
    """The bad end of an evaluation; print it to see a table.

    Attributes:
        episodes: the number of episodes in the ledger.
        completed: the number that ran to their end: returns are of these.
        quantiles: of the returns; empty if there is none, or one is not finite.
        worst_means: the mean of the worst part of the returns, by its share.
        failures: the rate of failures, with a bound; None if no episode says whether it is one.
        worst: the worst episodes: those that did not complete, then by their return.
        confidence: of the intervals, and of the bound.
    """

    episodes: int
    completed: int
    quantiles: tuple[Quantile, ...]
    worst_means: dict[float, float]
    failures: Failures | None
    worst: tuple[Episode, ...]
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain dicts, lists, numbers and None, for JSON."""
        means = [{"share": share, "mean": mean} for share, mean in self.worst_means.items()]
        worst = [episode.index for episode in self.worst]
        return {**asdict(self), "worst_means": means, "worst": worst}

    def __repr__(self) -> str:
        return display.one_line(self, self._head(), *self._failure_words())

    def _head(self) -> str:
        return f"{display.count_text(self.episodes, 'episode')}, {self.completed} completed"

    def header(self) -> list[str]:
        return ["", "return", f"{display.percent_text(self.confidence)} interval"]

    def rows(self) -> list[list[str]]:
        """Return the table's rows: a label, a return, and its interval."""
        rows: list[list[Any]] = [
            [f"{display.percent_text(q.share)} quantile", q.value, ends(q.interval)]
            for q in self.quantiles
        ]
        rows += [
            [f"mean of the worst {display.percent_text(share)}", mean, None]
            for share, mean in self.worst_means.items()
        ]
        return display.number_columns(rows) if rows else []

    def notes(self) -> list[str]:
        notes = self._failure_words()
        if self.worst_means and (few := min(self.worst_means) * self.completed) < FEW:
            share = display.percent_text(min(self.worst_means))
            notes.append(
                f"The worst {share} are {few:.3g} episodes: their mean says little about others."
            )
        if not self.quantiles:
            notes.append("No return, or one that is NaN or infinite: no quantiles.")
        return notes

    def _failure_words(self) -> list[str]:
        if self.failures is None:
            return []
        f = self.failures
        rate, bound = (display.percent_text(float(f"{share:.3g}")) for share in (f.rate, f.bound))
        sure = display.percent_text(self.confidence)
        of = display.count_text(f.count, "episode")
        return [
            f"{f.failures} of {of} {f.what}: {rate}, and with {sure} confidence at most {bound}."
        ]


def tails(
    episodes: Sequence[Episode],
    *,
    below: float | None = None,
    worst: int = 5,
    confidence: float = 0.95,
) -> Tails:
    """Return the bad end of a ledger: what the mean does not show.

    Args:
        episodes: the records, completed or not.
        below: an episode with a lower return is a failure, and one that did not complete. Without
            it, one that is no success, if the env reports success; else one that did not complete.
        worst: the number of worst episodes to name.
        confidence: of the intervals of quantiles, which have two ends, and of the bound on the
            failure rate, which has one.

    Raises:
        ValueError: if a number is out of range, or two records have one index.
        ModuleNotFoundError: without scipy, which the extra ``evaluate`` brings.
    """
    check.share(confidence=confidence)
    check.count(worst=worst)
    if below is not None and not (check.is_number(below) and math.isfinite(below)):
        raise ValueError(f"expected below to be a finite return, or None, got {below!r}")
    records = in_order(episodes)
    returns = np.array([e.episode_return for e in records if e.completed], np.float64)
    usable = len(returns) > 0 and bool(np.isfinite(returns).all())
    return Tails(
        episodes=len(records),
        completed=len(returns),
        quantiles=tuple(_quantile(returns, q, confidence) for q in QUANTILES if usable),
        worst_means={share: worst_mean(returns, share) for share in WORST_PARTS if usable},
        failures=_failures(records, below, confidence),
        worst=tuple(sorted(records, key=_badness)[:worst]),
        confidence=confidence,
    )


def _badness(episode: Episode) -> tuple[float, int]:
    value = episode.episode_return
    if value is None:
        return -math.inf, episode.index - 10**18  # before all that completed
    return -math.inf if math.isnan(value) else value, episode.index


def indices_of(which: str, episodes: Sequence[Episode] = ()) -> list[int]:
    """Return the indices of the episodes that a text names, the worst first.

    Args:
        which: ``"worst:3"`` for the lowest returns of the episodes that completed; ``"failed"`` for
            those whose env raised, or said that they were no success; or indices, ``"1,5"``.
        episodes: the records. Indices are returned whether there is such a record or not.

    Raises:
        ValueError: for another text.
    """
    if (found := _WHICH.fullmatch(which)) is None:
        raise ValueError(f"expected episodes as {WHICH}, got {which!r}")
    if which == "failed":
        named = [e for e in episodes if e.status == FAILED or e.success is False]
        return [e.index for e in sorted(named, key=_badness)]
    if found[1]:
        completed = sorted((e for e in episodes if e.completed), key=_badness)
        return [e.index for e in completed[: int(found[1])]]
    return sorted({int(index) for index in which.split(",")})


def _quantile(returns: Values, share: float, confidence: float) -> Quantile:
    stats = extra_module("scipy.stats", "the interval of a quantile")
    found = stats.quantile_test(returns, p=share).confidence_interval(confidence)
    low = -math.inf if math.isnan(found.low) else float(found.low)
    high = math.inf if math.isnan(found.high) else float(found.high)
    return Quantile(share, float(np.quantile(returns, share)), Interval(low, high))


def worst_mean(returns: Values, share: float) -> float:
    """Return the mean of the worst ``share`` of ``returns [E]``, the conditional value at risk.

    Where ``share`` of E is no whole number, the last return counts in part: Acerbi and Tasche, On
    the Coherence of Expected Shortfall, Journal of Banking & Finance 26, 2002.
    """
    scaled, unit = in_units(returns)
    ordered, part = np.sort(scaled), share * len(returns)
    if part <= 1:
        return unit * float(ordered[0])
    whole = math.floor(part)
    last = ordered[min(whole, len(ordered) - 1)]
    return unit * float((math.fsum(ordered[:whole]) + (part - whole) * last) / part)


def _failures(
    records: Sequence[Episode], below: float | None, confidence: float
) -> Failures | None:
    if below is not None:
        what = f"did not reach a return of {display.number_text(below)}"
        # Not `<`: NaN is a failure.
        said = [e.episode_return is None or not e.episode_return >= below for e in records]
    elif any(e.success is not None for e in records):
        what = "were no success"
        said = [not e.success for e in records if not e.completed or e.success is not None]
    else:
        what, said = "did not complete", [not e.completed for e in records]
    if not said:
        return None
    failures, count = sum(said), len(said)
    return Failures(
        what, failures, count, failures / count, rate_bound(failures, count, confidence)
    )


def rate_bound(failures: int, count: int, confidence: float) -> float:
    """Return the one-sided upper bound of a rate, exact, of Clopper and Pearson.

    The highest rate with which so few failures are not less likely than ``1 - confidence``. With
    none of n it is ``1 - (1 - confidence)**(1 / n)``. Clopper and Pearson, The Use of Confidence or
    Fiducial Limits Illustrated in the Case of the Binomial, Biometrika 26, 1934.
    """
    stats = extra_module("scipy.stats", "the bound of a failure rate")
    test = stats.binomtest(failures, count, alternative="less")
    return float(test.proportion_ci(confidence, method="exact").high)
