"""The rule of races: tests by betting, which may look after every block of episodes.

Pure functions of the records: no files, no random numbers. ``docs/statistics.md`` has the formulas
with their sources, and what simulations say about error and power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tdcollect import check
from tdcollect.evaluation.statistics import Values, exact_mean

if TYPE_CHECKING:
    from tdcollect.evaluation.ledger import Episode

BETS = np.append(_BETS := np.geomspace(0.04, 0.9, 30), 0.99)
"""The shares of the capital that are bet, each with a part of the capital of its own."""
LOG_WEIGHTS = np.log(np.append(0.55 * _BETS**0.6 / (_BETS**0.6).sum(), 0.45))
"""The logs of these parts: large bets are the ones for returns that vary little."""
TOLERANCE = 1e-6  # of an interval's ends, in units of the largest difference


@dataclass(frozen=True)
class Rule:
    """The rule that decides a race, fixed before it starts.

    Attributes:
        names: the policies, at least two.
        on: ``"return"``, ``"success"``, or the name of a metric.
        value_range: the lowest and the highest value that an episode can have. Without it, values
            are compared by the sign of their difference.
        alpha: the probability of a wrong decision, over all looks and all policies together.
        margin: the difference that matters; without it, a race ends by a difference alone.
        failed: how episodes count that failed, were lost or have no value of the metric:
            ``"worst"``, as the worst value of the range or as no success; ``"leave out"``, the pair
            is left out. None stands for ``"worst"`` where there is a worst value, and for
            ``"leave out"`` elsewhere.
        lower_is_better: of a metric such as a cost.

    Raises:
        ValueError: for a setting that is out of range, or that does not go with the others.
    """

    names: tuple[str, ...]
    on: str = "return"
    value_range: tuple[float, float] | None = None
    alpha: float = 0.05
    margin: float | None = None
    failed: str | None = None
    lower_is_better: bool = False

    def __post_init__(self) -> None:
        names = self.names
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"expected names to be the names of policies, got {names!r}")
        object.__setattr__(self, "names", tuple(names))
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(
                f"expected names of two or more policies that differ, got {list(names)}; to run "
                "one policy, call evaluate"
            )
        check.bools(lower_is_better=self.lower_is_better)
        if not isinstance(self.on, str):
            raise ValueError(  # noqa: TRY004, as for the other settings
                f"expected on to be 'return', 'success' or the name of a metric, got {self.on!r}"
            )
        check.share(alpha=self.alpha)
        if self.value_range is not None:
            self._check_range()
        bounded = self.on == "success" or self.value_range is not None
        if self.failed is None:
            object.__setattr__(self, "failed", "worst" if bounded else "leave out")
        check.one_of(("worst", "leave out"), failed=self.failed)
        if self.failed == "worst" and not bounded:
            raise ValueError(
                "expected a range of returns with failed='worst', got none; give the range, or "
                "leave pairs with a failed episode out with failed='leave out'"
            )
        if self.margin is None:
            return
        if not bounded:
            raise ValueError(
                f"expected a range of returns with a margin, got margin={self.margin!r} alone; "
                "give the range: signs of differences say nothing about their size"
            )
        if not (check.is_number(self.margin) and 0 < self.margin < self.reach):
            raise ValueError(
                f"expected margin to be above 0 and below {self.reach:g}, the largest difference, "
                f"got {self.margin!r}"
            )

    def _check_range(self) -> None:
        ends = self.value_range
        if self.on == "success":
            raise ValueError(
                f"expected no range with on='success', got {ends!r}; leave it out: a success "
                "counts 1, anything else 0"
            )
        if not isinstance(ends, Sequence) or len(ends) != 2 or not all(map(check.is_number, ends)):
            raise ValueError(f"expected a range to be two numbers, got {ends!r}")
        low, high = map(float, ends)
        if not (low < high and math.isfinite(high - low)):
            raise ValueError(f"expected a range from a finite number to a higher one, got {ends!r}")
        object.__setattr__(self, "value_range", (low, high))

    @property
    def question(self) -> str:
        """The question that is asked of each pair of policies, in words."""
        word, other = ("lower", "higher") if self.lower_is_better else ("higher", "lower")
        if self.by_sign:
            return (
                f"is the {self.on} {word} on more episodes than it is {other}? Without a range of "
                "it this is tested in place of the means, and the two can disagree."
            )
        name = "success rate" if self.on == "success" else f"mean {self.on}"
        return f"is the {name} {word}?"

    @property
    def by_sign(self) -> bool:
        """True if only the sign of each difference counts."""
        return self.on != "success" and self.value_range is None

    @property
    def reach(self) -> float:
        """The largest difference that two values can have."""
        low, high = self.value_range or (0.0, 1.0)
        return high - low

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain lists, numbers and None: ``Rule(**found)`` is the rule."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def value(self, name: str, episode: Episode) -> float | None:
        """Return the value of an episode of a policy; None if its pairs are left out.

        Raises:
            ValueError: for a value outside the range, and for an episode without a success.
        """
        number = episode.episode_return
        if self.on == "success":
            number = None if episode.success is None else float(episode.success)
        elif self.on != "return":
            number = (episode.metrics or {}).get(self.on)
        if not episode.completed or (number is None and self.on in (episode.metrics or {})):
            low, high = self.value_range or (0.0, 1.0)
            return (high if self.lower_is_better else low) if self.failed == "worst" else None
        where = f"in episode {episode.index} of policy {name!r}"
        if self.on == "success" and number is None:
            raise ValueError(
                f"expected the env to report success, got none {where}; race on='return', or "
                "report 'is_success' in the last info"
            )
        if number is None or not math.isfinite(number):
            what = "rewards" if self.on == "return" else "data"
            raise ValueError(
                f"expected a finite {self.on}, got {number} {where}; look into the {what} of that "
                "episode"
            )
        if self.value_range is not None:
            low, high = self.value_range
            things = "returns" if self.on == "return" else f"values of {self.on}"
            if not low <= number <= high:
                raise ValueError(
                    f"expected {things} from {low:g} to {high:g}, got {number!r} {where}; give a "
                    f"range that holds all {things} that are possible, and race again: values are "
                    "never clipped"
                )
        return number


class Differences(NamedTuple):
    """Paired differences as their distinct values, ascending, and how often each occurred.

    Sums over them do not depend on the order of episodes.
    """

    values: Values
    counts: Values
    reach: float

    @classmethod
    def of(cls, found: Sequence[float], reach: float) -> Differences:
        """Sort the differences ``found``, which lie within plus and minus ``reach``."""
        values, counts = np.unique(np.array(found, dtype=np.float64), return_counts=True)
        return cls(values, counts.astype(np.float64), reach)

    def swapped(self) -> Differences:
        """Return the differences the other way round."""
        return Differences(-self.values[::-1], self.counts[::-1].copy(), self.reach)

    def log_capital(self, mean: float) -> float:
        """Return the log of the capital of a player who bets against "the mean is at most this".

        ``K(m) = sum_j w_j prod_i (1 - f_j + f_j (d_i + R) / (m + R))``, with the bets ``f_j`` and
        their weights ``w_j``. It starts at 1. If the mean is ``m``, the expected value of each
        factor is 1, so that it ever reaches ``c`` with a probability of at most ``1 / c`` (Ville,
        *Étude critique de la notion de collectif*, 1939). It falls as ``m`` rises.
        """
        gains = (self.values + self.reach) / (mean + self.reach) - 1
        logs = (self.counts[:, None] * np.log1p(gains[:, None] * BETS)).sum(0)
        return float(np.logaddexp.reduce(logs + LOG_WEIGHTS))

    def log_evidence(self, mean: float) -> float:
        """Return the log of the mean capital of two players: against a lower and a higher mean.

        It is convex in the mean, and at most 0 at the mean of the sample.
        """
        below, above = self.log_capital(mean), self.swapped().log_capital(-mean)
        return float(np.logaddexp(below, above)) - math.log(2)

    def lower_end(self, former: float, limit: float, nulls: Sequence[float]) -> float:
        """Return the largest mean below the sample's that is excluded, to within the tolerance.

        Args:
            former: the lower end before; a lower one is not returned.
            limit: the log of the evidence that excludes a mean.
            nulls: means that are tried as they are, so that the end is on their right side.
        """
        if not len(self.values):
            return former
        inside = float((self.values * self.counts).sum() / self.counts.sum())
        outside = max(former, -self.reach * (1 - TOLERANCE))
        if outside >= inside or self.log_evidence(outside) < limit:
            return former
        waiting = [null for null in nulls if outside < null < inside]
        while inside - outside > TOLERANCE * self.reach:
            middle = waiting.pop() if waiting else (outside + inside) / 2
            if not outside < middle < inside:
                continue
            if self.log_evidence(middle) >= limit:
                outside = middle
            else:
                inside = middle
        return outside


def e_holm(evidence: Mapping[Any, float], alpha: float) -> list[Any]:
    """Return the hypotheses that are rejected, by the logs of their e-values, strongest first.

    Closed testing with averages: a hypothesis is rejected if in every set of hypotheses that holds
    it, the mean of the e-values is at least ``1 / alpha``. The worst such set holds all others
    whose e-value is below that (Vovk and Wang, *E-values: Calibration, combination and
    applications*, Annals of Statistics 49, 2021, section 4; Hartog and Lei, *Family-wise Error
    Rate Control with E-values*, 2025). It holds for e-values that depend on each other in any way.

    Args:
        evidence: by hypothesis, those that were not rejected before.
        alpha: the probability that some true hypothesis is rejected.
    """
    levels = {key: math.exp(min(log + math.log(alpha), 700)) for key, log in evidence.items()}
    lacking = math.fsum(1 - level for level in levels.values() if level < 1)
    ordered = sorted(levels, key=lambda key: -evidence[key])  # stable: ties keep their order
    return [key for key in ordered if levels[key] - 1 >= lacking]


class Look(NamedTuple):
    """The state of knowledge on a pair of policies after a block.

    Attributes:
        episodes: the number of episodes that both had played.
        pairs: the number of them that are compared.
        difference: the mean difference, the first policy's values minus the second's; None
            without pairs. Of signs, without a range.
        low: the lower end of its confidence sequence.
        high: the upper end.
    """

    episodes: int
    pairs: int
    difference: float | None
    low: float
    high: float


class _Pair:
    """Two policies: their differences, and what was known of these after each block."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        reach = 1.0 if rule.by_sign else rule.reach
        self.found: list[float] = []
        self.differences = Differences.of(self.found, reach)
        self.look = Look(0, 0, None, -reach, reach)
        self.looks: list[Look] = []
        policies = len(rule.names)
        self.limit = math.log(policies * (policies - 1) / 2) - math.log(rule.alpha)
        self.nulls = (0.0,) if rule.margin is None else (-rule.margin, rule.margin, 0.0)

    def add(self, first: Sequence[float | None], second: Sequence[float | None]) -> None:
        for a, b in zip(first, second, strict=True):
            if a is not None and b is not None:
                self.found.append(float(np.sign(a - b)) if self.rule.by_sign else a - b)
        differences = self.differences = Differences.of(self.found, self.differences.reach)
        low = differences.lower_end(self.look.low, self.limit, self.nulls)
        high = -differences.swapped().lower_end(-self.look.high, self.limit, self.nulls)
        mean = exact_mean(np.array(self.found)) if self.found else None
        episodes = self.look.episodes + len(first)
        # The ends pass each other where no mean fits all looks, with a probability below alpha.
        self.look = Look(episodes, len(self.found), mean, low, max(low, high))
        self.looks.append(self.look)

    @property
    def within(self) -> bool:
        """True if the interval lies within the margin."""
        margin = self.rule.margin
        return margin is not None and -margin <= self.look.low and self.look.high <= margin

    def evidence(self) -> dict[str, float]:
        """The log of the capital of each player: that the first policy is better, or worse."""
        ahead, behind = self.differences, self.differences.swapped()
        higher, lower = ahead.log_capital(0.0), behind.log_capital(0.0)
        better, worse = (lower, higher) if self.rule.lower_is_better else (higher, lower)
        capitals = {"better": better, "worse": worse}
        if self.rule.margin is not None:
            capitals["above -margin"] = ahead.log_capital(-self.rule.margin)
            capitals["below margin"] = behind.log_capital(-self.rule.margin)
        return capitals


class Standing:
    """The standing of a race after the blocks that were added: who plays, who is out, and why.

    It depends on the rule and on the records of the blocks, in the order of index, alone.

    Attributes:
        rule: the rule.
        playing: the policies that play the next block.
        out: of each policy that is out: ``by``, the policies that it is worse than, and
            ``episodes``, the number that it played.
        episodes: the number of episodes played.
        history: by pair of policies, in the rule's order, what was known after each block that
            both played.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.playing: tuple[str, ...] = rule.names
        self.out: dict[str, dict[str, Any]] = {}
        self.episodes = 0
        self._pairs = {pair: _Pair(rule) for pair in combinations(rule.names, 2)}
        self._worse: set[tuple[str, str]] = set()  # the first is worse than the second: shown

    @property
    def history(self) -> dict[tuple[str, str], list[Look]]:
        return {names: pair.looks for names, pair in self._pairs.items()}

    @property
    def ended(self) -> bool:
        """True if the race is decided."""
        left = combinations(self.playing, 2)
        return all(self._pairs[names].within for names in left)  # of one policy there is no pair

    def add(self, block: Mapping[str, Sequence[Episode]]) -> None:
        """Add the records of the next block, and look.

        Args:
            block: of each policy that plays, and of no other, the records of the same episodes, by
                index, which follow those of the blocks before. A race that has ended takes none.

        Raises:
            ValueError: for a value that the rule refuses.
        """
        values = {name: [self.rule.value(name, e) for e in block[name]] for name in self.playing}
        self.episodes += len(values[self.playing[0]])
        for first, second in combinations(self.playing, 2):
            self._pairs[first, second].add(values[first], values[second])
        self._look()

    def _look(self) -> None:
        evidence = {}
        for (first, second), pair in self._pairs.items():
            found = pair.evidence()
            evidence[first, second], evidence[second, first] = found["worse"], found["better"]
        open_ones = {key: log for key, log in evidence.items() if key not in self._worse}
        for loser, winner in e_holm(open_ones, self.rule.alpha):
            self._worse.add((loser, winner))
            if loser in self.out:
                self.out[loser]["by"].append(winner)
            elif len(self.playing) > 1:  # signs may go round in a circle: one is left in any case
                self.playing = tuple(name for name in self.playing if name != loser)
                self.out[loser] = {"by": [winner], "episodes": self.episodes}

    @property
    def outcome(self) -> dict[str, Any]:
        """The findings of the race so far, as plain dicts, lists, numbers and words, for JSON."""
        return {
            "question": self.rule.question,
            "failed": self.rule.failed,
            "confidence": 1 - self.rule.alpha,
            "episodes": self.episodes,
            "ended": self.ended,
            "playing": list(self.playing),
            "out": {name: dict(pairs) for name, pairs in self.out.items()},
            "pairs": [self._outcome(*names) for names in self._pairs],
        }

    def _outcome(self, first: str, second: str) -> dict[str, Any]:
        pair = self._pairs[first, second]
        look = pair.look
        decisions = ["better"] * ((second, first) in self._worse)
        decisions += ["worse"] * ((first, second) in self._worse)
        decisions += ["no difference larger than margin"] * pair.within
        return {
            "policies": [first, second],
            "episodes": look.episodes,
            "pairs": look.pairs,
            "difference": look.difference,
            "interval": [look.low, look.high],
            "log_evidence": pair.evidence(),
            "decisions": decisions or ["undecided"],
        }
