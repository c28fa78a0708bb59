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
from measure import spread
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


def started(count: int) -> tuple[tdcollect.LocalWorkers, float]:
    """Return warm workers, and the seconds until they had run an episode each."""
    workers = tdcollect.LocalWorkers(count)
    begin = time.perf_counter()
    tdcollect.evaluate("CartPole-v1", None, count, workers=workers, progress=False)
    return workers, time.perf_counter() - begin


def speedup(busy: bool, counts: list[int], episodes: int, length: int, rounds: int) -> None:
    """Print the time of one worker over that of several."""
    make, acts = Make(seconds=0.001, busy=busy, length=length), policy()
    crews = {count: started(count)[0] for count in (1, *counts)}
    times: dict[int, list[float]] = {count: [] for count in crews}
    digests = set()
    for turn in range(rounds + 1):
        for count, crew in crews.items():
            begin = time.perf_counter()
            result = tdcollect.evaluate(make, acts, episodes, workers=crew, progress=False)
            if turn:
                times[count].append(time.perf_counter() - begin)
            digests.add(result.digest)
    assert len(digests) == 1
    for crew in crews.values():
        crew.close()
    kind = "busy" if busy else "asleep"
    alone = episodes * length * 0.001
    print(f"{kind}: {episodes} episodes of {length} steps of 1 ms ({alone:.1f} s of env)")
    for count in counts:
        ratios = [a / b for a, b in zip(times[1], times[count], strict=True)]
        print(f"  {count} workers: {_text(ratios)} times as fast as 1 ({min(times[count]):.2f} s)")


def short_episodes(rounds: int) -> None:
    """Print the cost of an episode of one step, beside the env."""
    make, acts = Make(seconds=0, busy=False, length=1), policy()
    workers, _ = started(2)
    ways = {"in memory": False, "with a directory and its report": True}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, writes in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out" if writes else None
                begin = time.perf_counter()
                tdcollect.evaluate(
                    make, acts, 1000, workers=workers, output_dir=out, progress=False
                )
                if turn:
                    times[way].append(time.perf_counter() - begin)
    workers.close()
    for way, values in times.items():
        print(f"1,000 episodes of one step, 2 workers, {way}: {_text(values)} ms each")


def memory() -> None:
    """Print how the memory of the driver grows with trajectories that are not kept."""
    workers, _ = started(2)
    make, acts = Make(seconds=0, busy=False, length=100, size=10_000), policy(10_000)
    peaks = []
    for episodes in (20, 100):  # 4 MB each, and their following observations
        tdcollect.evaluate(make, acts, episodes, workers=workers, progress=False)
        gc.collect()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    with tempfile.TemporaryDirectory() as folder:
        tdcollect.evaluate(
            make, acts, 100, workers=workers, progress=False,
            keep_trajectories=True, output_dir=Path(folder) / "out",
        )  # fmt: skip
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    workers.close()
    print(
        f"peak memory of the driver: {peaks[0]:.0f} MiB after 20 episodes of 4 MB, {peaks[1]:.0f} "
        f"after 100 more, {peaks[2]:.0f} after 100 whose data went to a directory (0.8 GB)"
    )


def _text(values: list[float]) -> str:
    found = spread(values)
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torchrl")
    for count in (1, 2, 4):
        workers, seconds = started(count)
        workers.close()
        print(f"start of {count} workers, with an episode each: {seconds:.1f} s")
    speedup(False, [2, 4], options.episodes, 50, options.rounds)
    speedup(True, [2], options.episodes, 50, options.rounds)
    short_episodes(options.rounds)
    memory()


if __name__ == "__main__":
    main()
