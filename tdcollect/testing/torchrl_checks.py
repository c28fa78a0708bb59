"""Checks of a TorchRL ``EnvBase``; :func:`tdcollect.testing.check_env` runs them all."""

from __future__ import annotations

import inspect
import logging
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase, unravel_key
from torchrl import torchrl_logger
from torchrl.envs import EnvBase, check_env_specs

from tdcollect import keys
from tdcollect.checks.difference import mismatch, short
from tdcollect.checks.player import Key, TorchRLPlayer, ended_slots, next_key
from tdcollect.checks.registry import Failed, Skipped, check
from tdcollect.testing.seed_checks import (
    FRESH_RESET,
    OTHER_SEED,
    SAME_SEED,
    fresh_reset,
    other_seed,
    same_seed,
)

TwoSteps: TypeAlias = tuple[TensorDictBase, TensorDictBase]
GROUP = "torchrl"


@check(GROUP, "episodes run: reset and step work")
def _episodes_run(player: TorchRLPlayer) -> str:
    lengths = [len(rows) for rows in player.episodes]
    return f"{', '.join(map(str, lengths))} steps on three seeds"


@check(GROUP, "entries match the specs (torchrl.envs.check_env_specs)")
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


@check(GROUP, "observations lie in the space")
def _in_space(player: TorchRLPlayer) -> str:
    specs = _leaves(player.env.full_observation_spec)
    if not specs:
        raise Skipped("the env has no observation")
    for where, row in player.all_rows():
        for key, spec in specs.items():
            for name, value in (("next ", row[next_key(key)]), ("", row.extra[key])):
                if value.dtype == spec.dtype and not spec.is_in(value):
                    raise Failed(f"{where}: {name}{key!r} is not in {short(spec)}: {short(value)}")
    return f"{len(list(player.all_rows()))} rows"


@check(GROUP, "the dtype is the space's")
def _dtype(player: TorchRLPlayer) -> str:
    env = player.env
    specs = _leaves(env.full_observation_spec)
    specs |= _leaves(env.full_reward_spec) | _leaves(env.full_done_spec)
    for where, row in player.all_rows():
        for key, spec in specs.items():
            value = row[next_key(key)]
            if value.dtype != spec.dtype:
                raise Failed(f"{where}: next {key!r}: expected {spec.dtype}, got {value.dtype}")
            if value.shape != spec.shape:
                raise Failed(
                    f"{where}: next {key!r}: expected shape {list(spec.shape)}, got "
                    f"{list(value.shape)}"
                )
    return ""


@check(GROUP, "rewards are finite numbers")
def _rewards(player: TorchRLPlayer) -> str:
    low, high = float("inf"), float("-inf")
    for where, row in player.all_rows():
        for key in player.env.reward_keys:
            reward = row[next_key(key)]
            if not reward.isfinite().all():
                raise Failed(f"{where}: {key!r} is {short(reward)}")
            low, high = min(low, float(reward.min())), max(high, float(reward.max()))
    return f"from {low:g} to {high:g}"


@check(GROUP, "terminated and truncated are bools")
def _flags(player: TorchRLPlayer) -> str:
    for where, row in player.all_rows():
        for key in player.env.done_keys:
            flag = row[next_key(key)]
            if flag.dtype != torch.bool:
                raise Failed(f"{where}: {key!r} is {flag.dtype}")
    return ""


@check(GROUP, "done is terminated or truncated")
def _done(player: TorchRLPlayer) -> str:
    for where, row in player.all_rows():
        for key in player.env.done_keys:
            if key != _beside(key, keys.DONE):
                continue
            parts = [next_key(_beside(key, name)) for name in (keys.TERMINATED, keys.TRUNCATED)]
            flags = [row[part] for part in parts if part in row.entries]
            done = row[next_key(key)]
            either = torch.zeros_like(done)
            for flag in flags:
                either = either | flag
            if (done != either).any():
                slot = (done != either).reshape(-1).nonzero()[0].item()
                raise Failed(
                    f"{where}, slot {slot}: done is {done.reshape(-1)[slot].item()}, "
                    f"terminated or truncated is {either.reshape(-1)[slot].item()}"
                )
    return ""


check(GROUP, SAME_SEED)(same_seed)
check(GROUP, OTHER_SEED)(other_seed)
check(GROUP, FRESH_RESET)(fresh_reset)


@check(GROUP, "the final observation is not the next episode's first")
def _final(player: TorchRLPlayer) -> str:
    finals, firsts = _ends(player)
    if all(torch.equal(finals[key], firsts[key]) for key in finals):
        raise Failed(f"next {_first(finals)} ended an episode and began the one after it")
    return f"{len(next(iter(finals.values())))} episodes that ended"


@check(GROUP, "the final observation is not filled in with zeros")
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
        ended = ended_slots(env, row)
        for key in finals:
            final, first = row[next_key(key)], row.extra[key]
            finals[key].append(final[ended.to(final.device)])
            firsts[key].append(first[ended.to(first.device)])
            constant[key] &= torch.equal(final, row[key])
    if all(constant.values()):
        raise Skipped("observations never change")
    if not sum(len(part) for part in next(iter(finals.values()))):
        raise Skipped(f"no episode ended in {player.max_episode_steps} steps")
    return tuple({key: torch.cat(parts) for key, parts in d.items()} for d in (finals, firsts))  # type: ignore[return-value]


@check(GROUP, "a partial reset leaves other slots alone")
def _partial_reset(player: TorchRLPlayer) -> str:
    env = player.env
    if not env.batch_size or env.batch_size.numel() == 1:
        raise Skipped("the env has one slot")
    alone = _two_steps(player, partial=False)
    if _other_slots(env, alone, _two_steps(player, partial=False)):
        raise Skipped("the env does not repeat itself under one seed")
    found = _other_slots(env, alone, _two_steps(player, partial=True))
    if found:
        raise Failed(found)
    return "slot 0 was reset, and all were stepped on"


def _other_slots(env: EnvBase, first: TwoSteps, second: TwoSteps) -> str | None:
    """Return the first difference of two runs in the slots that were not reset, or None."""
    for name, a, b in zip(("reset", "step after it"), first, second, strict=True):
        others = _flat_rows(env, b)
        for key, value in _flat_rows(env, a).items():
            found = mismatch(repr(key), value[1:], others[key][1:])
            if found:
                return f"{key!r} of slots that go on differs in the {name}: {found}"
    return None


def _two_steps(player: TorchRLPlayer, *, partial: bool) -> TwoSteps:
    """Return the root after one step (and a reset of slot 0), and the result of the next step."""
    env = player.env
    root = player.start(env, player.seed)
    _, root = env.step_and_maybe_reset(player.act(env, root, player.seed))
    if partial:
        masked = root.clone()
        for key in env.reset_keys:
            done = env.full_done_spec[_beside(key, keys.DONE)]
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


@check(GROUP, "entries given out do not change later (no aliasing)")
def _no_aliasing(player: TorchRLPlayer) -> str:
    for where, row in player.all_rows():
        for values, given in zip((row.entries, row.extra), row.given, strict=True):
            for key, value in values.items():
                # Entries that a collector or a policy adds to a given TensorDict are no change.
                now = given.get(key)
                found = "it is gone" if now is None else mismatch(repr(key), value, now)
                if found:
                    raise Failed(f"{where}: {key!r} was changed after it was given out: {found}")
    return ""


@check(GROUP, "a step leaves its action as it was")
def _action_kept(player: TorchRLPlayer) -> str:
    env = player.env
    root = player.start(env, player.seed)
    acted = player.act(env, root, player.seed)
    before = {key: acted[key].clone() for key in env.action_keys}
    step = env.step(acted)
    for key, value in before.items():
        found = mismatch(repr(key), value, step[key])
        if found:
            raise Failed(str(found))
    return ""


@check(GROUP, "close can be called twice")
def _close_twice(player: TorchRLPlayer) -> str:
    player.env.close()
    # TorchRL's way to say that a second call is meant; its batched envs raise without it.
    knows = "raise_if_closed" in inspect.signature(player.env.close).parameters
    player.env.close(**({"raise_if_closed": False} if knows else {}))
    return ""


def _leaves(spec: Any) -> dict[Key, Any]:
    return {unravel_key(key): leaf for key, leaf in spec.items(True, True)}


def _first(values: dict[Key, torch.Tensor]) -> str:
    key, value = next(iter(values.items()))
    return f"{key!r} {short(value[0])}"


def _beside(key: Key, name: str) -> Key:
    """Return the key ``name`` in the nesting of ``key``."""
    return name if isinstance(key, str) else (*key[:-1], name)
