"""Nested values of gymnasium as flat lists of arrays in shared memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from tdcollect.envs.spaces import Array, kinds_for
from tdcollect.workers.worker import Field, Tree


def fields_of(space: spaces.Space[Any], fields: list[Field]) -> Tree:
    """How values of a space nest; a field for each array in them is appended to ``fields``."""
    if isinstance(space, spaces.Dict):
        return {name: fields_of(part, fields) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [fields_of(part, fields) for part in space.spaces]
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        shape = () if isinstance(space, spaces.Discrete) else tuple(space.nvec.shape)
        fields.append(Field(shape, "i8", "i"))
    else:
        assert space.shape is not None
        assert space.dtype is not None
        dtype = np.dtype(space.dtype)
        fields.append(Field(tuple(space.shape), dtype.str, kinds_for(dtype)))
    return len(fields) - 1


def flatten(value: Any, arrays: list[Array]) -> Tree:
    """How a value nests; its arrays are appended to ``arrays``."""
    if isinstance(value, dict):
        return {name: flatten(part, arrays) for name, part in value.items()}
    if isinstance(value, tuple):
        return [flatten(part, arrays) for part in value]
    arrays.append(np.asarray(value))
    return len(arrays) - 1


def nest(tree: Tree, arrays: Sequence[Array]) -> Any:
    """Arrays as the value that nests like ``tree``."""
    if isinstance(tree, int):
        return arrays[tree]
    if isinstance(tree, dict):
        return {name: nest(part, arrays) for name, part in tree.items()}
    return tuple(nest(part, arrays) for part in tree)


def row(value: Any, slot: int) -> Any:
    """One slot's part of a nested value."""
    if isinstance(value, dict):
        return {name: row(part, slot) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(row(part, slot) for part in value)
    return value[slot]
