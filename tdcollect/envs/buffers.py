"""Buffers that one step of N slots writes: their entries, and memory for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from tdcollect import keys
from tdcollect.envs.backend import Backend, SlotBuffers
from tdcollect.envs.spaces import Path
from tdcollect.workers.values import Array

_ALIGNMENT = 64  # bytes


class Bookkeeping(NamedTuple):
    """Options for entries beside the env's own, under the names of TorchRL's transforms."""

    step_count: bool = False
    episode_reward: bool = False
    is_init: bool = False
    max_episode_steps: int | None = None


class Entry(NamedTuple):
    """An array that every step and every reset writes, beside reward and flags."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    spec: TensorSpec


class StepBuffers(NamedTuple):
    """The arrays and tensors that one step or reset of N slots writes, in memory of their own.

    ``entries`` are arrays ``[N, *shape]``, in the order of the stepper's: ``raw`` holds those that
    the backend writes, ``bookkeeping`` those that the stepper writes. ``reward`` is float32
    ``[N]``: the backend's own array, or its rounding where the backend writes float64. ``done`` is
    bool ``[N]``. ``tensors`` share the memory of the entries, then reward, terminated, truncated
    and done ``[N, 1]``.
    """

    raw: SlotBuffers
    bookkeeping: Sequence[Array]
    entries: Sequence[Array]
    reward: Array
    done: Array
    tensors: Sequence[torch.Tensor]

    @property
    def state(self) -> list[Array]:
        """The arrays ``[N, ...]`` that say where slots are: all but the reward."""
        return [*self.entries, self.raw.terminated, self.raw.truncated, self.done]

    def copy_state(self, arrays: Iterable[Array], slots: Sequence[int] | None = None) -> None:
        """Copy the :attr:`state` of other buffers, of ``slots`` (None for all)."""
        rows: Any = ... if slots is None else list(slots)
        for target, array in zip(self.state, arrays, strict=True):
            target[rows] = array[rows]


def entries_of(backend: Backend, bookkeeping: Bookkeeping, marks: bool) -> list[Entry]:
    """The entries of buffers beside reward and flags: observations, infos, bookkeeping.

    Args:
        backend: the slots.
        bookkeeping: the further entries.
        marks: add an entry that marks failed steps.

    Raises:
        ValueError: if two entries share a name.
    """
    entries = [
        *_observation_entries(backend),
        *_info_entries(backend),
        *_bookkeeping_entries(bookkeeping, marks),
    ]
    _check_names([entry.path for entry in entries], backend.action.paths)
    return entries


def allocate_buffers(
    backend: Backend,
    entries: Sequence[Entry],
    count: int,
    batched: bool,
    pinned: bool,
    exact: bool = False,
) -> list[StepBuffers]:
    """Zeroed buffers for ``count`` steps, allocated together; see :meth:`Stepper.allocate`."""

    def zeros(shape: Sequence[int], dtype: Any) -> Array:
        array = _aligned_zeros((count, backend.num_envs, *shape), dtype)
        return torch.from_numpy(array).pin_memory().numpy() if pinned else array

    arrays = [zeros(entry.shape, entry.dtype) for entry in entries]
    reward = zeros((1,), np.float32)
    flags = [zeros((1,), bool) for _ in range(3)]
    blocks = [*arrays, reward, *flags]
    tensors = zip(
        *(torch.from_numpy(b if batched else b[:, 0]).unbind(0) for b in blocks), strict=True
    )
    exactly = zeros((1,), np.float64) if exact else reward
    scalars = zip(*(block[..., 0] for block in (exactly, *flags)), strict=True)
    rounded = reward[..., 0] if exact else [None] * count
    infos = len(backend.observation.leaves)
    bookkeeping = infos + len(backend.info)
    return [
        StepBuffers(
            SlotBuffers(step[:infos], step[infos:bookkeeping], *scalar[:3]),
            step[bookkeeping:],
            step,
            scalar[0] if stored is None else stored,
            scalar[3],
            tensor,
        )
        for step, scalar, stored, tensor in zip(
            zip(*arrays, strict=True), scalars, rounded, tensors, strict=True
        )
    ]


def _aligned_zeros(shape: Sequence[int], dtype: Any) -> Array:
    """Zeros of which each ``[i]`` is aligned as a tensor of torch's own would be.

    A policy's products round by the alignment of their input. They must not depend on whether the
    input lies in the buffers or in a copy.
    """
    count, *inner = shape
    size = math.prod(inner) * np.dtype(dtype).itemsize
    padded = -(-size // _ALIGNMENT) * _ALIGNMENT
    memory = np.zeros(count * padded + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    strides = np.empty(inner, dtype).strides
    return np.ndarray(shape, dtype, memory, offset, (padded, *strides))


def _observation_entries(backend: Backend) -> list[Entry]:
    codec = backend.observation
    return [
        Entry(path, leaf.shape, leaf.dtype, leaf.spec)
        for path, leaf in zip(codec.paths, codec.leaves, strict=True)
    ]


def _info_entries(backend: Backend) -> list[Entry]:
    return [
        Entry(
            (info.key,),
            info.shape,
            info.dtype,
            Unbounded(info.shape, dtype=torch.from_numpy(np.empty((), info.dtype)).dtype),
        )
        for info in backend.info
    ]


def _bookkeeping_entries(bookkeeping: Bookkeeping, marks: bool) -> list[Entry]:
    entries = []
    flag = Categorical(2, shape=(1,), dtype=torch.bool)
    if bookkeeping.step_count:
        most = torch.iinfo(torch.int64).max
        spec = Bounded(0, most, (1,), dtype=torch.int64)
        entries.append(Entry((keys.STEP_COUNT,), (1,), np.dtype(np.int64), spec))
    if bookkeeping.episode_reward:
        unbounded = Unbounded((1,), dtype=torch.float32)
        entries.append(Entry((keys.EPISODE_REWARD,), (1,), np.dtype(np.float32), unbounded))
    if bookkeeping.is_init:
        entries.append(Entry((keys.IS_INIT,), (1,), np.dtype(bool), flag))
    if marks:
        entries.append(Entry((keys.ENV_ERROR,), (1,), np.dtype(bool), flag))
    return entries


def _check_names(entries: Sequence[Path], actions: Sequence[Path]) -> None:
    paths = [*entries, *actions]
    for i, path in enumerate(paths):
        is_action = i >= len(entries) and path[0] == keys.ACTION
        taken = path[0] in keys.RESERVED and not is_action
        clashes = any(path[: len(p)] == p or p[: len(path)] == path for p in paths[:i])
        if taken or clashes:
            raise ValueError(
                f"the entry {'/'.join(path)!r} of the observation space, the action space or "
                "info_keys has a name that the batch uses for something else; rename it in the env"
            )
