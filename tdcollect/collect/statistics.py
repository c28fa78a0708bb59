"""Statistics of a collector's collections: episodes, steps, returns, lengths, times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdcollect.display import html_text, one_line

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
    """

    slots: Ints
    returns: Floats
    lengths: Ints


class RowEnds(NamedTuple):
    """The E ends of episodes in the F rows of a collection, slot by slot.

    Those of a slot follow each other, as in a batch ``[*N, T]``. Rows by arrival are put in this
    order. Whole episodes follow each other in one slot, in a tally of their own.

    Attributes:
        steps: F, over all slots.
        slots: ``[S]``, the slots that have rows, ascending.
        counts: ``[S]``, how many each has.
        order: ``[F]``, the rows by arrival in this order; None where they came in it.
        rows: ``[E]``, the row with which each episode ended, ascending.
        of: ``[E]``, the index of its slot in ``slots``.
        by_arrival: ``[E]``, the ends in the order of arrival: by the step, then by the slot.
        failed: ``[F]``, whether an env's failure broke the episode off; None where none did.
        whole: whether they are whole episodes.
        dims: the dims of slots that entries have in front of that of steps; 0 if they are in rows.
    """

    steps: int
    slots: Ints
    counts: Ints
    order: Ints | None
    rows: Ints
    of: Ints
    by_arrival: Ints
    failed: Bools | None = None
    whole: bool = False
    dims: int = 0


def row_ends(done: Bools, slots: Ints | None, **others: Any) -> RowEnds:
    """The ends of episodes, given the flags ``[N, T]``, or ``[1, F]`` of rows.

    ``slots`` has the slot of each row by arrival.
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
    arrived = np.argsort(step, kind="stable")
    return RowEnds(done.size, present, counts, order, rows, of, arrived, **others)


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

    def drop(self, slots: Any = None) -> None:
        """Drop the episodes in flight, cut short by a reset: of all slots (None), or of these."""
        for values in (self._returns, self._lengths, self._broken):
            values[slice(None) if slots is None else slots] = 0

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
        """Add rows, given their rewards ``[N, T]``, or ``[1, F]``.

        Of steps more than the rows have, rewards are left out. Whole episodes have a tally of their
        own.

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
        if ends.whole:
            return Tally(1).feed(ends._replace(whole=False), reward)
        slots, counts, rows = ends.slots, ends.counts, ends.rows
        terms = reward[:, : ends.steps // len(reward)].reshape(-1)
        terms = (terms if ends.order is None else terms[ends.order]).astype(np.float64)
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
        self._returns[slots], self._lengths[slots] = returns[last], lengths[last]
        self._broken[slots] = broken[last]
        whole = ~broken[ended]
        if ends.failed is not None:
            whole &= ~ends.failed[rows]
        counted = ends.by_arrival[whole[ends.by_arrival]]
        ended = ended[counted]
        return EndedEpisodes(slots[ends.of[counted]], returns[ended], lengths[ended])


_NONE = EndedEpisodes(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))


class Spread(NamedTuple):
    """Mean, standard deviation (divided by the count), minimum and maximum of some numbers."""

    mean: float
    std: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"mean {self.mean:.4g}, std {self.std:.4g}, min {self.min:.4g}, max {self.max:.4g}"


def spread(values: NDArray[Any]) -> Spread | None:
    """The spread of an array; None where it is empty."""
    if not values.size:
        return None
    return Spread(*(float(f(values)) for f in (np.mean, np.std, np.min, np.max)))


class Timed:
    """Steps, and the time that they took."""

    steps: int
    seconds: float

    @property
    def steps_per_second(self) -> float:
        """Steps of all slots together, over the time in collections; nan where no time passed."""
        return self.steps / self.seconds if self.seconds > 0 else math.nan

    def __str__(self) -> str:
        return "\n".join(_lines(self))


class Spreads:
    """The spreads of returns and lengths of episodes."""

    returns: Any
    lengths: Any

    @property
    def return_stats(self) -> Spread | None:
        """Of the returns; None where no episode ended."""
        return spread(self.returns)

    @property
    def length_stats(self) -> Spread | None:
        """Of the lengths; None where no episode ended."""
        return spread(self.lengths)


@dataclass(frozen=True)
class Collection(Timed, Spreads):
    """One collection of a collector, usually one batch.

    Attributes:
        steps: steps of all slots together.
        seconds: time that it took.
        seconds_between: time since the collection before ended; None for the first.
        env_seconds: time in the env's steps and resets; None without ``timers=True``.
        policy_seconds: time in calls of the policy; None without ``timers=True``.
        slots: ``[E]`` int64, the slot of each episode that ended, counted over all batch dims.
        returns: ``[E]`` float64, the return of each: the sum of the env's rewards as batches hold
            them (float32), from the episode's first step on, in whatever collections these were
            taken. Of several rewards, it is the mean over the agents of a group, then over groups,
            as in :func:`tdcollect.evaluate`. Empty for an env without rewards.
        lengths: ``[E]`` int64, the length of each, in steps.
        shaped_returns: ``[E]`` float64, sums of the shaped rewards; None where none are shaped.
        restarts: envs that failed and were built again since the collection before. Episodes broken
            off so are not among those that ended; their steps count, the marked one included.
        group_returns: of several rewards, ``[E]`` float64 of each reward entry, by its path
            (``"agents/reward"``): the mean over its agents; empty for a single reward.
    """

    steps: int
    seconds: float
    seconds_between: float | None
    env_seconds: float | None
    policy_seconds: float | None
    slots: Ints
    returns: Floats
    lengths: Ints
    shaped_returns: Floats | None = None
    restarts: int = 0
    group_returns: dict[str, Floats] = field(default_factory=dict)

    @property
    def episodes(self) -> int:
        """E, the number of episodes that ended."""
        return len(self.lengths)

    @property
    def shaped_return_stats(self) -> Spread | None:
        """Of the shaped returns; None where no episode ended, or none are shaped."""
        return None if self.shaped_returns is None else spread(self.shaped_returns)

    def __repr__(self) -> str:
        return _line(self, f"{self.episodes} episodes")


@dataclass(repr=False)
class Moments:
    """Count, mean, squared deviations and extremes of numbers that come in batches.

    By the pairwise update of Chan, Golub and LeVeque (1979).
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: NDArray[Any]) -> None:
        """Take in numbers."""
        count = len(values)
        if not count:
            return
        mean = float(np.add.reduce(values)) / count
        deviations = values - mean
        low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
        self.merge(Moments(count, mean, float(deviations @ deviations), low, high))

    def merge(self, other: Moments) -> None:
        """Take in the numbers of another."""
        if not other.count:
            return
        away, total = other.mean - self.mean, self.count + other.count
        self.squares += other.squares + away * away * self.count * other.count / total
        self.mean += away * other.count / total
        self.count = total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    def spread(self) -> Spread | None:
        """None where there were none."""
        if not self.count:
            return None
        return Spread(self.mean, math.sqrt(self.squares / self.count), self.low, self.high)


@dataclass
class Lifetime(Timed):
    """All collections of a collector together.

    Attributes:
        collections: their number.
        steps: steps of all slots together.
        episodes: those that ended.
        seconds: time in collections.
        seconds_between: time between them.
        env_seconds: time in the env's steps and resets; None without ``timers=True``.
        policy_seconds: time in calls of the policy; None without ``timers=True``.
        restarts: envs that failed and were built again.
    """

    collections: int = 0
    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    seconds_between: float = 0.0
    env_seconds: float | None = None
    policy_seconds: float | None = None
    restarts: int = 0
    _returns: Moments = field(default_factory=Moments, repr=False)
    _lengths: Moments = field(default_factory=Moments, repr=False)
    _shaped: Moments = field(default_factory=Moments, repr=False)

    @property
    def return_stats(self) -> Spread | None:
        """Of the returns of all episodes; None where none ended."""
        return self._returns.spread()

    @property
    def length_stats(self) -> Spread | None:
        """Of the lengths of all episodes; None where none ended."""
        return self._lengths.spread()

    @property
    def shaped_return_stats(self) -> Spread | None:
        """Of the shaped returns of all episodes; None where none ended, or none are shaped."""
        return self._shaped.spread()

    def add(self, collection: Collection) -> None:
        """Count a collection."""
        self.collections += 1
        self.steps += collection.steps
        self.restarts += collection.restarts
        self.seconds += collection.seconds
        self.seconds_between += collection.seconds_between or 0.0
        if collection.env_seconds is not None and collection.policy_seconds is not None:
            self.env_seconds = (self.env_seconds or 0.0) + collection.env_seconds
            self.policy_seconds = (self.policy_seconds or 0.0) + collection.policy_seconds
        self.episodes += collection.episodes
        self._returns.add(collection.returns)
        self._lengths.add(collection.lengths)

    def __repr__(self) -> str:
        return _line(self, f"{self.collections} collections", f"{self.episodes} episodes")


class Window(Spreads):
    """The latest K episodes that ended, or fewer where fewer have.

    Args:
        size: K.

    Attributes:
        returns: ``[episodes]`` float64, oldest first.
        lengths: ``[episodes]`` int64, oldest first.
    """

    def __init__(self, size: int):
        self.size = size
        self.load(np.empty(0), np.empty(0, np.int64))

    def add(self, returns: Floats, lengths: Ints) -> None:
        """Take in episodes, in order."""
        self.load(np.append(self.returns, returns), np.append(self.lengths, lengths))

    def load(self, returns: Floats, lengths: Ints) -> None:
        """Hold the latest of these episodes instead."""
        self.returns, self.lengths = returns[-self.size :].copy(), lengths[-self.size :].copy()

    @property
    def episodes(self) -> int:
        """The number of episodes that it holds."""
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"Window({self.episodes} episodes of at most {self.size}, {self.return_stats})"


class Statistics:
    """Statistics of a collector: ``collector.stats``.

    Only whole episodes count: an episode counts in the collection in which it ends, with the steps
    that it had in collections before. Episodes that a reset cuts short are not counted.

    A call gives the dict of counters of TorchRL's ``collector.stats()``.

    Args:
        window: K, how many episodes :attr:`window` holds.
        on: whether there are any; :attr:`latest`, :attr:`lifetime` and :attr:`window` raise if not.
        progress: gives the parent's counters.
    """

    def __init__(self, window: int, on: bool, progress: Callable[[], dict[str, Any]]):
        self.on = on
        self._progress = progress
        self._window = Window(window)
        self._lifetime = Lifetime()
        self._latest: Collection | None = None

    @property
    def latest(self) -> Collection | None:
        """The latest collection, which never changes; None before the first."""
        self._check()
        return self._latest

    @property
    def lifetime(self) -> Lifetime:
        """All collections, counted up to now."""
        self._check()
        return self._lifetime

    @property
    def window(self) -> Window:
        """The latest K episodes, to smooth over collections."""
        self._check()
        return self._window

    def add(self, collection: Collection) -> None:
        """Take in a collection."""
        self._latest = collection
        self._lifetime.add(collection)
        self._window.add(collection.returns, collection.lengths)

    def add_shaped(self, returns: Floats) -> None:
        """Take in the shaped returns of the latest collection."""
        assert self._latest is not None
        self._latest = replace(self._latest, shaped_returns=returns)
        self._lifetime._shaped.add(returns)

    def _check(self) -> None:
        if not self.on:
            raise RuntimeError(
                "expected a collector that keeps statistics, got one made with statistics=False; "
                "leave the option out"
            )

    def save_state(self) -> dict[str, Any]:
        """All of it, as nested arrays and numbers."""
        window = self._window.returns, self._window.lengths
        latest = None if self._latest is None else vars(self._latest).copy()
        if latest is not None and not latest["group_returns"]:
            del latest["group_returns"]
        return {"lifetime": asdict(self._lifetime), "window": window, "latest": latest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`save_state`."""
        for name, value in state["lifetime"].items():
            held = Moments(**value) if isinstance(value, Mapping) else value
            setattr(self._lifetime, name, held)
        self._window.load(*state["window"])
        self._latest = None if state["latest"] is None else Collection(**state["latest"])

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The parent's counters: frames, batches and so on, as its ``stats()`` gives them."""
        return self._progress(*args, **kwargs)

    def __repr__(self) -> str:
        if not self.on:
            return one_line(self, "off")
        if self._latest is None:
            return one_line(self, "nothing collected yet")
        return one_line(self, f"latest {self._latest!r}", f"window {self._window!r}")

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __str__(self) -> str:
        line = repr(self)
        if self._latest is None:
            return line
        parts = [("latest collection", _lines(self._latest)), ("lifetime", _lines(self._lifetime))]
        last = [f"returns   {self._window.return_stats}", f"lengths   {self._window.length_stats}"]
        if self._window.episodes:
            parts.append((f"latest {self._window.episodes} episodes", last))
        return "\n".join(f"{name}\n" + "\n".join(f"  {x}" for x in lines) for name, lines in parts)


def _line(of: Collection | Lifetime, *counts: str) -> str:
    returns = "no returns" if of.return_stats is None else f"mean return {of.return_stats.mean:.4g}"
    return one_line(of, f"{of.steps} steps", f"{of.seconds:.4g} s", *counts, returns)


def _lines(part: Any) -> list[str]:
    groups = part.group_returns if isinstance(part, Collection) else {}
    lines = [
        f"episodes  {part.episodes}",
        f"steps     {part.steps}",
        f"time      {part.seconds:.4g} s, {part.steps_per_second:,.0f} steps/s",
        f"returns   {part.return_stats}",
        *(f"  {name}  {spread(values)}" for name, values in groups.items()),
        f"lengths   {part.length_stats}",
    ]
    if part.shaped_return_stats is not None:
        lines.insert(4 + len(groups), f"shaped    {part.shaped_return_stats}")
    if part.seconds_between is not None:
        lines.append(f"between   {part.seconds_between:.4g} s")
    if part.restarts:
        lines.append(f"restarts  {part.restarts}")
    if part.env_seconds is not None:
        lines.append(f"env       {part.env_seconds:.4g} s")
        lines.append(f"policy    {part.policy_seconds:.4g} s")
    return lines
