"""The index of the trajectories in a batch: computed once, used by every function here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from tensordict import TensorDictBase

from tdcollect import keys
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
