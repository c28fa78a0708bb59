"""What a policy keeps from one call to the next in plain Python, in its attributes.

Functions are followed to the objects that they name. Lists and numbers that they name themselves
are not compared: they may well be records of calls, which change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from tdcollect.evaluation.episodes.isolation import NotReproducibleError

_MOST = 20_000  # values that are compared, those nearest to the policy first
_LARGE = 2**20  # bytes; larger tensors are compared by torch's count of their changes
_PLAIN = (int, float, complex, str, bytes, np.generic, type(None))
_OF_MODULES = {*vars(nn.Module()), "_is_full_backward_hook"}  # and hooks, which observe
_LIBRARIES = ("torch", "tensordict", "torchrl")

State = dict[str, Any]
"""Plain values, and the bytes of arrays, by the path to them."""


def state_of(policy: Any) -> State:
    """Return all that can be reached from a policy, by value, up to a bound.

    Counts that modules of torch and TorchRL keep are left out: their outputs do not depend on them.
    """
    found: State = {}
    reached: dict[int, Any] = {}  # alive, so that nothing else takes over an id
    waiting: deque[tuple[str, Any]] = deque([("policy", policy)])
    while waiting and len(found) < _MOST:
        path, value = waiting.popleft()
        if isinstance(value, _PLAIN):
            found[path] = value if type(value) is str else repr(value)
        elif id(value) not in reached:
            reached[id(value)] = value
            with suppress(Exception):  # of values that do not let themselves be looked at
                if isinstance(value, torch.Tensor) or (
                    isinstance(value, np.ndarray) and value.dtype != object
                ):
                    found[path] = _bits(value)
                else:
                    parts = list(islice(_parts(value), _MOST))
                    found[path] = len(parts)
                    waiting.extend((path + name, part) for name, part in parts)
    return found


def check_kept(before: State, after: State) -> None:
    """Refuse a policy whose state has changed in a call that had another one's inputs.

    Raises:
        NotReproducibleError: naming what has changed.
    """
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    if changed:
        raise NotReproducibleError(
            f"the policy changes what it keeps, {', '.join(changed[:3])}, as it runs again on the "
            "same rows and random streams, so that an episode may depend on those before it. Write "
            "what it must remember as an entry of the TensorDict, which begins anew with each "
            "episode, and take out what only counts or records its calls"
        )


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.nbytes > _LARGE:
            return value.data_ptr(), None if value.is_inference() else value._version
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return value.shape, value.dtype.str, value.tobytes()


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """Return what a value consists of, each with the end of its path."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return ((f"[{place}]", part) for place, part in enumerate(value))
    own: dict[str, Any] = {}
    library, _, inside = type(value).__module__.partition(".")
    if isinstance(value, FunctionType):
        library = value.__module__.partition(".")[0]
        named = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            named[name] = cell.cell_contents
        if library not in _LIBRARIES:
            own = {name: part for name, part in named.items() if hasattr(part, "__dict__")}
    elif isinstance(value, GeneratorType):
        own = {"gi_frame": value.gi_frame and (value.gi_frame.f_lasti, value.gi_frame.f_locals)}
    elif isinstance(value, nn.Module):
        own = {name: part for name, part in vars(value).items() if name not in _OF_MODULES}
        own |= {**value._parameters, **value._buffers, **value._modules}
    elif not isinstance(value, (type, ModuleType)) and not inside.startswith("_dynamo"):
        for place, part in enumerate(value.__reduce_ex__(4)[1:]):  # as pickle takes it apart
            parts = list(part) if isinstance(part, Iterator) else part
            own |= parts if isinstance(parts, dict) else {f"[{place}]": parts}
    if library in _LIBRARIES:
        own = {name: part for name, part in own.items() if not isinstance(part, _PLAIN)}
    return ((name if name[0] == "[" else f".{name}", part) for name, part in own.items())
