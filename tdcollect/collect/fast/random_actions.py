"""Random actions of an action spec, drawn on StepDicts."""

from __future__ import annotations

from typing import Any

from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.modules import RandomPolicy

from tdcollect.collect.policies import Call, RandomActions
from tdcollect.collect.step_dict import Key, StepDict

RANDOM = (RandomActions, RandomPolicy)
"""The policies that draw from a spec."""

_LEAVES = (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)


def random_spec(policy: Any) -> tuple[Composite, str] | None:
    """The spec that a random policy draws from, and the policy's name.

    Args:
        policy: one of :data:`RANDOM`.

    Returns:
        None where the spec's leaves are not drawn one by one.
    """
    if isinstance(policy, RandomActions):
        spec, name = policy.spec, "random actions"
    elif isinstance(policy, RandomPolicy) and policy.action_spec is not None:
        spec, name = policy.action_spec, "RandomPolicy"
        if not isinstance(spec, Composite):
            spec = Composite({policy.action_key: spec}, shape=())
    else:
        return None
    return (spec, name) if _is_known(spec) else None


def _is_known(spec: TensorSpec | None) -> bool:
    """Tell whether the leaves of a spec are drawn one by one, as one tensor each."""
    if isinstance(spec, Composite):
        plain = type(spec) is Composite and spec.data_cls is None
        return plain and all(_is_known(part) for part in spec.values())
    return spec is None or isinstance(spec, _LEAVES)


def leaves(spec: Composite, above: tuple[str, ...] = ()) -> list[Key]:
    """The entries that a spec gives, in the order in which it draws them."""
    found: list[Key] = []
    for name, part in spec.items():
        if isinstance(part, Composite):
            found += leaves(part, (*above, name))
        elif part is not None:
            found.append((*above, name) if above else name)
    return found


def random_call(spec: Composite) -> Call:
    """A call that draws each leaf of a spec, as ``Composite.rand`` does."""

    def draw(step: StepDict, spec: Composite, above: tuple[str, ...]) -> None:
        device = spec.device
        for name, part in spec.items():
            if isinstance(part, Composite):
                draw(step, part, (*above, name))
            elif part is not None:
                value = part.rand(())
                if device is not None and value.device != device:
                    value = value.to(device)
                step[(*above, name) if above else name] = value

    return lambda step: draw(step, spec, ())
