"""Timing: the programs of a cell take turns, so a change of the machine's speed affects all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np


class Program(NamedTuple):
    """A program to time.

    ``run`` collects one batch of ``frames`` rows; ``close`` frees its resources.
    """

    run: Callable[[], object]
    frames: int
    close: Callable[[], object] = lambda: None


class Effort(NamedTuple):
    """The amount of measurement.

    Each program has ``rounds`` turns of about ``seconds`` each, in batches of ``steps`` steps (T).
    """

    steps: int = 128
    rounds: int = 11
    seconds: float = 0.2


QUICK = Effort(steps=16, rounds=2, seconds=0.005)


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """The median and quartiles of some values."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return Spread(float(median), float(low), float(high))


def alternate(programs: Mapping[str, Program], effort: Effort) -> dict[str, list[float]]:
    """Seconds per frame of each program in each round.

    Each program first collects two batches that are not counted; the second determines how many
    batches fill a turn. Each round begins with another program.
    """
    batches = {}
    for name, program in programs.items():
        program.run()
        batches[name] = max(1, round(effort.seconds / _seconds(program, 1)))
    gc.collect()
    gc.freeze()  # so that garbage collection in one program does not visit another's objects
    times: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for turn in range(effort.rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            took = _seconds(programs[name], batches[name])
            times[name].append(took / (batches[name] * programs[name].frames))
    gc.unfreeze()
    return times


def _seconds(program: Program, batches: int) -> float:
    start = time.perf_counter()
    for _ in range(batches):
        program.run()
    return time.perf_counter() - start


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, list[float]]:
    """Ratios of each other program's time to that of ``base`` in the same round."""
    return {
        name: [other / ours for other, ours in zip(values, times[base], strict=True)]
        for name, values in times.items()
        if name != base
    }
