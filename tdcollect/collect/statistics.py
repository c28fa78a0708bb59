"""Statistics of a collector's collections: episodes, steps, returns, lengths, times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdcollect.display import html_text, one_line

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


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


class Episodes(NamedTuple):
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


@dataclass(frozen=True)
class Collection:
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
            as in :func:`tdcollect.evaluate`.
        lengths: ``[E]`` int64, the length of each, in steps.
        shaped_returns: ``[E]`` float64, sums of the shaped rewards; None where none are shaped.
        restarts: envs that failed and were built anew since the collection before. Episodes broken
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
        return len(self.returns)

    @property
    def steps_per_second(self) -> float:
        """Steps of all slots together; nan where no time passed."""
        return _rate(self.steps, self.seconds)

    @property
    def return_stats(self) -> Spread | None:
        """Of the returns; None where no episode ended."""
        return spread(self.returns)

    @property
    def length_stats(self) -> Spread | None:
        """Of the lengths; None where no episode ended."""
        return spread(self.lengths)

    @property
    def shaped_return_stats(self) -> Spread | None:
        """Of the shaped returns; None where no episode ended, or none are shaped."""
        return None if self.shaped_returns is None else spread(self.shaped_returns)

    def __repr__(self) -> str:
        return _line(self, f"{self.episodes} episodes")

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass
class Lifetime:
    """All collections of a collector together.

    Attributes:
        collections: their number.
        steps: steps of all slots together.
        episodes: those that ended.
        seconds: time in collections.
        seconds_between: time between them.
        env_seconds: time in the env's steps and resets; None without ``timers=True``.
        policy_seconds: time in calls of the policy; None without ``timers=True``.
        restarts: envs that failed and were built anew.
    """

    collections: int = 0
    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    seconds_between: float = 0.0
    env_seconds: float | None = None
    policy_seconds: float | None = None
    restarts: int = 0
    _returns: _Moments = field(default_factory=lambda: _Moments(), repr=False)
    _lengths: _Moments = field(default_factory=lambda: _Moments(), repr=False)
    _shaped: _Moments = field(default_factory=lambda: _Moments(), repr=False)

    @property
    def steps_per_second(self) -> float:
        """Steps of all slots together, over the time in collections; nan before the first."""
        return _rate(self.steps, self.seconds)

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
        if collection.episodes:
            self.episodes += collection.episodes
            self._returns.add(collection.returns)
            self._lengths.add(collection.lengths)

    def add_shaped(self, returns: Floats) -> None:
        """Count the shaped returns of a collection."""
        if len(returns):
            self._shaped.add(returns)

    def __repr__(self) -> str:
        return _line(self, f"{self.collections} collections", f"{self.episodes} episodes")

    def __str__(self) -> str:
        return "\n".join(_lines(self))


class Window:
    """The latest K episodes that ended, or fewer where fewer have.

    Args:
        size: K.
    """

    def __init__(self, size: int):
        self.size = size
        self._returns: deque[float] = deque(maxlen=size)
        self._lengths: deque[int] = deque(maxlen=size)

    def add(self, returns: Floats, lengths: Ints) -> None:
        """Take in episodes, in order."""
        self._returns.extend(returns.tolist())
        self._lengths.extend(lengths.tolist())

    def load(self, returns: Floats, lengths: Ints) -> None:
        """Hold these episodes instead."""
        self._returns.clear()
        self._lengths.clear()
        self.add(returns, lengths)

    @property
    def episodes(self) -> int:
        """The number of episodes that it holds."""
        return len(self._returns)

    @property
    def returns(self) -> Floats:
        """``[episodes]`` float64, oldest first."""
        return np.array(self._returns, np.float64)

    @property
    def lengths(self) -> Ints:
        """``[episodes]`` int64, oldest first."""
        return np.array(self._lengths, np.int64)

    @property
    def return_stats(self) -> Spread | None:
        """Of the returns; None where no episode ended."""
        return spread(self.returns)

    @property
    def length_stats(self) -> Spread | None:
        """Of the lengths; None where no episode ended."""
        return spread(self.lengths)

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
        if collection.episodes:
            self._window.add(collection.returns, collection.lengths)

    def add_shaped(self, returns: Floats) -> None:
        """Take in the shaped returns of the latest collection."""
        assert self._latest is not None
        self._latest = replace(self._latest, shaped_returns=returns)
        self._lifetime.add_shaped(returns)

    def _check(self) -> None:
        if not self.on:
            raise RuntimeError(
                "expected a collector that keeps statistics, got one made with statistics=False; "
                "leave the option out"
            )

    def save_state(self) -> dict[str, Any]:
        """All of it, as nested arrays and numbers."""
        lifetime = {
            name: vars(value).copy() if isinstance(value, _Moments) else value
            for name, value in vars(self._lifetime).items()
        }
        window = self._window.returns, self._window.lengths
        latest = None if self._latest is None else vars(self._latest).copy()
        if latest is not None and not latest["group_returns"]:
            del latest["group_returns"]
        return {"lifetime": lifetime, "window": window, "latest": latest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`save_state`."""
        for name, value in state["lifetime"].items():
            if isinstance(value, Mapping):
                vars(getattr(self._lifetime, name)).update(value)
            else:
                setattr(self._lifetime, name, value)
        self._window.load(*state["window"])
        self._latest = None if state["latest"] is None else Collection(**state["latest"])

    def __call__(self) -> dict[str, Any]:
        """The parent's counters: frames, batches and so on, as its ``stats()`` gives them."""
        return self._progress()

    def __repr__(self) -> str:
        if not self.on:
            return one_line(self, "off")
        if self._latest is None:
            return one_line(self, "nothing collected yet")
        return one_line(self, f"latest {self._latest!r}", f"window {self._window!r}")

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __str__(self) -> str:
        if self._latest is None:
            return repr(self)
        parts = [("latest collection", _lines(self._latest)), ("lifetime", _lines(self._lifetime))]
        last = [f"returns   {self._window.return_stats}", f"lengths   {self._window.length_stats}"]
        if self._window.episodes:
            parts.append((f"latest {self._window.episodes} episodes", last))
        return "\n".join(f"{name}\n" + "\n".join(f"  {x}" for x in lines) for name, lines in parts)


def _line(of: Collection | Lifetime, *counts: str) -> str:
    returns = "no returns" if of.return_stats is None else f"mean return {of.return_stats.mean:.4g}"
    return one_line(of, f"{of.steps} steps", f"{of.seconds:.4g} s", *counts, returns)


class Tally:
    """Adds up episodes over batches, slot by slot.

    Sums go from an episode's first step to its last in float64, so that they do not depend on where
    batches cut the episode.

    Args:
        slots: N, over all batch dims of the env.
    """

    def __init__(self, slots: int):
        self._returns = np.zeros(slots)
        self._lengths = np.zeros(slots, np.int64)
        self._broken = np.zeros(slots, bool)

    def drop(self, slots: Any = slice(None)) -> None:
        """Drop the episodes in flight, cut short by a reset: of all slots, or of these."""
        self._returns[slots] = 0
        self._lengths[slots] = 0
        self._broken[slots] = False

    def miss(self) -> None:
        """Do not count the episodes in flight: steps of theirs were lost."""
        self._broken[:] = True

    @property
    def sums(self) -> tuple[Floats, Ints]:
        """Returns and lengths of the episodes in flight so far, ``[N]`` each."""
        return self._returns.copy(), self._lengths.copy()

    @sums.setter
    def sums(self, sums: tuple[Floats, Ints]) -> None:
        self._returns, self._lengths = sums

    def add(self, slots: Ints, rewards: Sequence[NDArray[Any]]) -> None:
        """Add one step of some slots.

        Args:
            slots: ``[K]``.
            rewards: the env's reward entries, of all slots: ``[*N, *feature]``.
        """
        self._lengths[slots] += 1
        means = [r.reshape(len(self._returns), -1).mean(-1, dtype=np.float64) for r in rewards]
        self._returns[slots] += np.mean(means, 0)[slots]

    def take(self, slots: Ints) -> tuple[Floats, Ints]:
        """The returns and lengths of the episodes of some slots, which end."""
        ended = self._returns[slots], self._lengths[slots]
        self.drop(slots)
        return ended

    def feed(self, reward: Floats, done: Bools, failed: Bools | None = None) -> Episodes:
        """Add a batch.

        Args:
            reward: ``[N, T]``.
            done: ``[N, T]``.
            failed: ``[N, T]``, steps with which an env's failure broke an episode off; None where
                there are none.

        Returns:
            The episodes that ended in it, without those broken off.
        """
        count = done.shape[1]
        if not np.count_nonzero(done):  # most small batches
            self._returns = _added(self._returns, reward)
            self._lengths += count
            return _NONE
        slots, steps = done.nonzero()
        segment = _segments(done)
        sums, self._returns = _sums(reward, done, segment, self._returns)
        first = np.ones(len(slots), bool)  # of its slot in this batch
        first[1:] = slots[1:] != slots[:-1]
        after = steps + 1
        before = np.where(first, -self._lengths[slots], np.roll(after, 1))
        complete = ~(first & self._broken[slots])
        if failed is not None:
            complete &= ~failed[slots, steps]
        self._lengths += count
        last = np.roll(first, -1)  # the first of one slot follows the last of another
        self._lengths[slots[last]] = count - after[last]
        self._broken[slots] = False
        order = np.argsort(steps, kind="stable")
        order = order[complete[order]]
        return Episodes(
            slots[order],
            sums[segment[slots, steps]][order],
            (after - before)[order],
        )

    def feed_rows(
        self, slots: Ints, reward: Floats, done: Bools, failed: Bools | None = None
    ) -> Episodes:
        """Add rows in the order of their arrival.

        Args:
            slots: ``[F]``, the slot of each row.
            reward: ``[1, F]``, as ``done`` and ``failed``; see :meth:`feed`.
            done: as there.
            failed: as there.

        Returns:
            The episodes that ended, in the order of arrival, without those broken off.
        """
        ended: list[tuple[int, int, float, int]] = []
        for slot in np.unique(slots).tolist():
            rows = np.flatnonzero(slots == slot)
            own = Tally(1)
            own._returns = self._returns[slot : slot + 1]
            own._lengths = self._lengths[slot : slot + 1]
            own._broken = self._broken[slot : slot + 1]
            marked = None if failed is None else failed[:, rows]
            found = own.feed(reward[:, rows], done[:, rows], marked)
            self._returns[slot], self._lengths[slot] = own._returns[0], own._lengths[0]
            ends = rows[done[0, rows]] if marked is None else rows[done[0, rows] & ~marked[0]]
            # The first may have been missed in part, and is not counted then.
            for row, total, length in zip(
                ends[len(ends) - len(found.returns) :], found.returns, found.lengths, strict=True
            ):
                ended.append((int(row), slot, float(total), int(length)))
        ended.sort()
        return Episodes(
            np.array([slot for _, slot, _, _ in ended], np.int64),
            np.array([total for _, _, total, _ in ended]),
            np.array([length for _, _, _, length in ended], np.int64),
        )


_NONE = Episodes(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))


def _added(carried: Floats, values: Floats) -> Floats:
    """Sums ``[N]`` so far, with the values ``[N, T]`` added one by one, in order."""
    if values.shape[1] == 1:
        return carried + values[:, 0]
    sums: Floats = np.concatenate([carried[:, None], values], 1).cumsum(1)[:, -1]
    return sums


def _segments(done: Bools) -> Ints:
    """Indices ``[N, T]`` from 0, one per run of steps of one slot that belong to one episode."""
    starts = np.ones(done.shape, np.int64)
    starts[:, 1:] = done[:, :-1]
    return np.cumsum(starts).reshape(done.shape) - 1


def _sums(values: Floats, done: Bools, segment: Ints, carried: Floats) -> tuple[Floats, Floats]:
    """The sum of each segment, first step first, and the sums that slots carry on."""
    slots, steps = values.shape
    # The sum so far stands before a slot's first step: it is what the next step is added to.
    padded = np.empty((slots, steps + 1))
    padded[:, 0] = carried
    padded[:, 1:] = values
    into = np.empty((slots, steps + 1), np.int64)
    into[:, 0] = segment[:, 0]
    into[:, 1:] = segment
    added = np.bincount(into.reshape(-1), weights=padded.reshape(-1))  # one by one, in order
    sums: Floats = added.astype(np.float64, copy=False)
    return sums, np.where(done[:, -1], 0.0, sums[segment[:, -1]])


class _Moments:
    """Count, mean, squared deviations and extremes of numbers that come in batches."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, values: NDArray[Any]) -> None:
        """Take in numbers, at least one (Chan, Golub and LeVeque 1979, their update by pairs)."""
        count = len(values)
        mean = float(np.add.reduce(values)) / count
        deviations = values - mean
        away, total = mean - self.mean, self.count + count
        self.squares += float(deviations @ deviations) + away**2 * self.count * count / total
        self.mean += away * count / total
        self.count = total
        self.low = min(self.low, float(np.minimum.reduce(values)))
        self.high = max(self.high, float(np.maximum.reduce(values)))

    def spread(self) -> Spread | None:
        """None where there were none."""
        if not self.count:
            return None
        return Spread(self.mean, math.sqrt(self.squares / self.count), self.low, self.high)


def _rate(steps: int, seconds: float) -> float:
    return steps / seconds if seconds > 0 else math.nan


def _lines(part: Collection | Lifetime) -> list[str]:
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
