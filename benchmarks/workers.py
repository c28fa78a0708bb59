"""Worker processes against one process, for envs alone and for the collector."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import workloads
from bench import QUICK, Effort, Program, alternate, ratios, spread
from burn import Burn, rounds_of
from gymnasium.vector import AsyncVectorEnv
from slots_alone import slots_alone

import tdcollect

SERIAL, ASYNC = "serial", "AsyncVectorEnv"
CHEETAH = "HalfCheetah-v5"


def workers(effort: Effort) -> list[dict[str, Any]]:
    """Speed relative to ``serial`` of each number of workers, for each workload."""
    quick = effort == QUICK
    cores = len(os.sched_getaffinity(0))
    counts = [cores] if quick else [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= cores]
    rows = []
    for slots, target in [(2, None)] if quick else [(8, 1.25), (32, 1.5)]:
        kinds: dict[str, Callable[[], Program]] = {
            SERIAL: partial(_alone, slots, effort.steps, "serial"),
            ASYNC: partial(_vector, slots, effort.steps),
        }
        for n in counts:
            kinds[f"{n}"] = partial(_alone, slots, effort.steps, "process", num_workers=n)
        name = f"{CHEETAH} alone, N={slots}"
        rows.append(_measure(name, kinds, effort, target))
        rows[-1]["against_async"] = _against_async(rows[-1])
    for microseconds in (10,) if quick else (30, 100, 300, 1000):
        rounds, slots = rounds_of(microseconds * 1e-6), 2 if quick else 8
        burn = partial(Burn, rounds)
        kinds = {SERIAL: partial(_collected, burn, slots, effort.steps, "serial")}
        for n in counts:
            kinds[f"{n}"] = partial(_collected, burn, slots, effort.steps, "process", num_workers=n)
        target = None if microseconds < 100 else 1.3
        name = f"collector, {microseconds} us per step, N={slots}"
        rows.append(_measure(name, kinds, effort, target))
    return rows


def _measure(
    name: str, kinds: dict[str, Callable[[], Program]], effort: Effort, target: float | None
) -> dict[str, Any]:
    torch.manual_seed(0)
    programs: dict[str, Program] = {}
    try:
        for kind, make in kinds.items():
            programs[kind] = make()
        times = alternate(programs, effort)
    finally:
        for program in programs.values():
            program.close()
    gains = {
        kind: spread([1 / value for value in values])._asdict()
        for kind, values in ratios(times, SERIAL).items()
    }
    medians = {kind: spread(values).median for kind, values in times.items()}
    return {
        "workload": name,
        "us_per_frame": medians[SERIAL] * 1e6,
        "gains": gains,
        "target": target,
    }


def _against_async(row: dict[str, Any]) -> float:
    """Speed of the largest number of workers relative to AsyncVectorEnv."""
    *_, most = row["gains"].values()
    return most["median"] / row["gains"][ASYNC]["median"]


def _alone(slots: int, steps: int, backend: str, **options: Any) -> Program:
    env = tdcollect.make_env(CHEETAH, slots, backend=backend, seed=0, **options)
    return slots_alone(env, steps)._replace(close=env.close)


def _vector(slots: int, steps: int) -> Program:
    envs = AsyncVectorEnv([partial(gym.make, CHEETAH)] * slots, context="forkserver")
    envs.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, slots, 6)).astype(np.float32)

    def run() -> None:
        for action in actions:
            envs.step(action)

    return Program(run, slots * steps, envs.close)


def _collected(make: Any, slots: int, steps: int, backend: str, **options: Any) -> Program:
    env = tdcollect.make_env(
        make, slots, backend=backend, categorical_action_encoding=True, **options
    )
    policy = workloads.discrete_actor(workloads.mlp(4, 2))
    program = workloads.ours(env, policy, steps)
    return program._replace(close=partial(_close, program, env))


def _close(program: Program, env: Any) -> None:
    program.close()
    if not env.is_closed:
        env.close()
