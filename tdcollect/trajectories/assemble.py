"""Whole trajectories out of batches that cut them.

Unfinished trajectories are held as pieces: runs of rows in several flat TensorDicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect import check, keys
from tdcollect.keys import Key, beside
from tdcollect.trajectories.split import TrajectoryIndex, entries_of, expand, flat_rows, rows_of

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Table = TypeVar("Table", bound=tuple[Numbers, ...])


class _Open(NamedTuple):
    """The unfinished trajectories: their number in the order of start, slot, and id."""

    serial: Numbers
    slot: Numbers
    ids: Numbers


class Pieces(NamedTuple):
    """Runs of rows, each of one trajectory. Those of one trajectory are in the order of time."""

    serial: Numbers  # the trajectory of each
    source: Numbers  # the index of its TensorDict in a list of flat ones
    start: Numbers  # its first row there
    length: Numbers


_NO_NUMBERS = np.zeros(0, dtype=np.int64)


def _where(table: Table, chosen: Numbers) -> Table:
    return type(table)(*(values[chosen] for values in table))


def _then(table: Table, other: Table) -> Table:
    return type(table)(*(np.concatenate(parts) for parts in zip(table, other, strict=True)))


def _by_serial(pieces: Pieces) -> Pieces:
    return _where(pieces, np.argsort(pieces.serial, kind="stable"))


def gather(sources: Sequence[TensorDict], pieces: Pieces) -> TensorDict:
    """The rows of the pieces, in their order: a copy. There is at least one source."""
    parts = []
    for source in np.unique(pieces.source) if len(pieces.source) else [-1]:
        mine = _where(pieces, pieces.source == source)
        parts.append(_select(sources[source], mine.start, mine.length))
    if len(parts) == 1:
        return parts[0]
    # The parts hold the pieces source by source: put them in the order asked for.
    order = np.argsort(pieces.source, kind="stable")
    start = np.empty_like(pieces.start)
    start[order] = _before(pieces.length[order])
    return _select(torch.cat(parts, 0), start, pieces.length)


def hold(sources: list[TensorDict], pieces: Pieces) -> tuple[list[TensorDict], Pieces]:
    """Move pieces into few sources that hold little else.

    Copied are the last source (the caller's), and those that hold no more than all later ones or
    that are needed by less than half, with all later ones: so the number of sources, and of copies
    of each row, grows with the logarithm of what is held.
    """
    live = np.bincount(pieces.source, pieces.length, minlength=len(sources))
    first, later = len(sources) - 1, live[-1]
    for source in reversed(range(first)):
        if live[source] <= later or 2 * live[source] < len(sources[source]):
            first = source
        later += live[source]
    moved = _where(pieces, pieces.source >= first)
    pieces = _where(pieces, pieces.source < first)
    if not len(moved.serial):
        return sources[:first], pieces
    at = Pieces(
        moved.serial, np.full_like(moved.source, first), _before(moved.length), moved.length
    )
    return [*sources[:first], gather(sources, moved)], _then(pieces, at)


def tails(pieces: Pieces, steps: int) -> Pieces:
    """The last ``steps`` rows of each trajectory."""
    pieces = _by_serial(pieces)
    behind = np.cumsum(pieces.length)
    last = np.searchsorted(pieces.serial, pieces.serial, side="right") - 1
    after = behind[last] - behind if len(behind) else behind
    length = np.clip(steps - after, 0, pieces.length)
    ends = pieces._replace(start=pieces.start + pieces.length - length, length=length)
    return _where(ends, length > 0)


def _select(source: TensorDict, start: Numbers, length: Numbers) -> TensorDict:
    return flat_rows(source, 0, expand(torch.from_numpy(start), torch.from_numpy(length)))


def _before(length: Numbers) -> Numbers:
    return np.cumsum(length) - length


class TrajectoryAssembler:
    """Put trajectories that span batches together again.

    >>> assembler = TrajectoryAssembler()
    >>> for batch in collector:
    ...     whole = assembler.feed(batch)  # [F], trajectories that have ended, one after the other

    A trajectory is whole when its last step is done. Those that a batch completes come out
    together, in the order in which they started; unfinished ones are held, as copies. At most twice
    as many steps are held as are unfinished, whatever the number of batches, and each step is
    copied a number of times that grows with the logarithm of the steps held.

    Args:
        match: how a trajectory is found again in the next batch. ``"slot"``, the default: each
            batch goes on where the one before it ended, slot by slot, as a collector's do. A
            trajectory that its slot does not go on with was cut off (by a seed or a reset, say); it
            is dropped, and counted in ``dropped``. ``"id"``: by trajectory id alone, which must be
            unique, for batches of several workers in any order; nothing is dropped.
        lookback: keep the last batch's pieces of trajectories in ``chunks``, each that continues
            one preceded by up to ``lookback`` earlier steps of it. None: keep none.
        trajectory_key, done_key: as for :func:`split_trajectories`. Done flags must be there, ids
            need not.

    Attributes:
        completed: trajectories given out so far.
        dropped: trajectories that were cut off before their end so far.

    Raises:
        ValueError: for another ``match``, or a negative ``lookback``.
    """

    def __init__(
        self,
        *,
        match: Literal["slot", "id"] = "slot",
        lookback: int | None = None,
        trajectory_key: Key | None = None,
        done_key: Key | None = None,
    ):
        check.one_of(("slot", "id"), match=match)
        if lookback is not None and lookback < 0:
            raise ValueError(f"expected lookback to be None or at least 0, got {lookback}")
        self.match = match
        self.lookback = lookback
        self.completed = 0
        self.dropped = 0
        self._trajectory_key = trajectory_key
        self._done_key = done_key
        self._started = 0
        self._slots: int | None = None
        self._adds_ids: tuple[Key, torch.device] | None = None  # if the batches have none
        self._template = TensorDict({}, batch_size=[0])
        self._chunks: TensorDict | None = None
        self.clear()

    def __repr__(self) -> str:
        return (
            f"TrajectoryAssembler(match={self.match!r}, lookback={self.lookback}; "
            f"{self.completed} completed, {self.dropped} dropped, "
            f"{self.num_unfinished} unfinished with {self.unfinished_frames} steps)"
        )

    @property
    def num_unfinished(self) -> int:
        """Trajectories held."""
        return len(self._open.serial)

    @property
    def unfinished_frames(self) -> int:
        """Steps of the trajectories held."""
        return int(self._pieces.length.sum())

    @property
    def unfinished(self) -> TensorDict:
        """A copy of the unfinished trajectories, ``[F]``: one after the other, by their start."""
        return self._give([*self._sources, self._template], _by_serial(self._pieces))

    @property
    def chunks(self) -> TensorDict:
        """The last batch's pieces of trajectories, ``[F]``, each with its lookback ahead.

        ``("collector", "lookback")``, bool ``[F]``, is true for steps of earlier batches.

        Raises:
            RuntimeError: without ``lookback=``, or before the first batch.
        """
        if self._chunks is None:
            missing = "lookback= at construction" if self.lookback is None else "a batch fed before"
            raise RuntimeError(f"expected {missing}: there are no chunks to give")
        return self._chunks

    def clear(self) -> None:
        """Forget the unfinished trajectories, without counting them as dropped."""
        self._sources: list[TensorDict] = []
        self._pieces = Pieces(*[_NO_NUMBERS] * 4)
        self._open = _Open(*[_NO_NUMBERS] * 3)

    def feed(self, batch: TensorDictBase) -> TensorDict:
        """Take in a batch ``[*N, T]``; give out the trajectories that it completes.

        Returns:
            ``[F]``, whole trajectories one after the other, in the order of their start; F = 0
            if none ended. Nothing is shared with the batch. Where the batch has no ids, the
            trajectories are numbered by their start over the assembler's life.

        Raises:
            KeyError: without done flags; without ids, where they are to be matched.
            ValueError: for a batch of another number of slots than the one before, where slots are
                matched; and as :meth:`TrajectoryIndex.of` does.
            TypeError: as :meth:`TrajectoryIndex.of` does.
        """
        index = TrajectoryIndex.of(
            batch, trajectory_key=self._trajectory_key, done_key=self._done_key
        )
        self._check(batch, index)
        steps = rows_of(batch, index)
        device = index.starts.device
        self._adds_ids = None if index.has_ids else (index.trajectory_key, device)
        self._template = steps[:0].clone()

        slot, ids, complete, length = (
            values.cpu().numpy()
            for values in (index.slot, index.ids, index.complete, index.lengths)
        )
        serial = self._continue(slot, ids, complete, index.from_ids)
        fed = Pieces(serial, np.full(len(serial), len(self._sources)), _before(length), length)
        sources = [*self._sources, steps]
        if self.lookback is not None:
            chunks, earlier = self._look_back(fed)
            self._chunks = self._give(sources, chunks)
            lookback = torch.from_numpy(np.repeat(earlier, chunks.length)).to(device)
            self._chunks.set(beside(index.trajectory_key, keys.LOOKBACK), lookback)

        pieces = _then(self._pieces, fed)
        done = np.unique(serial[complete])
        whole = self._give(sources, _by_serial(_where(pieces, np.isin(pieces.serial, done))))
        self._open = self._still_open(_Open(serial, slot, ids), done)
        unfinished = _where(pieces, np.isin(pieces.serial, self._open.serial))
        self.completed += len(done)
        self.dropped += len(np.unique(pieces.serial)) - len(done) - self.num_unfinished
        self._sources, self._pieces = hold(sources, unfinished)
        return whole

    def _check(self, batch: TensorDictBase, index: TrajectoryIndex) -> None:
        done_key = keys.NEXT_DONE if self._done_key is None else self._done_key
        if batch.get(done_key, None) is None:
            raise KeyError(
                f"expected done flags in {done_key!r}, which tell what trajectories are whole, got "
                f"{entries_of(batch)}: name them with done_key="
            )
        if self.match == "id" and not index.from_ids:
            raise KeyError(
                f"expected trajectory ids in {index.trajectory_key!r} for match='id', got none: "
                "name them with trajectory_key=, or use match='slot'"
            )
        steps = index.shape[index.time_dim]
        if self.match == "slot" and steps:
            slots = index.shape.numel() // steps
            if self._slots not in (None, slots):
                raise ValueError(
                    f"expected {self._slots} slots, as in the batch before, got {slots}: give each "
                    "source an assembler of its own, or use match='id'"
                )
            self._slots = slots

    def _continue(self, slot: Numbers, ids: Numbers, complete: Numbers, by_ids: bool) -> Numbers:
        """The serial of each piece of a batch: that of the one it continues, or a new one.

        A group is a trajectory: pieces of one id, up to one that ends. Where slots are matched, it
        is the piece that a slot has open, and the first of the batch in it, if of the same id.
        """
        held = self.num_unfinished
        every = _then(self._open, _Open(np.full(len(slot), -1), slot, ids))
        ended = np.concatenate([np.zeros(held, dtype=bool), complete])
        by_slot = self.match == "slot"
        what = every.slot if by_slot else every.ids
        order = np.argsort(what, kind="stable")
        before, after = order[:-1], order[1:]
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = (what[before] != what[after]) | ended[before]
        if by_slot:
            begins[1:] |= before >= held
        if by_slot and by_ids:
            begins[1:] |= every.ids[before] != every.ids[after]
        group = np.empty(len(order), dtype=np.int64)
        group[order] = np.cumsum(begins) - 1
        head = order[begins]
        serials = every.serial[head]
        fresh = np.flatnonzero(serials < 0)
        heads = fresh[np.argsort(head[fresh])]  # numbered in the order of the batch
        serials[heads] = self._started + np.arange(len(heads))
        self._started += len(heads)
        return serials[group[held:]]

    def _still_open(self, fed: _Open, done: Numbers) -> _Open:
        """The trajectories still unfinished; the latest of each slot, if slots are matched."""
        every = _then(self._open, fed)
        what = every.slot if self.match == "slot" else every.serial
        # Of each, what was fed last: unique gives the first, so count from the end.
        _, back = np.unique(what[::-1], return_index=True)
        latest = len(what) - 1 - back
        return _where(every, latest[~np.isin(every.serial[latest], done)])

    def _look_back(self, fed: Pieces) -> tuple[Pieces, Numbers]:
        """The pieces of a batch, behind the last steps of those that they continue; and these."""
        continued, first = np.unique(fed.serial, return_index=True)
        before = _where(self._pieces, np.isin(self._pieces.serial, continued))
        ahead = tails(before, self.lookback or 0)
        place = first[np.searchsorted(continued, ahead.serial)]
        order = np.argsort(np.concatenate([place, np.arange(len(fed.serial))]), kind="stable")
        return _where(_then(ahead, fed), order), order < len(ahead.serial)

    def _give(self, sources: list[TensorDict], pieces: Pieces) -> TensorDict:
        rows = gather(sources, pieces)
        rows.names = self._template.names
        if self._adds_ids is not None:
            key, device = self._adds_ids
            serial = np.repeat(pieces.serial, pieces.length)
            rows.set(key, torch.from_numpy(serial).to(device))
        return rows
