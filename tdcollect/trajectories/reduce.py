"""One number, or one row, per trajectory.

Sums of floats are float64 inside, which every device but MPS has.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect import keys
from tdcollect.keys import Key
from tdcollect.trajectories.entries import map_entries, take, to_rows
from tdcollect.trajectories.index import TrajectoryIndex, entries_of
from tdcollect.trajectories.split import index_of

_NEXT_REWARD = (keys.NEXT, keys.REWARD)


def lengths(batch: TensorDictBase, index: TrajectoryIndex | None = None) -> torch.Tensor:
    """Steps of each trajectory in the batch, ``[B]`` int64.

    Args:
        batch: ``[*N, T]``, or padded ``[B, L]`` with its mask.
        index: of the batch, to compute it once for several calls.
    """
    return index_of(batch, index).lengths


def returns(
    batch: TensorDictBase,
    index: TrajectoryIndex | None = None,
    *,
    key: Key = _NEXT_REWARD,
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
        batch: ``[*N, T]``, or padded ``[B, L]`` with its mask.
        gamma: between 0 and 1; 0 leaves the first reward alone.
        index: of the batch, to compute it once for several calls.
        key: of the rewards.

    Raises:
        KeyError: if the batch lacks the entry.
        ValueError: for another gamma.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"expected gamma between 0 and 1, got {gamma}")
    index = index_of(batch, index)
    rewards = _rows(_entry(batch, key), index)
    exact = torch.complex128 if rewards.is_complex() else torch.float64
    discounts = float(gamma) ** index.step.to(rewards.device, torch.float64)
    discounts = discounts.reshape(-1, *[1] * (rewards.ndim - 1))
    sums = _sum_rows(rewards.to(exact) * discounts, index)
    return sums.to(rewards.dtype) if rewards.is_floating_point() else sums


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
    rows = _rows(values, index)
    if not rows.is_floating_point() and not rows.is_complex():
        return _sum_rows(rows.to(torch.int64), index)
    exact = torch.complex128 if rows.is_complex() else torch.float64
    return _sum_rows(rows.to(exact), index).to(values.dtype)


def first(batch: TensorDictBase, index: TrajectoryIndex | None = None) -> TensorDict:
    """The first row of each trajectory in the batch, ``[B]``.

    Args:
        batch: ``[*N, T]``, or padded ``[B, L]`` with its mask.
        index: of the batch, to compute it once for several calls.
    """
    index = index_of(batch, index)
    return _pick(batch, index, index.starts)


def last(batch: TensorDictBase, index: TrajectoryIndex | None = None) -> TensorDict:
    """The last row of each trajectory in the batch, ``[B]``.

    Args:
        batch: ``[*N, T]``, or padded ``[B, L]`` with its mask.
        index: of the batch, to compute it once for several calls.
    """
    index = index_of(batch, index)
    return _pick(batch, index, index.starts + index.lengths - 1)


def _pick(batch: TensorDictBase, index: TrajectoryIndex, rows: torch.Tensor) -> TensorDict:
    to_flat = partial(to_rows, ndim=batch.ndim, time_dim=index.time_dim)
    return map_entries(batch, lambda values: take(to_flat(values), rows), [len(index)])


def _entry(batch: TensorDictBase, key: Key) -> torch.Tensor:
    value = batch.get(key, None)
    if value is None:
        raise KeyError(
            f"expected rewards in {key!r}, got {entries_of(batch)}: name the entry with key="
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


def _sum_rows(rows: torch.Tensor, index: TrajectoryIndex) -> torch.Tensor:
    """Sums ``[B, *feature]`` of rows ``[F, *feature]`` in their own dtype."""
    if rows.dtype is torch.float64 and len(index) and math.prod(rows.shape):
        # In order of time on any device, where index_add's atomics follow no order.
        return torch.segment_reduce(
            rows.contiguous(), "sum", lengths=index.lengths.to(rows.device), unsafe=True
        )
    zeros = rows.new_zeros(len(index), *rows.shape[1:])
    return zeros.index_add(0, index.trajectory.to(rows.device), rows)
