"""From a batch ``[*N, T]`` to its trajectories, in four layouts; and flat over slots, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias, overload

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, unravel_key

from tdcollect import check, keys
from tdcollect._upstream.torchrl import apply_unchecked
from tdcollect.keys import Key, beside
from tdcollect.trajectories.entries import Values, from_rows, map_entries, place, take, to_rows
from tdcollect.trajectories.index import TrajectoryIndex, time_dim_of

Layout: TypeAlias = Literal["padded", "jagged", "flat", "list"]

LAYOUTS = ("padded", "jagged", "flat", "list")


@overload
def split_trajectories(
    batch: TensorDictBase,
    *,
    layout: Literal["padded", "jagged", "flat"] = "padded",
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
    index: TrajectoryIndex | None = None,
    prefix: Key | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDict: ...
@overload
def split_trajectories(
    batch: TensorDictBase,
    *,
    layout: Literal["list"],
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
    index: TrajectoryIndex | None = None,
) -> list[TensorDict]: ...
def split_trajectories(
    batch: TensorDictBase,
    *,
    layout: Layout = "padded",
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
    index: TrajectoryIndex | None = None,
    prefix: Key | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDict | list[TensorDict]:
    """The trajectories of a batch ``[*N, T]``, in the order of their slots and then of time.

    ============ ================================================================================
    ``"padded"`` ``[B, L]``, zeros after each trajectory's end, and ``("collector", "mask")``,
                 bool ``[B, L]``, true where there is a step
    ``"jagged"`` ``[B]``, each tensor a nested one (``torch.jagged``) ``[B, length, *feature]``,
                 all with the same offsets
    ``"flat"``   ``[sum of lengths]``, one trajectory after the other
    ``"list"``   B TensorDicts ``[length]``
    ============ ================================================================================

    Ids from done flags, ``0 .. B-1`` int64, are added where the batch has none. Entries keep
    their dtype, device and gradient; a layout that needs no copy of an entry shares its memory.
    A non-tensor entry with one value for the batch keeps it; one with a value per step is padded
    with None, and in the jagged layout has one list per trajectory.

    Args:
        batch: ``[*N, T]``; its time dimension is the one named ``"time"``, else the last. A padded
            batch ``[B, L]`` with its mask is split like any other.
        layout: of the result.
        trajectory_key: ids, integers ``[*N, T]``. By default ``("collector", "traj_ids")``. The
            mask goes beside them.
        done_key: flags, bool ``[*N, T, 1]``, for a batch without ids. By default
            ``("next", "done")``. If it is given alone, it takes precedence over ids.
        index: of the batch, to compute it once for several calls; instead of the two keys.
        prefix: as TorchRL has it: where ids and mask stand, instead of ``"collector"``.
        as_nested: as TorchRL has it: nested tensors (``torch.strided``) ``[B, -1]`` instead of
            padded ones; those of ``layout="jagged"`` can do more.

    Raises:
        ValueError: for an unknown layout, one beside ``as_nested``, an index of another batch
            size, and as :meth:`TrajectoryIndex.of` does.
        TypeError, KeyError: as :meth:`TrajectoryIndex.of` does.
    """
    check.one_of(LAYOUTS, layout=layout)
    if as_nested and layout != "padded":
        raise ValueError(f"expected as_nested or layout, got both ({layout!r}); leave one out")
    if prefix is not None and trajectory_key is None:
        ids = unravel_key((prefix, keys.TRAJ_IDS[-1]))
        if ids in batch.keys(include_nested=True):
            trajectory_key = ids
        else:
            found = index_of(batch, index, None, keys.NEXT_DONE if done_key is None else done_key)
            index, done_key = replace(found, trajectory_key=ids, has_ids=False), None
    index = index_of(batch, index, trajectory_key, done_key)
    flat = rows_of(batch, index)
    if not index.has_ids:
        flat.set(index.trajectory_key, take(index.ids, index.trajectory))
    if as_nested and not _whole_slots(index):
        lengths = index.lengths.tolist()
        nest = lambda values: torch.nested.as_nested_tensor(list(values.split(lengths)))  # noqa: E731
        return apply_unchecked(flat, nest, [len(index), -1])
    if layout == "padded":
        return _padded(flat, index)
    if layout == "jagged":
        return _jagged(flat, index)
    if layout == "list":
        return list(flat.split(index.lengths.tolist())) if len(index) else []
    return flat


def index_of(
    batch: TensorDictBase,
    index: TrajectoryIndex | None,
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
) -> TrajectoryIndex:
    """The index given, checked against the batch, or else the batch's own."""
    if index is None:
        return TrajectoryIndex.of(batch, trajectory_key=trajectory_key, done_key=done_key)
    if trajectory_key is not None or done_key is not None:
        raise ValueError(
            "expected index= or trajectory_key= and done_key=, got both: the index was made with "
            "its own keys"
        )
    if batch.batch_size != index.shape:
        raise ValueError(
            f"expected a batch of size {list(index.shape)}, as the index has it, got "
            f"{list(batch.batch_size)}: make the index of this batch with TrajectoryIndex.of"
        )
    return index


def rows_of(batch: TensorDictBase, index: TrajectoryIndex) -> TensorDict:
    """The steps ``[F]`` of all trajectories, one behind the other, without a mask."""

    def gather(values: Values) -> Values:
        rows = to_rows(values, batch.ndim, index.time_dim)
        return rows if index.dense else take(rows, index.rows)

    flat = map_entries(batch, gather, [index.frames], [index.names[index.time_dim]])
    mask = beside(index.trajectory_key, keys.MASK)
    return flat.exclude(mask) if mask in flat.keys(include_nested=True) else flat


def _padded(flat: TensorDict, index: TrajectoryIndex) -> TensorDict:
    size, longest = len(index), index.longest
    if index.frames == size * longest:
        spread = partial(_grid, size=size, longest=longest)
    else:
        rows = index.trajectory * longest + index.step
        spread = partial(_spread, rows=rows, size=size, longest=longest)
    padded = map_entries(flat, spread, [size, longest], _padded_names(index))
    steps = torch.arange(longest, device=index.lengths.device)
    padded.set(beside(index.trajectory_key, keys.MASK), steps < index.lengths.unsqueeze(-1))
    return padded


def _grid(values: Values, size: int, longest: int) -> Values:
    return values.reshape(size, longest, *values.shape[1:])


def _spread(values: Values, rows: torch.Tensor, size: int, longest: int) -> Values:
    return _grid(place(values, rows, size * longest), size, longest)


def _padded_names(index: TrajectoryIndex) -> list[str | None]:
    """TorchRL's: those of the batch where every slot is one trajectory, none elsewhere."""
    if not _whole_slots(index):
        return [None, None]
    slots = [name for dim, name in enumerate(index.names) if dim != index.time_dim]
    return [slots[0] if len(slots) == 1 else None, index.names[index.time_dim]]


def _whole_slots(index: TrajectoryIndex) -> bool:
    return index.dense and bool((index.lengths == index.shape[index.time_dim]).all())


def _jagged(flat: TensorDict, index: TrajectoryIndex) -> TensorDict:
    # One tensor of offsets for all entries of a device: to torch, ragged sizes are equal where the
    # offsets are the same object.
    offsets = torch.nn.functional.pad(index.lengths.cumsum(0), (1, 0))
    placed = {offsets.device: offsets}
    bounds = offsets.tolist()

    def nest(values: Values) -> Values:
        if isinstance(values, torch.Tensor):
            here = placed.setdefault(values.device, offsets.to(values.device))
            return torch.nested.nested_tensor_from_jagged(values, offsets=here)
        lists = np.empty(len(index), dtype=object)
        for i in range(len(index)):
            lists[i] = values[bounds[i] : bounds[i + 1]].tolist()
        return lists

    return map_entries(flat, nest, [len(index)], inner_dims=False)


def flatten_time(batch: TensorDictBase) -> TensorDict:
    """``[*N, T]`` to ``[N * T]``: the T steps of the first slot, then those of the second, ...

    Args:
        batch: its time dimension is the one named ``"time"``, else the last.

    Returns:
        ``[N * T]``, its dimension named as the batch's time. Entries share memory with the batch
        where their layout allows.

    Raises:
        ValueError: without a time dimension.
    """
    time_dim = time_dim_of(batch)
    to_flat = partial(to_rows, ndim=batch.ndim, time_dim=time_dim)
    return map_entries(batch, to_flat, [batch.numel()], [batch.names[time_dim]])


def unflatten_time(flat: TensorDictBase, slots: int | Sequence[int]) -> TensorDict:
    """``[N * T]`` back to ``[*N, T]``: the inverse of :func:`flatten_time`, with time last.

    Args:
        flat: ``[N * T]``.
        slots: N, or the sizes of several slot dims; ``()`` for an unbatched env's ``[T]``.

    Raises:
        ValueError: for a batch that is not flat, or not a multiple of N long.
    """
    sizes = (slots,) if isinstance(slots, int) else tuple(slots)
    count = math.prod(sizes)
    if flat.ndim != 1:
        raise ValueError(
            f"expected a flat batch [N * T], got batch_size {list(flat.batch_size)}: it has its "
            "slots already"
        )
    if count < 1 or len(flat) % count:
        raise ValueError(
            f"expected slots to divide the {len(flat)} steps, got {slots}: it is N, the number of "
            "env slots that were flattened"
        )
    shape = (*sizes, len(flat) // count)
    names = [None] * len(sizes) + [flat.names[0]]
    return map_entries(flat, partial(from_rows, shape=shape, time_dim=len(sizes)), shape, names)
