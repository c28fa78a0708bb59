"""The rules of :func:`tdcollect.testing.check_env` for a TorchRL ``EnvBase``.

Each is a function of a :class:`Probe` that returns its evidence, raises ``Broken`` with it, or
raises ``NotChecked`` with the reason.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase, unravel_key
from torchrl import torchrl_logger
from torchrl.envs import EnvBase, check_env_specs

from tdcollect import keys
from tdcollect.testing.report import Broken, NotChecked, array_difference
from tdcollect.testing.rules import Rules
from tdcollect.testing.torchrl_probe import Probe, Row, ends

TwoSteps: TypeAlias = tuple[TensorDictBase, TensorDictBase]
Key: TypeAlias = str | tuple[str, ...]
RULES: Rules[Probe] = Rules()
"""The rules by their sentences, in the order in which they are tried."""


def _beside(key: Key, name: str) -> Key:
    """The entry ``name`` beside the entry ``key``, wherever it is nested."""
    return name if isinstance(key, str) else (*key[:-1], name)


def _rows(probe: Probe) -> Iterator[tuple[str, Row]]:
    for i, rows in enumerate(probe.plays):
        for step, row in enumerate(rows):
            yield f"seed {probe.seed + i}, step {step}", row


@RULES.add("episodes run: reset and step work")
def _episodes_run(probe: Probe) -> str:
    lengths = [len(rows) for rows in probe.plays]
    return f"{', '.join(map(str, lengths))} steps on three seeds"


@RULES.add("entries match the specs (torchrl.envs.check_env_specs)")
def _specs(probe: Probe) -> str:
    if probe.policy is not None:
        raise NotChecked("check_env_specs acts at random, and a policy was given")
    level = torchrl_logger.level
    torchrl_logger.setLevel(logging.WARNING)  # its success is told by the report
    try:
        check_env_specs(probe.env)
    finally:
        torchrl_logger.setLevel(level)
    return ""


@RULES.add("observations lie in the space")
def _in_space(probe: Probe) -> str:
    specs = _leaves(probe.env.full_observation_spec)
    if not specs:
        raise NotChecked("the env has no observation")
    for where, row in _rows(probe):
        for key, spec in specs.items():
            for name, values in (("next ", row.step[keys.NEXT]), ("", row.after)):
                value = values[key]
                if value.dtype == spec.dtype and not spec.is_in(value):
                    raise Broken(f"{where}: {name}{key!r} is not in {_show(spec)}: {_show(value)}")
    return f"{len(list(_rows(probe)))} rows"


@RULES.add("the dtype is the space's")
def _dtype(probe: Probe) -> str:
    env = probe.env
    specs = _leaves(env.full_observation_spec)
    specs |= _leaves(env.full_reward_spec) | _leaves(env.full_done_spec)
    for where, row in _rows(probe):
        for key, spec in specs.items():
            value = row.step[keys.NEXT][key]
            if value.dtype != spec.dtype:
                raise Broken(f"{where}: next {key!r}: expected {spec.dtype}, got {value.dtype}")
            if value.shape != spec.shape:
                raise Broken(
                    f"{where}: next {key!r}: expected shape {list(spec.shape)}, got "
                    f"{list(value.shape)}"
                )
    return ""


@RULES.add("rewards are finite numbers")
def _rewards(probe: Probe) -> str:
    low, high = float("inf"), float("-inf")
    for where, row in _rows(probe):
        for key in probe.env.reward_keys:
            reward = row.step[keys.NEXT][key]
            if not reward.isfinite().all():
                raise Broken(f"{where}: {key!r} is {_show(reward)}")
            low, high = min(low, float(reward.min())), max(high, float(reward.max()))
    return f"from {low:g} to {high:g}"


@RULES.add("terminated and truncated are bools")
def _flags(probe: Probe) -> str:
    for where, row in _rows(probe):
        for key in probe.env.done_keys:
            flag = row.step[keys.NEXT][key]
            if flag.dtype != torch.bool:
                raise Broken(f"{where}: {key!r} is {flag.dtype}")
    return ""


@RULES.add("done is terminated or truncated")
def _done(probe: Probe) -> str:
    for where, row in _rows(probe):
        values = row.step[keys.NEXT]
        for key in probe.env.done_keys:
            if key != _beside(key, keys.DONE):
                continue
            parts = [_beside(key, name) for name in (keys.TERMINATED, keys.TRUNCATED)]
            flags = [values[part] for part in parts if part in values.keys(True)]
            done = values[key]
            either = torch.zeros_like(done)
            for flag in flags:
                either = either | flag
            if (done != either).any():
                slot = (done != either).reshape(-1).nonzero()[0].item()
                raise Broken(
                    f"{where}, slot {slot}: done is {done.reshape(-1)[slot].item()}, "
                    f"terminated or truncated is {either.reshape(-1)[slot].item()}"
                )
    return ""


@RULES.add("the same seed gives the same episode")
def _same_seed(probe: Probe) -> str:
    plays = [probe.play_anew(probe.seed) for _ in range(2)]
    _check_same(*plays)
    whose = "the same env" if probe.make is None else "two new envs"
    return f"{len(plays[0])} steps of {whose}"


@RULES.add("another seed gives another episode")
def _other_seed(probe: Probe) -> str:
    first, *others = (probe.play_anew(probe.seed + i) for i in range(3))
    if all(_difference(first, other) is None for other in others):
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
        # Leave episodes unfinished: what they hold must not show either.
        unfinished = probe.rows(env, probe.seed + 1)
        for _ in range(3):
            next(unfinished, None)
        _check_same(first, probe.play(env, probe.seed))
    finally:
        probe.done_with(env)
    return "after episodes that ended and some that did not"


@RULES.add("the final observation is not the next episode's first")
def _final(probe: Probe) -> str:
    finals, firsts = _ends(probe)
    if all(torch.equal(finals[key], firsts[key]) for key in finals):
        raise Broken(f"next {_first(finals)} ended an episode and began the one after it")
    return f"{len(next(iter(finals.values())))} episodes that ended"


@RULES.add("the final observation is not filled in with zeros")
def _not_zeros(probe: Probe) -> str:
    finals, firsts = _ends(probe)
    floats = [key for key in finals if finals[key].is_floating_point()]
    if not floats:
        raise NotChecked("no observation is of floating point")
    if all((finals[key] == 0).all() and (firsts[key] != 0).any() for key in floats):
        count = len(finals[floats[0]])
        raise Broken(f"all {count} episodes ended in zeros: their true last observation is lost")
    return ""


def _ends(probe: Probe) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
    """Final observations of the episodes that ended, and the first ones after, ``[E, ...]``."""
    env = probe.env
    finals: dict[Key, list[torch.Tensor]] = {key: [] for key in _leaves(env.full_observation_spec)}
    firsts: dict[Key, list[torch.Tensor]] = {key: [] for key in finals}
    constant = dict.fromkeys(finals, True)
    for _, row in _rows(probe):
        ended = ends(env, row)
        for key in finals:
            final, first = row.step[keys.NEXT][key], row.after[key]
            finals[key].append(final[ended.to(final.device)])
            firsts[key].append(first[ended.to(first.device)])
            constant[key] &= torch.equal(final, row.step[key])
    if all(constant.values()):
        raise NotChecked("observations never change")
    if not sum(len(part) for part in next(iter(finals.values()))):
        raise NotChecked(f"no episode ended in {probe.steps} steps")
    return tuple({key: torch.cat(parts) for key, parts in d.items()} for d in (finals, firsts))  # type: ignore[return-value]


@RULES.add("a partial reset leaves other slots alone")
def _partial_reset(probe: Probe) -> str:
    env = probe.env
    if not env.batch_size or env.batch_size.numel() == 1:
        raise NotChecked("the env has one slot")
    alone = _two_steps(probe, partial=False)
    if _other_slots(env, alone, _two_steps(probe, partial=False)):
        raise NotChecked("the env does not repeat itself under one seed")
    found = _other_slots(env, alone, _two_steps(probe, partial=True))
    if found:
        raise Broken(found)
    return "slot 0 was reset, and all were stepped on"


def _other_slots(env: EnvBase, first: TwoSteps, second: TwoSteps) -> str | None:
    """Where all slots but the first, which may have been reset, differ between two runs."""
    for name, a, b in zip(("reset", "step after it"), first, second, strict=True):
        others = _flat_rows(env, b)
        for key, value in _flat_rows(env, a).items():
            found = _leaf_difference(value[1:], others[key][1:])
            if found:
                return f"{key!r} of slots that go on differs in the {name}: {found}"
    return None


def _two_steps(probe: Probe, *, partial: bool) -> TwoSteps:
    """The root after one step (and a reset of the first slot), and what the next step gives."""
    env = probe.env
    root = probe.start(env, probe.seed)
    _, root = env.step_and_maybe_reset(probe.act(env, root, probe.seed))
    if partial:
        masked = root.clone()
        for key in env.reset_keys:
            done = env.full_done_spec[_beside(key, keys.DONE)]
            mask = torch.zeros(done.shape, dtype=torch.bool, device=done.device)
            mask.view(env.batch_size.numel(), -1)[0] = True
            masked[key] = mask
        root = env.reset(masked)
    shown = root.select(*_leaves(env.full_observation_spec), *env.done_keys, strict=False).clone()
    # Both ways act alike in every slot, whatever the reset changed.
    step = env.step(probe.act(env, root, probe.seed + 1))
    return shown, step[keys.NEXT]


def _flat_rows(env: EnvBase, values: TensorDictBase) -> dict[Key, torch.Tensor]:
    wanted = [*_leaves(env.full_observation_spec), *env.reward_keys, *env.done_keys]
    return {
        key: values[key].reshape(env.batch_size.numel(), -1)
        for key in wanted
        if key in values.keys(True)
    }


@RULES.add("entries given out do not change later (no aliasing)")
def _no_aliasing(probe: Probe) -> str:
    for where, row in _rows(probe):
        for copy, given in zip((row.step, row.after), row.given, strict=True):
            for key in copy.keys(True, True):
                # What a collector or a policy adds to a given TensorDict is no change.
                value, now = copy[key], given.get(key)
                found = _leaf_difference(value, now)
                if found:
                    raise Broken(f"{where}: {key!r} was changed after it was given out: {found}")
    return ""


@RULES.add("a step leaves its action as it was")
def _action_kept(probe: Probe) -> str:
    env = probe.env
    root = probe.start(env, probe.seed)
    acted = probe.act(env, root, probe.seed)
    before = {key: acted[key].clone() for key in env.action_keys}
    step = env.step(acted)
    for key, value in before.items():
        found = _leaf_difference(value, step[key])
        if found:
            raise Broken(f"{key!r}: {found}")
    return ""


@RULES.add("close can be called twice")
def _close_twice(probe: Probe) -> str:
    probe.env.close()
    # TorchRL's way to say that a second call is meant; its batched envs raise without it.
    knows = "raise_if_closed" in inspect.signature(probe.env.close).parameters
    probe.env.close(**({"raise_if_closed": False} if knows else {}))
    return ""


def _leaves(spec: Any) -> dict[Key, Any]:
    return {unravel_key(key): leaf for key, leaf in spec.items(True, True)}


def _check_same(first: list[Row], second: list[Row]) -> None:
    found = _difference(first, second)
    if found:
        raise Broken(found)


def _difference(first: list[Row], second: list[Row]) -> str | None:
    for step, (a, b) in enumerate(zip(first, second, strict=False)):
        for key in a.step.keys(True, True):
            found = _leaf_difference(a.step[key], b.step.get(key))
            if found:
                return f"step {step}: {key!r} differs: {found}"
    if len(first) != len(second):
        return f"one takes {len(first)} steps to its end, the other {len(second)}"
    return None


def _leaf_difference(first: Any, second: Any) -> str | None:
    if not isinstance(first, torch.Tensor):
        return None  # strings and other non-tensor data
    if not isinstance(second, torch.Tensor):
        return "it is gone"
    return array_difference(first.detach().cpu(), second.detach().cpu())


def _first(values: dict[Key, torch.Tensor]) -> str:
    key, value = next(iter(values.items()))
    return f"{key!r} {_show(value[0])}"


def _show(value: Any) -> str:
    text = str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
