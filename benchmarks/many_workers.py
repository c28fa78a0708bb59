"""Test episodes on worker processes, against one of them.

    OMP_NUM_THREADS=1 python benchmarks/many_workers.py

Envs take 1 ms per step: asleep, so that cores do not matter, or busy. Workers are warm; their start
is reported apart. Sides take turns, and so do the numbers of workers.
"""

from __future__ import annotations

import argparse
import gc
import resource
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import workers_report
from bench import QUICK, Effort, spread
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import tdcollect


class Taking(gym.Env[Any, Any]):
    """Episodes of a fixed length, whose steps take a time.

    Args:
        seconds: of a step.
        busy: use the core meanwhile; else sleep.
        length: of episodes.
        size: of observations.
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float, busy: bool, length: int, size: int = 4):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.seconds, self.busy, self.length, self.size = seconds, busy, length, size

    def _observation(self) -> Any:
        return self.np_random.normal(size=self.size).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = self.length
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        if self.busy:
            end = time.perf_counter() + self.seconds
            while time.perf_counter() < end:
                pass
        elif self.seconds:
            time.sleep(self.seconds)
        self.left -= 1
        return self._observation(), 1.0, self.left == 0, False, {}


class Make:
    """Makes the env; a class, so that workers can have it by name."""

    def __init__(self, **kwargs: Any):
        self.kwargs = kwargs
        self.__name__ = "Taking"

    def __call__(self) -> Taking:
        return Taking(**self.kwargs)


def policy(size: int = 4) -> Any:
    """A policy of 64 x 64."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )


def many_workers(effort: Effort) -> dict[str, Any]:
    """Speed-ups, costs and memory; the numbers of workers take turns."""
    rounds, quick = max(2, effort.rounds // 2), effort == QUICK
    starts = {}
    for count in (1, 2, 4):
        workers, starts[count] = _started(count)
        workers.close()
    episodes = 8 if quick else 200
    return {
        "seconds to start": starts,
        "speedups": [
            _speedup("asleep", 2, 1.8, episodes, rounds),
            _speedup("asleep", 4, 3.4, episodes, rounds),
            _speedup("busy", 2, 1.5, episodes, rounds),
        ],
        "short": _short_episodes(20 if quick else 1000, rounds),
        "memory": _memory(quick),
    }


def _started(count: int) -> tuple[tdcollect.LocalWorkers, float]:
    """Return warm workers, and the seconds until they had run an episode each."""
    workers = tdcollect.LocalWorkers(count)
    begin = time.perf_counter()
    tdcollect.evaluate("CartPole-v1", None, count, workers=workers, progress=False)
    return workers, time.perf_counter() - begin


def _speedup(kind: str, count: int, target: float, episodes: int, rounds: int) -> dict[str, Any]:
    """The time of one worker over that of several, for steps of 1 ms."""
    make, acts = Make(seconds=0.001, busy=kind == "busy", length=50), policy()
    crews = {number: _started(number)[0] for number in (1, count)}
    times: dict[int, list[float]] = {number: [] for number in crews}
    digests = set()
    for turn in range(rounds + 1):
        for number, crew in crews.items():
            begin = time.perf_counter()
            result = tdcollect.evaluate(make, acts, episodes, workers=crew, progress=False)
            if turn:  # the first warms up
                times[number].append(time.perf_counter() - begin)
            digests.add(result.digest)
    assert len(digests) == 1
    for crew in crews.values():
        crew.close()
    ratios = [a / b for a, b in zip(times[1], times[count], strict=True)]
    found = {"kind": kind, "workers": count, "target": target, "episodes": episodes}
    return {**found, "ratio": spread(ratios)._asdict()}


def _short_episodes(episodes: int, rounds: int) -> list[dict[str, Any]]:
    """The milliseconds of an episode of one step, beside the env, on two workers."""
    make, acts = Make(seconds=0, busy=False, length=1), policy()
    workers, _ = _started(2)
    ways = {"in memory": False, "with a directory and its report": True}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, writes in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out" if writes else None
                begin = time.perf_counter()
                tdcollect.evaluate(
                    make, acts, episodes, workers=workers, output_dir=out, progress=False
                )
                if turn:
                    times[way].append(1000 * (time.perf_counter() - begin) / episodes)
    workers.close()
    return [
        {"way": way, "episodes": episodes, "target": 1.5, "ms": spread(values)._asdict()}
        for way, values in times.items()
    ]


def _memory(quick: bool) -> list[dict[str, Any]]:
    """The peak memory of the driver, in MiB, after episodes of 8 MB each; it only grows."""
    counts = (2, 4) if quick else (20, 100)
    workers, _ = _started(2)
    make, acts = Make(seconds=0, busy=False, length=100, size=10_000), policy(10_000)
    rows = []
    for episodes, keep in ((counts[0], False), (counts[1], False), (counts[1], True)):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out" if keep else None
            tdcollect.evaluate(
                make,
                acts,
                episodes,
                workers=workers,
                progress=False,
                keep_trajectories=keep,
                output_dir=out,
            )
        gc.collect()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append({"episodes": episodes, "kept": keep, "peak_MiB": peak})
    workers.close()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use small sizes, to see that it runs")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torchrl")
    effort = QUICK if parser.parse_args().quick else Effort()
    print("\n".join(workers_report.many_workers(many_workers(effort))))
