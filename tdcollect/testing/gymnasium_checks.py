"""Checks of a gymnasium env; :func:`tdcollect.testing.check_env` runs them all."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from numbers import Real
from typing import Any

import numpy as np
from gymnasium import spaces

from tdcollect import keys
from tdcollect.checks.difference import first_divergence, mismatch, short
from tdcollect.checks.player import GymnasiumPlayer, Row
from tdcollect.checks.registry import Failed, Skipped, check
from tdcollect.testing.seed_checks import (
    FRESH_RESET,
    OTHER_SEED,
    SAME_SEED,
    check_same,
    fresh_reset,
    other_seed,
    same_seed,
)

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
    values = []
    for where, row in player.all_rows():
        if row.is_reset:
            continue
        reward = row[keys.REWARD]
        single = isinstance(reward, np.ndarray) and reward.shape == ()
        if isinstance(reward, (bool, np.bool_)) or not (isinstance(reward, Real) or single):
            raise Failed(f"{where}: {type(reward).__name__} {reward!r}")
        if not np.isfinite(float(reward)):
            raise Failed(f"{where}: {reward}")
        values.append(float(reward))
    return f"from {min(values):g} to {max(values):g}"


@check(GROUP, "terminated and truncated are bools")
def flags(player: GymnasiumPlayer) -> str:
    for where, row in player.all_rows():
        for name in (keys.TERMINATED, keys.TRUNCATED):
            if not isinstance(row[name], (bool, np.bool_)):
                raise Failed(f"{where}: {name} is {type(row[name]).__name__} {row[name]!r}")
    return ""


check(GROUP, SAME_SEED)(same_seed)
check(GROUP, OTHER_SEED)(other_seed)
check(GROUP, FRESH_RESET)(fresh_reset)


@check(GROUP, "envs do not share state")
def _apart(player: GymnasiumPlayer) -> str:
    if player.make is None:
        raise Skipped("needs a callable that makes the env, rather than an env")
    envs = [player.make() for _ in range(4)]
    try:
        alone, again = (player.play(env, player.seed) for env in envs[:2])
        if first_divergence(0, [alone], [again]):
            raise Skipped("two new envs differ under one seed")
        beside = player.forever(envs[3], player.seed + 1, later_seed=player.seed + 1)
        turns = zip(player.rows(envs[2], player.seed), beside, strict=False)
        check_same(alone, [row for row, _ in turns])
    finally:
        for env in envs:
            env.close()
    return "two envs stepped in turn"


@check(GROUP, "the final observation is not the next episode's first")
def final(player: GymnasiumPlayer) -> str:
    varied = [(seed, episode) for seed, episode in player.ended if not _is_constant(episode)]
    if not varied:
        raise Skipped("all observations of an episode are equal")
    if all(_is_first_of_next(player, seed, episode) for seed, episode in varied):
        seed, episode = varied[0]
        final = short(episode[-1][keys.OBSERVATION])
        raise Failed(f"{final} ended the episode of seed {seed} and began the one after it")
    return f"{len(varied)} episodes that ended"


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
            raise Failed(f"{where}: expected a tuple of {len(space.spaces)}, got {short(value)}")
        for i, part in enumerate(space.spaces):
            _check_leaves(part, value[i], f"{where}, item {i}", why)
    else:
        reason = why(space, value)
        if reason:
            raise Failed(f"{where}: {reason}")


def _why_outside(space: spaces.Space[Any], value: Any) -> str | None:
    if not isinstance(space, spaces.Box):
        return None if space.contains(value) else f"{short(value)} is not in {space}"
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
            else f"expected an integer, got {type(value).__name__} {short(value)}"
        )
    if space.dtype is None or np.dtype(space.dtype).kind not in "biufc":
        return None  # Text, say: no array of numbers, and the space itself knows its values
    if not isinstance(value, (np.ndarray, np.generic)):
        return f"expected an array of {space.dtype}, got {type(value).__name__}"
    return None if value.dtype == space.dtype else f"expected {space.dtype}, got {value.dtype}"
