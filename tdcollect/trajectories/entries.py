"""One operation on every entry of a TensorDict, whatever the entry is.

An operation sees a tensor ``[*batch, *feature]`` or, for a non-tensor entry with one value per
step, an object array ``[*batch]``. The helpers below take either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

Values: TypeAlias = Any
"""A tensor, or an object array."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype for each width in bytes."""

_FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
_NOT_INDEXED = {torch.uint16, torch.uint32, torch.uint64, *_FLOAT8}


def map_entries(
    batch: TensorDictBase,
    operation: Callable[[Values], Values],
    batch_size: Sequence[int],
    names: Sequence[str | None] | None = None,
    *,
    inner_dims: bool = True,
) -> TensorDict:
    """A new TensorDict of ``batch_size`` with ``operation`` done to each entry.

    A non-tensor entry with one value for the whole batch stays one. A nested TensorDict keeps the
    batch dims that it has beyond those of ``batch``, unless ``inner_dims`` is False; one that is
    stacked lazily along such a dim stays so.
    """
    size = torch.Size(batch_size)

    def inner(value: Any) -> torch.Size:
        return size + value.batch_size[batch.ndim :] if inner_dims else size

    def each(value: LazyStackedTensorDict) -> LazyStackedTensorDict:
        """Heterogeneous agents, say: the same for each."""
        parts = [visit(part, inner(part)) for part in value.tensordicts]
        stack_dim = value.stack_dim - batch.ndim + len(size)
        return LazyStackedTensorDict(*parts, stack_dim=stack_dim)

    def visit(source: TensorDictBase, size: torch.Size) -> TensorDict:
        result = TensorDict({}, batch_size=size, device=source.device)
        for key, value in _items(source):
            if is_non_tensor(value):
                entry = _map_non_tensor(value, operation, inner(value))
            elif (
                inner_dims
                and isinstance(value, LazyStackedTensorDict)
                and value.stack_dim >= batch.ndim
            ):
                entry = each(value)
            elif is_tensor_collection(value):
                entry = visit(value, inner(value))
                if not isinstance(value, TensorDictBase):  # a tensorclass stays one
                    entry = type(value).from_tensordict(entry)
            else:
                entry = operation(value)
            result.set(key, entry)
        return result

    result = visit(batch, size)
    if names is not None and any(names):
        result.names = list(names)
    return result


def leaves(batch: TensorDictBase) -> Iterator[Any]:
    """The tensors of a TensorDict, in no order; of what is stacked lazily, those of each row."""
    if isinstance(batch, LazyStackedTensorDict):
        for part in batch.tensordicts:
            yield from leaves(part)
        return
    for value in batch.values():
        if not is_non_tensor(value):
            yield from leaves(value) if is_tensor_collection(value) else [value]


def _items(source: TensorDictBase) -> list[tuple[str, Any]]:
    try:
        return list(source.items())
    except RuntimeError as error:
        if not isinstance(source, LazyStackedTensorDict):
            raise
        raise ValueError(
            "expected entries of one shape at every step, got steps of unlike shapes that "
            f"TensorDict has stacked lazily, with the entries {sorted(source.keys())}; pad them, "
            "or leave them out (batch.exclude)"
        ) from error


def _map_non_tensor(
    value: Any, operation: Callable[[Values], Values], size: torch.Size
) -> NonTensorData | NonTensorStack:
    if isinstance(value, NonTensorData):
        return NonTensorData(value.data, batch_size=size)
    if min(value.batch_size, default=0) < 0:
        raise ValueError(
            "expected as many non-tensor values at every step, got "
            f"{list(value.batch_size)} of {value.tolist()!r:.80}; leave them out (batch.exclude)"
        )
    flat = value.tolist()
    for _ in value.batch_size[1:]:
        flat = chain.from_iterable(flat)
    return stack_values(
        operation(objects(flat, math.prod(value.batch_size)).reshape(value.batch_size))
    )


def objects(values: Iterable[Any], count: int) -> np.ndarray[Any, Any]:
    """An object array of some values: numpy's own would take a value that is a list for a row."""
    array = np.empty(count, dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def stack_values(array: np.ndarray[Any, Any]) -> Any:
    """A non-tensor entry of the values of an object array, of its shape."""
    if not array.size:
        return NonTensorData(None, batch_size=array.shape)
    if array.ndim == 1:
        return NonTensorStack(*(NonTensorData(value) for value in array))
    return NonTensorStack(*(stack_values(row) for row in array))


def to_rows(values: Values, ndim: int, time_dim: int) -> Values:
    """``[*batch, *feature]`` to ``[rows, *feature]``: slot by slot, time last. A view if it can."""
    if time_dim != ndim - 1:
        values = _movedim(values, time_dim, ndim - 1)
    shape = values.shape
    return values.reshape(math.prod(shape[:ndim]), *shape[ndim:])


def from_rows(values: Values, shape: Sequence[int], time_dim: int) -> Values:
    """The inverse of :func:`to_rows`, for a batch of ``shape``."""
    last = len(shape) - 1
    moved = [*shape[:time_dim], *shape[time_dim + 1 :], shape[time_dim]]
    values = values.reshape(*moved, *values.shape[1:])
    return values if time_dim == last else _movedim(values, last, time_dim)


def _movedim(values: Values, source: int, destination: int) -> Values:
    if isinstance(values, torch.Tensor):
        return values.movedim(source, destination)
    return np.moveaxis(values, source, destination)


def take(values: Values, rows: torch.Tensor) -> Values:
    """``values[rows]``, for any dtype."""
    if not isinstance(values, torch.Tensor):
        return values[rows.cpu().numpy()]
    packed = _pack(values)
    return _unpack(packed.index_select(0, rows.to(values.device)), values)


def place(values: Values, rows: torch.Tensor, size: int) -> Values:
    """``values`` at ``rows`` of ``size`` rows, which are zeros (None for objects) elsewhere."""
    if not isinstance(values, torch.Tensor):
        array = np.empty(size, dtype=object)
        array[rows.cpu().numpy()] = values
        return array
    packed = _pack(values)
    rows = rows.to(values.device)
    out = packed.new_zeros(size, *packed.shape[1:])
    # scatter is the faster of the two, but takes one number a row only.
    out = out.scatter_(0, rows, packed) if packed.ndim == 1 else out.index_copy_(0, rows, packed)
    return _unpack(out, values)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """The same bits as rows of one number each, where a dtype is as wide as a row.

    torch moves single numbers several times as fast as short rows. Bits pass no gradient, so a
    tensor with one stays as it is. Dtypes that torch cannot index always become integers.
    """
    if values.requires_grad or values.is_complex() or values.device.type not in ("cpu", "cuda"):
        return values
    width = values.itemsize * math.prod(values.shape[1:])
    aligned = (
        values.is_contiguous() and values.storage_offset() * values.itemsize % (width or 1) == 0
    )
    if width in _WORDS and aligned:
        return values.reshape(-1).view(_WORDS[width])
    if values.dtype in _NOT_INDEXED:
        return values.view(_WORDS[values.itemsize])
    return values


def _unpack(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    count = len(packed)
    packed = packed if packed.dtype is like.dtype else packed.view(like.dtype)
    return packed.reshape(count, *like.shape[1:])
