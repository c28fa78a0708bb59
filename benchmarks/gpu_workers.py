"""Worker processes on the cores of the GPU's machine: envs alone, beside EnvPool's threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from bench import Program
from burn import Burn, rounds_of
from gpu_setting import CORES, LeftOut, Plan, Row, Setting, in_turns, median, need, started
from slots_alone import slots_alone

import tdcollect

SERIAL, POOL = "serial", "EnvPool"
TARGET, TARGET_WORKERS = 0.8, 8
CHEETAH = "HalfCheetah-v5"


def workers(setting: Setting) -> Plan:
    """Yield the measurements of worker processes."""
    for slots in setting.slots(64, 256):
        yield f"{CHEETAH}, N={slots}", partial(_cheetah, slots, setting)
        yield f"1 ms per step, N={slots}", partial(_burning, slots, setting)


def counts() -> list[int]:
    """The numbers of workers to measure."""
    return [count for count in (1, 2, 4, 8, 16) if count <= CORES]


def _cheetah(slots: int, setting: Setting) -> Row:
    need("mujoco")
    pools = {}
    try:
        need("envpool")
        pools = {f"{POOL} {n}": partial(_pool, slots, n) for n in counts()}
    except LeftOut:
        pass
    return _measure(CHEETAH, CHEETAH, slots, pools, setting, frames=2048)


def _burning(slots: int, setting: Setting) -> Row:
    cost = 1e-5 if setting.quick else 1e-3
    make = partial(Burn, rounds_of(cost))
    return _measure(f"{cost * 1e6:,.0f} us per step", make, slots, {}, setting, frames=256)


def _measure(
    name: str,
    env: Any,
    slots: int,
    pools: dict[str, Callable[[int], Program]],
    setting: Setting,
    frames: int,
) -> Row:
    """Speeds of each number of workers, over that of one worker for each of them."""
    effort = setting.effort(slots, frames)._replace(rounds=2 if setting.quick else 4)
    kinds: dict[str, Callable[[int], Program]] = {SERIAL: partial(_alone, env, slots, "serial")}
    for n in counts():
        kinds[f"{n}"] = partial(_alone, env, slots, "process", num_workers=n)
    makes = {kind: partial(make, effort.steps) for kind, make in {**kinds, **pools}.items()}
    programs, _ = started(makes)
    times = in_turns(programs, effort)
    speeds = {kind: 1 / median(values) for kind, values in times.items()}
    return {
        "workload": name,
        "N": slots,
        "frames_per_second": speeds,
        "efficiency": {f"{n}": speeds[f"{n}"] / (n * speeds["1"]) for n in counts()},
        "pool_efficiency": {
            f"{n}": speeds[f"{POOL} {n}"] / (n * speeds[f"{POOL} 1"]) for n in counts() if pools
        },
        "T": effort.steps,
    }


def _alone(env: Any, slots: int, backend: str, steps: int, **options: Any) -> Program:
    made = tdcollect.make_env(
        env, slots, backend=backend, seed=0, categorical_action_encoding=True, **options
    )
    return slots_alone(made, steps)._replace(close=made.close)


def _pool(slots: int, threads: int, steps: int) -> Program:
    import envpool

    pool = envpool.make_gymnasium(CHEETAH, num_envs=slots, seed=0, num_threads=threads)
    pool.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, slots, 6))

    def run() -> None:
        for action in actions:
            pool.step(action)

    return Program(run, slots * steps, pool.close)
