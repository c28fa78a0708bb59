"""Round robins: games on both sides of the same episodes, and the strengths that they show."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.optimize import minimize

from tdcollect import env_seed
from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.round_robin import (
    ELO,
    RoundRobinResult,
    bradley_terry,
    round_robin,
)
from tdcollect.policies import from_function

from .torchrl_envs import Teams, teams

pytestmark = pytest.mark.usefixtures("small_reports")
SIDES = ("red", "blue")


def signs(count: int) -> Any:
    eye = np.eye(count)
    return np.array([eye[i] - eye[j] for i, j in combinations(range(count), 2)])


def test_strengths_are_the_most_likely_ones() -> None:
    """By a general optimiser, and by the iteration of Hunter's (2004), equation 3."""
    rng = np.random.default_rng(0)
    games, sides = np.array([9.0, 30.0, 4.0, 7.0, 0.0, 12.0]), signs(4)
    points = np.floor(2 * rng.random((3, 6)) * games) / 2

    def loss(strengths: Any, won: Any) -> float:
        gaps = sides @ strengths
        likely = (won + 0.5) @ np.logaddexp(0, -gaps) + (games - won + 0.5) @ np.logaddexp(0, gaps)
        return float(likely + strengths.sum() ** 2)

    found = bradley_terry(points, games, sides)
    for won, strengths in zip(points, found, strict=True):
        assert strengths.sum() == pytest.approx(0, abs=1e-12)
        best = minimize(loss, np.zeros(4), (won,), method="BFGS", options={"gtol": 1e-8})
        assert strengths == pytest.approx(best.x, abs=1e-5)
        total = np.maximum(sides, 0).T @ (won + 0.5) + np.maximum(-sides, 0).T @ (games - won + 0.5)
        skill = np.ones(4)
        for _ in range(3000):
            rates = (games + 1) / (np.abs(sides) @ skill)
            skill = total / (np.abs(sides).T @ rates)
        assert strengths == pytest.approx(np.log(skill) - np.log(skill).mean(), abs=1e-6)
    # Two policies: the log-odds of the games and the added draw.
    first, second = bradley_terry(np.array([7.5]), np.array([10.0]), signs(2))
    assert first - second == pytest.approx(np.log(8 / 3))


def pushes(by: float) -> Any:
    return from_function(lambda seen: np.full((len(seen), 1), by, np.float32))


POLICIES = {"even": pushes(0.0), "strong": pushes(0.7)}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RoundRobinResult:
    folder = tmp_path_factory.mktemp("robin") / "all"
    return round_robin(
        teams, POLICIES, SIDES, episodes=12, seed=3, output_dir=folder, progress=False
    )


def test_each_pair_plays_both_sides_of_the_same_episodes(played: RoundRobinResult) -> None:
    assert {*played.results} == {*permutations(POLICIES, 2)}
    for (first, second), result in played.results.items():
        assert [e.env_seed for e in result.episodes] == [env_seed(3, n) for n in range(12)]
        back = played.results[second, first]
        gained = POLICIES[first].source(np.zeros((1, 2)))[0, 0] * 4  # in four steps
        lost = POLICIES[second].source(np.zeros((1, 2)))[0, 0] * 4
        change = result.group_returns["red/reward"] - back.group_returns["red/reward"]
        assert change == pytest.approx(np.full(12, gained - lost), abs=1e-5)


def test_the_table_counts_the_games_of_the_ledgers(played: RoundRobinResult) -> None:
    counts = {name: [0, 0, 0] for name in POLICIES}
    for (first, second), result in played.results.items():
        returns = result.group_returns
        for red, blue in zip(returns["red/reward"], returns["blue/reward"], strict=True):
            counts[first][0 if red > blue else 2] += 1
            counts[second][0 if blue > red else 2] += 1
    assert played.counts == counts
    assert played.names == ["strong", "even"]
    text = str(played)
    assert text.splitlines()[0] == "Teams: 2 policies, 12 episodes on both sides"
    assert "95% interval" in text
    for name in POLICIES:
        interval = played.intervals[name]
        assert interval is not None
        assert interval.low < played.elo[name] < interval.high
    value, interval = played.difference("strong", "even")
    assert value == pytest.approx(played.elo["strong"] - played.elo["even"])
    assert interval is not None
    assert interval.low < value < interval.high


def test_the_same_call_runs_nothing_again_and_further_policies_their_matches_alone(
    played: RoundRobinResult,
) -> None:
    folder = played.results["strong", "even"].directory
    assert folder is not None
    root = folder.parents[1]
    before = {path: path.stat().st_mtime_ns for path in root.glob("*/*/episodes.jsonl")}
    run = partial(round_robin, teams, groups=SIDES, episodes=12, seed=3, progress=False)
    assert str(run(POLICIES, output_dir=root)) == str(played)
    more = run({**POLICIES, "same": POLICIES["even"]}, output_dir=root)
    assert len(more.results) == 6
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(ValueError, match=r"policy\.groups"):
        run({**POLICIES, "same": pushes(-0.4)}, output_dir=root)
    # Two names of one policy win and lose alike.
    assert more.elo["even"] == pytest.approx(more.elo["same"])


def test_one_that_wins_every_game_has_a_wide_interval() -> None:
    policies = {"wins": pushes(99.0), "even": pushes(0.0), "weak": pushes(-0.2)}
    found = round_robin(teams, policies, SIDES, episodes=8, progress=False)
    assert found.counts["wins"] == [32, 0, 0]
    value, interval = found.difference("wins", "even")
    assert interval is not None
    # 16 games won are likely, with 2.5 %, for odds of 3.9 to 1: more must not be claimed.
    assert interval.low < ELO * np.log(3.9) < value
    assert "wins won every game: its strength follows from the added draws" in str(found)
    assert bradley_terry(np.full(3, 1e6), np.full(3, 1e6), signs(3)).max() < 20


class Falls(Teams):
    """The teams, whose third and later episodes may fail by the sign of what red sees."""

    def _step(self, tensordict: Any) -> Any:
        if tensordict["red", "observation"][0, 0] > 1.5:
            raise RuntimeError("fell")
        return super()._step(tensordict)


def test_games_that_fail_are_left_out_with_their_other_side() -> None:
    policies = {"a": {"red": pushes(0.1), "blue": pushes(0.2)}, "b": None}
    found = round_robin(Falls, policies, SIDES, episodes=12, max_restarts=0, progress=False)
    ended = [{e.index for e in r.episodes if e.completed} for r in found.results.values()]
    both = len(ended[0] & ended[1])
    assert 0 < both < 12
    assert found.left_out == 12 - both
    assert sum(found.counts["a"]) == 2 * both
    assert "pairs of games without outcome are left out" in str(found)


def test_pairs_of_games_are_decided_by_their_sums(played: RoundRobinResult) -> None:
    paired = RoundRobinResult(played.results, SIDES, paired=True)
    # Whatever the start, who pushes more has more on both sides together.
    assert paired.counts == {"strong": [12, 0, 0], "even": [0, 0, 12]}
    assert "the higher sum of returns over both sides" in str(paired)


def test_lengths_may_decide() -> None:
    found = round_robin(teams, {"a": None, "b": None}, SIDES, on="length", episodes=3)
    assert found.counts == {"a": [0, 6, 0], "b": [0, 6, 0]}  # both groups end after four steps
    assert found.difference("a", "b") == (pytest.approx(0), None)  # which nothing bounds


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"policies": {"a": None}}, "two policies or more"),
        ({"groups": ("red",)}, "two groups of agents that play each other"),
        ({"groups": ("red", "green")}, "got one of green"),
        ({"on": "steps"}, "'return', 'length' or 'success'"),
        ({"confidence": 95}, "confidence"),
        ({"policies": {"a/b": None, "c": None}}, "name of a policy"),
        ({"episode": 4}, "did you mean episodes"),
        ({"policies": {"a": {"red": None}, "b": None}}, "'a' to be by group, .* got .'red'"),
        ({"policies": {"a": None, "b": None, "c": 7}, "env": 0}, "policy of group 'blue'"),
        ({"groups": None}, "two groups of agents that play each other"),
        ({"shard": (0, 2)}, "whole matches of policies={...}, got shard="),
    ],
)
def test_what_cannot_be_played_is_refused(change: dict[str, Any], match: str) -> None:
    asked: dict[str, Any] = {"policies": {"a": None, "b": None}, "groups": SIDES, **change}
    with pytest.raises((TypeError, ValueError), match=match):
        round_robin(**{"env": teams, "episodes": 2, "progress": False, **asked})


class Ledger(NamedTuple):
    """The records of a match, in the place of its evaluation."""

    episodes: list[Episode]


def simulated(strengths: Any, episodes: int, rng: Any) -> Mapping[tuple[str, str], Any]:
    """Matches with the chances of the model, and with starts that favour some policies together."""
    liking = rng.normal(0, 0.5, (episodes, len(strengths)))
    found = {}
    for i, j in permutations(range(len(strengths)), 2):
        gap = strengths[i] - strengths[j] + liking[:, i] - liking[:, j]
        won = rng.random(episodes) < 1 / (1 + np.exp(-gap))
        found[f"{i}", f"{j}"] = Ledger(
            [
                Episode(n, 0, 0, group_returns={"red/reward": float(w), "blue/reward": 0.5})
                for n, w in enumerate(won)
            ]
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("episodes", [20, 60])
@pytest.mark.parametrize("strengths", [(0, 0, 0, 0), (1, 0.3, -0.3, -1)])
def test_intervals_hold_the_truth_as_often_as_they_say(strengths: Any, episodes: int) -> None:
    rng, inside = np.random.default_rng(1), []
    # Strengths are those of a game whose start nobody knows: found with very many episodes.
    many = RoundRobinResult(simulated(np.array(strengths), 10_000, rng), SIDES)
    for _ in range(120):
        found = RoundRobinResult(simulated(np.array(strengths), episodes, rng), SIDES)
        for name, interval in found.intervals.items():
            assert interval is not None
            inside.append(interval.low <= many.elo[name] <= interval.high)
    assert 0.92 < np.mean(inside) < 0.98
    assert max(map(abs, many.elo.values())) < 1.2 * ELO
