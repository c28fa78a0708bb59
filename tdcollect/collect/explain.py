"""What ``Collector.explain()`` says: which parts of a collection run how, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchrl.envs import EnvBase

from tdcollect.collect.fast.devices import Placement
from tdcollect.collect.fast.policy import Program
from tdcollect.collect.fast.transforms import base_of, transforms_of
from tdcollect.display import html_table, one_line
from tdcollect.envs.wrapper import GymnasiumEnv


class Part(NamedTuple):
    """One part of the loop: what it is, how it runs, and why not faster where it could not."""

    name: str
    what: str
    how: str


class Explanation(tuple[Part, ...]):
    """The parts of a collection; prints as a table."""

    def __repr__(self) -> str:
        return one_line(self, *(f"{part.name}: {part.how}" for part in self))

    def _repr_html_(self) -> str:
        return html_table(["part", "what", "how"], self)

    def __str__(self) -> str:
        name_width = max(len(part.name) for part in self)
        what_width = max(len(part.what) for part in self)
        return "\n".join(
            f"{part.name:<{name_width}}  {part.what:<{what_width}}  {part.how}" for part in self
        )


def explanation(
    env: EnvBase,
    reason: str | None,
    program: Program,
    place: Placement | None,
    return_same_td: bool,
) -> Explanation:
    """The parts of a collection.

    Args:
        env: the env with its transforms.
        reason: why it is not stepped on arrays; None where it is.
        program: the policy.
        place: what moves tensors between devices, if anything.
        return_same_td: the collector's option.
    """
    how = "on rows" if reason is None else "as TorchRL does"
    stepped = "steps on arrays" if reason is None else f"{how}: {reason}"
    parts = [Part("env", short(base_of(env)), stepped)]
    parts += [Part("transform", short(transform), how) for transform in transforms_of(env)]
    parts += [Part("policy", what, called) for what, called in program.described]
    if reason is not None:
        parts.append(Part("batch", "stacked from TensorDicts, then copied", how))
        return Explanation(parts)
    if place is not None:
        parts.append(Part("devices", repr(place), "each tensor crosses once"))
    if return_same_td:
        parts.append(Part("batch", "copied into one TensorDict", "return_same_td=True"))
    else:
        parts.append(Part("batch", "stacked once", "no copy"))
    return Explanation(parts)


def short(thing: Any) -> str:
    """The name of a part."""
    if isinstance(thing, GymnasiumEnv):
        return f"{type(thing).__name__}({thing.name}, {thing.backend_name})"
    return getattr(thing, "__name__", type(thing).__name__)
