"""Compare tdcollect under several interpreters, or of several checkouts, and TorchRL's collector.

    python benchmarks/interpreters.py .venv/bin/python .venv-next/bin/python
    python benchmarks/interpreters.py ../before .

Each side is a process; they take turns of a second, and so do the two collectors in each. This
interpreter runs the package of a checkout. Prints a table: the side, microseconds per frame,
TorchRL's time over ours, and our time over that of the first side in the same round; medians and
quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import workloads
from bench import Effort, alternate, ratios, spread
from machine import machine, versions
from networks import cheetah_net, continuous_actor, discrete_actor, mlp
from tables import table, with_spread

import tdcollect

CELLS = {
    "CartPole-v1, N=8": (8, partial(mlp, 4, 2), discrete_actor),
    "CartPole-v1, N=64": (64, partial(mlp, 4, 2), discrete_actor),
    "HalfCheetah-v5, N=8": (8, cheetah_net, continuous_actor),
}


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sides", nargs="*", metavar="SIDE", help="interpreter, or checkout")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each side")
    parser.add_argument("--here", choices=CELLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        _measure(options.here, options.rounds)
        return
    before, rows = machine()["load_before"], []
    for cell in CELLS:
        found = _in_turns(cell, options.sides, options.rounds)
        rows += [
            _row(side, cell, turns, found[0])
            for side, turns in zip(options.sides, found, strict=True)
        ]
    print(f"load before and after: {before} and {machine()['load_before']}")
    head = ["side", "workload", "tdcollect, us", "TorchRL, us", "ratio", "beside the first side"]
    print(table(head, rows))


def _in_turns(cell: str, sides: list[str], rounds: int) -> list[dict[str, Any]]:
    processes = [_start(Path(side), cell, rounds) for side in sides]
    for _ in range(rounds):
        for process in processes:
            print("go", file=process.stdin, flush=True)
            process.stdout.readline()
    return [json.loads(process.communicate("")[0]) for process in processes]


def _start(side: Path, cell: str, rounds: int) -> Any:
    """Start the process of an interpreter, or one of this interpreter with a checkout's package."""
    python, settings = str(side), {"OMP_NUM_THREADS": "1"}
    if side.is_dir():
        python, settings["PYTHONPATH"] = sys.executable, str(side.resolve())
    command = [python, "-W", "ignore", __file__, "--here", cell, "--rounds", str(rounds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process: Any = subprocess.Popen(command, env=os.environ | settings, **pipes)
    process.stdout.readline()
    return process


def _measure(cell: str, rounds: int) -> None:
    """Time the two collectors; after the warm-up and each round, wait for the next turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    slots, net, actor = CELLS[cell]
    env_id = cell.partition(",")[0]
    policy, effort = actor(net()), Effort(rounds=rounds)
    env = tdcollect.make_env(env_id, slots, categorical_action_encoding=True)
    stock = workloads.torchrl_env(env_id, slots)
    programs = {
        workloads.OURS: workloads.ours(env, policy, effort.steps),
        workloads.TORCHRL: workloads.torchrl(stock, policy, effort.steps),
    }
    _wait()
    times = alternate(programs, effort, after=_wait)
    for program in programs.values():
        program.close()
    against = ratios(times, workloads.OURS)[workloads.TORCHRL]
    print(json.dumps({"versions": versions(), "times": times, "ratios": against}))


def _wait() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def _row(side: str, cell: str, turns: dict[str, Any], first: dict[str, Any]) -> list[str]:
    named = ", ".join(f"{n} {turns['versions'][n]}" for n in ("torch", "torchrl", "tensordict"))
    times = [turns["times"][name] for name in (workloads.OURS, workloads.TORCHRL)]
    micro = [[1e6 * seconds for seconds in one] for one in times]
    pairs = zip(times[0], first["times"][workloads.OURS], strict=True)
    beside = [now / then for now, then in pairs]
    figures = (with_spread(spread(v)._asdict()) for v in [*micro, turns["ratios"], beside])
    return [f"{side}: {named}", cell, *figures]


if __name__ == "__main__":
    main()
