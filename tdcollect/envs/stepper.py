"""Slots with their bookkeeping, on arrays: the one place where a step of interaction happens.

The ``EnvBase`` wrapper and the collector both drive an env through a :class:`Stepper`. It adds to a
backend what TorchRL's StepCounter, RewardSum and InitTracker add, a time limit, the seeds that
wait for their reset, and the checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from tdcollect import keys
from tdcollect.envs.backend import Backend, Frame
from tdcollect.envs.errors import SlotError
from tdcollect.envs.spaces import Array, Path

_ALIGNMENT = 64  # bytes


class Bookkeeping(NamedTuple):
    """What is recorded beside what the env says, under the names of TorchRL's transforms."""

    step_count: bool = False
    episode_reward: bool = False
    is_init: bool = False
    time_limit: int | None = None


class Entry(NamedTuple):
    """An array that every step and every reset writes, beside reward and flags."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    spec: TensorSpec


class StepFrame(NamedTuple):
    """What one step or reset of N slots writes, in memory of its own.

    ``entries`` are arrays ``[N, *shape]``, in the order of the stepper's; ``backend`` and
    ``bookkeeping`` are the parts of them that each writes. ``done`` is bool ``[N]``. ``tensors``
    share the memory of the entries, then reward, terminated, truncated and done ``[N, 1]``.
    """

    backend: Frame
    bookkeeping: Sequence[Array]
    entries: Sequence[Array]
    done: Array
    tensors: Sequence[torch.Tensor]


class Stepper:
    """Steps and resets slots on arrays.

    Args:
        backend: the slots.
        bookkeeping: what to record beside.

    Attributes:
        entries: what a frame holds beside reward and flags: observations, infos, bookkeeping.

    Raises:
        ValueError: for a time limit on slots that cannot be reset singly, and for entries that
            share a name.
    """

    def __init__(self, backend: Backend, bookkeeping: Bookkeeping = Bookkeeping()):
        if bookkeeping.time_limit is not None and not backend.resets_subset:
            raise ValueError(
                "expected no time_limit: this vector env cannot reset single slots, which a limit "
                "asks for; make the env itself with one, or use backend='serial'"
            )
        self.backend = backend
        self.num_envs = backend.num_envs
        self.bookkeeping = bookkeeping
        self.entries = [
            *_observation_entries(backend),
            *_info_entries(backend),
            *_bookkeeping_entries(bookkeeping),
        ]
        _check_names([entry.path for entry in self.entries], backend.action.paths)
        self._every_slot = range(self.num_envs)
        self._counts_matter = bookkeeping.step_count or bookkeeping.time_limit is not None
        self._counts = np.zeros(self.num_envs, np.int64)
        self._returns = np.zeros(self.num_envs, np.float32)
        self._must_reset = np.ones(self.num_envs, bool)
        self._unstarted = set(self._every_slot)
        self._seeds: dict[int, int] = {}

    def frames(self, count: int, batched: bool = True, pinned: bool = False) -> list[StepFrame]:
        """Zeroed frames for ``count`` steps, allocated together.

        Args:
            count: how many.
            batched: tensors of batch size ``[N]``; False for ``[]``, where N is 1.
            pinned: in page-locked memory, from which copies to a GPU need not be waited for.
        """

        def zeros(shape: Sequence[int], dtype: Any) -> Array:
            array = _aligned_zeros((count, self.num_envs, *shape), dtype)
            return torch.from_numpy(array).pin_memory().numpy() if pinned else array

        entries = [zeros(entry.shape, entry.dtype) for entry in self.entries]
        reward = zeros((1,), np.float32)
        flags = [zeros((1,), bool) for _ in range(3)]
        blocks = [*entries, reward, *flags]
        tensors = zip(
            *(torch.from_numpy(b if batched else b[:, 0]).unbind(0) for b in blocks), strict=True
        )
        scalars = zip(*(block[..., 0] for block in (reward, *flags)), strict=True)
        first = len(self.backend.observation.leaves)
        second = first + len(self.backend.info)
        return [
            StepFrame(
                Frame(row[:first], row[first:second], *scalar[:3]),
                row[second:],
                row,
                scalar[3],
                tensor,
            )
            for row, scalar, tensor in zip(
                zip(*entries, strict=True), scalars, tensors, strict=True
            )
        ]

    def set_seeds(self, seeds: Sequence[int]) -> None:
        """Keep one seed a slot for that slot's next reset.

        Raises:
            ValueError: where the backend can never honour them.
        """
        self.backend.check_seeds(seeds)
        self._seeds = dict(enumerate(seeds))

    def reset(
        self,
        slots: Sequence[int] | None,
        out: StepFrame,
        seeds: Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start an episode in each of ``slots`` (None for all); write the rows of those only.

        Args:
            slots: ascending.
            out: its reward and flags are left alone.
            seeds: one a slot in ``slots``; None for those of :meth:`set_seeds` that were not used
                yet, or the env's own generators.
            options: gymnasium's reset options.
        """
        slots = self._every_slot if slots is None else slots
        if not slots:
            return
        failed: SlotError | None = None
        for group, group_seeds in self._by_seeding(slots, seeds):
            if group_seeds is not None:
                self.backend.check_seeds(group_seeds)
            try:
                self.backend.reset(group, group_seeds, options, out.backend)
            except SlotError as error:
                failed = error if failed is None else failed.joined(error)
        for slot in slots:
            self._seeds.pop(slot, None)
        rows = list(slots) if failed is None else [s for s in slots if s not in failed.causes]
        self._counts[rows] = 0
        self._returns[rows] = 0
        self._must_reset[rows] = False
        self._unstarted.difference_update(rows)
        self._write_bookkeeping(rows, True, out)
        if failed is not None:
            raise failed

    def _by_seeding(
        self, slots: Sequence[int], seeds: Sequence[int] | None
    ) -> list[tuple[Sequence[int], Sequence[int] | None]]:
        """Slots apart by whether a seed waits for them."""
        if seeds is not None or not self._seeds:
            return [(slots, seeds)]
        seeded = [slot for slot in slots if slot in self._seeds]
        free = [slot for slot in slots if slot not in self._seeds]
        groups: list[tuple[Sequence[int], Sequence[int] | None]] = []
        if seeded:
            groups.append((seeded, [self._seeds[slot] for slot in seeded]))
        if free:
            groups.append((free, None))
        return groups

    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: StepFrame) -> None:
        """Step ``slots`` (None for all) and write their rows; others are left alone.

        Args:
            actions: ``[N, *shape]`` each, in the order of the action entries.
            slots: ascending.
            out: receives observations (at an episode's end the true final one), reward and flags.

        Raises:
            RuntimeError: before the first reset, or where an action would be lost.
            SlotError: where the envs of some slots raised; the others are stepped.
        """
        self._check_step(slots)
        frame = out.backend
        failed: SlotError | None = None
        try:
            self.backend.step(actions, slots, frame)
        except SlotError as error:
            failed = error
            stepped = self._every_slot if slots is None else slots
            slots = [slot for slot in stepped if slot not in error.causes]
            self._must_reset[list(error.causes)] = True
        rows: Any = slice(None) if slots is None else list(slots)
        if self._counts_matter:
            self._counts[rows] += 1
        if self.bookkeeping.time_limit is not None:
            frame.truncated[rows] |= self._counts[rows] >= self.bookkeeping.time_limit
        if self.bookkeeping.episode_reward:
            self._returns[rows] += frame.reward[rows]
        np.logical_or(frame.terminated, frame.truncated, out=out.done)
        self._must_reset[rows] = out.done[rows]
        if out.bookkeeping:
            self._write_bookkeeping(rows, False, out)
        if failed is not None:
            raise failed

    def rebuild(self, slots: Sequence[int]) -> None:
        """Make the envs of ``slots`` anew; each must be reset before it is stepped."""
        self.backend.rebuild(slots)
        self._must_reset[list(slots)] = True
        self._unstarted.update(slots)

    def save_state(self) -> dict[str, Any]:
        """Where the slots are in their episodes: counts, sums and waiting seeds."""
        return {
            "counts": self._counts.copy(),
            "returns": self._returns.copy(),
            "must_reset": self._must_reset.copy(),
            "unstarted": sorted(self._unstarted),
            "seeds": dict(self._seeds),
        }

    def load_state(self, state: dict[str, Any], slots: Sequence[int]) -> None:
        """Take over what :meth:`save_state` gave for ``slots``, whose envs are there already."""
        rows = list(slots)
        self._counts[rows] = state["counts"][rows]
        self._returns[rows] = state["returns"][rows]
        self._must_reset[rows] = state["must_reset"][rows]
        self._unstarted.difference_update(rows)
        self._unstarted.update(set(rows).intersection(state["unstarted"]))
        waiting = {slot: seed for slot, seed in state["seeds"].items() if slot in rows}
        self._seeds = {s: seed for s, seed in self._seeds.items() if s not in rows} | waiting

    def _write_bookkeeping(self, rows: Any, is_init: bool, out: StepFrame) -> None:
        values = (
            (self.bookkeeping.step_count, self._counts),
            (self.bookkeeping.episode_reward, self._returns),
        )
        arrays = iter(out.bookkeeping)
        for wanted, value in values:
            if wanted:
                next(arrays)[rows, 0] = value[rows]
        if self.bookkeeping.is_init:
            next(arrays)[rows] = is_init

    def _check_step(self, slots: Sequence[int] | None) -> None:
        if self._unstarted and (slots is None or self._unstarted.intersection(slots)):
            raise RuntimeError("expected reset() before the first step(); call env.reset()")
        if slots is not None and not self.backend.steps_subset:
            raise RuntimeError(
                f"expected a step of all {self.num_envs} slots, got one of slots {list(slots)}: "
                "this vector env steps its slots together; use backend='serial' to step some"
            )
        if not self.backend.steps_ended_slots:
            ended = self._must_reset if slots is None else self._must_reset[list(slots)]
            if ended.any():
                raise RuntimeError(
                    f"the episodes of slots {np.flatnonzero(self._must_reset).tolist()} have "
                    "ended and the env would ignore their actions; reset these slots first (a "
                    "'_reset' mask, env.maybe_reset or env.step_and_maybe_reset do)"
                )

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()


def _aligned_zeros(shape: Sequence[int], dtype: Any) -> Array:
    """Zeros, each ``[i]`` of which begins where a tensor of torch's own would.

    A policy's products round by where their input begins, so it must not show whether rows are
    those of a frame or a copy of them.
    """
    count, *inner = shape
    size = math.prod(inner) * np.dtype(dtype).itemsize
    padded = -(-size // _ALIGNMENT) * _ALIGNMENT
    memory = np.zeros(count * padded + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    strides = np.empty(inner, dtype).strides
    return np.ndarray(shape, dtype, memory, first, (padded, *strides))


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


def _bookkeeping_entries(bookkeeping: Bookkeeping) -> list[Entry]:
    entries = []
    if bookkeeping.step_count:
        most = torch.iinfo(torch.int64).max
        spec = Bounded(0, most, (1,), dtype=torch.int64)
        entries.append(Entry((keys.STEP_COUNT,), (1,), np.dtype(np.int64), spec))
    if bookkeeping.episode_reward:
        unbounded = Unbounded((1,), dtype=torch.float32)
        entries.append(Entry((keys.EPISODE_REWARD,), (1,), np.dtype(np.float32), unbounded))
    if bookkeeping.is_init:
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        entries.append(Entry((keys.IS_INIT,), (1,), np.dtype(bool), flag))
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
