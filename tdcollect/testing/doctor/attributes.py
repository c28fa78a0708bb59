"""Which attributes of two envs that should be alike differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from tdcollect.testing.doctor.divergence import differences, shown

_MANY = 1000


def unlike_attributes(first: Any, second: Any) -> list[str]:
    """The plain attributes in which two envs, or their wrappers, differ, with both values.

    Numbers, strings, arrays, random generators, and lists, tuples and dicts of these are compared;
    what else an env holds (a simulator, say) is not looked into.
    """
    unlike = []
    for one, other in zip(_layers(first), _layers(second), strict=True):
        # What one has not set yet may stand in its class.
        for name in vars(one) | vars(other):
            mine, its = getattr(one, name, None), getattr(other, name, None)
            if not (_is_plain(mine) and _is_plain(its)):
                continue
            found = next(differences(name, _settled(mine), _settled(its)), None)
            if found is not None:
                at, a, b, _ = found
                values = f" ({shown(a)} and {shown(b)})"
                drawn = isinstance(mine, np.random.Generator)
                unlike.append(f"{type(one).__name__}.{at}{'' if drawn else values}")
    return unlike


def _layers(env: Any) -> Iterator[Any]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    yield env


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < _MANY and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) < _MANY and all(map(_is_plain, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, (int, float, str, np.generic, np.random.Generator))


def _settled(value: Any) -> Any:
    return repr(value.bit_generator.state) if isinstance(value, np.random.Generator) else value
