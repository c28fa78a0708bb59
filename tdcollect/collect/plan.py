"""How a collection runs: the parts on arrays, those that run as TorchRL runs them, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torchrl.data.utils import contains_lazy_spec
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv

from tdcollect import keys
from tdcollect._upstream.torchrl import replaced_methods, steps_alone
from tdcollect.collect.arrays import (
    ArrayEnv,
    Exact,
    InnerEnv,
    RewardShape,
    SlotArrays,
    TensorDictEnv,
    TorchRLEnv,
)
from tdcollect.collect.lowering import Shown, lower_transforms, member_slots
from tdcollect.collect.policy import ON_TENSORDICT, Policy
from tdcollect.collect.step_dict import with_index
from tdcollect.collect.store import Placement
from tdcollect.collect.transforms import StepTransform
from tdcollect.display import html_table, one_line
from tdcollect.envs.adopted import adopt
from tdcollect.envs.parallel import ParallelEnv as OurParallelEnv
from tdcollect.envs.traits import NotKnown, base_of, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv

RUN_ON_ARRAYS = os.environ.get("TDCOLLECT_ARRAYS") != "0"
"""False to run TorchRL's loop alone; batches are the same either way."""


class Plan(NamedTuple):
    """The way in which an env is stepped.

    Attributes:
        env: the env on arrays; None if TorchRL's loop steps it.
        reasons: why it is not on arrays.
    """

    env: ArrayEnv | None
    reasons: Sequence[str] = ()


def plan_for(env: EnvBase, exact: Exact | None = None, reasons: Sequence[str] = ()) -> Plan:
    """Decide how an env is stepped.

    Args:
        env: with its transforms.
        exact: carries float64 rewards through the transforms; None to do without.
        reasons: those against arrays, whatever the env.
    """
    base = env.base_env if type(env) is TransformedEnv else env
    reasons = [*reasons, *([] if RUN_ON_ARRAYS else ["TDCOLLECT_ARRAYS=0"])]
    replaced = {*replaced_methods(env), *replaced_methods(base)}
    reasons += [f"the env has a {name} of its own" for name in sorted(replaced)]
    if len(env.done_keys_groups) > 1 or not set(keys.FLAGS).issuperset(env.done_keys):
        reasons.append(f"the env has the flags {list(env.done_keys)}, not one of each per slot")
    if any(env.full_done_spec[key].dtype is not torch.bool for key in env.done_keys):
        reasons.append("the env has flags of another dtype than bool")
    plain = type(env) is GymnasiumEnv or _has_plain_entries(env)
    if not plain:
        reasons.append("the env has entries that are no tensors of one shape")
    try:
        transforms = lower_transforms(transforms_of(env), env)
        if plain:
            mixes = not all(transform.by_row for transform in transforms)
            inner, further = _inner(base, env is not base, mixes)
    except NotKnown as refused:
        reasons += refused.reasons
    if reasons:
        return Plan(None, reasons)
    if env.device is not None and not all(part.anywhere for part in (*further, *transforms)):
        inner.home = with_index(env.device)  # the CPU would not give the same
    for transform in transforms:
        transform.attach(inner, further)
    last = [RewardShape(env)] if isinstance(inner, TorchRLEnv) else []
    return Plan(ArrayEnv(inner, [*further, *transforms, *last], env, exact))


def by_episodes(plan: Plan, env: EnvBase, exact: Exact | None = None) -> ArrayEnv:
    """The env for the loop by episodes: on arrays if it can be, else through TensorDicts.

    Raises:
        ValueError: for an env that cannot be collected by episodes.
    """
    found = plan.env
    if found is None or found.base is None or found.home.type != "cpu":
        # The slots of any other env cannot wait, and cannot be seeded, one by one.
        return TensorDictEnv(env, exact)
    return found


def _inner(
    base: EnvBase, under_transforms: bool, mixes: bool
) -> tuple[InnerEnv, list[StepTransform]]:
    """The env without its transforms, and those of its own envs, on StepDicts.

    Args:
        base: the env without its transforms.
        under_transforms: whether it has some.
        mixes: whether these mix rows.
    """
    if type(base) is GymnasiumEnv:
        return SlotArrays(base), []
    if type(base) is OurParallelEnv and base.inner is not None:
        lifted = lower_transforms(transforms_of(base.inner), base.inner)
        return SlotArrays(base_of(base.inner)), [*lifted, Shown(base.shown, mixes)]
    try:
        slots, members, shown = adopt(base)
        if members:
            return member_slots(SlotArrays(slots), members, shown, mixes)
        return SlotArrays(slots), []
    except NotKnown as error:
        on_cpu = base.device is None or base.device.type == "cpu"
        reason = str(error) if on_cpu else f"its tensors are on {base.device}"
        # TorchRL's ParallelEnv steps and resets by one message; no transform comes in between.
        if not (steps_alone(base) or (under_transforms and type(base) is ParallelEnv)):
            raise NotKnown(f"{reason}, and steps in a way of its own") from None
        return TorchRLEnv(base, reason), []


def _has_plain_entries(env: EnvBase) -> bool:
    """Tell whether all entries are single tensors of fixed shapes."""
    for spec in (env.output_spec, env.input_spec):
        nodes = [spec, *spec.values(True, False)]
        if contains_lazy_spec(spec) or any(
            getattr(node, "data_cls", None) not in (None, TensorDict) for node in nodes
        ):
            return False
        if any(leaf.dtype is None or -1 in leaf.shape for leaf in spec.values(True, True)):
            return False
    return True


class Part(NamedTuple):
    """One part of the loop.

    Attributes:
        name: its kind.
        what: its name.
        how: the way in which it runs; off the arrays, why, and what to change.
        cost: about what it costs off the arrays; empty on them.
    """

    name: str
    what: str
    how: str
    cost: str = ""


class Explanation(tuple[Part, ...]):
    """The parts of a collection; prints as a table."""

    @property
    def obstacles(self) -> list[Part]:
        """The parts that run slower than they could; none where all is on arrays."""
        return [part for part in self if part.cost]

    def __repr__(self) -> str:
        return one_line(self, *(f"{part.name}: {part.how}" for part in self))

    def _repr_html_(self) -> str:
        return html_table(["part", "what", "how", "about"], self)

    def __str__(self) -> str:
        name_width = max(len(part.name) for part in self)
        what_width = max(len(part.what) for part in self)
        return "\n".join(
            f"{part.name:<{name_width}}  {part.what:<{what_width}}  {part.how}"
            + (f" (about {part.cost})" if part.cost else "")
            for part in self
        )


def explanation(
    env: EnvBase,
    plan: Plan,
    policy: Policy,
    place: Placement,
    return_same_td: bool,
    by_arrival: bool = False,
) -> Explanation:
    """The parts of a collection.

    Args:
        env: the env with its transforms.
        plan: how it is stepped.
        policy: on StepDicts.
        place: moves tensors between devices.
        return_same_td: the collector's option.
        by_arrival: likewise.
    """
    name, stepped = short(base_of(env)), plan.env
    if stepped is None:
        how = "as TorchRL does"
        cost = "3 to 5 times the time of a step on arrays"
        parts = [Part("env", name, f"{how}: {reason}", cost) for reason in plan.reasons]
        parts += [Part("transform", short(each), how) for each in transforms_of(env)]
    else:
        parts = [Part("env", name, stepped.inner.how, stepped.inner.cost)]
        if stepped.can.asynchronous:
            wait_num = f"wait_num={stepped.can.wait_num}"
            parts.append(Part("slots", wait_num, "go on when they are ready"))
        elif reason := stepped.why.get("asynchronous"):
            parts.append(Part("slots", "wait_num", f"in step: {reason}", "the slowest slot"))
        if stepped.resets_by_mask:
            parts.append(Part("resets", "by mask", "at every step; no flag is read"))
        elif stepped.home.type != "cpu" and stepped.base is None:
            parts.append(
                Part("resets", "where flags say so", f"one wait per step for {stepped.home}")
            )
        parts += [Part("transform", t.label, t.how, t.cost) for t in stepped.parts]
    parts += [
        Part("policy", what, called, "30 to 250 us a call" * called.startswith(ON_TENSORDICT))
        for what, called in policy.described
    ]
    if stepped is None:
        parts.append(Part("batch", "stacked from TensorDicts, then copied", how))
        return Explanation(parts)
    if place.moves:
        parts.append(Part("devices", repr(place), "each tensor crosses once"))
    if by_arrival:
        parts.append(
            Part("batch", "rows in the order of their arrival", "no slot waits at its end")
        )
    elif return_same_td:
        parts.append(Part("batch", "copied into one TensorDict", "return_same_td=True"))
    else:
        parts.append(Part("batch", "stacked once", "no copy"))
    return Explanation(parts)


def short(thing: Any) -> str:
    """The name of a part."""
    if isinstance(thing, GymnasiumEnv):
        return f"{type(thing).__name__}({thing.name}, {thing.backend_name})"
    return getattr(thing, "__name__", type(thing).__name__)
