"""Plans: how many episodes, or training runs, would show a difference of a given size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tdcollect import check, display
from tdcollect.evaluation import comparison
from tdcollect.evaluation.comparison import RETURN, SUCCESS, Evaluated
from tdcollect.evaluation.statistics import Values, degrees_of_freedom, summarize
from tdcollect.packages import extra_module

if TYPE_CHECKING:
    from tdcollect.lab.results import SuiteResults

ASSURANCE = 0.8  # that the true spread is not above the one that cautious numbers take
NAMES = {RETURN: "the mean return", SUCCESS: "the success rate"}


class Aim(NamedTuple):
    """The aim of a comparison: to show a difference, with a chance, by a two-sided test."""

    difference: float
    power: float = 0.8
    confidence: float = 0.95


@dataclass(frozen=True)
class Need:
    """A number that is needed, of episodes or of training runs.

    Attributes:
        thing: ``"episodes"``, ``"episodes of each task"`` or ``"runs of each policy"``.
        number: the number, if the spread is that of the pilot.
        cautious: the number for the upper 80% limit of the spread that the pilot shows (Browne, On
            the Use of a Pilot Sample for Sample Size Determination, Statistics in Medicine 14,
            1995); None where that is not known.
        spread: what the pilot shows: a standard deviation, or the share of episodes that differ.
    """

    thing: str
    number: int
    cautious: int | None
    spread: float


@dataclass(frozen=True)
class Plan:
    """The numbers that would show a difference; print it to see a table.

    Attributes:
        what: the difference, in words.
        pilot: what it was planned from, in words.
        difference: its size.
        power: the chance to find it.
        confidence: one minus the significance of the test.
        needs: the numbers.
    """

    what: str
    pilot: str
    difference: float
    power: float
    confidence: float
    needs: tuple[Need, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts, lists, numbers and None, for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        needed = (f"{need.number} {need.thing}" for need in self.needs)
        return display.one_line(self, self.what, *needed)

    def __str__(self) -> str:
        head = (
            f"A difference of {self.difference:g} in {self.what}, with power "
            f"{display.percent_text(self.power)} at significance "
            f"{display.number_text(1 - self.confidence)}.\nFrom {self.pilot}."
        )
        header = ["", "needed", f"with {display.percent_text(ASSURANCE)} assurance", "spread"]
        rows = [
            [n.thing, str(n.number), display.number_text(n.cautious), display.number_text(n.spread)]
            for n in self.needs
        ]
        return f"{display.visible(head, lines=True)}\n\n{display.text_table(rows, header)}"


def plan(
    pilot: Sequence[Evaluated],
    difference: float,
    *,
    on: str = RETURN,
    power: float = 0.8,
    confidence: float = 0.95,
    correlation: float | None = None,
    names: Sequence[str] | None = None,
) -> Plan:
    """Plan a comparison on the same episodes from a smaller one, or from one evaluation.

    Args:
        pilot: two evaluations of the same episodes; or one, whose spread stands for both policies'.
        difference: that matters, in units of return, or of the success rate. Its sign matters for
            the success rate of one evaluation alone, which it is added to.
        on: ``"return"`` for the mean return, ``"success"`` for the success rate.
        power: the chance that the comparison finds a difference as large as this.
        confidence: of the comparison; its tests are two-sided.
        correlation: of the two policies over episodes, for a pilot of one; 0 by default, as if
            they did not play the same episodes.
        names: of the evaluations.

    Raises:
        ValueError: if a number is out of range, or the pilot does not tell the spread.
    """
    check.one_of([RETURN, SUCCESS], on=on)
    comparison.check_difference(difference)
    if len(pilot) not in (1, 2):
        raise ValueError(f"expected one or two evaluations as a pilot, got {len(pilot)}")
    if correlation is not None and (len(pilot) == 2 or not 0 <= correlation < 1):
        raise ValueError(
            "expected a correlation from 0 to below 1, and a pilot of one evaluation, got "
            f"{correlation!r} and {len(pilot)}"
        )
    aim = Aim(difference, power, confidence)
    if len(pilot) == 2:
        compared = comparison.compare(*pilot, names=names, resamples=1)
        told, need = _of_pair(compared.differences[0], on, aim)
    else:
        told, need = _of_one(pilot[0], correlation or 0.0, on, aim)
    return Plan(NAMES[on], told, *aim, (need,))


def _of_pair(d: comparison.Difference, on: str, aim: Aim) -> tuple[str, Need]:
    d.measured(on)  # which refuses an env that does not report success
    if on == RETURN or d.success is None:
        told = f"the paired differences of {d.name} and {d.baseline} on"
        need = _by_deviation("episodes", d.difference.std, len(d.values) - 1, aim)
        return f"{told} {display.count_text(len(d.values), 'episode')}", need
    differ, count = d.success.gained + d.success.lost, d.success.count
    least = abs(aim.difference)  # no fewer episodes differ than that
    number, cautious = (
        episodes_for_success(*aim[:1], max(share, least), *aim[1:])
        for share in (differ / count, rate_bound(differ, count, ASSURANCE))
    )
    told = f"{display.count_text(count, 'episode')} of {d.name} and {d.baseline}"
    return f"{told}, of which {differ} differ in success", Need(
        "episodes", number, cautious, differ / count
    )


def _of_one(pilot: Evaluated, correlation: float, on: str, aim: Aim) -> tuple[str, Need]:
    summary = summarize(pilot.episodes, resamples=1)
    told = (
        f"{display.count_text(summary.completed, 'episode')} of one policy, with a correlation of "
        f"{correlation:g} to the other's"
    )
    if on == RETURN:
        std = summary.returns.std
        paired = None if std is None else std * math.sqrt(2 * (1 - correlation))
        return told, _by_deviation("episodes", paired, summary.returns.count - 1, aim)
    if summary.success is None:
        raise ValueError("expected an env that reports success, got one that does not")
    rate, other = summary.success.rate, summary.success.rate + aim.difference
    if not 0 <= other <= 1:
        raise ValueError(
            f"expected a difference that leads to a success rate from 0 to 1, got "
            f"{aim.difference:g} beside a rate of {display.number_text(rate)}; give it another "
            "sign, or a smaller one"
        )
    both = rate * other + correlation * math.sqrt(rate * (1 - rate) * other * (1 - other))
    differing = min(1.0, max(abs(aim.difference), rate + other - 2 * both))
    number = episodes_for_success(aim.difference, differing, aim.power, aim.confidence)
    return told, Need("episodes", number, None, differing)


def plan_suite(
    results: SuiteResults,
    difference: float,
    policies: Sequence[str] | None = None,
    *,
    power: float = 0.8,
    confidence: float = 0.95,
) -> Plan:
    """Plan the comparison of two policies of a suite by their mean score, from a finished one.

    Episodes are those of each task and run that would show a difference of *these* runs. Runs, each
    of as many episodes as now, would show one of the algorithms that trained them; they are planned
    if both policies have several.

    Args:
        results: of the suite.
        difference: of the mean scores over tasks.
        policies: the two policies; by default those of a suite with two.
        power, confidence: as for :func:`plan`.

    Raises:
        ValueError: unless the suite has two such policies with all their scores.
    """
    comparison.check_difference(difference)
    aim, scores = Aim(difference, power, confidence), results.scores()
    chosen = [*(scores if policies is None else policies)]
    if len(chosen) != 2 or len({*chosen} & scores.keys()) != 2:
        raise ValueError(
            f"expected two policies that have all their scores, of {', '.join(scores) or 'none'}, "
            f"got {', '.join(chosen) or 'none'}; name two"
        )
    played = results.episode_scores()
    first, second = (played[policy].mean((0, 1)) for policy in chosen)
    ahead = (second - first)[np.isfinite(second - first)]
    std = float(ahead.std(ddof=1)) if len(ahead) > 1 else None
    needs = [_by_deviation("episodes of each task", std, len(ahead) - 1, aim)]
    arrays = [scores[name] for name in chosen]
    if all(len(array) > 1 for array in arrays):
        needs.append(runs_needed(arrays, aim))
    runs = " and ".join(f"{display.count_text(len(scores[n]), 'run')} of {n}" for n in chosen)
    tasks = display.count_text(len(results.scored_tasks), "task")
    told = f"{runs} on {tasks}, {display.count_text(results.episodes, 'episode')} each"
    return Plan(f"the mean score of {results.name}", told, *aim, tuple(needs))


def runs_needed(scores: Sequence[Values], aim: Aim) -> Need:
    """Return the number of runs of each of two policies that show a difference of mean scores.

    The formula of :func:`tdcollect.evaluation.episodes_needed` for two samples, with the variances
    of means over tasks, whose runs are independent, and Satterthwaite's degrees of freedom (An
    Approximate Distribution of Estimates of Variance Components, Biometrics Bulletin 2, 1946).

    Args:
        scores: of the two policies, float64 ``[runs, tasks]`` with at least two runs.
        aim: the difference of the mean scores over tasks, and the test.
    """
    parts = np.concatenate([array.var(0, ddof=1) / array.shape[1] ** 2 for array in scores])
    freedoms = np.concatenate([np.full(array.shape[1], len(array) - 1) for array in scores])
    freedom = degrees_of_freedom(parts, freedoms)
    return _by_deviation("runs of each policy", math.sqrt(parts.sum()), freedom, aim, samples=2)


def _by_deviation(
    thing: str, std: float | None, freedom: float, aim: Aim, samples: int = 1
) -> Need:
    """Return the number for a standard deviation that is known with some degrees of freedom."""
    if std is None:
        raise ValueError(
            "expected a pilot of at least two completed episodes with finite returns, to know how "
            "they vary, got fewer"
        )
    stats = extra_module("scipy.stats", "a plan")
    factor, correction = comparison.sample_size_terms(aim.power, aim.confidence)
    above = std * math.sqrt(freedom / float(stats.chi2.ppf(1 - ASSURANCE, freedom)))
    number, cautious = (
        comparison.sample_size(spread, aim.difference, (factor, correction / samples))
        for spread in (std, above)
    )
    return Need(thing, number, cautious, std)


def episodes_for_success(
    difference: float, differing: float, power: float = 0.8, confidence: float = 0.95
) -> int:
    """Return the number of episodes that show a difference of success rates, by McNemar's test.

    The smallest number with this :func:`power_for_success`, found from Connor's formula on (Sample
    Size for Testing Differences in Proportions for the Paired-Sample Design, Biometrics 43, 1987).

    Args:
        difference: of the success rates; its sign does not matter.
        differing: the share of episodes that are a success of one policy alone; at least as large.
        power: the chance that the test finds it.
        confidence: one minus the significance of the test, which is exact and two-sided.

    Raises:
        ValueError: if a number is out of range.
    """
    comparison.check_difference(difference)
    size = abs(difference)
    if not size <= differing <= 1:
        raise ValueError(
            f"expected a share of episodes that differ from {size:g} to 1, got {differing}"
        )
    check.share(power=power, confidence=confidence)
    special = extra_module("scipy.special", "the number of episodes needed")
    z_test, z_power = special.ndtri([0.5 + confidence / 2, power]).tolist()
    root = z_test * math.sqrt(differing) + z_power * math.sqrt(differing - size**2)
    few, enough = 0, math.ceil((root / size) ** 2) + 1
    while power_for_success(enough, size, differing, confidence) < power:
        few, enough = enough, enough + 1 + enough // 4
    while enough - few > 1:
        middle = (few + enough) // 2
        reached = power_for_success(middle, size, differing, confidence) >= power
        few, enough = (few, middle) if reached else (middle, enough)
    return enough


def power_for_success(
    episodes: int, difference: float, differing: float, confidence: float = 0.95
) -> float:
    """Return the chance that McNemar's exact test shows a difference of success rates.

    Exact: summed over the number of episodes that differ, which is binomial, as is then the number
    of them that the better policy wins. See :func:`episodes_for_success`.
    """
    binom = extra_module("scipy.stats", "the power of a test").binom
    least, most = binom.ppf([1e-12, 1 - 1e-12], episodes, differing)
    count = np.arange(int(least), int(most) + 1)
    # The most of the rarer kind that the test rejects; -1 if it rejects nothing.
    edge = binom.ppf((1 - confidence) / 2, count, 0.5) - 1
    won = (differing + difference) / (2 * differing)
    rejects = binom.cdf(edge, count, won) + binom.sf(count - edge - 1, count, won)
    return float((binom.pmf(count, episodes, differing) * rejects).sum())


def rate_bound(failures: int, count: int, confidence: float) -> float:
    """Return the one-sided upper bound of a rate, exact, of Clopper and Pearson.

    The highest rate with which so few failures are not less likely than ``1 - confidence``. With
    none of n it is ``1 - (1 - confidence)**(1 / n)``. Clopper and Pearson, The Use of Confidence or
    Fiducial Limits Illustrated in the Case of the Binomial, Biometrika 26, 1934.
    """
    stats = extra_module("scipy.stats", "the bound of a failure rate")
    test = stats.binomtest(failures, count, alternative="less")
    return float(test.proportion_ci(confidence, method="exact").high)
