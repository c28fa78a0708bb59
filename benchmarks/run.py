"""Compare tdcollect's collector with hand-written loops and other libraries; see README.md.

    make bench
    python benchmarks/run.py --only cartpole-8 --only hot-loop

Prints the table of ratios, and writes README.md and results.json with the samples into runs/bench;
README.md beside this file for a full run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import flat
import memory
import pipelines
import report
import torch
import workloads
from bench import QUICK, Effort, alternate, ratios, spread
from beside import beside
from evaluating import evaluating
from hot_loop import hot_loop
from machine import machine, versions
from many_agents import many_agents
from many_workers import many_workers
from monitoring import monitoring
from processes import processes
from ready import ready
from shares import shares
from suites import suites
from variants import variants
from workers import workers
from workloads import CELLS, OURS

PEAK_TARGET = 1.25
HERE = Path(__file__).parent


def main(arguments: list[str]) -> None:
    """Run the benchmarks, print the table, and write the files."""
    options = _parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*precision lowered by casting")
    effort = QUICK if options.quick else Effort()
    wanted = options.only or [*(cell.name for cell in CELLS), *EXTRAS]
    samples = options.output_dir or Path("runs/bench")
    whole = options.output_dir is None and not options.quick and not options.only
    page = (HERE if whole else samples) / "README.md"
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/run.py", *arguments]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "settings": {**effort._asdict(), "pool_threads": workloads.POOL_THREADS},
        "cells": [],
    }
    samples.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        """Write what there is so far: a part that fails takes none of the others with it."""
        (samples / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    for cell in CELLS:
        if cell.name in wanted:
            _say(cell.title)
            results["cells"].append(_measure(cell, effort))
            write()
    for name, run in EXTRAS.items():
        if name in wanted:
            _say(name)
            results[name] = run(effort)
            write()
    page.write_text(report.page(results))
    if results["cells"]:
        print(report.main_table(results["cells"]))
        print(report.misses(results["cells"]))
    print(f"wrote {page} and {samples / 'results.json'}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*(cell.name for cell in CELLS), *EXTRAS]
    parser.add_argument("--quick", action="store_true", help="use small sizes, to see that it runs")
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"run this part only; one of {', '.join(names)}",
    )
    parser.add_argument("--output-dir", type=Path, help="folder for README.md and results.json")
    return parser.parse_args(arguments)


def _measure(cell: workloads.Cell, effort: Effort) -> dict[str, Any]:
    programs = cell.programs(effort.steps)
    try:
        times = alternate(programs, effort)
        spent = shares(programs[OURS], 5 * effort.seconds) if cell.on_arrays else None
    finally:
        for program in programs.values():
            program.close()
    rounds = ratios(times, OURS)
    if {workloads.ENVS, workloads.POLICY} <= rounds.keys():
        alone = zip(rounds[workloads.ENVS], rounds[workloads.POLICY], strict=True)
        rounds[workloads.LIMIT] = [env + policy for env, policy in alone]
    against = {name: spread(values) for name, values in rounds.items()}
    return {
        "name": cell.name,
        "title": cell.title,
        "slots": programs[OURS].frames // effort.steps,
        "frames_per_second": 1 / spread(times[OURS]).median,
        "targets": cell.targets,
        "ratios": {name: value._asdict() for name, value in against.items()},
        "shares": spent,
        "seconds_per_frame": times,
    }


def _memory(effort: Effort) -> list[dict[str, Any]]:
    iterations = 2 if effort == QUICK else 20
    rows = []
    for collector in memory.COLLECTORS:
        row = memory.measure("peak", collector, steps=effort.steps, iterations=iterations)
        target = PEAK_TARGET if collector == "tdcollect" else None
        rows.append({"collector": collector, "target": target, **row})
    return rows


def _growth(effort: Effort) -> dict[str, Any]:
    iterations = 50 if effort == QUICK else 1000
    row = memory.measure("growth", "tdcollect", steps=16, iterations=iterations)
    return {"steps": 16, "frames": 128, **row}


def _pipelines(effort: Effort) -> dict[str, Any]:
    return pipelines.results_of(QUICK if effort == QUICK else pipelines.EFFORT, say=_say)


EXTRAS = {
    "hot-loop": hot_loop,
    "memory": _memory,
    "growth": _growth,
    "steps": flat.against_steps,
    "batches": flat.against_batches,
    "variants": variants,
    "monitoring": monitoring,
    "workers": workers,
    "processes": processes,
    "evaluating": evaluating,
    "many-workers": many_workers,
    "many-agents": many_agents,
    "ready": ready,
    "suites": suites,
    "beside": beside,
    "pipelines": _pipelines,
}


def _say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
