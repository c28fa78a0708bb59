"""Memory that the workers and their parent share: its layout, and arrays in it.

It holds actions, observations, rewards, flags and infos of all slots.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from tdcollect.workers.values import Array, Tree, kinds_for


class Field(NamedTuple):
    """An array ``[N, *shape]`` in shared memory.

    ``kinds`` are NumPy's letters of the dtypes that may be written into it; others would not come
    out as the ``serial`` backend would write them.
    """

    shape: tuple[int, ...]
    dtype: str
    kinds: str = "biuf"


def fields_of(space: spaces.Space[Any], fields: list[Field]) -> Tree:
    """Append a field for each array in values of a space; returns how the values nest."""
    if isinstance(space, spaces.Dict):
        return {name: fields_of(part, fields) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(fields_of(part, fields) for part in space.spaces)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        shape = () if isinstance(space, spaces.Discrete) else tuple(space.nvec.shape)
        fields.append(Field(shape, "i8", "i"))
    else:
        assert space.shape is not None
        assert space.dtype is not None
        dtype = np.dtype(space.dtype)
        fields.append(Field(tuple(space.shape), dtype.str, kinds_for(dtype)))
    return len(fields) - 1


class Shared(NamedTuple):
    """The contents of shared memory, and how the values nest there."""

    num_envs: int
    observation_tree: Tree
    observation: Sequence[Field]
    action_tree: Tree
    action: Sequence[Field]

    @property
    def fields(self) -> list[Field]:
        """Every field, in order; reward, terminated and truncated come first."""
        return [Field((), "f8"), Field((), "?"), Field((), "?"), *self.observation, *self.action]


class SharedArrays:
    """The arrays ``[N, *shape]`` of shared memory.

    Args:
        shared: the contents.
        descriptor: the file that is shared.
    """

    def __init__(self, shared: Shared, descriptor: int):
        arrays = map_arrays(descriptor, shared.num_envs, shared.fields)
        split = 3 + len(shared.observation)
        self.outcome = arrays[:3]
        self.observation = arrays[3:split]
        self.action = arrays[split:]


def layout(num_envs: int, fields: Sequence[Field]) -> tuple[list[int], int]:
    """The offset of each field, which begins a cache line, and the bytes of all."""
    offsets, end = [], 0
    for field in fields:
        offsets.append(end)
        size = num_envs * int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
        end += -(-size // 64) * 64
    return offsets, end


def map_arrays(descriptor: int, num_envs: int, fields: Sequence[Field]) -> list[Array]:
    """The fields as arrays ``[N, *shape]`` that share the memory of a file."""
    offsets, size = layout(num_envs, fields)
    memory = mmap.mmap(descriptor, max(size, 1))
    return [
        np.ndarray((num_envs, *field.shape), field.dtype, memory, offset)
        for field, offset in zip(fields, offsets, strict=True)
    ]


def shared_file(size: int) -> int:
    """The descriptor of a file of zeros in memory. No name leads to it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tdcollect")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, max(size, 1))
    return descriptor
