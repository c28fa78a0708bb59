"""The rules of :func:`tdcollect.testing.check_env` for a gymnasium env.

Each is a function of a :class:`Probe` that returns its evidence, raises ``Broken`` with it, or
raises ``NotChecked`` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from numbers import Real
from typing import Any

import numpy as np
from gymnasium import spaces

from tdcollect.testing.gymnasium_probe import Env, Probe, Row
from tdcollect.testing.report import Broken, NotChecked, array_difference
from tdcollect.testing.rules import Rules

RULES: Rules[Probe] = Rules()
"""The rules by their sentences, in the order in which they are tried."""


def _rows(probe: Probe) -> Iterator[tuple[str, Row]]:
    for i, episode in enumerate(probe.episodes):
        for step, row in enumerate(episode):
            yield f"seed {probe.seed + i}, step {step}", row


@RULES.add("episodes run: reset gives two values, step gives five")
def _episodes_run(probe: Probe) -> str:
    lengths = [len(episode) - 1 for episode in probe.episodes]
    return f"episodes of {', '.join(map(str, lengths))} steps"


@RULES.add("observations lie in the space")
def _in_space(probe: Probe) -> str:
    count = 0
    for where, row in _rows(probe):
        _check_leaves(probe.env.observation_space, row.observation, where, _why_outside)
        count += 1
    return f"{count} observations"


@RULES.add("the dtype is the space's")
def _dtype(probe: Probe) -> str:
    for where, row in _rows(probe):
        _check_leaves(probe.env.observation_space, row.observation, where, _why_other_dtype)
    return ""


@RULES.add("rewards are finite numbers")
def _rewards(probe: Probe) -> str:
    rewards = [(where, row.reward) for where, row in _rows(probe) if not row.is_reset]
    for where, reward in rewards:
        single = isinstance(reward, np.ndarray) and reward.shape == ()
        if isinstance(reward, (bool, np.bool_)) or not (isinstance(reward, Real) or single):
            raise Broken(f"{where}: {type(reward).__name__} {reward!r}")
        if not np.isfinite(float(reward)):
            raise Broken(f"{where}: {reward}")
    values = [float(reward) for _, reward in rewards]
    return f"from {min(values):g} to {max(values):g}"


@RULES.add("terminated and truncated are bools")
def _flags(probe: Probe) -> str:
    for where, row in _rows(probe):
        for name, flag in (("terminated", row.terminated), ("truncated", row.truncated)):
            if not isinstance(flag, (bool, np.bool_)):
                raise Broken(f"{where}: {name} is {type(flag).__name__} {flag!r}")
    return ""


@RULES.add("the same seed gives the same episode")
def _same_seed(probe: Probe) -> str:
    episodes = [probe.play_anew(probe.seed) for _ in range(2)]
    _check_same(*episodes)
    whose = "the same env" if probe.make is None else "two new envs"
    return f"{len(episodes[0]) - 1} steps of {whose}"


@RULES.add("another seed gives another episode")
def _other_seed(probe: Probe) -> str:
    first, *others = (_values(probe.play_anew(probe.seed + i)) for i in range(3))
    if all(difference(first, other) is None for other in others):
        raise Broken(
            f"seeds {probe.seed} to {probe.seed + 2} give one and the same; if the env leaves "
            "nothing to chance, skip this rule"
        )
    return f"seeds {probe.seed} to {probe.seed + 2}"


@RULES.add("reset(seed) does not depend on what went before")
def _fresh_reset(probe: Probe) -> str:
    env = probe.another()
    try:
        first = probe.play(env, probe.seed)
        # Leave one episode unfinished: what it holds must not show either.
        unfinished = probe.rows(env, probe.seed + 1)
        for _ in range(3):
            next(unfinished, None)
        _check_same(first, probe.play(env, probe.seed))
    finally:
        probe.done_with(env)
    return "after an episode that ended and one that did not"


@RULES.add("envs do not share state")
def _apart(probe: Probe) -> str:
    if probe.make is None:
        raise NotChecked("needs what makes the env, rather than an env")
    envs = [probe.make() for _ in range(4)]
    try:
        alone, again = (probe.play(env, probe.seed) for env in envs[:2])
        if difference(_values(alone), _values(again)):
            raise NotChecked("two new envs differ under one seed as it is")
        beside = _forever(probe, envs[3], probe.seed + 1)
        turns = zip(probe.rows(envs[2], probe.seed), beside, strict=False)
        _check_same(alone, [row for row, _ in turns])
    finally:
        for env in envs:
            env.close()
    return "two envs stepped in turn"


def _forever(probe: Probe, env: Env, seed: int) -> Iterator[Row]:
    while True:
        yield from probe.rows(env, seed)


@RULES.add("the final observation is not the next episode's first")
def _final(probe: Probe) -> str:
    telling = [(seed, episode) for seed, episode in probe.ended if not _is_constant(episode)]
    if not telling:
        raise NotChecked("all observations of an episode are equal")
    if all(_is_first_of_next(probe, seed, episode) for seed, episode in telling):
        seed, episode = telling[0]
        final = _show(episode[-1].observation)
        raise Broken(f"{final} ended the episode of seed {seed} and began the one after it")
    return f"{len(telling)} episodes that ended"


def _is_constant(episode: list[Row]) -> bool:
    first = episode[0].observation
    return all(difference(row.observation, first) is None for row in episode)


def _is_first_of_next(probe: Probe, seed: int, episode: list[Row]) -> bool:
    """Whether the env restarted by itself: what it shows at the end is an episode's first."""
    final = episode[-1].observation
    # The env as it is restarted after the end, and as it would have been restarted at once.
    probe.play(probe.env, seed)
    after_end = deepcopy(probe.env.reset()[0])
    probe.env.reset(seed=seed)
    at_once = deepcopy(probe.env.reset()[0])
    return difference(final, after_end) is None or difference(final, at_once) is None


@RULES.add("entries given out do not change later (no aliasing)")
def _no_aliasing(probe: Probe) -> str:
    for where, row in _rows(probe):
        observation, info = row.given[0], row.given[-1]
        pairs = {"observation": (row.observation, observation), "info": (row.info, info)}
        for name, (then, now) in pairs.items():
            found = difference(then, now)
            if found:
                raise Broken(f"{where}: the {name} was changed after it was given out: {found}")
    return ""


@RULES.add("a step leaves its action as it was")
def _action_kept(probe: Probe) -> str:
    env = probe.env
    actions = deepcopy(env.action_space)
    actions.seed(probe.seed)
    observation, _ = env.reset(seed=probe.seed)
    for step in range(min(probe.steps, 20)):
        action = actions.sample() if probe.policy is None else probe.policy(observation)
        before = deepcopy(action)
        observation, _, terminated, truncated, _ = env.step(action)
        found = difference(before, action)
        if found:
            raise Broken(f"step {step}: {found}")
        if terminated or truncated:
            break
    return ""


@RULES.add("close can be called twice")
def _close_twice(probe: Probe) -> str:
    probe.close()
    probe.env.close()
    return ""


def _values(episode: list[Row]) -> list[tuple[Any, ...]]:
    return [(row.observation, row.reward, row.terminated, row.truncated) for row in episode]


def _check_same(first: list[Row], second: list[Row]) -> None:
    for step, (a, b) in enumerate(zip(_values(first), _values(second), strict=False)):
        for name, x, y in zip(
            ("observation", "reward", "terminated", "truncated"), a, b, strict=True
        ):
            found = difference(x, y)
            if found:
                raise Broken(f"step {step}: the {name} differs: {found}")
    if len(first) != len(second):
        raise Broken(f"one lasts {len(first) - 1} steps, the other {len(second) - 1}")


def difference(first: Any, second: Any) -> str | None:
    """Where two (nested) values differ, or None. NaNs are equal."""
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return f"the keys {sorted(map(str, first))} and {sorted(map(str, second))}"
        pairs = [(first[key], second[key]) for key in first]
    elif isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        if len(first) != len(second):
            return f"{len(first)} and {len(second)} items"
        pairs = list(zip(first, second, strict=True))
    else:
        return _leaf_difference(first, second)
    return next((found for found in (difference(a, b) for a, b in pairs) if found), None)


def _leaf_difference(first: Any, second: Any) -> str | None:
    no_value: bool = type(first).__eq__ is object.__eq__  # type: ignore[comparison-overlap]
    if no_value:
        return None  # an object without a value, such as an info may hold
    return array_difference(first, second)


def _show(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _check_leaves(
    space: spaces.Space[Any],
    value: Any,
    where: str,
    why: Callable[[spaces.Space[Any], Any], str | None],
) -> None:
    """Walk a value along its space; ``why`` tells what is wrong with a leaf."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            got = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise Broken(f"{where}: expected a dict of {sorted(space.spaces)}, got {got}")
        for name, part in space.spaces.items():
            _check_leaves(part, value[name], f"{where}, {name!r}", why)
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            raise Broken(f"{where}: expected a tuple of {len(space.spaces)}, got {_show(value)}")
        for i, part in enumerate(space.spaces):
            _check_leaves(part, value[i], f"{where}, item {i}", why)
    else:
        reason = why(space, value)
        if reason:
            raise Broken(f"{where}: {reason}")


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
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        return None if whole else f"expected an integer, got {type(value).__name__} {_show(value)}"
    if space.dtype is None or np.dtype(space.dtype).kind not in "biufc":
        return None  # Text, say: no array of numbers, and the space itself knows its values
    if not isinstance(value, (np.ndarray, np.generic)):
        return f"expected an array of {space.dtype}, got {type(value).__name__}"
    return None if value.dtype == space.dtype else f"expected {space.dtype}, got {value.dtype}"
