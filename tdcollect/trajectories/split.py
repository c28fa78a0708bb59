"""Trajectories of a batch: split into four layouts, joined again, and reduced to a number or a row.

Sums of floats are float64 inside, which every device but MPS has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, TypeAlias, get_args, overload

import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from tdcollect import check, keys
from tdcollect._upstream.torchrl import apply_unchecked
from tdcollect.keys import Key, beside


def entries_of(batch: TensorDictBase) -> str:
    """The keys of a batch, for error messages."""
    return str(sorted(batch.keys(include_nested=True, leaves_only=True), key=str))


def time_dim_of(batch: TensorDictBase) -> int:
    """The dimension named ``"time"``, else the last.

    Raises:
        ValueError: for a batch without batch dimensions.
    """
    if batch.ndim == 0:
        raise ValueError(
            "expected a batch with a time dimension, [*N, T], got batch_size []: a single step has "
            "no trajectories; give it one with batch.unsqueeze(0)"
        )
    names = batch.names
    return names.index(keys.TIME) if keys.TIME in names else batch.ndim - 1


def expand(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The runs ``starts[i], starts[i] + 1, ...`` of ``lengths[i]`` each, one after the other."""
    before = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(starts - before, lengths)
    return shift + torch.arange(len(shift), device=shift.device)


@dataclass(frozen=True, eq=False, repr=False)
class TrajectoryIndex:
    """The position of each of the B trajectories in a batch ``[*N, T]``. Made by :meth:`of`.

    A *row* counts the batch's steps slot by slot, time last: step t of slot n is row ``n * T + t``.
    A trajectory is a run of rows of one slot. Trajectories are in the order of their rows.

    Attributes:
        starts: ``[B]`` int64, the first row of each.
        lengths: ``[B]`` int64, in steps.
        slot: ``[B]`` int64, counted over all dims before time.
        ids: ``[B]``, the ids of the batch; ``0 .. B-1`` where it has none.
        complete: ``[B]`` bool, true if the last row is done. In a batch without done flags: true
            if another trajectory follows in the slot.
        shape: batch size of the batch.
        time_dim: its time dimension.
        names: its names.
        trajectory_key: the entry of the ids.
        from_ids: whether boundaries came from it, rather than from the done flags.
        has_ids: whether the batch has that entry.
        has_mask: whether it has a mask beside it.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    slot: torch.Tensor
    ids: torch.Tensor
    complete: torch.Tensor
    shape: torch.Size
    time_dim: int
    names: tuple[str | None, ...]
    trajectory_key: Key
    from_ids: bool
    has_ids: bool
    has_mask: bool

    @classmethod
    def of(
        cls,
        batch: TensorDictBase,
        *,
        trajectory_key: Key | None = None,
        done_key: Key | None = None,
    ) -> TrajectoryIndex:
        """The index of a batch ``[*N, T]``, or of a padded one ``[B, L]`` with its mask.

        A trajectory begins with a slot, and where the id changes; in a batch without ids, after
        each done flag. A ``"mask"`` entry beside the ids says which rows count.

        Args:
            batch: its time dimension is the one named ``"time"``, else the last.
            trajectory_key: ids, integers ``[*N, T]`` or ``[*N, T, 1]``. By default
                ``("collector", "traj_ids")``.
            done_key: flags, bool ``[*N, T]`` or ``[*N, T, 1]``. By default ``("next", "done")``.
                Given alone, it takes precedence over ids.

        Raises:
            TypeError: if the batch is not a TensorDict, ids are not integers, or flags not bools.
            ValueError: without a time dimension, or if an entry has another shape.
            KeyError: if there are neither ids nor done flags, or the entry named is missing.
        """
        if not isinstance(batch, TensorDictBase):
            raise TypeError(
                f"expected a TensorDict of batch size [*N, T], got {type(batch).__name__}; "
                "trajectories in a list are joined by join_trajectories"
            )
        time_dim = time_dim_of(batch)
        ids_at: Key = keys.TRAJ_IDS if trajectory_key is None else trajectory_key
        ids = _grid(batch, ids_at, time_dim)
        done = _grid(batch, keys.NEXT_DONE if done_key is None else done_key, time_dim)
        mask = _grid(batch, beside(ids_at, keys.MASK), time_dim)

        named = (("trajectory ids", trajectory_key, ids), ("done flags", done_key, done))
        for what, key, entry in named:
            if key is not None and entry is None:
                raise KeyError(f"expected an entry {key!r} with {what}, got {entries_of(batch)}")
        if ids is not None and (ids.is_floating_point() or ids.is_complex()):
            raise TypeError(f"expected integer ids in {ids_at!r}, got {ids.dtype}")
        for name, flags in (("done flags", done), ("the mask", mask)):
            if flags is not None and flags.dtype is not torch.bool:
                raise TypeError(f"expected {name} of dtype torch.bool, got {flags.dtype}")

        if ids is not None and (trajectory_key is not None or done_key is None):
            by_ids, between = ids, ids[:, 1:] != ids[:, :-1]
        elif done is not None:
            by_ids, between = None, done[:, :-1]
        else:
            raise KeyError(
                f"expected trajectory ids in {ids_at!r} or done flags in {keys.NEXT_DONE!r}, got "
                f"{entries_of(batch)}: name the entry with trajectory_key= or done_key="
            )
        size = between.shape[0], batch.shape[time_dim]
        starting, ending = (between.new_ones(size) for _ in range(2))
        starting[:, 1:] = ending[:, :-1] = between
        if mask is not None:  # a run of rows that count also ends at one that does not
            starting[:, 1:] |= ~mask[:, :-1]
            ending[:, :-1] |= ~mask[:, 1:]
            starting, ending = starting & mask, ending & mask
        starts, ends = (flags.reshape(-1).nonzero().squeeze(-1) for flags in (starting, ending))
        # max: a batch of no steps has no trajectories, and no slot to divide out.
        slot = starts // max(size[1], 1)
        followed = slot.diff(append=slot.new_full((1,), -1)) == 0
        return cls(
            starts=starts,
            lengths=ends - starts + 1,
            slot=slot,
            ids=(
                torch.arange(len(starts), device=starts.device)
                if by_ids is None
                else by_ids.reshape(-1)[starts]
            ),
            complete=followed if done is None else done.reshape(-1)[ends],
            shape=batch.batch_size,
            time_dim=time_dim,
            names=tuple(batch.names),
            trajectory_key=ids_at,
            from_ids=by_ids is not None,
            has_ids=ids is not None,
            has_mask=mask is not None,
        )

    def __len__(self) -> int:
        """B, the number of trajectories."""
        return len(self.starts)

    def __repr__(self) -> str:
        origin = "ids" if self.from_ids else "done flags"
        return (
            f"TrajectoryIndex({len(self)} trajectories, {int(self.complete.sum())} complete, "
            f"{self.frames} steps in a batch {list(self.shape)}, from {origin})"
        )

    @cached_property
    def frames(self) -> int:
        """Steps of all trajectories together: F."""
        return int(self.lengths.sum())

    @cached_property
    def longest(self) -> int:
        """L, the length of the longest trajectory; 0 if there is none."""
        return int(self.lengths.max()) if len(self) else 0

    @property
    def dense(self) -> bool:
        """True if every step of the batch belongs to a trajectory, as it does without a mask."""
        return self.frames == math.prod(self.shape)

    @cached_property
    def rows(self) -> torch.Tensor:
        """``[F]`` int64, the rows of the first trajectory, then those of the second, ..."""
        return expand(self.starts, self.lengths)

    @cached_property
    def trajectory(self) -> torch.Tensor:
        """``[F]`` int64, the trajectory, ``0 .. B-1``, of each of ``rows``."""
        return torch.repeat_interleave(self.lengths)

    @cached_property
    def step(self) -> torch.Tensor:
        """``[F]`` int64, the step of each of ``rows``, from 0 in each trajectory."""
        return expand(torch.zeros_like(self.lengths), self.lengths)


def _grid(batch: TensorDictBase, key: Key, time_dim: int) -> torch.Tensor | None:
    """An entry as ``[S, T]``, S slots of all dims before time; None if there is none."""
    value = batch.get(key, None)
    if value is None:
        return None
    shape = batch.batch_size
    if value.is_nested:
        raise ValueError(
            f"expected {key!r} of shape {list(shape)}, got a nested tensor: make the batch flat "
            "first, with join_trajectories"
        )
    if value.shape not in (shape, torch.Size([*shape, 1])):
        raise ValueError(
            f"expected {key!r} of shape {list(shape)} or {[*shape, 1]}, the batch size and a last "
            f"1, got {list(value.shape)}: name another entry with trajectory_key= or done_key="
        )
    value = value.reshape(shape).movedim(time_dim, -1)
    return value.reshape(math.prod(value.shape[:-1]), value.shape[-1])


Layout: TypeAlias = Literal["padded", "jagged", "flat", "list"]
LAYOUTS = get_args(Layout)
_NEXT_REWARD = (keys.NEXT, keys.REWARD)


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
        ids = tensordict.unravel_key((prefix, keys.TRAJ_IDS[-1]))
        if ids in batch.keys(include_nested=True):
            trajectory_key = ids
        else:
            by_done = index_of(batch, index, None, keys.NEXT_DONE if done_key is None else done_key)
            index, done_key = replace(by_done, trajectory_key=ids, has_ids=False), None
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
    rows = None if index.dense else index.rows
    flat = flat_rows(batch, index.time_dim, rows, index.names[index.time_dim])
    mask = beside(index.trajectory_key, keys.MASK)
    return flat.exclude(mask) if mask in flat.keys(include_nested=True) else flat


def flat_rows(
    batch: TensorDictBase, time_dim: int, rows: torch.Tensor | None = None, name: str | None = None
) -> TensorDict:
    """The steps of a batch, slot by slot, or the rows of these that are asked for."""

    def flat(values: torch.Tensor) -> torch.Tensor:
        values = to_rows(values, batch.ndim, time_dim)
        return values if rows is None else take(values, rows)

    count = math.prod(batch.batch_size) if rows is None else len(rows)
    return map_entries(batch, flat, [count], [name])


def _padded(flat: TensorDict, index: TrajectoryIndex) -> TensorDict:
    size, longest = len(index), index.longest
    full = index.frames == size * longest
    rows = None if full else index.trajectory * longest + index.step

    def spread(values: torch.Tensor) -> torch.Tensor:
        values = values if rows is None else place(values, rows, size * longest)
        return values.reshape(size, longest, *values.shape[1:])

    names: list[str | None] = [None, None]
    if _whole_slots(index):  # as TorchRL has it
        slots = [name for dim, name in enumerate(index.names) if dim != index.time_dim]
        names = [slots[0] if len(slots) == 1 else None, index.names[index.time_dim]]
    padded = map_entries(flat, spread, [size, longest], names)
    steps = torch.arange(longest, device=index.lengths.device)
    padded.set(beside(index.trajectory_key, keys.MASK), steps < index.lengths.unsqueeze(-1))
    return padded


def _whole_slots(index: TrajectoryIndex) -> bool:
    return index.dense and bool((index.lengths == index.shape[index.time_dim]).all())


def _jagged(flat: TensorDict, index: TrajectoryIndex) -> TensorDict:
    # One tensor of offsets for all entries of a device: to torch, ragged sizes are equal where the
    # offsets are the same object.
    offsets = torch.nn.functional.pad(index.lengths.cumsum(0), (1, 0))
    placed = {offsets.device: offsets}

    def nest(values: torch.Tensor) -> torch.Tensor:
        here = placed.setdefault(values.device, offsets.to(values.device))
        return torch.nested.nested_tensor_from_jagged(values, offsets=here)

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
    return flat_rows(batch, time_dim, name=batch.names[time_dim])


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


def join_trajectories(
    trajectories: TensorDictBase | Sequence[TensorDictBase],
    index: TrajectoryIndex | None = None,
    *,
    trajectory_key: Key | None = None,
) -> TensorDict:
    """The inverse of :func:`split_trajectories`, for each of its layouts.

    Args:
        trajectories: padded ``[B, L]`` with a mask, jagged ``[B]``, flat ``[F]``, or a list of
            ``[length]``; entries may have been added, changed or removed since the split.
        index: of the batch that was split. Without it, the result is flat.
        trajectory_key: of the split, if it was not the default; an index knows its own.

    Returns:
        ``[F]``, the steps of one trajectory behind those of the other, F the sum of lengths. With
        an index: the batch ``[*N, T]`` that was split, names included, without the ids and the
        mask that splitting added. Steps that its mask leaves out read zero.

    Raises:
        TypeError: for what is neither a TensorDict nor a sequence of them.
        ValueError: for an empty list without an index, a TensorDict in none of the layouts, and
            trajectories that are not as many, or not as long, as those of the index.
    """
    if index is not None:
        trajectory_key = index.trajectory_key
    mask_key = beside(keys.TRAJ_IDS if trajectory_key is None else trajectory_key, keys.MASK)
    sizes: list[int] | None = None
    if not isinstance(trajectories, TensorDictBase):
        flat, sizes = _join_list(trajectories)
    elif any(_is_nested(value) for value in leaves(trajectories)):
        flat, sizes = _join_jagged(trajectories)
    elif trajectories.ndim == 2 and mask_key in trajectories.keys(include_nested=True):
        flat = unpad(trajectories, mask_key=mask_key)
        sizes = trajectories.get(mask_key).sum(-1).tolist()
    elif trajectories.ndim == 1:
        flat = map_entries(trajectories, lambda values: values, trajectories.batch_size)
    else:
        raise ValueError(
            f"expected trajectories padded [B, L] with a mask in {mask_key!r}, jagged [B], flat "
            f"[F] or in a list, got batch_size {list(trajectories.batch_size)}: a batch [N, T] is "
            "made flat by split_trajectories(batch, layout='flat') or flatten_time(batch)"
        )
    if index is None:
        return flat
    if sizes is not None and sizes != index.lengths.tolist():
        raise ValueError(
            f"expected the {len(index)} trajectories of the index, {index.frames} steps, each of "
            f"its length there; got {len(sizes)} of {sum(sizes)} steps: pass the index of the "
            "batch that was split, and trajectories in their order"
        )
    if flat.batch_size[0] != index.frames:
        raise ValueError(
            f"expected the {index.frames} steps of the index, got {flat.batch_size[0]}: pass the "
            "index of the batch that was split"
        )
    return _restore(flat, index)


def unpad(padded: TensorDictBase, *, mask_key: Key | None = None) -> TensorDict:
    """The steps ``[F]`` of a padded batch ``[B, L]`` where its mask is true, without the mask.

    Args:
        padded: any batch dims, the last of which is time unless another is named ``"time"``.
        mask_key: bool, of the batch size. By default ``("collector", "mask")``.

    Raises:
        KeyError: without the mask.
        ValueError, TypeError: for a mask of another shape, or not of bools.
    """
    mask_key = beside(keys.TRAJ_IDS, keys.MASK) if mask_key is None else mask_key
    mask = _entry(padded, mask_key, "a mask", "mask_key")
    if mask.dtype is not torch.bool:
        raise TypeError(f"expected a mask of dtype torch.bool, got {mask.dtype}")
    if mask.shape != padded.batch_size:
        raise ValueError(
            f"expected a mask of the batch size {list(padded.batch_size)}, got {list(mask.shape)}"
        )
    time_dim = time_dim_of(padded)
    counting = to_rows(mask, padded.ndim, time_dim).nonzero().squeeze(-1)
    return _without(flat_rows(padded, time_dim, counting), mask_key)


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def _join_list(trajectories: Any) -> tuple[TensorDict, list[int]]:
    if not isinstance(trajectories, Sequence) or not all(
        isinstance(one, TensorDictBase) for one in trajectories
    ):
        raise TypeError(
            "expected a TensorDict or a list of TensorDicts, got "
            f"{type(trajectories).__name__}: see split_trajectories for the layouts"
        )
    for i, one in enumerate(trajectories):
        if one.ndim != 1:
            raise ValueError(
                f"expected trajectories of batch size [length], got {list(one.batch_size)} at {i}"
            )
    if not trajectories:
        raise ValueError(
            "expected at least one trajectory, got an empty list: it does not say what entries a "
            "joined batch would have"
        )
    joined = torch.cat(list(trajectories), 0) if len(trajectories) > 1 else trajectories[0].copy()
    return joined, [len(one) for one in trajectories]


def _join_jagged(jagged: TensorDictBase) -> tuple[TensorDict, list[int]]:
    nested = [value for value in leaves(jagged) if _is_nested(value)]
    if any(value.layout is not torch.jagged for value in nested):
        raise ValueError(
            "expected nested tensors of layout torch.jagged, got torch.strided: convert them with "
            "torch.nested.as_nested_tensor(..., layout=torch.jagged)"
        )
    lengths = nested[0].offsets().diff().tolist()

    def flatten(values: torch.Tensor) -> torch.Tensor:
        rows = values.values()
        if rows.shape[0] != sum(lengths):
            raise ValueError(
                f"expected {sum(lengths)} steps in each nested entry, got {rows.shape[0]}"
            )
        return rows

    offsets = nested[0].offsets().cpu()
    return map_entries(jagged, flatten, [sum(lengths)], offsets=offsets), lengths


def _restore(flat: TensorDict, index: TrajectoryIndex) -> TensorDict:
    if not index.has_ids:
        flat = _without(flat, index.trajectory_key)
    size = index.shape.numel()

    def lay_out(values: torch.Tensor) -> torch.Tensor:
        rows = values if index.dense else place(values, index.rows, size)
        return from_rows(rows, index.shape, index.time_dim)

    batch = map_entries(flat, lay_out, index.shape, index.names)
    if index.has_mask:
        steps = torch.ones(index.frames, dtype=torch.bool, device=index.rows.device)
        batch.set(beside(index.trajectory_key, keys.MASK), lay_out(steps))
    return batch


def _without(batch: TensorDict, key: Key) -> TensorDict:
    """Without an entry, and without the nested TensorDict that held nothing else."""
    if key not in batch.keys(include_nested=True):
        return batch
    batch = batch.exclude(key)
    parent = None if isinstance(key, str) or len(key) == 1 else key[:-1]
    if parent is not None and batch.get(parent).is_empty():
        batch = batch.exclude(parent)
    return batch


def lengths(batch: TensorDictBase, index: TrajectoryIndex | None = None) -> torch.Tensor:
    """Steps of each trajectory in the batch, ``[B]`` int64.

    Args:
        batch: ``[*N, T]``, or padded ``[B, L]`` with its mask.
        index: of the batch, to compute it once for several calls.
    """
    return index_of(batch, index).lengths


def returns(
    batch: TensorDictBase, index: TrajectoryIndex | None = None, *, key: Key = _NEXT_REWARD
) -> torch.Tensor:
    """Sum of rewards of each trajectory, ``[B, 1]`` for TorchRL's rewards ``[*N, T, 1]``.

    Rewards count from the trajectory's first step in the batch to its last there; ``complete`` of
    the index tells whole endings. Dtype and rounding are those of :func:`segment_sum`.

    Args:
        batch: ``[*N, T]``, or padded ``[B, L]`` with its mask.
        index: of the batch, to compute it once for several calls.
        key: of the rewards.

    Raises:
        KeyError: if the batch lacks the entry.
    """
    index = index_of(batch, index)
    return segment_sum(_entry(batch, key), index)


def discounted_returns(
    batch: TensorDictBase,
    gamma: float,
    index: TrajectoryIndex | None = None,
    *,
    key: Key = _NEXT_REWARD,
) -> torch.Tensor:
    """``sum_k gamma**k * reward_k`` of each trajectory, k from its first step: ``[B, 1]``.

    Powers, products and sums are float64; the result has the dtype of the rewards, or float64
    where they are integers.

    Args:
        gamma: between 0 and 1; 0 leaves the first reward alone.
        batch, index, key: as for :func:`returns`.

    Raises:
        KeyError: if the batch lacks the entry.
        ValueError: for another gamma.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"expected gamma between 0 and 1, got {gamma}")
    index = index_of(batch, index)
    rewards = _rows(_entry(batch, key), index)
    discounts = float(gamma) ** index.step.to(rewards.device, torch.float64)
    discounts = discounts.reshape(-1, *[1] * (rewards.ndim - 1))
    # A discount of zero leaves out what may be infinite.
    discounted = (rewards * discounts).masked_fill(discounts == 0, 0)
    return _sum_rows(discounted, index, rewards.dtype)


def segment_sum(values: torch.Tensor, index: TrajectoryIndex) -> torch.Tensor:
    """Sum over the steps of each trajectory, ``[B, *feature]``.

    Floats are added in float64, first step first, and rounded once to their own dtype; integers and
    bools are added exactly, in int64. Gradients pass.

    Args:
        values: ``[*N, T, *feature]``, of the batch's size.
        index: of the batch.

    Raises:
        ValueError: for values of another size.
    """
    return _sum_rows(_rows(values, index), index, values.dtype)


def first(batch: TensorDictBase, index: TrajectoryIndex | None = None) -> TensorDict:
    """The first row of each trajectory, ``[B]``; arguments are as for :func:`lengths`."""
    index = index_of(batch, index)
    return flat_rows(batch, index.time_dim, index.starts)


def last(batch: TensorDictBase, index: TrajectoryIndex | None = None) -> TensorDict:
    """The last row of each trajectory, ``[B]``; arguments are as for :func:`lengths`."""
    index = index_of(batch, index)
    return flat_rows(batch, index.time_dim, index.starts + index.lengths - 1)


def _entry(batch: TensorDictBase, key: Key, what: str = "rewards", by: str = "key") -> torch.Tensor:
    value = batch.get(key, None)
    if value is None:
        raise KeyError(
            f"expected {what} in {key!r}, got {entries_of(batch)}: name the entry with {by}="
        )
    return value


def _rows(values: torch.Tensor, index: TrajectoryIndex) -> torch.Tensor:
    """``[F, *feature]``: the values of the trajectories' steps, one behind the other."""
    ndim = len(index.shape)
    if values.shape[:ndim] != index.shape:
        raise ValueError(
            f"expected values of shape {[*index.shape, '...']}, the batch size of the index, got "
            f"{list(values.shape)}"
        )
    rows = to_rows(values, ndim, index.time_dim)
    return rows if index.dense else take(rows, index.rows)


def _sum_rows(rows: torch.Tensor, index: TrajectoryIndex, dtype: torch.dtype) -> torch.Tensor:
    """Sums ``[B, *feature]`` of rows ``[F, *feature]``, rounded once to a dtype of floats."""
    if rows.is_floating_point():
        rows = rows.to(torch.float64)
    else:
        rows = rows.to(torch.complex128 if rows.is_complex() else torch.int64)
    if rows.dtype is torch.float64 and len(index) and math.prod(rows.shape):
        # In order of time on any device, where index_add's atomics follow no order.
        sums = torch.segment_reduce(
            rows.contiguous(), "sum", lengths=index.lengths.to(rows.device), unsafe=True
        )
    else:
        zeros = rows.new_zeros(len(index), *rows.shape[1:])
        sums = zeros.index_add(0, index.trajectory.to(rows.device), rows)
    return sums.to(dtype) if dtype.is_floating_point or dtype.is_complex else sums


# ----------------------------------------------------- one operation on every entry, whatever it is

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype for each width in bytes."""

_FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
_NOT_INDEXED = {torch.uint16, torch.uint32, torch.uint64, *_FLOAT8}


def map_entries(
    batch: TensorDictBase,
    operation: Callable[[torch.Tensor], torch.Tensor],
    batch_size: Sequence[int],
    names: Sequence[str | None] | None = None,
    *,
    inner_dims: bool = True,
    offsets: torch.Tensor | None = None,
) -> TensorDict:
    """A new TensorDict of ``batch_size`` with ``operation`` done to each entry.

    For a non-tensor entry with one value per step, it is done to the numbers of these values; with
    ``offsets``, of a jagged batch, the values are those in its lists.
    A nested TensorDict keeps the batch dims that it has beyond those of ``batch``, unless
    ``inner_dims`` is False; one that is stacked lazily along such a dim stays so.
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
            if tensordict.is_non_tensor(value):
                entry = _map_non_tensor(value, operation, inner(value), offsets)
            elif (
                inner_dims
                and isinstance(value, LazyStackedTensorDict)
                and value.stack_dim >= batch.ndim
            ):
                entry = each(value)
            elif tensordict.is_tensor_collection(value):
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
        if not tensordict.is_non_tensor(value):
            yield from leaves(value) if tensordict.is_tensor_collection(value) else [value]


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
    value: Any,
    operation: Callable[[torch.Tensor], torch.Tensor],
    size: torch.Size,
    offsets: torch.Tensor | None,
) -> NonTensorData | tensordict.NonTensorStack:
    if isinstance(value, NonTensorData):
        return NonTensorData(value.data, batch_size=size)
    if min(value.batch_size, default=0) < 0:
        raise ValueError(
            "expected as many non-tensor values at every step, got "
            f"{list(value.batch_size)} of {value.tolist()!r:.80}; leave them out (batch.exclude)"
        )
    flat = value.tolist()
    for _ in value.batch_size[1:] if offsets is None else value.batch_size:
        flat = chain.from_iterable(flat)
    values = [None, *flat]  # 0 is where the operation puts nothing
    numbers = torch.arange(1, len(values))
    if offsets is None:
        return _stack(operation(numbers.reshape(value.batch_size)), values)
    nested = torch.nested.nested_tensor_from_jagged(numbers, offsets=offsets)
    return _stack(operation(nested), values)


def _stack(numbers: Any, values: list[Any]) -> Any:
    """A non-tensor entry of values by their numbers; lists of them, where the tensor is nested."""
    if not len(numbers) or not (numbers.is_nested or numbers.numel()):
        return NonTensorData(None, batch_size=numbers.shape[: 1 if numbers.is_nested else None])
    if numbers.is_nested:
        parts = numbers.values().split(numbers.offsets().diff().tolist())
        lists = ([values[i] for i in part.tolist()] for part in parts)
        return tensordict.NonTensorStack(*map(NonTensorData, lists))
    if numbers.ndim == 1:
        return tensordict.NonTensorStack(*(NonTensorData(values[i]) for i in numbers.tolist()))
    return tensordict.NonTensorStack(*(_stack(row, values) for row in numbers))


def to_rows(values: torch.Tensor, ndim: int, time_dim: int) -> torch.Tensor:
    """``[*batch, *feature]`` to ``[rows, *feature]``: slot by slot, time last. A view if it can."""
    values = values.movedim(time_dim, ndim - 1)
    return values.reshape(math.prod(values.shape[:ndim]), *values.shape[ndim:])


def from_rows(values: torch.Tensor, shape: Sequence[int], time_dim: int) -> torch.Tensor:
    """The inverse of :func:`to_rows`, for a batch of ``shape``."""
    moved = [*shape[:time_dim], *shape[time_dim + 1 :], shape[time_dim]]
    return values.reshape(*moved, *values.shape[1:]).movedim(len(shape) - 1, time_dim)


def take(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``values[rows]``, for any dtype."""
    packed = _pack(values)
    return _unpack(packed.index_select(0, rows.to(values.device)), values)


def place(values: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    """``values`` at ``rows`` of ``size`` rows, which are zeros elsewhere."""
    packed = _pack(values)
    rows = rows.to(values.device)
    out = packed.new_zeros(size, *packed.shape[1:])
    # scatter is the faster of the two, but takes one number a row only.
    out = out.scatter_(0, rows, packed) if packed.ndim == 1 else out.index_copy_(0, rows, packed)
    return _unpack(out, values)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """The same bits as rows of one number each, which torch moves several times as fast.

    Bits pass no gradient, so a tensor with one stays as it is. Dtypes that torch cannot index
    always become integers.
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
