"""Replay buffers that cannot take a collector's batches are refused before anything is collected.

TorchRL finds out when it writes the first batch or samples the first slice, and a buffer smaller
than a batch overwrites a part of it without a word.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torchrl.data import ImmutableDatasetWriter, RoundRobinWriter, SliceSampler

from tdcollect.keys import TIME


def check_replay_buffer(
    buffer: Any,
    batch_size: torch.Size,
    steps: int,
    *,
    whole_batches: bool = True,
    trajectories: bool = False,
) -> None:
    """Refuse a replay buffer of the wrong kind, of too many or too few dimensions, or too small.

    Args:
        buffer: of the user. The shape of what one with transforms stores is not known: it passes.
        batch_size: the env's, ``[N]`` or ``[]``.
        steps: T of a batch.
        whole_batches: batches ``[N, T]`` are written, rather than single steps ``[N]``.
        trajectories: trajectories ``[length]`` are written instead.

    Raises:
        TypeError: for what is no replay buffer, or cannot be written to.
        ValueError: for a storage that cannot hold a batch.
    """
    if not all(callable(getattr(buffer, name, None)) for name in ("add", "extend", "sample")):
        raise TypeError(
            "expected replay_buffer to be a replay buffer (torchrl.data.ReplayBuffer, say), got "
            f"{type(buffer).__name__}"
        )
    storage = getattr(buffer, "storage", None)
    ndim, capacity = getattr(storage, "ndim", None), getattr(storage, "max_size", None)
    if isinstance(getattr(buffer, "writer", None), ImmutableDatasetWriter):
        raise TypeError(
            "expected a replay buffer that can be written to, got one with an "
            "ImmutableDatasetWriter; choose a RoundRobinWriter"
        )
    if ndim is None or capacity is None or getattr(buffer, "transform", None):
        return
    shape = [steps] if trajectories else [*batch_size, steps]
    letters = ["length"] if trajectories else [*"N" * len(batch_size), "T"]
    what = f"{'trajectories' if trajectories else 'batches'} [{', '.join(letters)}]"
    asks = f"{type(storage).__name__}(max_size, ndim={len(shape)})"
    if ndim > len(shape):
        raise ValueError(
            f"expected a storage of at most {len(shape)} dimensions for {what}, whose last one is "
            f"{TIME!r}, got ndim={ndim}; make it {asks}"
        )
    if isinstance(getattr(buffer, "sampler", None), SliceSampler) and ndim < len(shape):
        raise ValueError(
            f"expected a storage of steps for a {type(buffer.sampler).__name__}, got ndim={ndim}, "
            f"whose items are whole slots of {what}; make it {asks}"
        )
    if trajectories or not whole_batches or not isinstance(buffer.writer, RoundRobinWriter):
        return
    # A storage of several dimensions is a grid: room for all slots, as many times as is needed.
    rows, room = (shape[0], capacity) if ndim == 1 else (steps, -(-capacity // batch_size.numel()))
    if room < rows:
        least = math.prod(shape[:ndim])
        raise ValueError(
            f"expected a replay buffer that holds a batch, {least} items of {what} with "
            f"{shape}, got max_size={capacity}: a part of each batch would be overwritten as it is "
            f"written; make max_size at least {least}, or frames_per_batch smaller"
        )
