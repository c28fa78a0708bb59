"""Compare tdcollect with TorchRL's collector under several interpreters, such as two of tensordict.

    python benchmarks/interpreters.py .venv/bin/python .venv-next/bin/python

The interpreters take turns, each in a new process, and so do the two collectors in it. Prints a
table: the versions, microseconds per frame, and TorchRL's time over ours; medians and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from functools import partial
from typing import Any

import torch
import workloads
from machine import machine, versions
from measure import Effort, alternate, ratios, spread
from networks import cheetah_net, continuous_actor, discrete_actor, mlp
from tables import table, with_spread

import tdcollect

CELLS = {
    "CartPole-v1": (partial(mlp, 4, 2), discrete_actor),
    "HalfCheetah-v5": (cheetah_net, continuous_actor),
}
SLOTS = 8


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("interpreters", nargs="*", metavar="PYTHON")
    parser.add_argument("--turns", type=int, default=4, help="processes of each interpreter")
    parser.add_argument("--here", choices=CELLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(_measure(options.here)))
        return
    before, rows = machine()["load_before"], []
    for env_id in CELLS:
        found: dict[str, list[Any]] = {python: [] for python in options.interpreters}
        for _ in range(options.turns):
            for python in options.interpreters:
                command = [python, "-W", "ignore", __file__, "--here", env_id]
                done = subprocess.run(
                    command,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    check=True,
                )
                found[python].append(json.loads(done.stdout))
        rows += [_row(env_id, processes) for processes in found.values()]
    print(f"load before and after: {before} and {machine()['load_before']}")
    print(table(["versions", "workload", "tdcollect, us", "TorchRL, us", "ratio"], rows))


def _measure(env_id: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, actor = CELLS[env_id]
    policy, effort = actor(net()), Effort()
    env = tdcollect.make_env(env_id, SLOTS, categorical_action_encoding=True)
    stock = workloads.torchrl_env(env_id, SLOTS)
    programs = {
        workloads.OURS: workloads.ours(env, policy, effort.steps),
        workloads.TORCHRL: workloads.torchrl(stock, policy, effort.steps),
    }
    times = alternate(programs, effort)
    for program in programs.values():
        program.close()
    against = ratios(times, workloads.OURS)[workloads.TORCHRL]
    return {"versions": versions(), "times": times, "ratios": against}


def _row(env_id: str, processes: list[dict[str, Any]]) -> list[str]:
    of = processes[0]["versions"]
    named = ", ".join(f"{name} {of[name]}" for name in ("torch", "torchrl", "tensordict"))
    micro = [
        [1e6 * seconds for process in processes for seconds in process["times"][name]]
        for name in (workloads.OURS, workloads.TORCHRL)
    ]
    pooled = [*micro, [value for process in processes for value in process["ratios"]]]
    cells = [with_spread(spread(values)._asdict()) for values in pooled]
    return [named, f"{env_id}, N={SLOTS}", *cells]


if __name__ == "__main__":
    main()
