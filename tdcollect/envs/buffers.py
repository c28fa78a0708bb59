"""Buffers that one step of N slots writes: their entries, and memory for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from tdcollect import keys
from tdcollect.envs.process.values import Array, InfoEntry
from tdcollect.envs.spaces import Path, SpaceCodec

_ALIGNMENT = 64  # bytes


class SlotBuffers(NamedTuple):
    """The arrays that a backend writes one step of N slots to. All belong to the caller.

    ``observation`` and ``info`` hold one array ``[N, *shape]`` per entry, ``reward`` is float32
    ``[N]``, or float64 for a caller that needs it as the env gave it; ``terminated`` and
    ``truncated`` are bool ``[N]``.
    """

    observation: Sequence[Array]
    info: Sequence[Array]
    reward: Array
    terminated: Array
    truncated: Array


class Bookkeeping(NamedTuple):
    """The entries to add to the env's own, under the names of TorchRL's transforms."""

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


def entries_of(
    observation: SpaceCodec,
    action: SpaceCodec,
    info: Sequence[InfoEntry],
    bookkeeping: Bookkeeping,
    marks: bool,
) -> list[Entry]:
    """The entries of buffers beside reward and flags; with ``marks``, one for failed steps."""
    entries = [
        Entry(path, leaf.shape, leaf.dtype, leaf.spec)
        for path, leaf in zip(observation.paths, observation.leaves, strict=True)
    ]
    for key, shape, dtype in info:
        kind = torch.from_numpy(np.empty((), dtype)).dtype
        entries.append(Entry((key,), shape, dtype, Unbounded(shape, dtype=kind)))
    count = Bounded(0, torch.iinfo(torch.int64).max, (1,), dtype=torch.int64)
    flag = Categorical(2, shape=(1,), dtype=torch.bool)
    further: list[tuple[bool, str, type, TensorSpec]] = [
        (bookkeeping.step_count, keys.STEP_COUNT, np.int64, count),
        (
            bookkeeping.episode_reward,
            keys.EPISODE_REWARD,
            np.float32,
            Unbounded((1,), dtype=torch.float32),
        ),
        (bookkeeping.is_init, keys.IS_INIT, bool, flag),
        (marks, keys.ENV_ERROR, bool, flag),
    ]
    entries += [
        Entry((name,), (1,), np.dtype(kind), spec) for wanted, name, kind, spec in further if wanted
    ]
    _check_names([entry.path for entry in entries], action.paths)
    return entries


def allocate_buffers(
    entries: Sequence[Entry],
    split: tuple[int, int],
    num_envs: int,
    count: int,
    batched: bool,
    pinned: bool,
    exact: bool = False,
) -> list[StepBuffers]:
    """Zeroed buffers for ``count`` steps, allocated together; see :meth:`Stepper.allocate`.

    ``split`` says where in ``entries`` infos and bookkeeping begin.
    """

    def zeros(shape: Sequence[int], dtype: Any) -> Array:
        array = _aligned_zeros((count, num_envs, *shape), dtype)
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
    infos, bookkeeping = split
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
