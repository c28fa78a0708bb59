"""The evaluations of a suite on workers that they share, against one after the other on the same.

    OMP_NUM_THREADS=1 python benchmarks/suites.py

Six tasks of unlike speed with two policies each, asleep for 1 to 8 ms per step, on four warm
workers. The two ways take turns, and write the same evaluations.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import workers_report
from bench import QUICK, Effort, spread
from many_workers import Make, policy

import tdcollect

WORKERS = 4
MILLISECONDS = (1, 1, 2, 2, 4, 8)  # per step, by task
LENGTH = 25  # steps of each episode


def suites(effort: Effort) -> dict[str, Any]:
    """The time of evaluations one after the other, over that of the same ones as a suite."""
    rounds, quick = max(2, effort.rounds // 2), effort == QUICK
    suite = _suite(4 if quick else 30)
    ratios, shares = [], []
    with tdcollect.LocalWorkers(WORKERS) as workers:
        tdcollect.evaluate("CartPole-v1", None, 8, workers=workers, progress=False)
        for _ in range(rounds):
            together, digests = _together(suite, workers)
            apart, others = _apart(suite, workers)
            assert digests == others
            ratios.append(apart / together)
            shares.append(_least(suite) / together)
    return {
        "workers": WORKERS,
        "evaluations": len(suite.cells()),
        "episodes": suite.episodes,
        "target": 1.0,
        "ratio": spread(ratios)._asdict(),
        "share of ideal": spread(shares)._asdict(),
    }


def net() -> Any:
    """A policy of 64 x 64."""
    return policy()


def _suite(episodes: int) -> tdcollect.Suite:
    tasks = [
        {
            "name": f"task{number}",
            "env": "many_workers:Taking",
            "env_kwargs": {"seconds": ms / 1000, "busy": False, "length": LENGTH},
            "num_envs": 4,
        }
        for number, ms in enumerate(MILLISECONDS)
    ]
    policies = [{"name": "random", "factory": "random"}, {"name": "net", "factory": "suites:net"}]
    tables = {"suite": {"name": "b", "episodes": episodes}, "tasks": tasks, "policies": policies}
    return tdcollect.Suite.of(tables, Path(__file__).parent)


def _together(suite: tdcollect.Suite, workers: tdcollect.LocalWorkers) -> tuple[float, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        suite.run(folder, workers=workers, progress=False)
        seconds = time.perf_counter() - begin
        found = [tdcollect.EvaluationResult.load(Path(folder, c.path)) for c in suite.cells()]
        return seconds, [result.digest for result in found]


def _apart(suite: tdcollect.Suite, workers: tdcollect.LocalWorkers) -> tuple[float, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        begin, digests = time.perf_counter(), []
        for cell in suite.cells():
            settings = cell.task.env_kwargs
            result = tdcollect.evaluate(
                Make(**settings),
                net() if cell.policy.name == "net" else None,
                suite.episodes,
                num_envs=4,
                workers=workers,
                output_dir=Path(folder, cell.path),
                progress=False,
            )
            digests.append(result.digest)
        return time.perf_counter() - begin, digests


def _least(suite: tdcollect.Suite) -> float:
    """The seconds of all steps, divided by the workers: each steps one slot at a time."""
    steps = len(suite.policies) * suite.episodes * LENGTH
    return sum(MILLISECONDS) / 1000 * steps / WORKERS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use small sizes, to see that it runs")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torchrl")
    effort = QUICK if parser.parse_args().quick else Effort()
    print("\n".join(workers_report.suites(suites(effort))))
