"""Checks that a seed decides an episode, for gymnasium and TorchRL envs alike."""

from __future__ import annotations

from typing import Any

from tdcollect.checks.difference import first_divergence
from tdcollect.checks.player import Player, Row
from tdcollect.checks.registry import Failed

SAME_SEED = "the same seed gives the same episode"
OTHER_SEED = "another seed gives another episode"
FRESH_RESET = "reset(seed) does not depend on what went before"


def same_seed(player: Player[Any]) -> str:
    """Play two new envs on one seed."""
    first, second = (player.play_another(player.seed) for _ in range(2))
    check_same(first, second)
    whose = "the same env" if player.make is None else "two new envs"
    return f"{_steps(first)} steps of {whose}"


def other_seed(player: Player[Any]) -> str:
    """Play new envs on three seeds."""
    first, *others = ([player.play_another(player.seed + i)] for i in range(3))
    if not any(first_divergence(player.seed, first, other) for other in others):
        raise Failed(
            f"seeds {player.seed} to {player.seed + 2} give one and the same; if the env leaves "
            "nothing to chance, skip this rule"
        )
    return f"seeds {player.seed} to {player.seed + 2}"


def fresh_reset(player: Player[Any]) -> str:
    """Play one env twice on one seed, with an unfinished episode in between."""
    env = player.another()
    try:
        first = player.play(env, player.seed)
        player.leave_unfinished(env, player.seed + 1)
        check_same(first, player.play(env, player.seed))
    finally:
        player.done_with(env)
    return "after episodes that ended and some that did not"


def check_same(first: list[Row], second: list[Row]) -> None:
    """Raise ``Failed`` with the first difference of two episodes, if they differ."""
    found = first_divergence(0, [first], [second])
    if found is None:
        return
    if found.entry == "length":
        raise Failed(f"one lasts {_steps(first)} steps, the other {_steps(second)}")
    raise Failed(f"step {found.step}: {found.mismatch}")


def _steps(episode: list[Row]) -> int:
    return sum(not row.is_reset for row in episode)
