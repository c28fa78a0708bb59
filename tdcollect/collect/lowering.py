"""The transforms of an env as they run on StepDicts: of one env, and of the envs of a SerialEnv.

Transforms inside of the envs of a ``SerialEnv`` that treat each row by itself, and are alike in all
envs, run once for the batch. The others run env by env. An env with such a transform begins its
episodes by its own ``reset``: it may take no-op steps there, draw numbers, or update statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect import keys
from tdcollect._upstream import torchrl as upstream
from tdcollect.collect import transforms as on_steps
from tdcollect.collect.step_dict import StepDict
from tdcollect.collect.transforms import (
    Applied,
    Changed,
    Island,
    Mapped,
    OwnCode,
    StepTransform,
    gray,
)
from tdcollect.envs.traits import EnvAction, NotKnown, of_kind, runs_once, traits_of, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv, texts_of
from tdcollect.keys import Key
from tdcollect.states import equal

LOWERED: dict[type, Callable[[Any, EnvBase], StepTransform]] = {
    EnvAction: on_steps.env_action,
    T.ActionScaling: on_steps.ActionScaling,
    T.CatFrames: on_steps.CatFrames,
    T.DeviceCastTransform: on_steps.device_cast,
    T.EndOfLifeTransform: on_steps.EndOfLife,
    T.ExcludeTransform: on_steps.exclude,
    T.FiniteTensorDictCheck: on_steps.finite_check,
    T.FrameSkipTransform: on_steps.StepsAgain,
    T.InitTracker: on_steps.InitTracker,
    T.NoopResetEnv: on_steps.InResets,
    T.RemoveEmptySpecs: on_steps.nothing,
    T.RenameTransform: on_steps.Rename,
    T.RewardSum: on_steps.RewardSum,
    T.SelectTransform: on_steps.select,
    T.StepCounter: on_steps.StepCounter,
    T.TensorDictPrimer: on_steps.primer,
    T.VecNorm: on_steps.vec_norm,
    T.VecNormV2: on_steps.vec_norm,
}
"""The transforms that are written out here; others of :data:`TRAITS` run by their own code."""
if hasattr(T, "LastAction"):  # since TorchRL 0.15
    LOWERED[T.LastAction] = on_steps.last_action


def lower_transforms(transforms: Sequence[T.Transform], env: EnvBase) -> list[StepTransform]:
    """Transforms on StepDicts, innermost first; NotKnown for one that changes the env's loop."""
    lowered: list[StepTransform] = []
    reasons: list[str] = []
    carried: set[Key] = set()
    for transform in transforms:
        if reason := _changes_loop(transform, env):
            reasons.append(reason)
            continue
        try:
            part = _lower(transform, env)
        except NotKnown as unknown:
            part = _island(transform, env, str(unknown))
        if isinstance(part, OwnCode | Changed) and carried.intersection(transform.in_keys):
            part.by_row = False  # the rows of slots that go on hold its result already
            carried.update(transform.out_keys)
        touched = {*transform.in_keys, *transform.out_keys}
        if (texts := texts_of(env)) and (isinstance(part, Island) or touched & texts.keys()):
            reasons.append(f"the transform {type(transform).__name__} may read text")
        carried.update(part.keys)
        part.label = type(transform).__name__
        lowered.append(part)
    if reasons:
        raise NotKnown(*reasons)
    return lowered


def joined(parts: Sequence[StepTransform]) -> list[StepTransform]:
    """Transforms, innermost first, with those that one pass over an image can do joined."""
    parts_joined: list[StepTransform] = []
    for part in parts:
        before = parts_joined[-1] if parts_joined else part
        if _runs(before, T.ToTensorImage) and _runs(part, T.GrayScale):
            parts_joined[-1:] = gray(before, part)
        else:
            parts_joined.append(part)
    return parts_joined


def _runs(part: StepTransform, kind: type[T.Transform]) -> TypeGuard[OwnCode]:
    return type(part) is Mapped and type(part.transform) is kind


def _changes_loop(transform: T.Transform, env: EnvBase) -> str:
    """Why TorchRL's own loop must run; empty where it need not."""
    name = type(transform).__name__
    if upstream.changes_loop(transform):
        return f"the transform {name} changes the env's own loop"
    alone = type(transform) is T.ActionDiscretizer and env.transform is transform
    if alone and transform.in_keys_inv != transform.out_keys_inv:
        return (
            f"the transform {name}, where it is alone, writes to the step that the batch holds; "
            "put it into a Compose"
        )
    return ""


def _lower(transform: T.Transform, env: EnvBase) -> StepTransform:
    """A transform on StepDicts; raises NotKnown with the reason why it must be an island."""
    kind, trait = type(transform), traits_of(transform)
    if replaced := upstream.replaced_calls(transform):
        raise NotKnown(f"has a {replaced[0]} of its own")
    if upstream.has_forward_hooks(transform):
        raise NotKnown("has hooks")
    if kind in LOWERED:
        return LOWERED[kind](transform, env)
    if trait is None or not trait.own_code:
        raise NotKnown("is not known to run on arrays")
    entries = (*transform.in_keys, *transform.out_keys)
    if kind in (T.Stack, T.Timer) and any(isinstance(key, tuple) for key in entries):
        raise NotKnown("has nested entries")
    if kind is PolicyVersion and transform.version_type not in (int, "int"):
        raise NotKnown("writes strings")
    if trait.elementwise and upstream.maps_entries(transform):
        return Mapped(transform, env, trait)
    return OwnCode(transform, env, trait)


def _island(transform: T.Transform, env: EnvBase, reason: str) -> StepTransform:
    """A transform that is not known, on as little as it needs."""
    if (
        upstream.only_applies(transform, of_kind("elementwise"))
        and upstream.preparation_of(transform) is None
    ):
        return Applied(transform, env)
    return Island(transform, env, reason)


# ------------------------------------------------------------------------- the envs of a SerialEnv


class Shown(StepTransform):
    """Notes what resets give in the tensors ``[N, ...]`` where TorchRL's ``SerialEnv`` keeps it.

    Transforms that follow and mix rows (``mixes``) find these entries in slots that go on.
    """

    def __init__(self, shown: Mapping[Key, torch.Tensor], mixes: bool):
        self._shown = shown
        self._mixes = mixes

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        starting = marks[keys.RESET].view(-1)
        for key, shown in self._shown.items():
            value, there = begun[key], shown.device  # the env's; its envs may be elsewhere
            marked = starting.to(there)
            shown[marked] = value.to(there)[marked]
            if self._mixes:
                begun[key] = shown.to(value.device, copy=True)


class _EnvByEnv(StepTransform):
    """One transform per env, each on the row of its slot; episodes begin by their own resets."""

    by_row = False

    def __init__(self, transforms: Sequence[StepTransform]):
        self._transforms = transforms
        self.how = f"env by env, {transforms[0].how}"
        self.label = transforms[0].label
        self.follows_specs = transforms[0].follows_specs
        self.cost = transforms[0].cost and f"{transforms[0].cost} and env"

    def inv(self, step: StepDict) -> None:
        self._run(step, [transform.inv for transform in self._transforms])

    def step(self, step: StepDict, following: StepDict) -> None:
        for slot, transform in enumerate(self._transforms):
            transform.rows = None if self.rows is None else self.rows[slot]
        pairs = zip(self._transforms, self._rows(step), strict=True)
        self._run(following, [partial(transform.step, row) for transform, row in pairs])

    def _run(self, step: StepDict, calls: Sequence[Callable[[StepDict], None]]) -> None:
        """Call each with the row of its env, and take over what has changed in some rows."""
        rows = self._rows(step)
        before = [dict(row) for row in rows]
        for call, row in zip(calls, rows, strict=True):
            call(row)
        for key in [key for key in step if key not in rows[0]]:
            del step[key]
        for key in rows[0]:
            if any(row[key] is not old.get(key) for row, old in zip(rows, before, strict=True)):
                step[key] = torch.stack([torch.as_tensor(row[key]) for row in rows])

    def _rows(self, step: StepDict) -> list[StepDict]:
        unbound = [(key, value.unbind(0)) for key, value in step.items()]
        slots = range(len(self._transforms))
        return [StepDict((key, values[slot]) for key, values in unbound) for slot in slots]


def lower_members(members: Sequence[EnvBase]) -> tuple[list[StepTransform], bool]:
    """The transforms of a ``SerialEnv``'s envs; whether all of them run once for the batch."""
    stacks = [transforms_of(member) for member in members]
    if len({tuple(map(type, stack)) for stack in stacks}) > 1:
        raise NotKnown("its envs have transforms unlike each other's")
    lowered = [lower_transforms(stack, env) for stack, env in zip(stacks, members, strict=True)]
    if any(part.writes_next for part in lowered[0]):
        raise NotKnown("its envs have transforms whose inverses may write the following step")
    together: list[StepTransform] = []
    once = True
    for ones, parts in zip(zip(*stacks, strict=True), zip(*lowered, strict=True), strict=True):
        if runs_once(ones[0]) and _are_alike(ones):
            together.append(parts[0])
        else:
            once = False
            if type(parts[0]) is on_steps.EndOfLife and _are_alike(ones):
                together.append(on_steps.EndOfLife.together(parts))
            elif not upstream.does_nothing_in_steps(ones[0]):
                together.append(_EnvByEnv(parts))
    return joined(together), once


def _are_alike(transforms: Sequence[T.Transform]) -> bool:
    settings = upstream.settings_of(transforms[0])
    return all(equal(upstream.settings_of(other), settings) for other in transforms[1:])


# ------------------------------------------------------------------------------------ exact rewards


def exact_reward_of(env: EnvBase) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that carries the rewards of an env through its transforms in float64.

    None where a transform may cast or is not known, and where only the env itself knows what
    becomes of its rewards.
    """
    base = env.base_env if type(env) is TransformedEnv else env
    if (
        type(base) is not GymnasiumEnv
        or upstream.replaced_methods(env)
        or upstream.replaced_methods(base)
        or base.stepper.group_map
    ):
        return None
    calls = []
    for transform in transforms_of(env):
        trait = traits_of(transform)
        alone = list(transform.in_keys) == list(transform.out_keys) == [keys.REWARD]
        if trait and trait.scalar and alone:
            calls.append(upstream.call_of(transform))
        elif not _leaves_reward(transform):
            return None

    def exact(reward: torch.Tensor) -> torch.Tensor:
        step = StepDict({keys.REWARD: reward})
        for call in calls:
            call(step)
        return step[keys.REWARD]

    return exact if calls else lambda reward: reward


def _leaves_reward(transform: T.Transform) -> bool:
    if type(transform) is T.RenameTransform:
        return keys.REWARD not in (*transform.in_keys, *transform.out_keys)
    if type(transform) is T.ExcludeTransform:
        return keys.REWARD not in transform.excluded_keys
    trait = traits_of(transform)
    return trait is not None and trait.leaves_reward and keys.REWARD not in transform.out_keys
