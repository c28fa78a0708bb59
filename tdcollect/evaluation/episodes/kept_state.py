"""The plain Python state that a policy keeps from one call to the next, in its attributes.

Functions are followed to the objects that they name. Lists and numbers that they name themselves
are not compared: they may well be records of calls, which change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import getclosurevars
from itertools import islice
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from tdcollect.evaluation.episodes.isolation import NotReproducibleError

_MOST = 20_000  # values that are compared, those nearest to the policy first
_LARGE = 2**20  # bytes; of larger arrays, only the shape is compared
_PLAIN = (int, float, complex, str, bytes, np.generic, type(None))
_LIBRARIES = ("torch", "tensordict", "torchrl")

State = dict[str, Any]
"""Plain values and arrays, as text, by the path to them."""


def state_of(policy: Any) -> State:
    """Return the attributes that can be reached from a policy, by value, up to a bound.

    Left out are parameters and buffers, which have a check of their own; hooks, which observe; and
    the counts that modules of torch and TorchRL keep, as their outputs do not depend on them.
    """
    found: State = {}
    reached: dict[int, Any] = {}  # alive, so that nothing else takes over an id
    waiting: deque[tuple[str, Any]] = deque([("policy", policy)])
    while waiting and len(found) < _MOST:
        path, value = waiting.popleft()
        if isinstance(value, _PLAIN):
            found[path] = repr(value)
        elif id(value) not in reached:
            reached[id(value)] = value
            with suppress(Exception):  # of values that do not let themselves be looked at
                if isinstance(value, (torch.Tensor, np.ndarray)):
                    found[path] = value.shape if value.nbytes > _LARGE else repr(value.tolist())
                    continue
                parts = _parts(value)
                found[path] = len(parts)
                waiting.extend((path + name, part) for name, part in islice(parts.items(), _MOST))
    return found


def check_kept(before: State, after: State) -> None:
    """Refuse a policy whose state has changed in a call that had another one's inputs.

    Raises:
        NotReproducibleError: naming what has changed.
    """
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    if changed:
        raise NotReproducibleError(
            f"the policy changes what it keeps, {', '.join(changed[:3])}, as it runs, so that an "
            "episode may depend on those before it. Write what it must remember as an entry of the "
            "TensorDict, and take out what only counts or records its calls"
        )


def _parts(value: Any) -> dict[str, Any]:
    """Return what a value consists of, by the end of its path."""
    if isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {f"[{key!r}]": part for key, part in items}
    own: dict[str, Any] = {}
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, FunctionType):
        library = value.__module__.partition(".")[0]
        named = getclosurevars(value)
        own = {} if library in _LIBRARIES else {**named.globals, **named.nonlocals}
        own = {name: part for name, part in own.items() if hasattr(part, "__dict__")}
    elif isinstance(value, GeneratorType):
        own = {"gi_frame": value.gi_frame and (value.gi_frame.f_lasti, value.gi_frame.f_locals)}
    elif isinstance(value, nn.Module):
        own = {name: part for name, part in vars(value).items() if name not in _OF_MODULES}
        own |= value.named_children()
    elif not isinstance(value, (type, ModuleType)):
        for place, part in enumerate(value.__reduce_ex__(4)[1:]):  # as pickle takes it apart
            parts = list(part) if isinstance(part, Iterator) else part
            own |= parts if isinstance(parts, dict) else {str(place): parts}
    if library in _LIBRARIES:
        own = {name: part for name, part in own.items() if not isinstance(part, _PLAIN)}
    return {f".{name}": part for name, part in own.items()}


_OF_MODULES = vars(nn.Module()).keys()
