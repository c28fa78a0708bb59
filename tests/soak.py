"""Soak test: envs that fail at random, for a given time, on serial and process backends.

    python -m tests.soak --minutes 5

Counting envs raise, give nonsense, are killed and hang, at random; collection goes on. Every row
that is not marked is checked against the truth that its observation tells, and at the end memory,
processes and file descriptors must be what they were after the first tenth of the time.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tdcollect import Collector

from .counting import (
    CountingRules,
    StatelessCountingPolicy,
    check_counting_batch,
)
from .testing.faulty_envs import IN_STEP, Faulty, env_of

RULES = CountingRules(lengths=(3, 40, 17, 90, 8))
SLOTS = 8
STEPS = 128


class Unlucky(Faulty):
    """Fails at random.

    A failed reset leaves no mark in a batch, so resets fail before the first step of a life alone:
    the marked row that made the env anew stands before them.
    """

    def __init__(self, slot: int, faults: dict[str, float]):
        super().__init__(slot, "", Path(), rules=RULES)
        self.luck = random.Random(int.from_bytes(os.urandom(8), "big"))
        self.faults = faults
        self.fresh = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        if self.fresh and self.luck.random() < 0.1:
            return self.fail(self.luck.choice(IN_STEP[:4]), result)
        self.fresh = False
        return result

    def step(self, action: Any) -> Any:
        result = super().step(action)
        for what, chance in self.faults.items():
            if self.luck.random() < chance:
                return self.fail(what, result)
        return result


def held() -> dict[str, float]:
    """Resources of this process: memory in MiB, children, file descriptors, mappings."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "MiB": int(status.split("VmRSS:")[1].split()[0]) // 1024,
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def check(late: dict[str, float], early: dict[str, float]) -> None:
    """Raise if more is held than before: of memory and of mappings, much more."""
    print(f"  before: {early}\n  after:  {late}", flush=True)
    for name, growth in (("MiB", 1.05), ("mappings", 1.05), ("children", 1), ("descriptors", 1)):
        assert late[name] <= early[name] * growth, f"more {name} than before"


def soak(backend: str, seconds: float) -> None:
    """Collect for a given time; raise if a row is wrong or a resource leaks."""
    faults = dict.fromkeys(IN_STEP, 3e-4)
    if backend == "process":
        faults |= {"kill": 2e-4, "hang": 4e-5}
    factories = [partial(Unlucky, slot, faults) for slot in range(SLOTS)]
    env = env_of(factories, backend, num_workers=3, max_restarts=10**9)
    collector = Collector(env, StatelessCountingPolicy(), frames_per_batch=SLOTS * STEPS)
    start = time.monotonic()
    early: dict[str, float] = {}
    previous, marked = None, 0
    while (passed := time.monotonic() - start) < seconds:
        batch = collector.rollout()
        check_counting_batch(batch, RULES, previous=previous, require=[("collector", "traj_ids")])
        marked += int(batch["next", "env_error"].sum())
        previous = batch
        if not early and passed > seconds / 10:
            early = held()
    late = held()
    life = collector.stats.lifetime
    print(
        f"{backend}: {life.steps:,} rows in {seconds:.0f} s, all checked; {life.episodes:,} "
        f"episodes, {marked:,} broken off, {life.restarts:,} envs built anew"
    )
    collector.shutdown()
    assert marked > 0, "nothing failed: make it longer"
    check(late, early)


def main() -> None:
    """Soak each backend for its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of both backends together")
    minutes: float = parser.parse_args().minutes
    torch.set_num_threads(1)
    before = held()
    for backend in ("serial", "process"):
        soak(backend, minutes * 30)
    allowed = {"MiB": math.inf, "mappings": math.inf, "descriptors": before["descriptors"] + 1}
    check(held(), before | allowed)


if __name__ == "__main__":
    main()
