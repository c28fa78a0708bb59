"""Values that envs give and take: nested ones, numbers, rewards, flags and infos; shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Tree = Any
"""The nesting of a value: the index of an array, a dict of trees, or a tuple of trees."""

FLOATS = (np.dtype(np.float64), np.dtype(np.float32))
BOOL = np.dtype(bool)
_ZERO = np.zeros((), bool)
_TEXT = "<U256"  # texts in shared memory; longer ones are sent


# --- nested values -----------------------------------------------------------------------------


def flatten(value: Any, arrays: list[Array]) -> Tree:
    """Append the arrays of a nested value to ``arrays``; returns how the value nests."""
    if isinstance(value, dict):
        return {name: flatten(part, arrays) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(flatten(part, arrays) for part in value)
    arrays.append(np.asarray(value))
    return len(arrays) - 1


def nest(tree: Tree, arrays: Sequence[Array]) -> Any:
    if isinstance(tree, int):
        return arrays[tree]
    if isinstance(tree, dict):
        return {name: nest(part, arrays) for name, part in tree.items()}
    return tuple(nest(part, arrays) for part in tree)


def slot_of(value: Any, slot: int | Array) -> Any:
    """The part of one slot, or of several, of a nested value with arrays ``[N, ...]``."""
    if isinstance(value, dict):
        return {name: slot_of(part, slot) for name, part in value.items()}
    if isinstance(value, tuple) and not (value and isinstance(value[0], str)):
        return tuple(slot_of(part, slot) for part in value)
    return np.asarray(value, object)[slot] if isinstance(value, tuple) else value[slot]


def unstack(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, dict):
        parts = {name: unstack(part, count) for name, part in value.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(count)]
    if isinstance(value, tuple):
        return list(zip(*(unstack(part, count) for part in value), strict=True))
    return value


# --- numbers -----------------------------------------------------------------------------------


def keeps(values: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether an array of a dtype takes these numbers as they are.

    A float may lose digits there, as TorchRL has it (float64 into float32). An integer must lie in
    its range, and a fraction goes into floats only.
    """
    theirs = values.dtype
    if theirs == dtype:
        return True
    if theirs.kind not in ("biuf" if dtype.kind == "f" else "biu"):
        return False
    if dtype.kind == "f" or not values.size or np.can_cast(theirs, dtype, "safe"):
        return True
    low, high = limits(dtype)
    return low <= int(values.min()) and int(values.max()) <= high


def limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    bounds = np.iinfo(dtype)
    return int(bounds.min), int(bounds.max)


# --- rewards and flags -------------------------------------------------------------------------


def as_reward(value: Any) -> float:
    """A reward as a float: any one real number, as a scalar or in an array."""
    if type(value) is float:
        return value
    array = np.asarray(value)
    if array.size == 1:
        item, kind = array.item(), array.dtype.kind
        if kind in "biuf" or (kind == "O" and isinstance(item, Real)):
            return float(item)
    raise ValueError(
        f"expected a reward that is one real number, got {_shortened(value)}; correct the env"
    )


def as_flag(name: str, value: Any) -> bool:
    """A flag of a step as a bool: any one number that is 0 or 1, as a scalar or in an array."""
    if value is True or value is False:
        return value
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "biuf" and array.item() in (0, 1):
        return bool(array.item())
    raise ValueError(f"expected {name} to be one bool, got {_shortened(value)}; correct the env")


def _shortened(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:80] + '...'}"


def as_rewards(values: Any, count: int) -> Array:
    """Rewards of ``count`` slots as floats ``[count]``."""
    array = np.asarray(values)
    if array.dtype in FLOATS and array.shape == (count,):
        return array
    return _of_count(np.array([as_reward(value) for value in values]), "rewards", count)


def as_flags(name: str, values: Any, count: int) -> Array | bool:
    """Flags of ``count`` slots as bools ``[count]``; False if none is set."""
    if type(values) is tuple and values.count(False) == count:
        return False  # at nearly all steps, and quicker than making the array
    array = np.asarray(values)
    if array.dtype is BOOL and array.shape == (count,):
        return array
    return _of_count(np.array([as_flag(name, value) for value in values]), name, count)


def _of_count(array: Array, name: str, count: int) -> Array:
    if len(array) != count:
        raise ValueError(
            f"expected {count} {name}, one per slot, got {len(array)}; correct the env"
        )
    return array


# --- infos -------------------------------------------------------------------------------------


def as_info(info: Any) -> Mapping[str, Any]:
    """An env's info, which some envs leave None where it would be empty."""
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(
            f"expected the info to be a dict, got {type(info).__name__}; correct the env"
        )
    return {} if info is None else info


def as_begun(result: Any) -> Begun:
    """What a reset returned: an observation and an info, which gym before 0.26 had not."""
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result  # type: ignore[return-value]
    got = type(result).__name__
    raise TypeError(f"expected reset() to return an observation and a dict of infos, got {got}")


def info_at(info: Mapping[str, Any], name: str) -> Any:
    """Return an info by its name, or by its path, as ``"episode/r"``; None where it is not."""
    if name in info:
        return info[name]
    first, _, rest = name.partition("/")
    within = info.get(first)
    return info_at(within, rest) if rest and isinstance(within, Mapping) else None


def is_number(value: Any) -> bool:
    """Return whether an info is a number or an array of numbers, of which torch has the dtype."""
    dtype = np.asarray(value).dtype
    return dtype.kind in "biuf" and dtype.itemsize <= 8


class InfoEntry(NamedTuple):
    """An entry of gymnasium's info that is stored with the observations."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def like(cls, key: str, example: Any) -> InfoEntry:
        if not is_number(example):
            raise TypeError(
                f"expected info {key!r} to be a number or an array of numbers, got "
                f"{type(example).__name__} {example!r}; leave it out of info_keys"
            )
        array = np.asarray(example)
        return cls(key, array.shape, array.dtype)


def write_info(
    entries: Sequence[InfoEntry], info: Mapping[str, Any], arrays: Sequence[Array], slot: int
) -> None:
    """Write one slot's infos to arrays ``[N, *shape]``; one that the env leaves out reads zero."""
    info = as_info(info)
    for (key, shape, dtype), array in zip(entries, arrays, strict=True):
        value = np.asarray(info.get(key, _ZERO))
        fits = value is _ZERO or value.shape == shape
        if not (fits and keeps(value, dtype)):
            got = f"{value.dtype} of shape {value.shape}"
            got = f"{value.dtype} {value}" if value.shape == shape == () else got
            raise ValueError(
                f"expected info {key!r} to be {dtype} of shape {shape}, as it was at first, got "
                f"{got}; pass info_keys as a dict from names to examples that say what to expect"
            )
        array[slot] = value


# --- reset options -----------------------------------------------------------------------------


Options = dict[str, Any]
Begun = tuple[Any, dict[str, Any]]
"""What a reset of a gymnasium env gives: the observation and the info."""


class EachOptions(dict[Any, Any]):
    """Reset options by slot, in the place of those of all slots."""


def options_of(options: Mapping[Any, Any] | None, slot: int) -> dict[str, Any] | None:
    """The reset options of a slot, out of those of each slot, or of all."""
    own: Any = options.get(slot) if isinstance(options, EachOptions) else options
    return own


# --- shared memory -----------------------------------------------------------------------------


class Field(NamedTuple):
    """An array ``[N, *shape]`` in shared memory."""

    shape: tuple[int, ...]
    dtype: str


def fields_of(value: Any) -> tuple[Tree, list[Field]]:
    arrays: list[Array] = []
    tree = flatten(value, arrays)
    dtypes = [_TEXT if array.dtype.kind in "OU" else array.dtype.str for array in arrays]
    return tree, [Field(array.shape[1:], dtype) for array, dtype in zip(arrays, dtypes)]  # noqa: B905


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

    def mapped(self, descriptor: int) -> tuple[list[Array], list[Array], list[Array]]:
        """The arrays of a file's memory: reward and flags, observations, actions."""
        arrays = map_arrays(descriptor, self.num_envs, self.fields)
        split = 3 + len(self.observation)
        return arrays[:3], arrays[3:split], arrays[split:]


def map_arrays(descriptor: int, num_envs: int, fields: Sequence[Field | InfoEntry]) -> list[Array]:
    """The fields as arrays ``[N, *shape]`` that share the memory of a file, which grows for them.

    Each begins a cache line.
    """
    offsets, end = [], 0
    for field in fields:
        offsets.append(end)
        size = num_envs * int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
        end += -(-size // 64) * 64
    if os.fstat(descriptor).st_size < end:
        os.truncate(descriptor, end)
    memory = mmap.mmap(descriptor, max(end, 1))
    return [
        np.ndarray((num_envs, *field.shape), field.dtype, memory, offset)
        for field, offset in zip(fields, offsets, strict=True)
    ]
