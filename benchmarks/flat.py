"""Cost per frame against T, beside TorchRL's, and against the number of batches collected."""

from __future__ import annotations

import time
from typing import Any

import torch
import workloads
from bench import QUICK, Effort, alternate, ratios, spread

import tdcollect

NUM_ENVS = 8


def against_steps(effort: Effort) -> list[dict[str, Any]]:
    """Microseconds per frame for batches of T steps, and TorchRL's time over it."""
    rows = []
    for steps in (1, 8) if effort == QUICK else (1, 8, 32, 64, 128, 256, 512, 1024):
        torchrl = workloads.torchrl_env("CartPole-v1", NUM_ENVS)
        programs = {
            workloads.OURS: _ours(steps),
            workloads.TORCHRL: workloads.torchrl(torchrl, _policy(), steps),
        }
        times = alternate(programs, effort)
        for program in programs.values():
            program.close()
        ratio = spread(ratios(times, workloads.OURS)[workloads.TORCHRL])._asdict()
        ours = spread([value * 1e6 for value in times[workloads.OURS]])._asdict()
        rows.append({"T": steps, **ours, "torchrl": ratio})
    return rows


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


def _policy() -> Any:
    torch.manual_seed(0)
    return workloads.discrete_actor(workloads.mlp(4, 2))


def _ours(steps: int) -> Any:
    env = tdcollect.make_env("CartPole-v1", NUM_ENVS, categorical_action_encoding=True)
    return workloads.ours(env, _policy(), steps)
