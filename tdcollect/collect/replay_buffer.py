"""Replay buffers that cannot take a collector's batches are refused before anything is collected.

TorchRL finds out when it writes the first batch or samples the first slice, and a replay buffer
smaller than a batch overwrites a part of it without a word.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torchrl.data import ImmutableDatasetWriter, RoundRobinWriter, SliceSampler

from tdcollect.keys import TIME


def check_replay_buffer_of(collector: Any) -> None:
    """Check the replay buffer of a collector; see :func:`check_replay_buffer`."""
    # A postproc changes the batch in ways that are not known yet.
    if collector.replay_buffer is not None and collector.postproc is None:
        check_replay_buffer(
            collector.replay_buffer,
            collector.env.batch_size,
            collector.frames_per_batch,
            extends=collector.extend_buffer,
            trajectories=collector.trajs_per_batch is not None,
        )


def check_replay_buffer(
    buffer: Any,
    batch_size: torch.Size,
    steps: int,
    *,
    extends: bool = True,
    trajectories: bool = False,
) -> None:
    """Refuse a replay buffer of the wrong kind, of too many or too few dimensions, or too small.

    Args:
        buffer: the replay buffer. One with transforms passes: the shape that it stores is unknown.
        batch_size: the env's, ``[N]`` or ``[]``.
        steps: T of a batch.
        extends: batches ``[N, T]`` are written, rather than single steps ``[N]``.
        trajectories: trajectories ``[length]`` are written instead.

    Raises:
        TypeError: if it is not a replay buffer, or cannot be written to.
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
    written = f"{'trajectories' if trajectories else 'batches'} [{', '.join(letters)}]"
    asks = f"{type(storage).__name__}(max_size, ndim={len(shape)})"
    if ndim > len(shape):
        raise ValueError(
            f"expected a storage of at most {len(shape)} dimensions for {written}, whose last one "
            f"is {TIME!r}, got ndim={ndim}; make it {asks}"
        )
    if isinstance(getattr(buffer, "sampler", None), SliceSampler) and ndim < len(shape):
        raise ValueError(
            f"expected a storage of steps for a {type(buffer.sampler).__name__}, got ndim={ndim}, "
            f"whose items are whole slots of {written}; make it {asks}"
        )
    if trajectories or not extends or not isinstance(buffer.writer, RoundRobinWriter):
        return
    # A storage of several dimensions is a grid: room for all slots, as many times as is needed.
    need, room = (shape[0], capacity) if ndim == 1 else (steps, -(-capacity // batch_size.numel()))
    if room < need:
        least = math.prod(shape[:ndim])
        raise ValueError(
            f"expected a replay buffer that holds a batch, {least} items of {written} with "
            f"{shape}, got max_size={capacity}: a part of each batch would be overwritten as it is "
            f"written; make max_size at least {least}, or frames_per_batch smaller"
        )
