"""Cost per frame against T, and against the number of batches collected so far."""

from __future__ import annotations

import time
from typing import Any

import torch
import workloads
from bench import QUICK, Effort, alternate, spread

import tdcollect

NUM_ENVS = 8


def against_steps(effort: Effort) -> list[dict[str, Any]]:
    """Microseconds per frame for batches of T steps."""
    lengths = (8, 16) if effort == QUICK else (32, 64, 128, 256, 512, 1024)
    programs = {str(steps): _ours(steps) for steps in lengths}
    times = alternate(programs, effort)
    for program in programs.values():
        program.close()
    return [
        {"T": int(steps), **spread([value * 1e6 for value in values])._asdict()}
        for steps, values in times.items()
    ]


def against_batches(effort: Effort) -> list[dict[str, Any]]:
    """Microseconds per frame in each tenth of a run of batches of 32 steps."""
    program, window = _ours(32), 3 if effort == QUICK else 100
    program.run()
    rows = []
    for first in range(0, 10 * window, window):
        times = []
        for _ in range(window):
            start = time.perf_counter()
            program.run()
            times.append((time.perf_counter() - start) / program.frames * 1e6)
        rows.append({"batches": f"{first + 1} to {first + window}", **spread(times)._asdict()})
    program.close()
    return rows


def _ours(steps: int) -> Any:
    torch.manual_seed(0)
    env = tdcollect.make_env("CartPole-v1", NUM_ENVS, categorical_action_encoding=True)
    return workloads.ours(env, workloads.discrete_actor(workloads.mlp(4, 2)), steps)
