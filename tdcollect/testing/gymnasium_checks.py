"""Checks of a gymnasium env; :func:`tdcollect.testing.check_env` runs them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from numbers import Real
from typing import Any

import numpy as np
from gymnasium import spaces

from tdcollect import keys
from tdcollect.checks.difference import first_divergence, mismatch
from tdcollect.checks.player import Env, GymnasiumPlayer, Row
from tdcollect.checks.registry import Failed, Skipped, check

GROUP = "gymnasium"


@check(GROUP, "episodes run: reset gives two values, step gives five")
def episodes_run(player: GymnasiumPlayer) -> str:
    lengths = [len(episode) - 1 for episode in player.episodes]
    return f"episodes of {', '.join(map(str, lengths))} steps"


@check(GROUP, "observations lie in the space")
def in_space(player: GymnasiumPlayer) -> str:
    count = 0
    for where, row in player.all_rows():
        _check_leaves(player.env.observation_space, row[keys.OBSERVATION], where, _why_outside)
        count += 1
    return f"{count} observations"


@check(GROUP, "the dtype is the space's")
def dtype(player: GymnasiumPlayer) -> str:
    for where, row in player.all_rows():
        _check_leaves(player.env.observation_space, row[keys.OBSERVATION], where, _why_other_dtype)
    return ""


@check(GROUP, "rewards are finite numbers")
def rewards(player: GymnasiumPlayer) -> str:
    rewards = [(where, row[keys.REWARD]) for where, row in player.all_rows() if not row.is_reset]
    for where, reward in rewards:
        single = isinstance(reward, np.ndarray) and reward.shape == ()
        if isinstance(reward, (bool, np.bool_)) or not (isinstance(reward, Real) or single):
            raise Failed(f"{where}: {type(reward).__name__} {reward!r}")
        if not np.isfinite(float(reward)):
            raise Failed(f"{where}: {reward}")
    values = [float(reward) for _, reward in rewards]
    return f"from {min(values):g} to {max(values):g}"


@check(GROUP, "terminated and truncated are bools")
def flags(player: GymnasiumPlayer) -> str:
    for where, row in player.all_rows():
        for name, flag in (
            ("terminated", row[keys.TERMINATED]),
            ("truncated", row[keys.TRUNCATED]),
        ):
            if not isinstance(flag, (bool, np.bool_)):
                raise Failed(f"{where}: {name} is {type(flag).__name__} {flag!r}")
    return ""


@check(GROUP, "the same seed gives the same episode")
def _same_seed(player: GymnasiumPlayer) -> str:
    episodes = [player.play_another(player.seed) for _ in range(2)]
    _check_same(*episodes)
    whose = "the same env" if player.make is None else "two new envs"
    return f"{len(episodes[0]) - 1} steps of {whose}"


@check(GROUP, "another seed gives another episode")
def _other_seed(player: GymnasiumPlayer) -> str:
    first, *others = ([player.play_another(player.seed + i)] for i in range(3))
    if not any(first_divergence(0, first, other) for other in others):
        raise Failed(
            f"seeds {player.seed} to {player.seed + 2} give one and the same; if the env leaves "
            "nothing to chance, skip this rule"
        )
    return f"seeds {player.seed} to {player.seed + 2}"


@check(GROUP, "reset(seed) does not depend on what went before")
def _fresh_reset(player: GymnasiumPlayer) -> str:
    env = player.another()
    try:
        first = player.play(env, player.seed)
        # Leave one episode unfinished: its state must not show either.
        unfinished = player.rows(env, player.seed + 1)
        for _ in range(3):
            next(unfinished, None)
        _check_same(first, player.play(env, player.seed))
    finally:
        player.done_with(env)
    return "after an episode that ended and one that did not"


@check(GROUP, "envs do not share state")
def _apart(player: GymnasiumPlayer) -> str:
    if player.make is None:
        raise Skipped("needs a callable that makes the env, rather than an env")
    envs = [player.make() for _ in range(4)]
    try:
        alone, again = (player.play(env, player.seed) for env in envs[:2])
        if first_divergence(0, [alone], [again]):
            raise Skipped("two new envs differ under one seed as it is")
        beside = _forever(player, envs[3], player.seed + 1)
        turns = zip(player.rows(envs[2], player.seed), beside, strict=False)
        _check_same(alone, [row for row, _ in turns])
    finally:
        for env in envs:
            env.close()
    return "two envs stepped in turn"


def _forever(player: GymnasiumPlayer, env: Env, seed: int) -> Iterator[Row]:
    while True:
        yield from player.rows(env, seed)


@check(GROUP, "the final observation is not the next episode's first")
def final(player: GymnasiumPlayer) -> str:
    telling = [(seed, episode) for seed, episode in player.ended if not _is_constant(episode)]
    if not telling:
        raise Skipped("all observations of an episode are equal")
    if all(_is_first_of_next(player, seed, episode) for seed, episode in telling):
        seed, episode = telling[0]
        final = _show(episode[-1][keys.OBSERVATION])
        raise Failed(f"{final} ended the episode of seed {seed} and began the one after it")
    return f"{len(telling)} episodes that ended"


def _is_constant(episode: list[Row]) -> bool:
    first = episode[0][keys.OBSERVATION]
    return all(_are_same(row[keys.OBSERVATION], first) for row in episode)


def _are_same(first: Any, second: Any) -> bool:
    return mismatch("", first, second) is None


def _is_first_of_next(player: GymnasiumPlayer, seed: int, episode: list[Row]) -> bool:
    """Return whether the env restarted by itself: its last observation is an episode's first."""
    final = episode[-1][keys.OBSERVATION]
    # The first observation after a reset at the end, and after a reset right at the start.
    player.play(player.env, seed)
    after_end = deepcopy(player.env.reset()[0])
    player.env.reset(seed=seed)
    at_once = deepcopy(player.env.reset()[0])
    return _are_same(final, after_end) or _are_same(final, at_once)


@check(GROUP, "entries given out do not change later (no aliasing)")
def no_aliasing(player: GymnasiumPlayer) -> str:
    for where, row in player.all_rows():
        observation, info = row.given[0], row.given[-1]
        pairs = {"observation": (row[keys.OBSERVATION], observation), "info": (row.extra, info)}
        for name, (then, now) in pairs.items():
            found = mismatch(name, then, now)
            if found:
                raise Failed(f"{where}: the {name} was changed after it was given out: {found}")
    return ""


@check(GROUP, "a step leaves its action as it was")
def action_kept(player: GymnasiumPlayer) -> str:
    env = player.env
    actions = deepcopy(env.action_space)
    actions.seed(player.seed)
    observation, _ = env.reset(seed=player.seed)
    for step in range(min(player.max_episode_steps, 20)):
        action = actions.sample() if player.policy is None else player.policy(observation)
        before = deepcopy(action)
        observation, _, terminated, truncated, _ = env.step(action)
        found = mismatch("action", before, action)
        if found:
            raise Failed(f"step {step}: {found}")
        if terminated or truncated:
            break
    return ""


@check(GROUP, "close can be called twice")
def _close_twice(player: GymnasiumPlayer) -> str:
    player.close()
    player.env.close()
    return ""


def _check_same(first: list[Row], second: list[Row]) -> None:
    found = first_divergence(0, [first], [second])
    if found is None:
        return
    if found.entry == "length":
        raise Failed(f"one lasts {found.first} steps, the other {found.second}")
    raise Failed(f"step {found.step}: {found.mismatch}")


def _show(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _check_leaves(
    space: spaces.Space[Any],
    value: Any,
    where: str,
    why: Callable[[spaces.Space[Any], Any], str | None],
) -> None:
    """Walk a value along its space; ``why`` returns the reason that a leaf is wrong, or None."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            got = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise Failed(f"{where}: expected a dict of {sorted(space.spaces)}, got {got}")
        for name, part in space.spaces.items():
            _check_leaves(part, value[name], f"{where}, {name!r}", why)
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            raise Failed(f"{where}: expected a tuple of {len(space.spaces)}, got {_show(value)}")
        for i, part in enumerate(space.spaces):
            _check_leaves(part, value[i], f"{where}, item {i}", why)
    else:
        reason = why(space, value)
        if reason:
            raise Failed(f"{where}: {reason}")


def _why_outside(space: spaces.Space[Any], value: Any) -> str | None:
    if not isinstance(space, spaces.Box):
        return None if space.contains(value) else f"{_show(value)} is not in {space}"
    array = np.asarray(value)
    if array.shape != space.shape:
        return f"expected shape {space.shape}, got {array.shape}"
    # Written so that NaN is outside.
    outside = ~((array >= space.low) & (array <= space.high))
    if outside.any():
        at = tuple(np.argwhere(outside)[0].tolist())
        low, high = (np.broadcast_to(bound, array.shape)[at] for bound in (space.low, space.high))
        return f"{array[at]} at {list(at)} is not in [{low}, {high}]"
    return None


def _why_other_dtype(space: spaces.Space[Any], value: Any) -> str | None:
    if isinstance(space, spaces.Discrete):
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        return (
            None
            if is_integer
            else f"expected an integer, got {type(value).__name__} {_show(value)}"
        )
    if space.dtype is None or np.dtype(space.dtype).kind not in "biufc":
        return None  # Text, say: no array of numbers, and the space itself knows its values
    if not isinstance(value, (np.ndarray, np.generic)):
        return f"expected an array of {space.dtype}, got {type(value).__name__}"
    return None if value.dtype == space.dtype else f"expected {space.dtype}, got {value.dtype}"
