"""Runs of rows in several flat TensorDicts: gathered into one, or held without excess memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from tdcollect.trajectories.entries import map_entries, take

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Pieces(NamedTuple):
    """Runs of rows, each of one trajectory. Those of one trajectory are in the order of time."""

    serial: Numbers
    """The trajectory of each."""
    source: Numbers
    """Which of a list of flat TensorDicts holds it."""
    start: Numbers
    """Its first row there."""
    length: Numbers

    @classmethod
    def none(cls) -> Pieces:
        return cls(*(np.zeros(0, dtype=np.int64) for _ in range(4)))

    def where(self, chosen: Numbers) -> Pieces:
        return Pieces(*(values[chosen] for values in self))

    def then(self, other: Pieces) -> Pieces:
        return Pieces(*(np.concatenate(parts) for parts in zip(self, other, strict=True)))

    def by_serial(self) -> Pieces:
        return self.where(np.argsort(self.serial, kind="stable"))


def gather(sources: Sequence[TensorDict], pieces: Pieces) -> TensorDict:
    """The rows of the pieces, in their order: a copy. There is at least one source."""
    found = np.unique(pieces.source)
    if not len(found):
        return _select(sources[-1], np.zeros(0, dtype=np.int64))
    parts = []
    for source in found:
        mine = pieces.where(pieces.source == source)
        parts.append(_select(sources[source], _runs(mine.start, mine.length)))
    if len(parts) == 1:
        return parts[0]
    # The parts hold the pieces source by source: put them in the order asked for.
    order = np.argsort(pieces.source, kind="stable")
    start = np.empty_like(pieces.start)
    start[order] = _before(pieces.length[order])
    return _select(torch.cat(parts, 0), _runs(start, pieces.length))


def hold(sources: Sequence[TensorDict], pieces: Pieces) -> tuple[list[TensorDict], Pieces]:
    """Move pieces into few sources that hold little else.

    The last source is the caller's, and is copied from. A source of which more than half is not
    needed is copied too, and one is joined with a later one that is as long: so the number of
    sources, and of copies of each row, grows with the logarithm of what is held.
    """
    live = np.bincount(pieces.source, pieces.length, minlength=len(sources))
    groups: list[list[int]] = []
    for source in np.flatnonzero(live):
        groups.append([int(source)])
        while len(groups) > 1 and live[groups[-2]].sum() <= live[groups[-1]].sum():
            joined = groups.pop()
            groups[-1] += joined
    held: list[TensorDict] = []
    kept = Pieces.none()
    for group in groups:
        mine = pieces.where(np.isin(pieces.source, group))
        source = sources[group[0]]
        owned = len(group) == 1 and group[0] != len(sources) - 1
        if not owned or 2 * live[group[0]] < len(source):
            source = gather(sources, mine)
            mine = mine._replace(start=_before(mine.length))
        kept = kept.then(mine._replace(source=np.full(len(mine.serial), len(held))))
        held.append(source)
    return held, kept


def tails(pieces: Pieces, steps: int) -> Pieces:
    """The last ``steps`` rows of each trajectory."""
    pieces = pieces.by_serial()
    behind = np.cumsum(pieces.length)
    last = np.searchsorted(pieces.serial, pieces.serial, side="right") - 1
    after = behind[last] - behind if len(behind) else behind
    length = np.clip(steps - after, 0, pieces.length)
    ends = pieces._replace(start=pieces.start + pieces.length - length, length=length)
    return ends.where(length > 0)


def _select(source: TensorDict, rows: Numbers) -> TensorDict:
    return map_entries(source, partial(take, rows=torch.from_numpy(rows)), [len(rows)])


def _before(length: Numbers) -> Numbers:
    return np.cumsum(length) - length


def _runs(start: Numbers, length: Numbers) -> Numbers:
    return np.repeat(start - _before(length), length) + np.arange(length.sum())
