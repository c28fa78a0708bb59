"""From ``[N, T]`` to ``[N * T]`` and back: slots, not trajectories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from tensordict import TensorDict, TensorDictBase

from tdcollect.trajectories.entries import from_rows, map_entries, to_rows
from tdcollect.trajectories.index import time_dim_of


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
