"""The one fork: the parts that run on arrays, those that run as TorchRL does, and why.

No other module outside of ``fast`` imports from that folder. Where it is missing, everything is
stepped as TorchRL does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torchrl.envs import EnvBase

from tdcollect.collect.env_parts import ExactReward
from tdcollect.collect.policies import ON_TENSORDICT, Noise, Policy, TensorDictPolicy
from tdcollect.collect.step_dict import Key, StepDict, with_index
from tdcollect.collect.tensordict_env import SteppedEnv, TensorDictEnv
from tdcollect.display import html_table, one_line
from tdcollect.envs.transforms import base_of, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv

if TYPE_CHECKING:
    from tdcollect.collect.fast.array_env import ArrayEnv
    from tdcollect.collect.fast.devices import Placement

_SPEC = find_spec("tdcollect.collect.fast")
HAS_FAST_PATH = _SPEC is not None and _SPEC.origin is not None
"""True if the folder ``fast`` is there."""

RUN_ON_ARRAYS = True
"""False to collect in TorchRL's loop alone; batches are the same either way."""

if HAS_FAST_PATH:
    from tdcollect.collect.fast.array_env import array_env
    from tdcollect.collect.fast.devices import Placement
    from tdcollect.collect.fast.islands import NotOnArrays
    from tdcollect.collect.fast.loop import collect_frames as collect_frames  # for the runner
    from tdcollect.collect.fast.policy import Program

_NO_FAST_PATH = "tdcollect.collect.fast is missing"


class Plan(NamedTuple):
    """The way in which an env is stepped.

    Attributes:
        env: the env on arrays; None where TorchRL's loop steps it.
        reasons: why it is not on arrays; empty where it is.
    """

    env: ArrayEnv | None
    reasons: Sequence[str] = ()


def plan_for(env: EnvBase, exact: ExactReward | None = None) -> Plan:
    """Decide how an env is stepped.

    Args:
        env: with its transforms.
        exact: carries float64 rewards through the transforms; None to do without.
    """
    if not HAS_FAST_PATH:
        return Plan(None, [_NO_FAST_PATH])
    try:
        return Plan(array_env(env, exact))
    except NotOnArrays as refused:
        return Plan(None, refused.reasons)


def stepped_env(env: EnvBase, exact: ExactReward | None = None) -> SteppedEnv:
    """The env for the loop by episodes: on arrays where it can be, else through TensorDicts.

    Raises:
        ValueError: for an env that cannot be collected by episodes.
    """
    return by_episodes(plan_for(env, exact), env, exact)


def by_episodes(plan: Plan, env: EnvBase, exact: ExactReward | None = None) -> SteppedEnv:
    """As :func:`stepped_env`, where the plan is made already."""
    # The slots of any other env cannot wait, and cannot be seeded, one by one.
    slots = plan.env is not None and plan.env.base is not None and plan.env.home.type == "cpu"
    return plan.env if slots else TensorDictEnv(env, exact)  # type: ignore[return-value]


def lowered(
    policy: Callable[..., Any],
    given: StepDict,
    batch_size: torch.Size,
    device: torch.device | None,
    *,
    select: Sequence[Key] | None = None,
    checked: bool = False,
    noise: Noise | None = None,
    as_it_is: str | None = None,
) -> Policy:
    """A policy on StepDicts: taken apart where that is known, else called as it is.

    Args:
        policy: the callable that a collector would call on a TensorDict.
        given: the entries that the first call finds.
        batch_size: the env's.
        device: the device of TensorDicts made on the way, if any.
        select: the outputs of a compiled policy; None for others.
        checked: draw with the distributions themselves, which check at every call.
        noise: a source of random numbers for draws that need no distribution object; None for
            torch's global generator.
        as_it_is: why the policy must be called as it is; None to take it apart.
    """
    if HAS_FAST_PATH:
        return Program(policy, given, batch_size, device, select, checked, noise, as_it_is)
    return TensorDictPolicy(policy, given, batch_size, device, as_it_is or _NO_FAST_PATH, select)


def placement(
    policy: torch.device | None,
    env: torch.device | None,
    storing: torch.device | None,
    home: torch.device,
) -> Placement | None:
    """Moves tensors between devices; None where all is on the CPU, or the policy does it itself."""
    if not HAS_FAST_PATH or all(d is None or d.type == "cpu" for d in (policy, env, storing)):
        return None
    policy, env, storing = (device and with_index(device) for device in (policy, env, storing))
    return Placement(policy, env, storing, with_index(home))


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
    place: Placement | None,
    return_same_td: bool,
    by_arrival: bool = False,
) -> Explanation:
    """The parts of a collection.

    Args:
        env: the env with its transforms.
        plan: how it is stepped.
        policy: on StepDicts.
        place: moves tensors between devices; None where nothing does.
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
        reason = stepped.in_step_for
        if reason is None:
            wait_num = stepped.stepper.backend.wait_num
            parts.append(Part("slots", f"wait_num={wait_num}", "go on when they are ready"))
        elif reason:
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
    if place is not None:
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
