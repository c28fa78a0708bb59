"""Tally: episodes added up over batches, slot by slot.

Nothing here runs in the loop on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The ends of episodes in the F rows of a collection.

    Rows of all slots follow each other step by step, or by arrival; or they are whole episodes,
    which are added up by themselves, not in the tally of the slots.

    Attributes:
        slots: the slot of each row.
        done: whether an episode ended with it.
        failed: whether an env's failure broke the episode off; None where none did.
        whole: whether they are whole episodes.
        dims: the dims of slots that entries have in front of that of steps; 0 if they are in rows.
        at: the time at which an episode ended, if one did, in seconds of collections.
    """

    slots: Ints
    done: Bools
    failed: Bools | None
    whole: bool
    dims: int
    at: Floats

    def feed(self, tally: Tally, reward: Floats) -> EndedEpisodes:
        """The episodes that ended, given the rewards ``[F]``."""
        return (Tally(1) if self.whole else tally).feed(self, reward)


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
        self._returns[slots] += np.mean(means, 0)[slots]

    def take(self, slots: Ints) -> tuple[Floats, Ints]:
        """The returns and lengths of the episodes of some slots, which end."""
        ended = self._returns[slots], self._lengths[slots]
        self.drop(slots)
        return ended

    def feed(self, ends: RowEnds, reward: Floats) -> EndedEpisodes:
        """Add rows in the order of their arrival, with their rewards ``[F]``.

        Sorted by slot, each row gets the number of its episode: its slot, and one more for each end
        before it. With two slots, of which the second ends an episode with the second of its rows::

            slots     0  0  0  1  1  1
            done      0  0  0  0  1  0
            number    0  0  0  1  1  2

        The episodes that go on from earlier rows are then ``first``, ``[0, 1]``; those that go on
        after these rows are ``last``, ``[0, 2]``; all others have ended, here 1.

        Returns:
            The episodes that ended, in the order of arrival, without those broken off.
        """
        slots, done = ends.slots, ends.done
        if not np.count_nonzero(done):  # most small batches
            np.add.at(self._returns, slots, reward)
            np.add.at(self._lengths, slots, 1)
            return _NONE
        order = np.argsort(slots, kind="stable")
        over = done[order]
        number = slots[order] + np.cumsum(over) - over
        counts = np.bincount(slots[done], minlength=len(self._returns))
        last = np.arange(len(counts)) + np.cumsum(counts)
        first = last - counts
        # The sum so far stands before the rewards that are added to it, one by one, in order.
        terms = np.append(self._returns, reward[order])
        rows, size = order[over], last[-1] + 1
        sums = np.bincount(np.append(first, number), weights=terms, minlength=size)
        returns: Floats = sums.astype(np.float64, copy=False)
        lengths = np.bincount(number, minlength=size)
        lengths[first] += self._lengths
        broken = np.zeros(size, bool)
        broken[first] = self._broken
        ended = np.delete(np.arange(size), last)
        began = np.empty(size)
        began[first], began[ended + 1] = self._began, ends.at[rows]
        self._returns, self._lengths = returns[last], lengths[last]
        self._broken, self._began = broken[last], began[last]
        whole = ~broken[ended]
        if ends.failed is not None:
            whole &= ~ends.failed[rows]
        rows, ended = rows[whole], ended[whole]
        by_arrival = np.argsort(rows)
        rows, ended = rows[by_arrival], ended[by_arrival]
        seconds = ends.at[rows] - began[ended]
        return EndedEpisodes(slots[rows], returns[ended], lengths[ended], seconds)


_NONE = EndedEpisodes(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0))
