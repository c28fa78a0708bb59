"""Statistics of a collector's collections: episodes, steps, returns, lengths, times; their monitor.

Nothing here runs in the loop on arrays, unless times were asked for.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch.nn.functional import pad
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase

from tdcollect import check, keys
from tdcollect._upstream.collectors import CollectorState
from tdcollect.display import html_text, one_line
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.keys import Key, entry_path, under_next
from tdcollect.progress import progress_bar

if TYPE_CHECKING:
    from tdcollect.collect.arrays import SteppedEnv
    from tdcollect.collect.episodes import Block, Piece
    from tdcollect.collect.hooks import Watch
    from tdcollect.collect.policy import Policy
    from tdcollect.collect.step_dict import StepDict

Env = TypeVar("Env", bound="SteppedEnv")
Function = TypeVar("Function", bound=Callable[..., Any])
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


class Figures:
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
    """The spreads of returns and lengths of episodes, and of numbers that hooks return."""

    returns: Any
    lengths: Any
    logged: Any

    @property
    def return_stats(self) -> Spread | None:
        """Of the returns; None where no episode ended."""
        return spread(self.returns)

    @property
    def length_stats(self) -> Spread | None:
        """Of the lengths; None where no episode ended."""
        return spread(self.lengths)

    @property
    def logged_stats(self) -> dict[str, Spread]:
        """Of the numbers that hooks have returned, by name."""
        found = {name: spread(np.array(values)) for name, values in self.logged.items()}
        return {name: numbers for name, numbers in found.items() if numbers is not None}


class Episodes(NamedTuple):
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


@dataclass(frozen=True)
class Collection(Figures, Spreads):
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
        episode_seconds: ``[E]`` float64, the time that each episode took, from its reset to its
            last step, without the time between collections. Where slots do not all step together on
            arrays, the time of a collection is shared evenly by its steps.
        logged: the numbers that hooks have returned, float64, by name.
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
    episode_seconds: Floats = field(default_factory=lambda: np.zeros(0))
    logged: dict[str, Floats] = field(default_factory=dict)

    @property
    def episodes(self) -> int:
        """E, the number of episodes that ended."""
        return len(self.returns)

    @property
    def shaped_return_stats(self) -> Spread | None:
        """Of the shaped returns; None where no episode ended, or none are shaped."""
        return None if self.shaped_returns is None else spread(self.shaped_returns)

    @property
    def episode_seconds_stats(self) -> Spread | None:
        """Of the time that episodes took; None where none ended."""
        return spread(self.episode_seconds)

    def __repr__(self) -> str:
        logged = [f"mean {name} {found.mean:.4g}" for name, found in self.logged_stats.items()]
        return _line(self, f"{self.episodes} episodes", *logged)


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
class Lifetime(Figures):
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
    _returns: Moments = field(default_factory=Moments, repr=False)
    _lengths: Moments = field(default_factory=Moments, repr=False)
    _shaped: Moments = field(default_factory=Moments, repr=False)
    _seconds: Moments = field(default_factory=Moments, repr=False)

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

    @property
    def episode_seconds_stats(self) -> Spread | None:
        """Of the time that all episodes took; None where none ended."""
        return self._seconds.spread()

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
        self._seconds.add(collection.episode_seconds)

    def __repr__(self) -> str:
        return _line(self, f"{self.collections} collections", f"{self.episodes} episodes")


class Window(Spreads):
    """The latest K episodes that ended, or fewer where fewer have.

    Args:
        size: K.

    Attributes:
        logged: the latest K numbers of each name that hooks have returned.
    """

    def __init__(self, size: int):
        self.size = size
        self._returns: deque[float] = deque(maxlen=size)
        self._lengths: deque[int] = deque(maxlen=size)
        self.logged: dict[str, deque[float]] = {}

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

    def __repr__(self) -> str:
        return f"Window({self.episodes} episodes of at most {self.size}, {self.return_stats})"


class Statistics:
    """Statistics of a collector: ``collector.stats``.

    Only whole episodes count: an episode counts in the collection in which it ends, with the steps
    that it had in collections before. Episodes that a reset cuts short are not counted.

    Numbers that :class:`tdcollect.Hooks` return are kept beside them, as ``logged``: by name, all
    of the latest collection, and the latest K.

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
        self.waiting: dict[str, list[float]] = {}  # numbers of hooks in the collection at hand

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
    def seconds(self) -> float:
        """The time in collections so far; 0 without statistics."""
        return self._lifetime.seconds

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
        self.log({})

    def log(self, numbers: Mapping[str, Any], now: bool = True) -> None:
        """Take in numbers of a hook, for the latest collection; not ``now``: for that at hand."""
        self._check()
        names = numbers if isinstance(numbers, Mapping) else [numbers]
        if not all(isinstance(name, str) and _is_free(name) for name in names):
            raise ValueError(
                "expected a hook to return None, or numbers by names that are those of no "
                f"statistic, got {numbers!r}; leave the return out, or choose another name"
            )
        for name, given in numbers.items():
            values = torch.as_tensor(given, dtype=torch.float64).reshape(-1).tolist()
            self.waiting.setdefault(name, []).extend(values)
        if now and self.waiting and self._latest is not None:
            logged, size = dict(self._latest.logged), self._window.size
            for name, values in self.waiting.items():
                logged[name] = np.append(logged.get(name, []), values)
                self._window.logged.setdefault(name, deque(maxlen=size)).extend(values)
            self._latest = replace(self._latest, logged=logged)
            self.waiting = {}

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
        for name in ("group_returns", "logged"):
            if latest is not None and not latest[name]:
                del latest[name]
        state = {"lifetime": asdict(self._lifetime), "window": window, "latest": latest}
        logged = {name: np.array(values) for name, values in self._window.logged.items()}
        return {**state, "logged": logged} if logged else state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`save_state`."""
        for name, value in state["lifetime"].items():
            held = Moments(**value) if isinstance(value, Mapping) else value
            setattr(self._lifetime, name, held)
        self._window.load(*state["window"])
        logged, size = state.get("logged", {}), self._window.size
        self._window.logged = {name: deque(values, size) for name, values in logged.items()}
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
        line = repr(self)
        if self._latest is None:
            return line
        parts = [("latest collection", _lines(self._latest)), ("lifetime", _lines(self._lifetime))]
        last = [f"returns   {self._window.return_stats}", f"lengths   {self._window.length_stats}"]
        last += _logged_lines(self._window)
        if self._window.episodes:
            parts.append((f"latest {self._window.episodes} episodes", last))
        return "\n".join(f"{name}\n" + "\n".join(f"  {x}" for x in lines) for name, lines in parts)


def _is_free(name: str) -> bool:
    """Tell whether a name is not that of a statistic, or of a number of ``LogStatistics``."""
    groups = ("return_", "length_", "shaped_return_", "window_return_", "episode_seconds_")
    known = name in Collection.__dataclass_fields__ or hasattr(Collection, name)
    return not known and not name.startswith(groups)


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
        self._began = np.zeros(slots)  # in seconds of collections

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

    def feed(self, ends: Ends, reward: Floats) -> Episodes:
        """Add rows in the order of their arrival, with their rewards ``[F]``.

        Returns:
            The episodes that ended, in the order of arrival, without those broken off.
        """
        slots, done, failed = ends.slots, ends.done, ends.failed
        if not np.count_nonzero(done):  # most small batches
            np.add.at(self._returns, slots, reward)
            np.add.at(self._lengths, slots, 1)
            return _NONE
        order = np.argsort(slots, kind="stable")
        of_row, over = slots[order], done[order]
        other_slot = of_row[1:] != of_row[:-1]
        begins = np.concatenate([[True], over[:-1] | other_slot])
        part = np.cumsum(begins) - 1  # of an episode, for each row
        heads = np.flatnonzero(begins)
        tails = np.append(heads[1:], len(order)) - 1
        slot, ended = of_row[heads], over[tails]
        goes_on = np.concatenate([[True], slot[1:] != slot[:-1]])  # from the batch before
        # The sum so far stands before the rewards that are added to it, one by one, in order.
        into = np.concatenate([np.arange(len(heads)), part])
        terms = np.concatenate([np.where(goes_on, self._returns[slot], 0.0), reward[order]])
        sums = np.bincount(into, weights=terms).astype(np.float64, copy=False)
        lengths = tails - heads + 1 + np.where(goes_on, self._lengths[slot], 0)
        broken = goes_on & self._broken[slot]
        at = ends.at[order[tails]]
        began = np.where(goes_on, self._began[slot], np.append(0.0, at[:-1]))
        self.drop(slot)
        self._began[slot] = np.where(ended, at, began)  # the latest of each slot stays
        left = slot[~ended]
        self._returns[left], self._lengths[left] = sums[~ended], lengths[~ended]
        self._broken[left] = broken[~ended]
        whole = ended & ~broken
        if failed is not None:
            whole &= ~failed[order[tails]]
        found = np.flatnonzero(whole)
        found = found[np.argsort(order[tails[found]])]
        return Episodes(slot[found], sums[found], lengths[found], (at - began)[found])


_NONE = Episodes(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0))


def _logged_lines(part: Spreads) -> list[str]:
    return [f"logged    {name}: {found}" for name, found in part.logged_stats.items()]


def _lines(part: Any) -> list[str]:
    groups = part.group_returns if isinstance(part, Collection) else {}
    lines = [
        f"episodes  {part.episodes}",
        f"steps     {part.steps}",
        f"time      {part.seconds:.4g} s, {part.steps_per_second:,.0f} steps/s",
        f"returns   {part.return_stats}",
        *(f"  {name}  {spread(values)}" for name, values in groups.items()),
        f"lengths   {part.length_stats}",
        f"seconds   {part.episode_seconds_stats}",
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
    return lines + (_logged_lines(part) if isinstance(part, Collection) else [])


class Ends(NamedTuple):
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

    def feed(self, tally: Tally, reward: Floats) -> Episodes:
        """The episodes that ended, given the rewards ``[F]``."""
        return (Tally(1) if self.whole else tally).feed(self, reward)


class CollectionLog:
    """Notes of one collection: rewards and done flags if wanted, and times on request.

    Attributes:
        batch: the batch collected; to be set.
        env_seconds: time in the env's steps and resets; None without timers.
        policy_seconds: time in calls of the policy; None without timers.
        stamps: the times at which slots have ended episodes, where they step on arrays.
    """

    def __init__(
        self, batch_size: torch.Size, wanted: bool, timers: bool, watch: Watch | None = None
    ):
        self.env_seconds = 0.0 if timers else None
        self.policy_seconds = 0.0 if timers else None
        self.batch: TensorDictBase | None = None
        self.stamps: list[tuple[float, list[int]]] = []
        self.wanted = wanted
        self.watch = watch
        self._dims = len(batch_size)
        self._slots = batch_size.numel()
        self._row_slots: Ints = np.arange(self._slots)  # and from there again
        self._timers = timers
        self._ended: list[Piece] = []
        # Rewards by path, flags, marks of failures: of the rows of a batch, or of each step.
        self._noted: list[tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]] = []

    # ------------------------------------------------------------------------------------ times

    def timed(self, name: str, function: Function) -> Function:
        """The same function, its time added to an attribute of this log if times are asked for."""
        if not self._timers:
            return function

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - start)

        return cast(Function, timed)

    def timed_parts(
        self, env: Env, lower: Callable[[StepDict], Policy]
    ) -> tuple[Env, Callable[[StepDict], Policy]]:
        """The env and the policy of a collection on StepDicts, timed if that is asked for."""
        if not self._timers:
            return env, lower
        in_two_parts = ("send_reset", "receive") if env.can.asynchronous else ()
        for name in ("advance", "begin", *in_two_parts):
            setattr(env, name, self.timed("env_seconds", getattr(env, name)))

        def lower_timed(step: StepDict) -> Policy:
            policy = lower(step)
            policy.calls = [self.timed("policy_seconds", call) for call in policy.calls]
            return policy

        return env, lower_timed

    # ------------------------------------------------------------------------------------ notes

    def note_blocks(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Hand on the blocks of a collection by episodes, and note which episodes ended."""
        for block in blocks:
            self._ended += [piece for piece in block.pieces if piece.ended]
            yield block

    def note_entries(
        self,
        entries: dict[Key, torch.Tensor],
        reward_keys: Sequence[Key],
        slots: Sequence[int] | None = None,
    ) -> None:
        """Note the rewards and flags of a batch ``[*N, T]``, or of whole episodes ``[F]``.

        By arrival, they are ``[F]`` too, and ``slots`` has the slot of each row.
        """
        if not self.wanted:
            return
        whole = bool(self._ended)
        if whole or slots is not None:
            self._dims, self._row_slots = 0, np.array(slots or [0], np.int64)
        done, failed = entries[keys.NEXT_DONE], entries.get(under_next(keys.ENV_ERROR))
        if not whole:  # a transform may truncate without ending the episode
            for key in (keys.TERMINATED, keys.TRUNCATED):
                if under_next(key) in entries:
                    done = done | entries[under_next(key)]
        rewards = {
            entry_path(key): rows_of(entries[under_next(key)], self._dims) for key in reward_keys
        }
        # Whole episodes that failed are left out.
        marks = None if failed is None or whole else rows_of(failed, self._dims)
        self._noted.append((rewards, rows_of(done, self._dims), marks))

    def note(self, given: tuple[TensorDictBase, TensorDictBase], env: EnvBase) -> None:
        """Note a step of TorchRL's loop: the step taken, and the one to go on with."""
        stepped, upcoming = given
        following, slots = stepped.get(keys.NEXT), self._slots
        found = (following.get(key, None) for key in env.done_keys)
        flags = torch.cat([flag.reshape(slots, -1) for flag in found if flag is not None], -1)
        failed = following.get(keys.ENV_ERROR, None)
        rewards = {
            entry_path(key): following.get(key).reshape(slots, -1) for key in env.reward_keys
        }
        if self.wanted:
            marks = None if failed is None else failed.reshape(slots, -1)
            self._noted.append((rewards, flags, marks))
        if self.watch is not None:
            ended: list[int] = flags.any(-1).nonzero().reshape(-1).tolist()
            self.watch.stepped(None, ended, lambda: stepped, rewards.values(), failed)
            if ended:
                self.watch.started(ended, lambda: upcoming)

    # ---------------------------------------------------------------------------- what was noted

    def rewards_and_ends(self, start: float, before: float) -> tuple[dict[str, Floats], Ends]:
        """The reward entries ``[F]`` by path, and the ends of episodes.

        The collection began at ``start``, after so many seconds in those ``before``.

        The reward of an entry is the mean over its features (the agents of a group, say). An
        episode ends where any flag says so, which is where TorchRL's collector starts a trajectory.
        """
        rewards, flags, marks = zip(*self._noted, strict=True)
        found = {name: averaged(_joined([step[name] for step in rewards])) for name in rewards[0]}
        done = _joined(flags).any(-1)
        failed = None if marks[0] is None else _joined(marks).any(-1)
        slots = np.tile(self._row_slots, len(done) // len(self._row_slots))
        steps = np.arange(len(done)) // (self._slots if self._dims else 1) + 1
        at = before + steps * (time.perf_counter() - start) / steps[-1]
        rows = np.flatnonzero(done)
        rows = rows[np.argsort(slots[rows], kind="stable")]
        stamps = sorted((slot, now) for now, ended in self.stamps for slot in ended)
        if [slot for slot, _ in stamps] == slots[rows].tolist():
            at[rows] = [before + now - start for _, now in stamps]
        return found, Ends(slots, done, failed, bool(self._ended), self._dims, at)

    @property
    def slots_and_seconds(self) -> tuple[Ints, Floats]:
        """Of whole episodes in the order in which they started, ``[E]`` each."""
        order = sorted(self._ended, key=lambda piece: piece.start.index)
        slots = np.array([piece.slot for piece in order], np.int64)
        return slots, np.array([piece.seconds for piece in order], np.float64)


def rows_of(entry: torch.Tensor, dims: int) -> torch.Tensor:
    """``[F, features]`` of an entry ``[*N, T, *feature]`` with so many dims of slots."""
    return entry.movedim(dims, 0).reshape(entry.shape[: dims + 1].numel(), -1)


def _joined(parts: Sequence[torch.Tensor]) -> Any:
    """Rows ``[F, features]`` of several parts as an array.

    Features that a part has less than others are zero: those of actions cut short by an end.
    """
    most = max(part.shape[1] for part in parts)
    padded = [pad(p, (0, most - p.shape[1])) if p.shape[1] < most else p for p in parts]
    rows = torch.cat(padded) if len(padded) > 1 else padded[0]
    return rows.detach().cpu().numpy()


def slots_of(index: Any, batch_size: torch.Size) -> Bools:
    """The slots of an index ``[N]``, as TorchRL's ``reset()`` reads it."""
    marked = torch.zeros((*batch_size, 1), dtype=torch.bool)
    marked[index] = True
    return cast(Bools, marked.reshape(-1).numpy())


def averaged(values: Any) -> Floats:
    """The mean over the features of ``[F, features]``."""
    if values.shape[-1] == 1:
        return values[..., 0].astype(np.float64)
    return values.mean(-1, dtype=np.float64)


class Monitor:
    """Keeps a collector's statistics, and calls its hooks.

    Attributes:
        stats: ``collector.stats``.
        collected: whether anything was collected since all slots were reset.
    """

    def __init__(self, statistics: bool, window: int, timers: bool, watch: Watch | None = None):
        check.positive_int(stats_window=window)
        if timers and not statistics:
            raise ValueError(
                "expected statistics=True with timers=True, got statistics=False: they are part "
                "of collector.stats; leave one of the two out"
            )
        self.stats = Statistics(window, statistics, self._counters)
        self._timers = timers
        self._watch = watch
        self._step_watch = watch if watch is not None and watch.steps else None
        self._collector: Callable[[], Any] = lambda: None
        self._ended: float | None = None
        self._unshaped: Ends | None = None
        self._restarts = 0
        self.collected = False

    def attach(self, collector: TorchRLCollector) -> None:
        """Attach to the collector, once it is made. It is not kept alive."""
        self._collector = weakref.ref(collector)
        self._batch_size = collector.env.batch_size
        names = sorted(map(entry_path, collector.env.reward_keys))
        slots = self._batch_size.numel()
        rewards = collector.env.full_reward_spec[collector.env.reward_keys[0]].shape.numel()
        self._groups = [] if names == [keys.REWARD] and rewards == slots else names
        self._tallies = [Tally(slots) for _ in range(2 + len(self._groups))]
        self._tally, self._shaped, *_ = self._tallies
        self._newly_restarted(None)
        if self._watch is not None:
            self._watch.attach(collector.env, self.stats)

    def _counters(self) -> dict[str, Any]:
        collector = self._collector()
        if collector is None:
            raise RuntimeError("the collector is gone, and its counters with it")
        return TorchRLCollector.stats(collector)

    def drop(self, index: Any = None) -> None:
        """Drop the episodes in flight, cut short by a reset: of all slots, or of an index."""
        slots = None if index is None else slots_of(index, self._batch_size)
        if slots is None:
            self.collected = False
        for tally in self._tallies:
            tally.drop(slots, self.stats.seconds)
        if self._watch is not None:
            self._watch.drop(slots)

    def save_state(self) -> dict[str, Any]:
        """Statistics, and the sums of episodes in flight, as nested arrays and numbers."""
        return {
            "stats": self.stats.save_state(),
            "tallies": [vars(tally).copy() for tally in self._tallies],
            "watch": None if self._watch is None else self._watch.save_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`save_state`."""
        self.stats.load_state(state["stats"])
        for tally, values in zip(self._tallies, state["tallies"], strict=True):
            tally.drop(None, self.stats.seconds)
            vars(tally).update(values)
        if self._watch is not None and state["watch"] is not None:
            self._watch.load_state(state["watch"])
        self._ended = self._unshaped = None

    def miss(self) -> None:
        """Leave out the episodes in flight, some of whose steps were not seen."""
        self.stats.waiting.clear()
        for tally in self._tallies:
            tally.miss()

    def lose(self) -> None:
        """Discard the running sums: they belong to other episodes than those in flight."""
        self.drop(slice(None))
        if self.collected:
            self.miss()

    def unnoted_log(self) -> CollectionLog:
        """A log for steps whose rows are noted later; hooks see them at once."""
        return CollectionLog(self._batch_size, False, False, self._step_watch)

    @contextmanager
    def collection(self) -> Iterator[CollectionLog]:
        """Keep the log of one collection, and count it at its end."""
        log = CollectionLog(self._batch_size, self.stats.on, self._timers, self._step_watch)
        start = time.perf_counter()
        try:
            yield log
        except BaseException:
            self.miss()
            raise
        finally:
            self.collected = True
        if self.stats.on:
            self._count(log, start)
        if self._watch is not None:
            self._watch.call("collection_ended", log.batch, self.stats)

    def _count(self, log: CollectionLog, start: float) -> None:
        rewards, ends = log.rewards_and_ends(start, self.stats.seconds)
        groups = {
            name: ends.feed(tally, rewards[name]).returns
            for name, tally in zip(self._groups, self._tallies[2:], strict=True)
        }
        episodes = ends.feed(self._tally, np.mean([*rewards.values()], 0))
        if ends.whole:
            slots, seconds = log.slots_and_seconds
            episodes = episodes._replace(slots=slots, seconds=seconds)
        if self._unshaped is not None:
            self._shaped.miss()  # its batch was not shaped
        self._unshaped = ends
        between = None if self._ended is None else start - self._ended
        now = self._ended = time.perf_counter()
        times = (now - start, between, log.env_seconds, log.policy_seconds)
        restarts = self._newly_restarted(ends.failed)
        took, steps = episodes.seconds, len(ends.done)
        self.stats.add(Collection(steps, *times, *episodes[:3], None, restarts, groups, took))

    def _newly_restarted(self, failed: Bools | None) -> int:
        """The number of envs built anew since the last call."""
        base = base_of(self._collector().env)
        if not isinstance(base, GymnasiumEnv):  # tdcollect's envs inside of others, say
            return 0 if failed is None else int(failed.sum())
        before, self._restarts = self._restarts, base.restarts or 0
        return self._restarts - before

    def shaped(self, reward: torch.Tensor) -> None:
        """Count shaped rewards of the latest collection: ``[*N, T, *feature]``, or ``[F, ...]``."""
        if self._unshaped is None:
            return
        ends, self._unshaped = self._unshaped, None
        values = averaged(rows_of(reward, ends.dims).detach().cpu().numpy())
        values = values[: len(ends.done)]  # it may have ended early
        self.stats.add_shaped(ends.feed(self._shaped, values).returns)


class StatsAttribute:
    """``collector.stats``: statistics that can be called, as the parent's method of that name."""

    def __get__(self, collector: Any, owner: type) -> Any:
        return TorchRLCollector.stats if collector is None else collector._monitor.stats


def with_progress(batches: Iterator[Any], collector: Any) -> Iterator[Any]:
    """The batches, while a bar shows the frames collected and the latest mean return.

    The bar closes with the iteration, however that ends.
    """
    parent, total = CollectorState(collector), collector.total_frames
    total = None if math.isinf(total) else total
    with (
        closing(batches),  # type: ignore[type-var]
        progress_bar(total, "frames", parent.frames) as bar,
    ):
        for batch in batches:
            latest = collector.stats.latest if collector.stats.on else None
            if latest is not None and latest.return_stats is not None:
                bar.set_postfix({"return": f"{latest.return_stats.mean:.4g}"}, refresh=False)
            bar.update(parent.frames - bar.n)
            yield batch
            del batch  # or it would take memory beside the next one
