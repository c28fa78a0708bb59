"""What collectors with workers ask of these: facts, seeds, statistics, explanations; lost ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np

from tdcollect.collect.plan import Explanation, Part
from tdcollect.collect.statistics import Collection, Lifetime, Statistics, Window
from tdcollect.collectors.worker import WorkerFacts, WorkerReport, facts_of, report_of, seeded
from tdcollect.display import count_text, one_line
from tdcollect.envs.adopted import chain

_ADVICE = (
    "make a new collector, or pass on_worker_lost='restart' to have another worker take its place"
)


@dataclass(frozen=True)
class LostWorker:
    """One worker that ended before its time.

    Attributes:
        worker: its index.
        pid: of its process, or a name of it on another machine.
        how: the way in which it ended: ``"was killed by SIGKILL"``, ``"ended with exit code 3"``.
        slots: those that it held, counted over all workers; empty if it had not started.
        frames: how many frames were lost with it at most: those of the batch at hand.
        replaced: another worker took its place.
    """

    worker: int
    pid: int | str | None
    how: str
    slots: range
    frames: int
    replaced: bool

    def __str__(self) -> str:
        first, last = self.slots.start, self.slots.stop - 1
        slots = f", slots {first} to {last}" if first < last else f", slot {first}"
        return f"worker {self.worker} (pid {self.pid}{slots if self.slots else ''}) {self.how}"


class LostWorkers(tuple[LostWorker, ...]):
    """The workers that a collector has lost, in order."""

    @property
    def frames(self) -> int:
        """The number of frames that were lost with them, at most."""
        return sum(lost.frames for lost in self)

    def __repr__(self) -> str:
        if not self:
            return one_line(self, "none")
        return one_line(self, *map(str, self), f"at most {count_text(self.frames, 'frame')} lost")

    def __str__(self) -> str:
        return "\n".join(f"{lost}; at most {lost.frames} frames lost" for lost in self) or "none"


class WorkerLostError(RuntimeError):
    """A worker of a collector ended before its time.

    Attributes:
        lost: the record of it.
    """

    def __init__(self, lost: LostWorker, advice: str = _ADVICE):
        self.lost = lost
        self._advice = advice
        super().__init__(f"{lost}; the other workers have been ended, {advice}")

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[LostWorker, str]]:
        return type(self), (self.lost, self._advice)


def slots_of(worker: int, slots: Sequence[int]) -> range:
    """The slots of a worker, counted over all workers.

    Args:
        worker: its index.
        slots: N of each worker.
    """
    first = sum(slots[:worker])
    return range(first, first + slots[worker])


def replacement_seed(seed: int, worker: int, replacement: int) -> int:
    """The seed of the first slot of a worker that takes the place of a lost one.

    It is another than that of the lost one, whose episodes would be collected twice, and repeats
    with ``seed``.

    Args:
        seed: of the whole collection.
        worker: the index of the place.
        replacement: 1 for the first worker that takes it.
    """
    key = (worker, replacement)
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(4)[3] >> 1)


class Asking:
    """A mixin of collectors with workers, over one way to ask them."""

    _facts: Sequence[WorkerFacts] | None = None
    """None until the workers are known, and where they run another's collector."""

    @abstractmethod
    def _ask(self, function: Callable[..., Any], given: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call ``function(collector, *arguments)`` in workers, all at once; return its results.

        Args:
            function: one of a module that workers can import.
            given: the arguments, by the index of the worker.
        """

    @property
    @abstractmethod
    def _workers(self) -> range:
        """The indices of the workers."""

    def _ask_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Ask all workers, with the same arguments."""
        return self._ask(function, dict.fromkeys(self._workers, arguments))

    @property
    def _slots(self) -> list[int]:
        """N of each worker; 1 where it is not known."""
        return [1 if self._facts is None else self._facts[worker].slots for worker in self._workers]

    def _learn_facts(self) -> None:
        """Ask for what is the same as long as the workers live."""
        self._facts = self._ask_all(facts_of)

    def _seed_workers(self, seed: int, static_seed: bool) -> Any:
        """Seed all workers; return the seed for the next env, as TorchRL computes it.

        The slots of all workers count on from ``seed``, as those of one env do, where envs can.
        """
        if all(one.seeds_in_a_row for one in self._facts or ()):
            firsts = accumulate(self._slots[:-1], initial=seed)
            given = {w: (first, seed, w, 0, static_seed) for w, first in enumerate(firsts)}
            self._ask(seeded, given)
            return seed if static_seed else chain(seed, len(given) + 1)[-1]
        following = seed
        for worker in self._workers:
            call = following, seed, worker, 0, static_seed
            (following,) = self._ask(seeded, {worker: call})
        return following

    @property
    def stats(self) -> Any:
        """Statistics merged over the workers; called, TorchRL's dict of counters."""
        return super().stats if self._facts is None else self._statistics  # type: ignore[misc]

    @cached_property
    def _statistics(self) -> MergedStatistics:
        return MergedStatistics(self._reports, lambda: self._slots, super().stats)  # type: ignore[misc]

    def explain(self) -> Explanation:
        """The parts of the workers' collections, and whether several workers pay.

        Raises:
            RuntimeError: where the collector is shut down, or its workers run another's collector.
        """
        if self._facts is None:
            kind = getattr(self, "collector_class", None)
            raise RuntimeError(
                "expected workers with tdcollect.Collector, got "
                f"{getattr(kind, '__name__', kind)}; leave collector_class out"
            )
        return merged_explanation(self._reports(), self._slots)

    def _reports(self) -> list[WorkerReport]:
        """The latest report of each worker."""
        return self._ask_all(report_of)

    def _lost_worker(
        self: Any, worker: int, pid: Any, how: str, frames: int, replaced: bool = False
    ) -> LostWorker:
        """Put a lost worker on record."""
        slots = slots_of(worker, self._slots) if self._facts else range(0)
        lost = LostWorker(worker, pid, how, slots, frames, replaced)
        self.lost = LostWorkers((*self.lost, lost))
        return lost


_PAYS = 10e-3
"""A batch takes a worker at least so many seconds where more processes pay.

To hand a batch over takes about 3 ms, and one process steps twice the slots in less than twice the
time: see benchmarks/processes.py.
"""


class MergedStatistics(Statistics):
    """Statistics of all workers of a collector: ``collector.stats``.

    Counts are sums over the workers, and times those of the slowest. Slots count on over the
    workers: slot i of worker w is ``w N + i``. ``latest`` holds the latest collection of each
    worker, and ``window`` the latest episodes of all, taken from the workers in turn.

    A call gives the dict of TorchRL's ``collector.stats(workers=...)``.

    Args:
        reports: gives the latest report of each worker.
        slots: N of each worker.
        progress: gives TorchRL's counters.
        window: K, how many episodes :attr:`window` holds.
    """

    def __init__(
        self,
        reports: Callable[[], Sequence[WorkerReport]],
        slots: Callable[[], Sequence[int]],
        progress: Callable[..., dict[str, Any]],
        window: int = 100,
    ):
        super().__init__(window, True, progress)
        self._reports = reports
        self._slots = slots
        self._count = progress

    def refresh(self) -> None:
        """Ask the workers."""
        states = [report.statistics for report in self._reports() if report.statistics]
        self.load_state(merged_states(states, self._slots(), self._size))

    @property
    def _size(self) -> int:
        return super().window.size

    @property
    def latest(self) -> Collection | None:
        """The latest collection of each worker together; None before the first."""
        self.refresh()
        return super().latest

    @property
    def lifetime(self) -> Lifetime:
        """All collections of all workers, counted up to now."""
        self.refresh()
        return super().lifetime

    @property
    def window(self) -> Window:
        """The latest K episodes, from all workers in turn."""
        self.refresh()
        return super().window

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """TorchRL's counters: frames, batches, workers and so on."""
        return self._count(*args, **kwargs)

    def __repr__(self) -> str:
        self.refresh()
        return super().__repr__()

    def __str__(self) -> str:
        self.refresh()
        return super().__str__()


def merged_states(
    states: Sequence[Mapping[str, Any]], slots: Sequence[int], window: int
) -> dict[str, Any]:
    """Statistics of several workers as those of one collector.

    Args:
        states: of each worker, as ``Statistics.save_state()`` gives them.
        slots: N of each worker.
        window: K, how many episodes the window holds.
    """
    latest = [state["latest"] for state in states]
    return {
        "lifetime": _merged_lifetimes([state["lifetime"] for state in states]),
        "window": _merged_windows([state["window"] for state in states], window),
        "latest": _merged_collections(latest, slots) if any(latest) else None,
    }


_LONGEST = ("seconds", "seconds_between", "env_seconds", "policy_seconds")


def _merged_lifetimes(lifetimes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name, first in lifetimes[0].items():
        values = [lifetime[name] for lifetime in lifetimes]
        if isinstance(first, Mapping):
            merged[name] = _merged_moments(values)
        else:
            merged[name] = _longest(values) if name in _LONGEST else sum(values)
    return merged


def _longest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _merged_moments(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count, mean, squared deviations and extremes of numbers that several have counted.

    By the pairwise update of Chan, Golub and LeVeque (1979).
    """
    merged = dict(parts[0])
    for part in parts[1:]:
        total = merged["count"] + part["count"]
        if part["count"]:
            away = part["mean"] - merged["mean"]
            merged["squares"] += part["squares"] + away**2 * merged["count"] * part["count"] / total
            merged["mean"] += away * part["count"] / total
        merged["count"] = total
        merged["low"] = min(merged["low"], part["low"])
        merged["high"] = max(merged["high"], part["high"])
    return merged


def _merged_windows(windows: Sequence[tuple[Any, Any]], size: int) -> tuple[Any, Any]:
    """The latest episodes of each worker in turn, the newest last."""
    newest = [zip(returns[::-1], lengths[::-1], strict=True) for returns, lengths in windows]
    episodes = [one for group in zip_longest(*newest) for one in group if one is not None]
    kept = episodes[:size][::-1]
    returns = np.array([episode[0] for episode in kept], np.float64)
    return returns, np.array([episode[1] for episode in kept], np.int64)


def _merged_collections(
    latest: Sequence[Mapping[str, Any] | None], slots: Sequence[int]
) -> dict[str, Any]:
    firsts = np.cumsum([0, *slots[:-1]])
    there = [(one, first) for one, first in zip(latest, firsts, strict=True) if one is not None]
    merged: dict[str, Any] = {name: _longest([one[name] for one, _ in there]) for name in _LONGEST}
    merged |= {name: sum(one[name] for one, _ in there) for name in ("steps", "restarts")}
    merged["slots"] = np.concatenate([one["slots"] + first for one, first in there])
    for name in ("returns", "lengths"):
        merged[name] = np.concatenate([one[name] for one, _ in there])
    groups = [one.get("group_returns", {}) for one, _ in there]
    merged["group_returns"] = {
        name: np.concatenate([one[name] for one in groups]) for name in groups[0]
    }
    shaped = [one["shaped_returns"] for one, _ in there]
    all_shaped = not any(part is None for part in shaped)
    merged["shaped_returns"] = np.concatenate(shaped) if all_shaped else None
    return merged


def merged_explanation(reports: Sequence[WorkerReport], slots: Sequence[int]) -> Explanation:
    """The parts of the workers' collections, and whether several processes pay.

    Args:
        reports: of each worker.
        slots: N of each worker.
    """
    return Explanation([*_parts_of(reports), *_advice(reports, slots)])


def _parts_of(reports: Sequence[WorkerReport]) -> Iterator[Part]:
    alike: dict[tuple[Part, ...], list[int]] = {}
    for worker, report in enumerate(reports):
        alike.setdefault(tuple(report.parts), []).append(worker)
    for parts, workers in alike.items():
        of = "" if len(alike) == 1 else f"worker {', '.join(map(str, workers))}: "
        for part in parts:
            yield part._replace(name=of + part.name)


def _advice(reports: Sequence[WorkerReport], slots: Sequence[int]) -> Iterator[Part]:
    counts = " or ".join(map(str, dict.fromkeys(slots)))
    what = f"{count_text(len(slots), 'worker')} of {counts} slots"
    seconds = [
        life["seconds"] / life["collections"]
        for report in reports
        if report.statistics is not None and (life := report.statistics["lifetime"])["collections"]
    ]
    if not seconds:
        yield Part("workers", what, "whether they pay is known after the first batch")
        return
    took = max(seconds)
    how = f"a batch takes one {took * 1e3:.3g} ms"
    if len(slots) == 1:
        yield Part("workers", what, how)
    elif took >= _PAYS:
        yield Part("workers", what, f"{how}: several processes pay")
    else:
        better = f"larger batches, or one process with {sum(slots)} slots, would be faster"
        yield Part("workers", what, f"{how}: {better}", "3 ms per batch")
