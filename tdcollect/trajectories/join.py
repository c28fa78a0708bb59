"""From trajectories in any layout back to a flat batch, or to the batch that they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect import keys
from tdcollect.keys import Key, beside
from tdcollect.trajectories.entries import Values, from_rows, leaves, map_entries, place
from tdcollect.trajectories.index import TrajectoryIndex, entries_of
from tdcollect.trajectories.split import rows_of


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
    lengths: list[int] | None = None
    if not isinstance(trajectories, TensorDictBase):
        lengths = _check_list(trajectories)
        flat = _join_list(trajectories)
    elif any(_is_nested(value) for value in leaves(trajectories)):
        lengths, flat = _join_jagged(trajectories)
    elif trajectories.ndim == 2 and mask_key in trajectories.keys(include_nested=True):
        lengths = trajectories.get(mask_key).sum(-1).tolist()
        flat = unpad(trajectories, mask_key=mask_key)
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
    _check_origin(flat, lengths, index)
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
    mask = padded.get(mask_key, None)
    if mask is None:
        raise KeyError(
            f"expected a mask in {mask_key!r}, got {entries_of(padded)}: name it with mask_key="
        )
    if mask.dtype is not torch.bool:
        raise TypeError(f"expected a mask of dtype torch.bool, got {mask.dtype}")
    if mask.shape != padded.batch_size:
        raise ValueError(
            f"expected a mask of the batch size {list(padded.batch_size)}, got {list(mask.shape)}"
        )
    # The mask alone says what counts: one trajectory a row, even if ids within it were changed.
    index = TrajectoryIndex.of(
        TensorDict({_IDS: torch.zeros_like(mask, dtype=torch.uint8), _MASK: mask}, mask.shape),
        trajectory_key=_IDS,
    )
    return _without(rows_of(padded, index), mask_key)


_IDS = keys.TRAJ_IDS[-1]
_MASK = keys.MASK


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def _check_list(trajectories: Any) -> list[int]:
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
    return [len(one) for one in trajectories]


def _join_list(trajectories: Sequence[TensorDictBase]) -> TensorDict:
    if not trajectories:
        raise ValueError(
            "expected at least one trajectory, got an empty list: it does not say what entries a "
            "joined batch would have"
        )
    return torch.cat(list(trajectories), 0) if len(trajectories) > 1 else trajectories[0].copy()


def _join_jagged(jagged: TensorDictBase) -> tuple[list[int], TensorDict]:
    nested = [value for value in leaves(jagged) if _is_nested(value)]
    if any(value.layout is not torch.jagged for value in nested):
        raise ValueError(
            "expected nested tensors of layout torch.jagged, got torch.strided: convert them with "
            "torch.nested.as_nested_tensor(..., layout=torch.jagged)"
        )
    lengths = nested[0].offsets().diff().tolist()

    def flatten(values: Values) -> Values:
        if isinstance(values, torch.Tensor):
            rows = values.values()
            if rows.shape[0] != sum(lengths):
                raise ValueError(
                    f"expected {sum(lengths)} steps in each nested entry, got {rows.shape[0]}"
                )
            return rows
        array = np.empty(sum(lengths), dtype=object)
        for row, value in enumerate(value for one in values for value in one):
            array[row] = value
        return array

    return lengths, map_entries(jagged, flatten, [sum(lengths)])


def _check_origin(flat: TensorDict, lengths: list[int] | None, index: TrajectoryIndex) -> None:
    if lengths is not None and lengths != index.lengths.tolist():
        raise ValueError(
            f"expected the {len(index)} trajectories of the index, {index.frames} steps, each of "
            f"its length there; got {len(lengths)} of {sum(lengths)} steps: pass the index of the "
            "batch that was split, and trajectories in their order"
        )
    if flat.batch_size[0] != index.frames:
        raise ValueError(
            f"expected the {index.frames} steps of the index, got {flat.batch_size[0]}: pass the "
            "index of the batch that was split"
        )


def _restore(flat: TensorDict, index: TrajectoryIndex) -> TensorDict:
    if not index.has_ids:
        flat = _without(flat, index.trajectory_key)
    size = index.shape.numel()

    def lay_out(values: Values) -> Values:
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


__all__ = ["join_trajectories", "unpad"]
