"""Round robins: policies play each other on both sides of the same episodes; a table of strengths.

Each pair plays every episode twice, with sides swapped: neither the start of an episode nor the
better side favours one of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np

from tdcollect import check
from tdcollect.display import Table, count_text, one_line, percent_text
from tdcollect.evaluation import statistics
from tdcollect.evaluation.episodes.groups import of_groups
from tdcollect.evaluation.episodes.measures import KINDS
from tdcollect.evaluation.evaluate import evaluate
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.statistics import Interval, Values
from tdcollect.files import check_output, distinct_names, folder_name
from tdcollect.packages import extra_module
from tdcollect.policies import recognized

ELO = 400 / math.log(10)
"""Points of Elo's scale for a difference of 1 in log-odds: 400 points are odds of 10 to 1."""
RESAMPLES = 2000


def bradley_terry(points: Any, games: Any, sides: Any, prior: Any = 1.0) -> Values:
    """Return the log-strengths ``[..., K]`` of policies, whose mean is zero.

    A policy i is taken to beat j with the probability ``1 / (1 + exp(s_j - s_i))``, and a draw to
    be half a win of each (Bradley and Terry, *Rank Analysis of Incomplete Block Designs*,
    Biometrika 39, 1952). The likelihood is concave; Newton's method finds its maximum. Games alone
    may have none (Hunter, *MM Algorithms for Generalized Bradley-Terry Models*, Annals of
    Statistics 32, 2004): with ``prior`` draws more in each pair there is one.

    Args:
        points: of the first policy of each pair, ``[..., P]``.
        games: of each pair, ``[..., P]``.
        sides: 1 at the first policy of each pair, and -1 at the second, ``[P, K]``.
        prior: the draws that are added to each pair, above 0; a number, or of each pair.
    """
    won, played = points + prior / 2, games + prior
    strengths = np.zeros((*won.shape[:-1], sides.shape[1]))
    for _ in range(200):
        expected = 1 / (1 + np.exp(-(strengths @ sides.T)))
        slope = (won - played * expected) @ sides
        weights = played * expected * (1 - expected)
        # Games leave the sum of strengths free: the 1 keeps it at zero.
        curvature = np.einsum("...p,pk,pl->...kl", weights, sides, sides) + 1
        step = np.linalg.solve(curvature, slope[..., None])[..., 0]
        largest = np.abs(step).max(-1, keepdims=True)
        strengths = strengths + step / np.maximum(largest, 1)  # so as not to overshoot
        if largest.max() < 1e-9:
            return strengths - strengths.mean(-1, keepdims=True)
    raise RuntimeError(f"expected strengths to converge, got a last step of {largest.max():g}")


class RoundRobinResult(Table):
    """The result of a round robin; print it to see the table.

    Attributes:
        names: the policies, the strongest first.
        elo: their strengths on Elo's scale, with a mean of 0.
        intervals: of these, as :meth:`difference` has them.
        counts: the games that each policy won, drew and lost.
        left_out: the pairs of games that do not count, as one of the two did not complete.
        results: the evaluation of each match, by the policies on the two sides.
        groups: the two sides.
        on, paired, confidence: as for :func:`round_robin`.
    """

    def __init__(
        self,
        results: Mapping[tuple[str, str], EvaluationResult],
        groups: Sequence[str],
        on: str = "return",
        paired: bool = False,
        confidence: float = 0.95,
    ):
        self.results, self.groups, self.on = dict(results), (*groups,), on
        self.paired, self.confidence = paired, confidence
        names = [*dict.fromkeys(name for match in results for name in match)]
        sides = np.array([one - other for one, other in combinations(np.eye(len(names)), 2)])
        ahead = np.array([self._ahead(*pair) for pair in combinations(names, 2)])
        scored = (1 + np.sign(ahead.sum(-1, keepdims=True) if paired else ahead)) / 2
        counted = np.isfinite(scored).all(-1)
        games, points = float(scored.shape[-1]) * counted, np.where(counted, scored.sum(-1), 0)
        self.left_out, self._episodes = int((~counted).sum()), counted.shape[1]
        strengths = bradley_terry(points.sum(1), games.sum(1), sides)
        even, rng = np.full(self._episodes, 1 / self._episodes), statistics.generator(0)
        # An episode is drawn for all pairs together: its start is the same for all. The added draws
        # vary, too: else a policy that wins every game would seem to have a strength well known.
        times = rng.multinomial(self._episodes, even, RESAMPLES)
        prior = rng.exponential(size=(RESAMPLES, len(sides)))
        again = bradley_terry(times @ points.T, times @ games.T, sides, prior)
        self.names = [names[k] for k in np.argsort(-strengths, kind="stable")]
        self._drawn = {name: ELO * again[:, k] for k, name in enumerate(names)}
        self.elo = {name: float(ELO * strengths[names.index(name)]) for name in self.names}
        self.intervals = {name: self.difference(name)[1] for name in self.names}
        outcomes = [(scored == value) & counted[..., None] for value in (1, 0.5, 0)]
        won, drawn, lost = (outcome.sum((1, 2)) for outcome in outcomes)
        first, second = sides == 1, sides == -1
        table = np.array(
            [won @ first + lost @ second, drawn @ (first | second), lost @ first + won @ second]
        )
        self.counts = {name: table[:, names.index(name)].tolist() for name in self.names}

    def _ahead(self, name: str, other: str) -> Values:
        """By how much a policy is ahead of another on both sides, ``[E, 2]``; NaN if unknown."""
        found = []
        for match, sign in ((name, other), 1), ((other, name), -1):
            values = [
                [record.numbers.get(f"{self.on}/{group}") for group in self.groups]
                for record in self.results[match].episodes
            ]
            first, second = np.array(values, np.float64).T
            found.append(sign * (first - second))
        return np.stack(found, -1)

    def difference(self, name: str, other: str | None = None) -> tuple[float, Interval | None]:
        """Return the strength of a policy minus another's, or the mean, with its interval.

        The interval is that of Student's t, with the bootstrap's standard error over episodes; None
        where nothing varies: for a single episode, or if all games were drawn.
        """
        value, drawn = self.elo[name], self._drawn[name]
        if other is not None:
            value, drawn = value - self.elo[other], drawn - self._drawn[other]
        if self._episodes < 2 or drawn.std() < 1e-6:
            return value, None
        freedom = self._episodes - 1
        stats = extra_module("scipy.stats", "a round robin")
        reach = stats.t.ppf(0.5 + self.confidence / 2, freedom) * drawn.std()
        reach *= math.sqrt(self._episodes / freedom)
        return value, Interval(float(value - reach), float(value + reach))

    def header(self) -> list[str]:
        interval = f"{percent_text(self.confidence)} interval"
        return ["", "games", "won", "drawn", "lost", "score", "Elo", interval]

    def rows(self) -> list[list[str]]:
        """Return a row for each policy, the strongest first."""
        rows = []
        for name in self.names:
            (won, drawn, lost), found = self.counts[name], self.intervals[name]
            games = won + drawn + lost
            score = f"{(won + drawn / 2) / games:.1%}" if games else "-"
            interval = "-" if found is None else f"[{found.low:.0f}, {found.high:.0f}]"
            counts = [f"{count:.0f}" for count in (games, won, drawn, lost)]
            rows.append([name, *counts, score, f"{self.elo[name]:.0f}", interval])
        return rows

    def notes(self) -> list[str]:
        what = f"sum of {self.on}s over both sides" if self.paired else f"{self.on} of a group"
        found = [
            f"A game is won by the higher {what}. Elo: 400 points are odds of 10 to 1, and the "
            "mean is 0. One draw is added to each pair, so that strengths are finite."
        ]
        for name, (won, drawn, lost) in self.counts.items():
            if not drawn and 0 in (won, lost):
                what = f"{name} {'won' if won else 'lost'} every game"
                found.append(f"{what}: its strength follows from the added draws.")
        if self.left_out:
            pairs = count_text(self.left_out, "pair")
            found.append(f"{pairs} of games without outcome are left out.")
        if self._episodes < statistics.FEW:
            few = f"fewer than {statistics.FEW} episodes"
            found.append(f"Intervals of {few} hold the truth less often than they say.")
        return found

    def _head(self) -> str:
        env = next(iter(self.results.values())).manifest["env"]["id"]
        episodes = count_text(self._episodes, "episode")
        return f"{env}: {count_text(len(self.names), 'policy')}, {episodes} on both sides"

    def __repr__(self) -> str:
        return one_line(self, self._head(), *self.names)


def round_robin(
    env: str | Callable[..., Any],
    policies: Mapping[str, Any],
    groups: Sequence[str],
    *,
    on: str = "return",
    paired: bool = False,
    confidence: float = 0.95,
    output_dir: str | os.PathLike[str] | None = None,
    **how: Any,
) -> RoundRobinResult:
    """Have each pair of policies play the same episodes on both sides; find their strengths.

    With ``output_dir``, the same call resumes a round robin, and one with more policies runs their
    matches alone: each match is an evaluation, in ``FIRST/SECOND`` after its sides.

    Args:
        env: a function that makes an env with two groups of agents.
        policies: two or more, by name: each is a policy of a group that can play both, or one for
            each, ``{"red": a, "blue": b}``; None for random actions.
        groups: the two groups.
        on: the number of a group that decides a game: ``"return"``, ``"length"``, ``"success"``.
        paired: a game is an episode on both sides, and the sums over both decide. So it should be
            where sides are unlike: else one of them wins, whoever plays it.
        confidence: of intervals.
        output_dir: the directory of the round robin.
        how: as for :func:`tdcollect.evaluate`: ``episodes``, ``seed``, ``workers`` and so on.

    Raises:
        TypeError, ValueError: as :func:`tdcollect.evaluate`, and for anything but two groups.
        NotReproducibleError, RuntimeError: as :func:`tdcollect.evaluate`.

    Examples:
        >>> result = round_robin(make_env, {"old": a, "new": b, "random": None}, ("red", "blue"))
        >>> print(result)
    """
    if not isinstance(policies, Mapping) or len(policies) < 2:
        raise ValueError(f"expected two policies or more, by name, got {policies!r}")
    named = isinstance(groups, (tuple, list)) and [*map(type, groups)] == [str, str]
    if not named or groups[0] == groups[1]:
        raise ValueError(f"expected two groups of agents that play each other, got {groups!r}")
    if given := how.keys() & {"policy", "shard"}:
        raise TypeError(f"expected whole matches of policies={{...}}, got {', '.join(given)}=")
    check.one_of(KINDS, on=on)
    check.bools(paired=paired)
    check.share(confidence=confidence)
    distinct_names([folder_name(name, "name of a policy") for name in policies], "policies")
    if output_dir is not None:
        check_output(Path(output_dir), "a round robin", policies)
    if on != "return":
        wanted = {f"{on}/{group}": f"{on}/{group}" for group in groups}
        how["metrics"] = {**wanted, **(how.get("metrics") or {})}
    for name, one in policies.items():
        if isinstance(one, Mapping) and one.keys() != {*groups}:
            raise ValueError(f"expected {name!r} to be by group, {[*groups]}, got {[*one]}")
    acting = {}  # all of them, before a match is played
    for match in permutations(policies, 2):
        sides = zip(groups, map(policies.__getitem__, match), strict=True)
        parts = {g: one[g] if isinstance(one, Mapping) else one for g, one in sides}
        acting[match] = of_groups(recognized(parts))
    folders = {match: output_dir and Path(output_dir, *match) for match in acting}
    results = {m: evaluate(env, acting[m], output_dir=folders[m], **how) for m in acting}
    return RoundRobinResult(results, groups, on, paired, confidence)
