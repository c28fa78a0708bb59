"""Slots that go on as they are ready, against slots in step, where steps take unlike times.

    OMP_NUM_THREADS=1 python benchmarks/ready.py

Envs sleep, so that cores do not matter: 1 ms per step, and 20 ms for one step in twenty; or 1 ms
for each. There are 16 slots in 16 processes. Sides take turns in one process. Tianshou's
``AsyncCollector`` and TorchRL's ``AsyncEnvPool`` step the same envs with the same network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import workers_report
from bench import QUICK, Effort, Program, alternate, spread
from many_workers import policy
from napping import Napping
from others import tianshou_async
from tensordict import TensorDictBase
from torchrl.envs import AsyncEnvPool, GymWrapper

import tdcollect

MakeEnv = Callable[[], Napping]

SLOTS = 16
IN_STEP = "tdcollect, in step"
READY = {"wait_num": 1}


LENGTH = 50
KINDS: dict[str, tuple[float, float]] = {
    "one step in twenty takes 20 ms": (0.05, 3.0),
    "each step takes 1 ms": (0.0, 0.95),
}
"""By name: the share of steps that take 20 ms, and the target."""

EFFORT = Effort(steps=64, rounds=7, seconds=0.4)


def ready(effort: Effort) -> dict[str, Any]:
    """Times of in step over those of each other side, by round, for both kinds of envs."""
    if effort != QUICK:
        effort = EFFORT
    rows = []
    for kind, (share, target) in KINDS.items():
        make = partial(Napping, share, LENGTH)
        rows += [{"kind": kind, **row} for row in _against(make, target, effort)]
    return {"slots": SLOTS, "steps": effort.steps, "rows": rows}


def _against(make: MakeEnv, target: float, effort: Effort) -> list[dict[str, Any]]:
    episodes = SLOTS if effort == QUICK else 4 * SLOTS
    rows = []
    for measured, programs in (
        ("training", _training(make, effort.steps)),
        ("whole episodes", _episodes(make, episodes)),
        # So many that the checks of the env, which are in step, do not count for much.
        ("test episodes", _test_episodes(make, 5 * episodes)),
    ):
        try:
            times = alternate(programs, effort)
        finally:
            for program in programs.values():
                program.close()
        for name, values in times.items():
            gains = [a / b for a, b in zip(times[IN_STEP], values, strict=True)]
            ours = name.startswith("tdcollect") and name != IN_STEP
            rows.append(
                {
                    "measured": measured,
                    "side": name,
                    "target": target if ours else None,
                    "per_second": 1 / spread(values).median,
                    "gain": spread(gains)._asdict(),
                }
            )
    return rows


def _env(make: MakeEnv, **options: Any) -> Any:
    return tdcollect.make_env(make, SLOTS, backend="process", num_workers=SLOTS, **options)


def _training(make: MakeEnv, steps: int) -> dict[str, Program]:
    """Frames for training: batches ``[N, T]``, and rows by arrival, which the others give too."""
    frames = steps * SLOTS

    def collecting(wait: dict[str, Any], **options: Any) -> Program:
        collector = tdcollect.Collector(
            _env(make, **wait), policy(), frames_per_batch=frames, **options
        )
        batches = iter(collector)
        return Program(lambda: next(batches), frames, collector.shutdown)

    others = tianshou_async(make, SLOTS, _net(policy()), steps, SLOTS)
    return {
        IN_STEP: collecting({}),
        "tdcollect, [N, T]": collecting(READY),
        "tdcollect, by arrival": collecting(READY, by_arrival=True),
        **({"Tianshou AsyncCollector": others["steps"]} if others else {}),
        "TorchRL AsyncEnvPool": _env_pool(make, frames),
    }


def _episodes(make: MakeEnv, episodes: int) -> dict[str, Program]:
    """``collect(episodes=)``; Tianshou's are the first to finish."""

    def collecting(wait: dict[str, Any]) -> Program:
        collector = tdcollect.Collector(_env(make, **wait), policy(), frames_per_batch=SLOTS)
        return Program(partial(collector.collect, episodes=episodes), episodes, collector.shutdown)

    others = tianshou_async(make, SLOTS, _net(policy()), LENGTH, episodes)
    return {
        IN_STEP: collecting({}),
        "tdcollect, ready": collecting(READY),
        **(
            {"Tianshou AsyncCollector": others["episodes"]._replace(close=others["steps"].close)}
            if others
            else {}
        ),
    }


def _test_episodes(make: MakeEnv, episodes: int) -> dict[str, Program]:
    """``evaluate``, with its checks of env and policy."""

    def evaluating(wait: dict[str, Any]) -> Program:
        env, acts = _env(make, **wait), policy()
        run = partial(tdcollect.evaluate, env, acts, episodes, progress=False)
        return Program(run, episodes, env.close)

    return {IN_STEP: evaluating({}), "tdcollect, ready": evaluating(READY)}


def _net(actor: Any) -> torch.nn.Module:
    """The network of an actor."""
    return next(part for part in actor.modules() if isinstance(part, torch.nn.Sequential))


def _env_pool(make: MakeEnv, frames: int) -> Program:
    """A loop over the pool: rows are stacked as they come, without log-probabilities.

    Its exchange in shared memory, the fastest, takes the entries of the env alone.
    """
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)  # as Tianshou's
    try:
        pool = AsyncEnvPool(
            [partial(GymWrapper, make()) for _ in range(SLOTS)],
            backend="multiprocessing",
            exchange="shm",
        )
    finally:
        multiprocessing.set_start_method(before, force=True)
    acts = policy()

    @torch.no_grad()
    def act(step: TensorDictBase) -> None:
        acts(step)
        pool.async_step_and_maybe_reset_send(step.exclude("logits", "action_log_prob"))

    act(pool.reset())

    def run() -> TensorDictBase:
        rows, count = [], 0
        while count < frames:
            row, following = pool.async_step_and_maybe_reset_recv(min_get=1)
            rows.append(row)
            count += len(row)
            act(following)
        return torch.cat(rows)

    return Program(run, frames, pool.close)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use small sizes, to see that it runs")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torchrl")
    effort = QUICK if parser.parse_args().quick else EFFORT
    print("\n".join(workers_report.ready(ready(effort))))
