"""Simulate races: how often they err, how many episodes they play, and beside them three others.

    python benchmarks/races.py

Prints the tables of docs/statistics.md, in five minutes of processor time; the same versions give
the same tables. It needs numpy and scipy. AdaStop (``adastop``) and STEP
(``sequentialized-barnard-tests``) have rows where they are installed: ``make simulate-races``
installs them into a venv of their own. N-SCORE is written out here, and compared with its package
(``nscore``) where that is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, permutations
from typing import Any

import numpy as np
from scipy import special, stats

from tdcollect.evaluation.ledger import Episode
from tdcollect.lab.sequential import BETS, LOG_WEIGHTS, Rule, Standing

ALPHA = 0.05
LOOKS = 1000
WEIGHTS = np.exp(LOG_WEIGHTS)
Array = Any
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


# Values of a policy, [races, episodes]


def cartpole(full: float, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return np.where(rng.random(shape) < full, 500.0, rng.uniform(50, 500, shape))


def heavy(shift: float, bound: float, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return np.clip(shift + rng.standard_t(1.5, shape), -bound, bound)


def two_values(
    low: float, high: float, chance: float, rng: np.random.Generator, shape: tuple[int, int]
) -> Array:
    return np.where(rng.random(shape) < chance, high, low)


def success(chance: float) -> Draw:
    return partial(two_values, 0.0, 1.0, chance)


@dataclass(frozen=True)
class Pair:
    """Two policies: a name for the table, how their values are drawn, and their range.

    ``alike`` is the share of episodes in which the second has the value of the first. Without a
    range, signs are compared.
    """

    name: str
    first: Draw
    second: Draw
    value_range: tuple[float, float] | None
    alike: float = 0.0

    @property
    def reach(self) -> float:
        return 1.0 if self.value_range is None else self.value_range[1] - self.value_range[0]

    def differences(self, rng: np.random.Generator, races: int, episodes: int) -> Array:
        first = self.first(rng, (races, episodes))
        second = self.second(rng, (races, episodes))
        found = np.where(rng.random((races, episodes)) < self.alike, 0.0, first - second)
        return np.sign(found) if self.value_range is None else found


RANGE = (0.0, 500.0)
UNIT = (0.0, 1.0)
T = partial(heavy, 0.0, np.inf)
CLIPPED = partial(heavy, 0.0, 10.0)
EQUAL = [
    Pair("500 in 4 of 5, else 50 to 500", *[partial(cartpole, 0.8)] * 2, RANGE),
    Pair("heavy-tailed, clipped to -10 to 10", CLIPPED, CLIPPED, (-10, 10)),
    Pair("heavy-tailed, by signs", T, T, None),
    Pair("10 or 200, evenly", *[partial(two_values, 10.0, 200.0, 0.5)] * 2, (0, 200)),
    Pair(
        "450; 500 in 9 of 10, else 0",
        partial(two_values, 450.0, 450.0, 0.0),
        partial(two_values, 0.0, 500.0, 0.9),
        RANGE,
    ),
    Pair("success in 1 of 2", success(0.5), success(0.5), UNIT),
    Pair("success in 1 of 2, alike in 4 of 5", success(0.5), success(0.5), UNIT, 0.8),
    Pair("success in 19 of 20", success(0.95), success(0.95), UNIT),
]
DIFFERENT = [
    Pair(
        "500 in 4 or in 3 of 5, else 50 to 500", *map(partial(partial, cartpole), (0.8, 0.6)), RANGE
    ),
    Pair(
        "heavy-tailed, 1 apart, clipped to -10 to 10",
        partial(heavy, 1.0, 10.0),
        CLIPPED,
        (-10, 10),
    ),
    Pair(
        "200 in 7 or in 5 of 10, else 10",
        partial(two_values, 10.0, 200.0, 0.7),
        partial(two_values, 10.0, 200.0, 0.5),
        (0, 200),
    ),
    Pair("success in 6 or in 5 of 10", success(0.6), success(0.5), UNIT),
    Pair("success in 95 or in 85 of 100", success(0.95), success(0.85), UNIT),
]


def true_difference(pair: Pair) -> float:
    """The mean difference: known, but for heavy tails, whose quantiles are averaged."""
    if "heavy" in pair.name:
        quantiles = stats.t.ppf((np.arange(4_000_000) + 0.5) / 4_000_000, 1.5)
        return float(np.clip(quantiles + 1, -10, 10).mean())
    known = {DIFFERENT[0].name: 0.2 * (500 - 275), DIFFERENT[2].name: 0.2 * 190}
    return known.get(pair.name, 0.1)


# Races, all at once


def excluded(
    differences: Array, null: float, reach: float, bets: Array = BETS, weights: Array = WEIGHTS
) -> tuple[Array, Array]:
    """When a mean is excluded: the look ``[races]``, from 1 (0: never), and the side of the truth.

    The capital of :class:`tdcollect.lab.sequential.Differences`, of many races at once, and
    with products in place of logs: it is compared with that in :func:`check`.
    """
    races, episodes = differences.shape
    look, side = np.zeros(races, np.int64), np.zeros(races, np.int64)
    active = np.arange(races)
    above, below = np.tile(weights, (races, 1)), np.tile(weights, (races, 1))
    for at in range(episodes):
        gain = (differences[active, at] - null)[:, None] * bets
        above *= 1 + gain / (reach + null)
        below *= 1 - gain / (reach - null)
        up, down = above.sum(1), below.sum(1)
        new = (up + down >= 2 / ALPHA) & (look[active] == 0)
        look[active[new]] = at + 1
        side[active[new]] = np.where(up > down, 1, -1)[new]
        if at % 20 == 19:
            left = look[active] == 0
            active, above, below = active[left], above[left], below[left]
            above[above < 1e-200] = 0  # else they become subnormal numbers, which are slow
            below[below < 1e-200] = 0
            if not len(active):
                break
    return look, side


class Five:
    """Races of several policies: who is out, and which pairs are within the margin."""

    def __init__(self, races: int, policies: int, reach: float, margin: float | None) -> None:
        self.pairs = list(combinations(range(policies), 2))
        self.ordered = list(permutations(range(policies), 2))
        self.nulls = [0.0] if margin is None else [0.0, margin, -margin]
        self.reach = reach
        self.weights = WEIGHTS[:, None, None]
        self.bets = BETS[:, None, None]
        whole = np.broadcast_to(self.weights, (len(BETS), races, len(self.pairs)))
        self.above = [whole.copy() for _ in self.nulls]
        self.below = [whole.copy() for _ in self.nulls]
        self.playing = np.ones((races, policies), bool)
        self.worse = np.zeros((races, len(self.ordered)), bool)
        self.outside = np.zeros((2, races, len(self.pairs)), bool)

    def add(self, values: Array) -> None:
        """One episode ``[races, policies]``; the evidence of pairs of which one is out stays."""
        differences, moves = self._by_pair(np.subtract, values), self._by_pair(np.logical_and)
        buffer = np.empty_like(self.above[0])
        sums = []
        for at, null in enumerate(self.nulls):
            gain = (differences - null) * moves
            for capital, unit in (
                (self.above[at], self.reach + null),
                (self.below[at], null - self.reach),
            ):
                np.multiply(self.bets / unit, gain, out=buffer)
                buffer += 1
                capital *= buffer
                sums.append(capital.sum(0))
        up, down = sums[::2], sums[1::2]
        for at in range(1, len(self.nulls)):
            larger = up[at] < down[at] if at == 1 else up[at] > down[at]
            self.outside[at - 1] |= larger & (up[at] + down[at] >= 2 * len(self.pairs) / ALPHA)
        self._e_holm(up[0], down[0])

    def keep(self, races: Array) -> None:
        """Go on with these races alone."""
        self.above = [capital[:, races] for capital in self.above]
        self.below = [capital[:, races] for capital in self.below]
        self.playing, self.worse = self.playing[races], self.worse[races]
        self.outside = self.outside[:, races]

    def _by_pair(self, operation: Any, of: Array | None = None) -> Array:
        of = self.playing if of is None else of
        first, second = np.array(self.pairs).T
        return operation(of[:, first], of[:, second])

    def _e_holm(self, up: Array, down: Array) -> None:
        index = {pair: at for at, pair in enumerate(self.pairs)}
        levels = ALPHA * np.stack(
            [down[:, index[i, j]] if i < j else up[:, index[j, i]] for i, j in self.ordered], 1
        )
        lacking = np.where(self.worse, 0.0, np.maximum(1 - levels, 0)).sum(1)
        self.worse |= ~self.worse & (levels >= 1) & (levels - 1 >= lacking[:, None])
        for at, (loser, _) in enumerate(self.ordered):
            self.playing[:, loser] &= ~self.worse[:, at]

    @property
    def within(self) -> Array:
        return self.outside.all(0)

    @property
    def ended(self) -> Array:
        both = self._by_pair(np.logical_and)
        return (~both | self.within).all(1) if len(self.nulls) > 1 else ~both.any(1)


def standing_of(rule: Rule, values: Array) -> tuple[Standing, int]:
    """The package's own race over values ``[episodes, policies]``, with ``block=1``."""
    standing = Standing(rule)
    for index, row in enumerate(values.tolist()):
        records = {
            name: [Episode(index, 0, 0, episode_return=value)]
            for name, value in zip(rule.names, row, strict=True)
        }
        standing.add({name: records[name] for name in standing.playing})
        if standing.ended:
            return standing, index + 1
    return standing, 0


def check() -> None:
    """Compare the races that are run here all at once with those of the package, one by one."""
    rng = np.random.default_rng(0)
    for pair, margin in [(DIFFERENT[0], None), (DIFFERENT[4], 0.3), (EQUAL[2], None)]:
        values = np.stack([draw(rng, (6, 200)) for draw in (pair.first, pair.second)], -1)
        found = values[..., 0] - values[..., 1]
        found = np.sign(found) if pair.value_range is None else found
        look, side = excluded(found, 0.0, pair.reach)
        claim = np.zeros(6, np.int64) if margin is None else claimed(found, margin, pair.reach)
        rule = Rule(("a", "b"), value_range=pair.value_range, margin=margin)
        for race in range(6):
            standing, ended = standing_of(rule, values[race])
            ends = [int(at[race]) for at in (look, claim) if at[race]]
            assert ended == min(ends, default=0)
            (outcome,) = standing.outcome["pairs"]
            if ended and ended == look[race]:
                assert outcome["decisions"][0] == ("better" if side[race] > 0 else "worse")
    chances = np.array([0.8, 0.75, 0.5, 0.3, 0.1])
    values = (rng.random((4, 150, 5)) < chances).astype(float)
    many = Five(4, 5, 1.0, 0.3)
    ends = np.zeros(4, np.int64)
    states = [[frozenset(range(5))] for _ in range(4)]
    for at in range(150):
        many.add(values[:, at])
        ends[(ends == 0) & many.ended] = at + 1
        for race in range(4):
            states[race].append(frozenset(np.flatnonzero(many.playing[race]).tolist()))
    for race in range(4):
        rule = Rule(tuple("abcde"), value_range=UNIT, margin=0.3)
        standing, ended = standing_of(rule, values[race])
        assert ended == ends[race]
        assert {"abcde".index(name) for name in standing.playing} == states[race][ended or 150]


def claimed(differences: Array, margin: float, reach: float) -> Array:
    """The look at which the sequence lies within the margin, ``[races]``; 0: never."""
    above, its_side = excluded(differences, margin, reach)
    below, other_side = excluded(differences, -margin, reach)
    both = (above > 0) & (below > 0) & (its_side < 0) & (other_side > 0)
    return np.where(both, np.maximum(above, below), 0)


# Tables


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def rate(hits: Array) -> str:
    """A share, with its exact 95% interval."""
    count, races = int(np.count_nonzero(hits)), len(hits)
    found = stats.binomtest(count, races).proportion_ci()
    return f"{percent(count / races)} [{percent(found.low)}, {percent(found.high)}]"


def saving(look: Array, planned: int) -> str:
    """The share of the planned episodes that the median race saves; without an end, the longest."""
    median = np.median(np.where(look == 0, np.inf, look))
    return "more" if np.isinf(median) else f"{round(100 * (1 - median / planned)):+d}%"


def error_row(races: int, number: int) -> list[str]:
    pair = EQUAL[number]
    found = pair.differences(np.random.default_rng([1, number]), races, LOOKS)
    look, _ = excluded(found, 0.0, pair.reach)
    return [pair.name, rate(look > 0)]


def truth_row(races: int, number: int) -> list[str]:
    """At a true difference of exactly the margin: misses, and claims that none is larger."""
    pair = DIFFERENT[number]
    truth = true_difference(pair)
    found = pair.differences(np.random.default_rng([2, number]), races, LOOKS)
    missed, _ = excluded(found, truth, pair.reach)
    wrong = claimed(found, truth, pair.reach)
    return [pair.name, f"{truth:.3g}", rate(missed > 0), rate(wrong > 0)]


FIVE: list[tuple[str, list[Draw], tuple[float, float], float | None]] = [
    ("success of all in 1 of 2", [success(0.5)] * 5, UNIT, None),
    ("500 in 4 of 5, else 50 to 500", [partial(cartpole, 0.8)] * 5, RANGE, None),
    (
        "success in 7, 7, 5, 4, 3 of 10",
        [success(chance) for chance in (0.7, 0.7, 0.5, 0.4, 0.3)],
        UNIT,
        None,
    ),
    (
        "success in 8, 8, 6, 6, 6 of 10, margin 0.2",
        [success(chance) for chance in (0.8, 0.8, 0.6, 0.6, 0.6)],
        UNIT,
        0.2,
    ),
]


def five_row(races: int, number: int) -> list[str]:
    name, draws, value_range, margin = FIVE[number]
    rng = np.random.default_rng([3, number])
    means = [float(draw(np.random.default_rng(0), (1000, 1000)).mean()) for draw in draws]
    means = [round(mean, 1) for mean in means]
    played, wrong, decided = np.zeros(races, np.int64), np.zeros(races, bool), np.zeros(races, bool)
    for first in range(0, races, 2500):
        active = np.arange(first, min(first + 2500, races))
        many = Five(len(active), len(draws), value_range[1] - value_range[0], margin)
        true_ones = [at for at, (i, j) in enumerate(many.ordered) if means[i] >= means[j]]
        apart = [
            at
            for at, (i, j) in enumerate(many.pairs)
            if margin is not None and abs(means[i] - means[j]) > margin - 1e-9
        ]
        for look in range(LOOKS):
            played[active] += np.where(decided[active], 0, many.playing.sum(1))
            many.add(np.concatenate([draw(rng, (len(active), 1)) for draw in draws], 1))
            said = many.worse[:, true_ones].any(1) | many.within[:, apart].any(1)
            wrong[active] |= said & ~decided[active]
            decided[active] |= many.ended
            if look % 20 == 19:
                left = ~decided[active]
                active = active[left]
                many.keep(left)
    return [name, rate(wrong), percent(decided.mean()), f"{int(np.median(played)):,}"]


@dataclass(frozen=True)
class Binary:
    """The worse policy's success rate, and the difference that the test is planned for.

    ``alike`` is the share of episodes on which both do the same whatever the difference.
    """

    worse: float
    difference: float
    alike: float = 0.0

    def chances(self, times: float) -> tuple[float, float]:
        """The probabilities that only the better one succeeds, and that only the worse one does."""
        differ = 1 - self.alike
        better = self.worse + times * self.difference / differ
        return differ * better * (1 - self.worse), differ * self.worse * (1 - better)

    def possible(self, times: float) -> bool:
        return self.worse + times * self.difference / (1 - self.alike) <= 1 + 1e-9

    def differences(self, times: float, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
        only_better, only_worse = self.chances(times)
        drawn = rng.random(shape)
        return (drawn < only_better).astype(float) - (drawn > 1 - only_worse)

    @cached_property
    def planned(self) -> int:
        """The episodes with which the exact McNemar test has a power of 80%."""
        low, high = 5, 20
        while self._power(high) < 0.8:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._power(middle) < 0.8 else (low, middle)
        return high

    def _power(self, episodes: int) -> float:
        only_better, only_worse = self.chances(1)
        differ = only_better + only_worse
        power = 0.0
        for count in range(1, episodes + 1):
            weight = stats.binom.pmf(count, episodes, differ)
            if weight < 1e-9:
                continue
            # Two-sided: at most this many of the rarer outcome.
            most = int(stats.binom.ppf(ALPHA / 2, count, 0.5))
            most -= stats.binom.cdf(most, count, 0.5) > ALPHA / 2
            share = only_better / differ
            tails = stats.binom.cdf(most, count, share) + stats.binom.cdf(most, count, 1 - share)
            power += weight * tails
        return power


BINARY = [
    Binary(0.5, 0.05),
    Binary(0.5, 0.1),
    Binary(0.3, 0.2),
    Binary(0.85, 0.05),
    Binary(0.5, 0.1, alike=0.5),
]
TIMES = (1.0, 1.5, 2.0, 3.0)


def cells(looks: dict[float, Array], planned: int) -> list[str]:
    """Cells for a difference as planned and for larger ones; those that cannot be have none."""
    at_d = looks[1.0]
    longest = int(1.25 * planned)
    undecided = (at_d == 0) | (at_d > longest)
    mean = np.where(undecided, longest, at_d).mean() / planned
    return [
        f"{planned:,}",
        saving(at_d, planned),
        f"{round(100 * (1 - mean)):+d}%",
        percent(undecided.mean()),
        *(saving(looks[times], planned) if times in looks else "-" for times in TIMES[1:]),
    ]


def binary_row(races: int, number: int) -> list[str]:
    case = BINARY[number]
    planned = case.planned
    looks = {}
    for times in TIMES:
        if case.possible(times):
            rng = np.random.default_rng([4, number, int(10 * times)])
            found = case.differences(times, rng, (races, 2 * planned))
            looks[times] = excluded(found, 0.0, 1.0)[0]
    name = f"{case.worse:g}, {case.difference:g}" + ", half of the episodes alike" * bool(
        case.alike
    )
    return [name, *cells(looks, planned)]


# Standard deviation and difference, in units of the range; None: by signs.
RETURNS = [(0.4, 0.1), (0.2, 0.02), (0.2, 0.05), (0.2, 0.1), (0.1, 0.02), (0.05, 0.01), None]


def normal_differences(
    number: int, times: float, races: int, rng: np.random.Generator
) -> tuple[int, Array]:
    """The episodes that a paired t-test needs, and three times as many differences of each race."""
    deviation, difference = RETURNS[number] or (1.0, 0.25)
    # Guenther's formula, as in tdcollect.evaluation.episodes_needed.
    quantile = stats.norm.ppf(1 - ALPHA / 2)
    spread = ((quantile + stats.norm.ppf(0.8)) * deviation / difference) ** 2
    planned = int(np.ceil(spread + quantile**2 / 2))
    found = rng.normal(times * difference, deviation, (races, 3 * planned))
    return planned, np.sign(found) if RETURNS[number] is None else np.clip(found, -1, 1)


def returns_row(races: int, number: int) -> list[str]:
    looks = {}
    for times in TIMES:
        rng = np.random.default_rng([5, number, int(10 * times)])
        planned, found = normal_differences(number, times, races, rng)
        looks[times] = excluded(found, 0.0, 1.0)[0]
    case = RETURNS[number]
    names = ["by signs", "0.25 deviations"] if case is None else [f"{x:g}" for x in case]
    return [*names, *cells(looks, planned)]


# Other bets


def even(low: float, high: float) -> tuple[Array, Array]:
    return np.geomspace(low, high, 40), np.full(40, 1 / 40)


def beta(first: float, second: float) -> tuple[Array, Array]:
    """A beta density over the fractions, by Gauss's quadrature."""
    bets, weights = special.roots_sh_jacobi(40, first + second - 1, first)
    return bets, weights / weights.sum()


BETS_TRIED = {
    "as used": (BETS, WEIGHTS),
    "0.04 to 0.9, in equal ratios, for 70%; 0.95": (
        np.append(np.geomspace(0.04, 0.9, 30), 0.95),
        np.append(np.full(30, 0.7 / 30), 0.3),
    ),
    "0.04 to 0.95, in equal ratios": even(0.04, 0.95),
    "0.1 to 0.95, in equal ratios": even(0.1, 0.95),
    "evenly from 0 to 1": beta(1, 1),
    "beta density, 1/2 and 1/2": beta(0.5, 0.5),
    "0.95 alone": (np.array([0.95]), np.ones(1)),
}
CASES = [
    (Binary(0.5, 0.05), 1.0),
    (Binary(0.5, 0.2), 1.0),
    (Binary(0.5, 0.2), 1.5),
    (2, 1.0),
    (3, 2.0),
]


def bets_row(races: int, name: str) -> list[str]:
    row = [name]
    for number, (case, times) in enumerate(CASES):
        rng = np.random.default_rng([8, number])
        if isinstance(case, Binary):
            planned = case.planned
            found = case.differences(times, rng, (races // 5, 3 * planned))
        else:
            planned, found = normal_differences(case, times, races // 5, rng)
        row.append(saving(excluded(found, 0.0, 1.0, *BETS_TRIED[name])[0], planned))
    return row


# Other rules

OTHERS = Binary(0.3, 0.2)
ADASTOP_RACES, STEP_RACES = 200, 2000


def adastop_look(first: Array, second: Array, each: int, interims: int, seed: int) -> int:
    """The episodes after which AdaStop finds a difference between two samples; 0: none."""
    from adastop import MultipleAgentsComparator

    found = MultipleAgentsComparator(n=each, K=interims, B=500, alpha=ALPHA, seed=seed)
    for interim in range(1, interims + 1):
        values = {"a": first[: interim * each], "b": second[: interim * each]}
        found.partial_compare(values, verbose=False)
        (decision,) = found.decisions.values()
        if decision in ("larger", "smaller"):
            return interim * each
        if found.is_finished:
            return 0
    return 0


def step_looks(first: Array, second: Array, longest: int) -> Array:
    """The episodes after which STEP ranks two policies; 0: never."""
    from sequentialized_barnard_tests import Decision, Hypothesis, MirroredStepTest

    with contextlib.redirect_stdout(io.StringIO()):
        test = MirroredStepTest(
            Hypothesis.P0LessThanP1, longest, ALPHA, inference_mode="ranking", random_seed=0
        )
    looks = []
    for race, (one, other) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        test.random_seed = race
        test.reset()
        looks.append(0)
        for at, pair in enumerate(zip(one, other, strict=True), 1):
            if test.step(*pair).decision != Decision.FailToDecide:
                looks[-1] = at
                break
    return np.array(looks)


def others_row(races: int, name: str) -> list[str] | None:
    """The findings of a rule on two independent success rates, at equality and beyond."""
    planned = OTHERS.planned
    interims = 5
    each = int(1.25 * planned) // interims
    longest = each * interims
    package = {"AdaStop": "adastop", "STEP": "sequentialized_barnard_tests"}.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        return None
    races = min(races, {"AdaStop": ADASTOP_RACES, "STEP": STEP_RACES}.get(name, races))
    looks = {}
    for times in (0.0, *TIMES):
        rng = np.random.default_rng([6, int(10 * times)])
        drawn = rng.random((2, races, longest))
        first = (drawn[0] < OTHERS.worse + times * OTHERS.difference).astype(float)
        second = (drawn[1] < OTHERS.worse).astype(float)
        if name == "AdaStop":
            found = [
                adastop_look(a, b, each, interims, race)
                for race, (a, b) in enumerate(zip(first, second, strict=True))
            ]
            looks[times] = np.array(found)
        elif name == "STEP":
            looks[times] = step_looks(first, second, longest)
        else:
            looks[times] = excluded(first - second, 0.0, 1.0)[0]
    unlike = "-"
    if name == "AdaStop":
        pair, rng = EQUAL[4], np.random.default_rng(7)
        first, second = (draw(rng, (races, longest)) for draw in (pair.first, pair.second))
        found = [
            adastop_look(a, b, each, interims, race)
            for race, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        unlike = rate(np.array(found) > 0)
    elif name == "a race":
        pair = EQUAL[4]
        found = pair.differences(np.random.default_rng(7), races, longest)
        unlike = rate(excluded(found, 0.0, pair.reach)[0] > 0)
    return [
        name,
        f"{races:,}",
        rate(looks[0.0] > 0),
        unlike,
        percent((looks[1.0] == 0).mean()),
        *(saving(looks[times], planned) for times in TIMES),
    ]


# N-SCORE

FRACTIONS = (np.arange(100) + 0.5) / 100


def steps_of(chance: float, count: int) -> Array:
    """The probabilities of 0 to ``count`` steps of a task, each done with one chance."""
    return stats.binom.pmf(np.arange(count + 1), count, chance)


# The probabilities of scores from 0 to 1 of the better policy, and of the other; the share alike.
SCORED: list[tuple[str, Array, Array, float]] = [
    ("success in 5 or in 3 of 10", np.array([0.5, 0.5]), np.array([0.7, 0.3]), 0.0),
    ("success in 95 or in 75 of 100", np.array([0.05, 0.95]), np.array([0.25, 0.75]), 0.0),
    ("success in 55 or in 50 of 100", np.array([0.45, 0.55]), np.array([0.5, 0.5]), 0.0),
    (
        "success in 5 or in 3 of 10, but alike in 3 of 4",
        np.array([0.5, 0.5]),
        np.array([0.7, 0.3]),
        0.75,
    ),
    ("4 steps, each done in 60 or in 45 of 100", steps_of(0.6, 4), steps_of(0.45, 4), 0.0),
    (
        "4 steps, all done in 50 or in 25 of 100",
        np.array([0.3, 0.05, 0.05, 0.1, 0.5]),
        np.array([0.45, 0.1, 0.1, 0.1, 0.25]),
        0.0,
    ),
    ("10 steps, each done in 6 or in 5 of 10", steps_of(0.6, 10), steps_of(0.5, 10), 0.0),
    ("10 steps, each done in 6 or in 4 of 10", steps_of(0.6, 10), steps_of(0.4, 10), 0.0),
]
NSCORE_RULES = ("N-SCORE at alpha / 2", "at alpha")


def scores(
    case: tuple[str, Array, Array, float], equal: bool, rng: np.random.Generator, shape: Any
) -> tuple[Array, Array]:
    """Scores of both policies, as steps done; those of the second are of the first if ``equal``."""
    _, better, worse, alike = case
    first, drawn = (rng.choice(len(better), shape, p=better) for _ in range(2))
    second = drawn if equal else rng.choice(len(worse), shape, p=worse)
    second = np.where(rng.random(shape) < alike, first, second)
    return first.astype(np.int8), second.astype(np.int8)


def nscore_looks(first: Array, second: Array, top: int, alpha: float) -> Array:
    """When N-SCORE says which of two policies scores higher, ``[races]`` from 1 (0: never).

    Each of two players bets, before each episode, the fraction that is best if scores are what the
    Dirichlet posteriors of both policies say, apart from each other; none, if the other policy is
    ahead. A side is decided when its capital reaches ``1 / alpha``. Scores are from 0 to ``top``.
    """
    races, episodes = first.shape
    log_gains = np.log1p(np.arange(-top, top + 1)[:, None] / top * FRACTIONS)
    counts = np.full((2, races, top + 1), 2 / (top + 1))
    capital, look = np.ones((2, races)), np.zeros(races, np.int64)
    active = np.arange(races)
    for at in range(episodes):
        one, other = counts / counts.sum(-1, keepdims=True)
        apart = np.zeros((len(active), 2 * top + 1))
        for score in range(top + 1):
            apart[:, score : score + top + 1] += one[:, score, None] * other[:, ::-1]
        ahead = (one - other) @ np.arange(top + 1.0)
        facing = np.where(ahead[:, None] > 0, apart, apart[:, ::-1])
        bet = FRACTIONS[(facing @ log_gains).argmax(1)] * (ahead != 0)
        found = (first[active, at] - second[active, at]) / top
        capital[0] *= np.where(ahead > 0, 1 + bet * found, 1)
        capital[1] *= np.where(ahead < 0, 1 - bet * found, 1)
        rows, ended = np.arange(len(active)), (capital >= 1 / alpha).any(0)
        counts[0][rows, first[active, at]] += 1
        counts[1][rows, second[active, at]] += 1
        look[active[ended]] = at + 1
        active, capital, counts = active[~ended], capital[:, ~ended], counts[:, ~ended]
    return look


def check_nscore() -> None:
    """Compare the looks of N-SCORE with those of its package, where that is installed."""
    if importlib.util.find_spec("nscore") is None:
        return
    from nscore.nonparametric_nsm import MirroredContinuousNsmTest
    from statistical_comparison_core import Decision, Hypothesis

    for case in (SCORED[0], SCORED[5], SCORED[7]):
        top = len(case[1]) - 1
        first, second = scores(case, False, np.random.default_rng(0), (2, 80))
        looks = []
        for one, other in zip(first / top, second / top, strict=True):
            test = MirroredContinuousNsmTest(
                Hypothesis.P0LessThanP1, ALPHA, np.linspace(0, 1, top + 1)
            )
            said = [test.step(*pair).decision for pair in zip(other, one, strict=True)]
            ends = [at for at, one in enumerate(said, 1) if one != Decision.FailToDecide]
            looks.append(ends[0] if ends else 0)
        assert looks == nscore_looks(first, second, top, ALPHA).tolist()


def nscore_row(races: int, number: int) -> list[str]:
    """Errors at every stop up to LOOKS where policies are equal, and episodes to a decision."""
    case, races = SCORED[number], min(races, 2000)
    top = len(case[1]) - 1
    errors, episodes = [], []
    for equal in (True, False):
        rng = np.random.default_rng([9, number, equal])
        longest = LOOKS * (5 if number == 2 and not equal else 1)
        first, second = scores(case, equal, rng, (races, longest))
        for look in (
            excluded((first - second) / top, 0.0, 1.0)[0],
            nscore_looks(first, second, top, ALPHA / 2),
            nscore_looks(first, second, top, ALPHA),
        ):
            errors += [percent((look > 0).mean())] * equal
            played = np.where(look == 0, longest, look)
            episodes += [f"{np.median(played):,.0f}, {played.mean():,.1f}"] * (not equal)
    return [case[0], *errors, *episodes]


HEADERS = {
    error_row: ["values, equal means", "a difference found"],
    truth_row: ["values", "true difference", "the sequence misses it", "said to be within it"],
    five_row: ["five policies", "anything wrong said", "ended", "episodes played, median"],
    binary_row: [
        "worse rate, d",
        "planned",
        "at d: median",
        "mean",
        "undecided",
        *(f"at {times:g} d" for times in TIMES[1:]),
    ],
    returns_row: [
        "deviation",
        "d",
        "planned",
        "at d: median",
        "mean",
        "undecided",
        *(f"at {times:g} d" for times in TIMES[1:]),
    ],
    bets_row: [
        "fractions",
        "rate 0.5, d = 0.05: at d",
        "d = 0.2: at d",
        "at 1.5 d",
        "deviation 0.2, d = 0.05: at d",
        "d = 0.1: at 2 d",
    ],
    others_row: [
        "rule",
        "races",
        "a difference found where there is none",
        "where means alone are equal",
        "undecided at d",
        *(f"at {times:g} d" for times in TIMES),
    ],
    nscore_row: [
        "scores of the two policies",
        *("error: a race", *NSCORE_RULES),
        *("episodes, median and mean: a race", *NSCORE_RULES),
    ],
}
TABLES: list[tuple[Callable[[int, Any], list[str] | None], Sequence[Any]]] = [
    (error_row, range(len(EQUAL))),
    (truth_row, range(len(DIFFERENT))),
    (five_row, range(len(FIVE))),
    (binary_row, range(len(BINARY))),
    (returns_row, range(len(RETURNS))),
    (others_row, ["a race", "AdaStop", "STEP"]),
    (nscore_row, range(len(SCORED))),
    (bets_row, list(BETS_TRIED)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--races", type=int, default=10_000, help="simulated races per cell")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    check()
    check_nscore()
    with ProcessPoolExecutor(arguments.processes) as pool:
        waiting = [
            (row, [pool.submit(row, arguments.races, case) for case in cases])
            for row, cases in TABLES
        ]
        for row, tasks in waiting:
            rows = [found for task in tasks if (found := task.result()) is not None]
            print(markdown(HEADERS[row], rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
