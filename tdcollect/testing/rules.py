"""``check_env``: the rules that collection relies on, for gymnasium envs and TorchRL's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection
from copy import deepcopy
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase, unravel_key
from torchrl import torchrl_logger
from torchrl.envs import EnvBase, check_env_specs

from tdcollect import check, keys
from tdcollect.envs.make import alike, make_env
from tdcollect.envs.process.worker import make_by_id, spec_of
from tdcollect.keys import Key, beside, under_next
from tdcollect.testing import checks
from tdcollect.testing.checks import (
    Failed,
    GymnasiumPlayer,
    Row,
    Skipped,
    TorchRLPlayer,
    first_divergence,
    mismatch,
    rule,
    seeded,
    short,
)

GYMNASIUM, TORCHRL = "gymnasium", "torchrl"  # the two groups of rules

AnyEnv: TypeAlias = gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | EnvBase


def check_env(
    env: str | Callable[[], AnyEnv] | AnyEnv,
    *,
    policy: Callable[[Any], Any] | None = None,
    max_episode_steps: int = 1000,
    seed: int = 0,
    skip: Collection[str] = (),
) -> checks.Report:
    """Check that an env keeps the rules that collection relies on.

    A gymnasium env is checked by gymnasium's interface, an ``EnvBase`` by TorchRL's; a gymnasium
    vector env is wrapped by :func:`tdcollect.make_env` and checked as an ``EnvBase``.

    Args:
        env: a gymnasium id, or a callable that makes an env, so that new envs can be compared. Or
            an env, about which some checks find less; it is closed in the end.
        policy: acts instead of random actions: a function from an observation to an action for a
            gymnasium env, a TensorDict policy for an ``EnvBase``.
        max_episode_steps: the most steps that an episode is played for.
        seed: the first of the seeds that are tried.
        skip: names of checks to leave out, which are their rules: "another seed gives another
            episode" for an env without chance, for instance.

    Returns:
        A report with one finding per check; print it, or call ``raise_if_failed()``.

    Raises:
        TypeError: if ``env`` is neither an env nor makes one.
        ValueError: for a name in ``skip`` that is no check of this kind of env, or if
            ``max_episode_steps`` is not positive.

    Examples:
        >>> print(check_env("CartPole-v1"))
        >>> check_env(lambda: MyEnv(size=5)).raise_if_failed()
    """
    check.positive_int(max_episode_steps=max_episode_steps)
    first, make = _make(env)
    kind: Any = GymnasiumPlayer if isinstance(first, gym.Env) else TorchRLPlayer
    player: checks.Player[Any] = kind(first, make, policy, max_episode_steps, seed)
    try:
        chosen = checks.select(GYMNASIUM if kind is GymnasiumPlayer else TORCHRL, skip=skip)
        # The env's draws from torch's global generator must not show outside.
        with torch.random.fork_rng():
            findings = checks.run_checks(chosen.values(), player, skip)
    finally:
        player.close()
    return checks.Report(_name(env, first), findings)


def _make(env: Any) -> tuple[gym.Env[Any, Any] | EnvBase, Callable[[], Any] | None]:
    """Return an env to check, and a callable that makes another one; None if nothing does."""
    if isinstance(env, VectorEnv):
        return make_env(env), None
    if isinstance(env, (gym.Env, EnvBase)):
        return env, None
    make = partial(make_by_id, spec_of(env) or env) if isinstance(env, str) else env
    if not callable(make):
        raise TypeError(
            "expected a gymnasium id, an env or a callable that makes one, got "
            f"{type(env).__name__} {env!r}"
        )
    make = partial(make, **alike(make) or {})
    first = make()
    if isinstance(first, VectorEnv):
        return make_env(first), lambda: make_env(make())
    if isinstance(first, (gym.Env, EnvBase)):
        return first, make
    raise TypeError(
        f"expected a callable that makes a gymnasium env or an EnvBase, got {type(first).__name__}"
    )


def _name(env: Any, first: Any) -> str:
    if isinstance(env, str):
        return env
    if isinstance(first, gym.Env):
        return first.spec.id if first.spec is not None else type(first.unwrapped).__name__
    return type(first).__name__


def seed_rules(group: str) -> None:
    """Register the rules about seeds, which are those of both kinds of envs."""
    rule(group, "the same seed gives the same episode")(same_seed)
    rule(group, "another seed gives another episode")(other_seed)
    rule(group, "reset(seed) does not depend on what went before")(fresh_reset)


def same_seed(player: checks.Player[Any]) -> str:
    """Play two new envs on one seed."""
    first, second = (player.play_another(player.seed) for _ in range(2))
    check_same(first, second)
    whose = "the same env" if player.make is None else "two new envs"
    return f"{_steps(first)} steps of {whose}"


def other_seed(player: checks.Player[Any]) -> str:
    """Play new envs on three seeds."""
    first, *others = ([player.play_another(player.seed + i)] for i in range(3))
    if not any(first_divergence(player.seed, first, other) for other in others):
        raise Failed(
            f"seeds {player.seed} to {player.seed + 2} give one and the same; if the env leaves "
            "nothing to chance, skip this rule"
        )
    return f"seeds {player.seed} to {player.seed + 2}"


def fresh_reset(player: checks.Player[Any]) -> str:
    """Play one env twice on one seed, with an unfinished episode in between."""
    with player.another() as env:
        first = player.play(env, player.seed)
        player.leave_unfinished(env, player.seed + 1)
        check_same(first, player.play(env, player.seed))
    return "after episodes that ended and some that did not"


def check_same(first: list[Row], second: list[Row]) -> None:
    """Raise ``Failed`` with the first difference of two episodes, if they differ."""
    difference = first_divergence(0, [first], [second])
    if difference is None:
        return
    if difference.entry == "length":
        raise Failed(f"one lasts {_steps(first)} steps, the other {_steps(second)}")
    raise Failed(f"step {difference.step}: {difference.mismatch}")


def _steps(episode: list[Row]) -> int:
    return sum(not row.is_reset for row in episode)


@rule(GYMNASIUM, "episodes run: reset gives two values, step gives five")
def episodes_run(player: GymnasiumPlayer) -> str:
    lengths = [len(episode) - 1 for episode in player.episodes]
    return f"episodes of {', '.join(map(str, lengths))} steps"


@rule(GYMNASIUM, "observations lie in the space")
def in_space(player: GymnasiumPlayer) -> str:
    for where, row in player.all_rows():
        _check_leaves(player.env.observation_space, row[keys.OBSERVATION], where, _why_outside)
    return f"{len([*player.all_rows()])} observations"


@rule(GYMNASIUM, "the dtype is the space's")
def dtype(player: GymnasiumPlayer) -> str:
    for where, row in player.all_rows():
        _check_leaves(player.env.observation_space, row[keys.OBSERVATION], where, _why_other_dtype)
    return ""


@rule(GYMNASIUM, "rewards are finite numbers")
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


@rule(GYMNASIUM, "terminated and truncated are bools")
def flags(player: GymnasiumPlayer) -> str:
    for where, row in player.all_rows():
        for name in (keys.TERMINATED, keys.TRUNCATED):
            if not isinstance(row[name], (bool, np.bool_)):
                raise Failed(f"{where}: {name} is {type(row[name]).__name__} {row[name]!r}")
    return ""


seed_rules(GYMNASIUM)


@rule(GYMNASIUM, "envs do not share state")
def _apart(player: GymnasiumPlayer) -> str:
    if player.make is None:
        raise Skipped("needs a callable that makes the env, rather than an env")
    alone, again = (player.play_another(player.seed) for _ in range(2))
    if first_divergence(0, [alone], [again]):
        raise Skipped("two new envs differ under one seed")
    check_same(alone, player.in_turn(len(alone) // 2))
    return "two envs stepped in turn"


@rule(GYMNASIUM, "the final observation is not the next episode's first")
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


@rule(GYMNASIUM, "entries given out do not change later (no aliasing)")
def no_aliasing(player: GymnasiumPlayer) -> str:
    for where, row in player.all_rows():
        observation, info = row.returned[0], row.returned[-1]
        pairs = {"observation": (row[keys.OBSERVATION], observation), "info": (row.extra, info)}
        for name, (then, now) in pairs.items():
            if change := mismatch(name, then, now):
                raise Failed(f"{where}: the {name} was changed after it was given out: {change}")
    return ""


@rule(GYMNASIUM, "a step leaves its action as it was")
def action_kept(player: GymnasiumPlayer) -> str:
    env = player.env
    actions = seeded(env.action_space, player.seed)
    observation, _ = env.reset(seed=player.seed)
    for step in range(min(player.max_episode_steps, 20)):
        action = actions.sample() if player.policy is None else player.policy(observation)
        before = deepcopy(action)
        observation, _, terminated, truncated, _ = env.step(action)
        if change := mismatch("action", before, action):
            raise Failed(f"step {step}: {change}")
        if terminated or truncated:
            break
    return ""


@rule(GYMNASIUM, "close can be called twice")
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
        if reason := why(space, value):
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
        got = f"{type(value).__name__} {short(value)}"
        return None if is_integer else f"expected an integer, got {got}"
    if space.dtype is None or np.dtype(space.dtype).kind not in "biufc":
        return None  # Text, say: no array of numbers, and the space itself knows its values
    if not isinstance(value, (np.ndarray, np.generic)):
        return f"expected an array of {space.dtype}, got {type(value).__name__}"
    return None if value.dtype == space.dtype else f"expected {space.dtype}, got {value.dtype}"


TwoSteps: TypeAlias = tuple[TensorDictBase, TensorDictBase]


@rule(TORCHRL, "episodes run: reset and step work")
def _episodes_run(player: TorchRLPlayer) -> str:
    lengths = [len(rows) for rows in player.episodes]
    return f"{', '.join(map(str, lengths))} steps on three seeds"


@rule(TORCHRL, "entries match the specs (torchrl.envs.check_env_specs)")
def _specs(player: TorchRLPlayer) -> str:
    if player.policy is not None:
        raise Skipped("check_env_specs acts at random, and a policy was given")
    level = torchrl_logger.level
    torchrl_logger.setLevel(logging.WARNING)  # the report says that it passed
    try:
        check_env_specs(player.env, seed=player.seed)
    finally:
        torchrl_logger.setLevel(level)
    return ""


@rule(TORCHRL, "observations lie in the space")
def _in_space(player: TorchRLPlayer) -> str:
    specs = _leaves(player.env.full_observation_spec)
    if not specs:
        raise Skipped("the env has no observation in numbers")
    for where, row in player.all_rows():
        for key, spec in specs.items():
            for name, value in (("next ", row[under_next(key)]), ("", row.extra[key])):
                if value.dtype == spec.dtype and not spec.is_in(value):
                    raise Failed(f"{where}: {name}{key!r} is not in {short(spec)}: {short(value)}")
    return f"{len(list(player.all_rows()))} rows"


@rule(TORCHRL, "the dtype is the space's")
def _dtype(player: TorchRLPlayer) -> str:
    env = player.env
    specs = _leaves(env.full_observation_spec)
    specs |= _leaves(env.full_reward_spec) | _leaves(env.full_done_spec)
    for where, row in player.all_rows():
        for key, spec in specs.items():
            value = row[under_next(key)]
            shapes = f"shape {list(spec.shape)}", f"shape {list(value.shape)}"
            for expected, got in ((spec.dtype, value.dtype), shapes):
                if expected != got:
                    raise Failed(f"{where}: next {key!r}: expected {expected}, got {got}")
    return ""


@rule(TORCHRL, "rewards are finite numbers")
def _rewards(player: TorchRLPlayer) -> str:
    low, high = float("inf"), float("-inf")
    for where, row in player.all_rows():
        for key in player.env.reward_keys:
            reward = row[under_next(key)]
            if not reward.isfinite().all():
                raise Failed(f"{where}: {key!r} is {short(reward)}")
            low, high = min(low, float(reward.min())), max(high, float(reward.max()))
    return f"from {low:g} to {high:g}"


@rule(TORCHRL, "terminated and truncated are bools")
def _flags(player: TorchRLPlayer) -> str:
    for where, row in player.all_rows():
        for key in player.env.done_keys:
            flag = row[under_next(key)]
            if flag.dtype != torch.bool:
                raise Failed(f"{where}: {key!r} is {flag.dtype}")
    return ""


@rule(TORCHRL, "done is terminated or truncated")
def _done(player: TorchRLPlayer) -> str:
    for where, row in player.all_rows():
        for key in player.env.done_keys:
            if key != beside(key, keys.DONE):
                continue
            parts = [under_next(beside(key, name)) for name in (keys.TERMINATED, keys.TRUNCATED)]
            flags = [row[part] for part in parts if part in row.entries]
            done = row[under_next(key)]
            either = torch.stack([torch.zeros_like(done), *flags]).any(0)
            if (done != either).any():
                slot = (done != either).reshape(-1).nonzero()[0].item()
                raise Failed(
                    f"{where}, slot {slot}: done is {done.reshape(-1)[slot].item()}, "
                    f"terminated or truncated is {either.reshape(-1)[slot].item()}"
                )
    return ""


seed_rules(TORCHRL)


@rule(TORCHRL, "the final observation is not the next episode's first")
def _final(player: TorchRLPlayer) -> str:
    finals, firsts = _ends(player)
    if all(torch.equal(finals[key], firsts[key]) for key in finals):
        raise Failed(f"next {_first(finals)} ended an episode and began the one after it")
    return f"{len(next(iter(finals.values())))} episodes that ended"


@rule(TORCHRL, "the final observation is not filled in with zeros")
def _not_zeros(player: TorchRLPlayer) -> str:
    finals, firsts = _ends(player)
    floats = [key for key in finals if finals[key].is_floating_point()]
    if not floats:
        raise Skipped("no observation is of floating point")
    if all((finals[key] == 0).all() and (firsts[key] != 0).any() for key in floats):
        count = len(finals[floats[0]])
        raise Failed(f"all {count} episodes ended in zeros: their true last observation is lost")
    return ""


def _ends(player: TorchRLPlayer) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
    """Return the final observations of ended episodes, and the first ones after, ``[E, ...]``."""
    env = player.env
    finals: dict[Key, list[torch.Tensor]] = {key: [] for key in _leaves(env.full_observation_spec)}
    firsts: dict[Key, list[torch.Tensor]] = {key: [] for key in finals}
    constant = dict.fromkeys(finals, True)
    for _, row in player.all_rows():
        ended = checks.ended_slots(env, row)
        for key in finals:
            final, first = row[under_next(key)], row.extra[key]
            finals[key].append(final[ended.to(final.device)])
            firsts[key].append(first[ended.to(first.device)])
            constant[key] &= torch.equal(final, row[key])
    if all(constant.values()):
        raise Skipped("observations never change, or are texts")
    if not sum(len(part) for part in next(iter(finals.values()))):
        raise Skipped(f"no episode ended in {player.max_episode_steps} steps")
    return tuple({key: torch.cat(parts) for key, parts in d.items()} for d in (finals, firsts))  # type: ignore[return-value]


@rule(TORCHRL, "a partial reset leaves other slots alone")
def _partial_reset(player: TorchRLPlayer) -> str:
    env = player.env
    if not env.batch_size or env.batch_size.numel() == 1:
        raise Skipped("the env has one slot")
    alone = _two_steps(player, partial=False)
    if _other_slots(env, alone, _two_steps(player, partial=False)):
        raise Skipped("the env does not repeat itself under one seed")
    if difference := _other_slots(env, alone, _two_steps(player, partial=True)):
        raise Failed(difference)
    return "slot 0 was reset, and all were stepped on"


def _other_slots(env: EnvBase, first: TwoSteps, second: TwoSteps) -> str | None:
    """Return the first difference of two runs in the slots that were not reset, or None."""
    for name, a, b in zip(("reset", "step after it"), first, second, strict=True):
        others = _flat_rows(env, b)
        for key, value in _flat_rows(env, a).items():
            if difference := mismatch(repr(key), value[1:], others[key][1:]):
                return f"{key!r} of slots that go on differs in the {name}: {difference}"
    return None


def _two_steps(player: TorchRLPlayer, *, partial: bool) -> TwoSteps:
    """Return the root after one step (and a reset of slot 0), and the result of the next step."""
    env = player.env
    root = player.start(env, player.seed)
    _, root = env.step_and_maybe_reset(player.act(env, root, player.seed))
    if partial:
        masked = root.clone()
        for key in env.reset_keys:
            done = env.full_done_spec[beside(key, keys.DONE)]
            mask = torch.zeros(done.shape, dtype=torch.bool, device=done.device)
            mask.view(env.batch_size.numel(), -1)[0] = True
            masked[key] = mask
        root = env.reset(masked)
    shown = root.select(*_leaves(env.full_observation_spec), *env.done_keys, strict=False).clone()
    # Both runs act alike in every slot, whatever the reset changed.
    step = env.step(player.act(env, root, player.seed + 1))
    return shown, step[keys.NEXT]


def _flat_rows(env: EnvBase, values: TensorDictBase) -> dict[Key, torch.Tensor]:
    wanted = [*_leaves(env.full_observation_spec), *env.reward_keys, *env.done_keys]
    return {
        key: values[key].reshape(env.batch_size.numel(), -1)
        for key in wanted
        if key in values.keys(True)
    }


@rule(TORCHRL, "entries given out do not change later (no aliasing)")
def _no_aliasing(player: TorchRLPlayer) -> str:
    for where, row in player.all_rows():
        for values, returned in zip((row.entries, row.extra), row.returned, strict=True):
            for key, value in values.items():
                # Entries that a collector or a policy adds to a given TensorDict are no change.
                now = returned.get(key)
                change = "it is gone" if now is None else mismatch(repr(key), value, now)
                if change:
                    raise Failed(f"{where}: {key!r} was changed after it was given out: {change}")
    return ""


@rule(TORCHRL, "a step leaves its action as it was")
def _action_kept(player: TorchRLPlayer) -> str:
    env = player.env
    root = player.start(env, player.seed)
    acted = player.act(env, root, player.seed)
    before = {key: deepcopy(acted[key]) for key in env.action_keys}
    step = env.step(acted)
    for key, value in before.items():
        if change := mismatch(repr(key), value, step[key]):
            raise Failed(str(change))
    return ""


@rule(TORCHRL, "close can be called twice")
def _torchrl_close_twice(player: TorchRLPlayer) -> str:
    player.env.close()
    # TorchRL's way to say that a second call is meant; its batched envs raise without it.
    knows = "raise_if_closed" in inspect.signature(player.env.close).parameters
    player.env.close(**({"raise_if_closed": False} if knows else {}))
    return ""


def _leaves(spec: Any) -> dict[Key, Any]:
    """The leaves of a spec, without those of text."""
    leaves = spec.items(True, True)
    return {unravel_key(key): leaf for key, leaf in leaves if leaf.dtype is not None}


def _first(values: dict[Key, torch.Tensor]) -> str:
    key, value = next(iter(values.items()))
    return f"{key!r} {short(value[0])}"
