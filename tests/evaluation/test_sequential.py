"""The rule of races: its capital, its interval, its ends, and what it refuses."""

from __future__ import annotations

import numpy as np

from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.sequential import Rule, Standing


def successes(values: list[bool], first: int = 0) -> list[Episode]:
    return [Episode(first + i, 0, 0, success=value) for i, value in enumerate(values)]


def test_a_race_ends_when_the_better_policy_is_known() -> None:
    rng = np.random.default_rng(0)
    standing = Standing(Rule(("old", "new"), on="success"))
    while not standing.ended:
        chances = {"old": 0.3, "new": 0.7}
        standing.add(
            {
                name: successes((rng.random(10) < chances[name]).tolist(), standing.episodes)
                for name in standing.playing
            }
        )
    assert standing.playing == ("new",)
    assert standing.out == {"old": {"by": ["new"], "episodes": standing.episodes}}
    (pair,) = standing.outcome["pairs"]
    assert pair["decisions"] == ["worse"]
    assert pair["interval"][1] < 0
