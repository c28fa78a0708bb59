"""Tally: episodes added up over batches, slot by slot.

Nothing here runs in the loop on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class EndedEpisodes(NamedTuple):
    """E episodes that ended, by the step at which they did, then by slot.

    Attributes:
        slots: ``[E]`` int64, counted over all batch dims of the env.
        returns: ``[E]`` float64, sums from first step to last of the env's rewards as batches hold
            them (float32); of several rewards, the mean over agents, then over groups.
        lengths: ``[E]`` int64, in steps.
        seconds: ``[E]`` float64, the time that they took, in collections.
    """

    slots: Ints
    returns: Floats
    lengths: Ints
    seconds: Floats


class RowEnds(NamedTuple):
    """The E ends of episodes in the F rows of a collection, slot by slot.

    Those of a slot follow each other, as in a batch ``[*N, T]``. Rows by arrival are put in this
    order. Whole episodes follow each other in one slot, in a tally of their own.

    Attributes:
        slots: ``[S]``, the slots that have rows, ascending.
        counts: ``[S]``, how many each has.
        order: ``[F]``, the rows by arrival in this order; None where they came in it.
        rows: ``[E]``, the row with which each episode ended, ascending.
        of: ``[E]``, the index of its slot in ``slots``.
        by_arrival: ``[E]``, the ends in the order of arrival: by the step, then by the slot.
        at: ``[E]``, the time of each, in seconds of collections.
        failed: ``[F]``, whether an env's failure broke the episode off; None where none did.
        whole: whether they are whole episodes.
        dims: the dims of slots that entries have in front of that of steps; 0 if they are in rows.
    """

    slots: Ints
    counts: Ints
    order: Ints | None
    rows: Ints
    of: Ints
    by_arrival: Ints
    at: Floats
    failed: Bools | None = None
    whole: bool = False
    dims: int = 0

    @property
    def steps(self) -> int:
        """F, over all slots."""
        return int(self.counts.sum())

    def feed(self, tally: Tally, reward: NDArray[Any]) -> EndedEpisodes:
        """The episodes that ended, given the rewards ``[N, T]``, or ``[1, F]`` of rows.

        Of steps more than these rows have, they are left out.
        """
        values = reward[:, : self.steps // len(reward)].reshape(-1)
        if self.order is not None:
            values = values[self.order]
        return (Tally(1) if self.whole else tally).feed(self, values)


def row_ends(
    done: Bools, slots: Ints | None, time_of: Callable[[Ints, Ints], Floats], **others: Any
) -> RowEnds:
    """The ends of episodes, given the flags ``[N, T]``, or ``[1, F]`` of rows.

    ``slots`` has the slot of each row by arrival. ``time_of`` gives the times of ends ``[E]``, of
    which it gets the steps and the slots.
    """
    count, steps = done.shape
    flat, order = done.reshape(-1), None
    if slots is None:
        present, counts = np.arange(count), np.full(count, steps)
    else:
        order = np.argsort(slots, kind="stable")
        flat = flat[order]
        present, counts = np.unique(slots, return_counts=True)
    rows = np.flatnonzero(flat)
    if order is None:
        of, step = np.divmod(rows, steps)
    else:
        of, step = np.searchsorted(np.cumsum(counts), rows, "right"), order[rows]
    at = time_of(step, present[of])
    return RowEnds(present, counts, order, rows, of, np.argsort(step, kind="stable"), at, **others)


class Tally:
    """Adds up episodes over batches, slot by slot.

    Sums go from an episode's first step to its last in float64, so that they do not depend on where
    batches cut the episode.

    Args:
        slots: N, over all batch dims of the env.
    """

    def __init__(self, slots: int):
        self._returns: Floats = np.zeros(slots)
        self._lengths: Ints = np.zeros(slots, np.int64)
        self._broken: Bools = np.zeros(slots, bool)
        self._began: Floats = np.zeros(slots)  # in seconds of collections

    def drop(self, slots: Any = None, now: float = 0.0) -> None:
        """Drop the episodes in flight, cut short by a reset: of all slots (None), or of these."""
        for values in (self._returns, self._lengths, self._broken, self._began):
            values[slice(None) if slots is None else slots] = now if values is self._began else 0

    def miss(self) -> None:
        """Do not count the episodes in flight: steps of theirs were lost."""
        self._broken[:] = True

    def add(self, slots: Ints, rewards: Sequence[NDArray[Any]]) -> None:
        """Add one step of some slots, given the env's reward entries of all, ``[*N, *feature]``."""
        self._lengths[slots] += 1
        means = [r.reshape(len(self._returns), -1).mean(-1, dtype=np.float64) for r in rewards]
        if means:
            self._returns[slots] += np.mean(means, 0)[slots]

    def take(self, slots: Ints) -> tuple[Floats, Ints]:
        """The returns and lengths of the episodes of some slots, which end."""
        ended = self._returns[slots], self._lengths[slots]
        self.drop(slots)
        return ended

    def feed(self, ends: RowEnds, reward: NDArray[Any]) -> EndedEpisodes:
        """Add rows, slot by slot, with their rewards ``[F]``.

        Each row gets the number of its episode: the index of its slot, and one more for each end
        before it. With two slots, of which the second ends an episode with the second of its rows::

            slots     0  0  0  1  1  1      counts  3  3
            done      0  0  0  0  1  0      rows    4
            number    0  0  0  1  1  2      of      1

        The episodes that go on from earlier rows are then ``first``, ``[0, 1]``; those that go on
        after these rows are ``last``, ``[0, 2]``; the others have ``ended``, ``[1]``. They are cut
        behind the rows 3, 5 and 6, and have 3, 2 and 1 of them.

        Returns:
            The episodes that ended, in the order of arrival, without those broken off.
        """
        slots, counts, rows = ends.slots, ends.counts, ends.rows
        terms = reward.astype(np.float64)
        if not len(rows):  # most small batches
            np.add.at(self._returns, np.repeat(slots, counts), terms)
            self._lengths[slots] += counts
            return _NONE
        stops = np.cumsum(counts)
        # The sum so far stands before the rewards that are added to it, one by one, in order.
        terms[stops - counts] += self._returns[slots]
        ended = np.arange(len(rows)) + ends.of
        last = np.arange(len(slots)) + np.cumsum(np.bincount(ends.of, minlength=len(slots)))
        first = np.append(0, last[:-1] + 1)
        cuts = np.empty(len(slots) + len(rows), np.int64)
        cuts[last], cuts[ended] = stops, rows + 1
        lengths = np.diff(cuts, prepend=0)
        number = np.repeat(np.arange(len(cuts)), lengths)
        returns = np.bincount(number, weights=terms, minlength=len(cuts))
        lengths[first] += self._lengths[slots]
        broken = np.zeros(len(cuts), bool)
        broken[first] = self._broken[slots]
        began = np.empty(len(cuts))
        began[first], began[ended + 1] = self._began[slots], ends.at
        self._returns[slots], self._lengths[slots] = returns[last], lengths[last]
        self._broken[slots], self._began[slots] = broken[last], began[last]
        whole = ~broken[ended]
        if ends.failed is not None:
            whole &= ~ends.failed[rows]
        counted = ends.by_arrival[whole[ends.by_arrival]]
        ended = ended[counted]
        seconds = ends.at[counted] - began[ended]
        return EndedEpisodes(slots[ends.of[counted]], returns[ended], lengths[ended], seconds)


_NONE = EndedEpisodes(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0))
