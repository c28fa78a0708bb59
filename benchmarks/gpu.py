"""Tests and benchmarks that need a GPU, in order of importance, within a few minutes.

    make gpu
    python benchmarks/gpu.py --only collectors --minutes 3
    python benchmarks/gpu.py --device cpu --quick

Writes results.json and README.md into runs/gpu after each measurement, so that a run that is cut
off has lost nothing. Prints a short table at the end. Exits with status 1 where a test or a
measurement has failed, and where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# torchrl asks for CUDA when it is imported; asked without NVML, forks could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import gpu_collectors
import gpu_device_envs
import gpu_evaluation
import gpu_parts
import gpu_report
import gpu_workers
import torch
from gpu_group import Group, find_device, run_group
from gpu_setting import CORES, Plan, Setting
from machine import machine, versions

HERE = Path(__file__).parent
TESTS = "tests"
TEST_SECONDS = 120
THREADS = {"torch": 1, "EnvPool": CORES}


def _evaluation(setting: Setting) -> Plan:
    """Measure what evaluation gives on the device."""

    def measure() -> dict[str, Any]:
        found = gpu_evaluation.measure(setting.device, setting.quick)
        return {"measured": found, "table": gpu_evaluation.table(found)}

    yield "evaluation", measure


# The share of the time is an upper bound: a group that ends early leaves its rest to the others.
GROUPS = {
    "settings": Group(gpu_collectors.settings, 3),
    "collectors": Group(gpu_collectors.eager, 15),
    "shares": Group(gpu_parts.shares, 4),
    "graphs": Group(gpu_collectors.graphs, 4),
    "device_envs": Group(gpu_device_envs.device_envs, 2),
    "overlap": Group(gpu_parts.overlap, 6),
    "workers": Group(gpu_workers.workers, 5),
    "evaluation": Group(_evaluation, 4),
    "compiled": Group(gpu_collectors.compiled, 8),
}


def main(arguments: list[str]) -> int:
    """Run the tests and the benchmarks; 0 where nothing has failed."""
    options = _parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # worker processes of any kind take it over
    torch.set_num_threads(1)
    out: Path = options.output_dir
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("")
    start_method, found = "fork", {}
    if options.device == "cuda":
        start_method, found = find_device(out / "log.txt")
    if found is None:
        print("expected a CUDA device, found none; --device cpu --quick tries the scripts")
        return 1
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/gpu.py", *arguments]),
        "date": datetime.date.today().isoformat(),
        "machine": {**machine(), **found},
        "versions": versions(),
        "threads": THREADS,
        "minutes": options.minutes,
        "groups": {},
    }
    wanted = options.only or [TESTS, *GROUPS]
    if TESTS in wanted and options.device == "cuda":
        _say("tests")
        results["tests"] = _run_tests(out)
        _write(out, results)
    _run_groups([name for name in GROUPS if name in wanted], start_method, options, results)
    _write(out, results)
    print(gpu_report.summary(results))
    print(f"wrote {out / 'README.md'} and {out / 'results.json'}")
    return 1 if gpu_report.failures(results) else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [TESTS, *GROUPS]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="use small sizes, to see that it runs")
    parser.add_argument(
        "--minutes", type=float, default=5.5, help="time for the benchmarks; tests come before"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"run this part only; one of {', '.join(names)}",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/gpu"))
    return parser.parse_args(arguments)


def _run_tests(out: Path) -> dict[str, Any]:
    """Run the tests that need a GPU; their output goes to tests.txt."""
    # `addopts` is taken out: its strictness asks for plugins that may be missing.
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-o", "addopts=", "-ra",
               "-v", "--continue-on-collection-errors", "-p", "no:cacheprovider"]  # fmt: skip
    if find_spec("xdist"):
        command += ["-n", str(min(4, CORES))]
    start, output = time.monotonic(), out / "tests.txt"
    with output.open("w") as file:
        try:
            ended = subprocess.run(
                command, cwd=HERE.parent, stdout=file, stderr=subprocess.STDOUT,
                timeout=TEST_SECONDS,
            )  # fmt: skip
            code: int | None = ended.returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = output.read_text().strip().splitlines()
    said = lines[-1].strip("= ") if lines else "no output"
    outcome = said if code is not None else f"stopped after {TEST_SECONDS} s"
    return {"status": code, "outcome": outcome, "seconds": round(time.monotonic() - start)}


def _run_groups(
    names: list[str], start_method: str, options: argparse.Namespace, results: dict[str, Any]
) -> None:
    end = time.monotonic() + 60 * options.minutes
    out: Path = options.output_dir
    shares = {name: GROUPS[name].share for name in names}
    for name in names:
        left = end - time.monotonic()
        seconds = left * shares[name] / sum(shares.values())
        del shares[name]
        rows: list[dict[str, Any]] = []
        results["groups"][name] = rows

        def keep(row: dict[str, Any], rows: list[dict[str, Any]] = rows, name: str = name) -> None:
            rows.append({"device": results["machine"].get("gpu", "CPU"), **row})
            _write(out, results)
            _say(": ".join([name, row["name"], *([row["problem"]] if "problem" in row else [])]))

        device = "cuda:0" if options.device == "cuda" else "cpu"
        setting = Setting(device, options.quick, _torchrl_options(results))
        run_group(GROUPS[name].plan, setting, max(seconds, 0), out / "log.txt", keep, start_method)


def _torchrl_options(results: dict[str, Any]) -> dict[str, Any]:
    """TorchRL's fastest correct options, where they have been measured."""
    for row in results["groups"].get("settings", []):
        if "fastest" in row:
            return {key: row["fastest"][key] for key in gpu_collectors.OPTIONS}
    return {}


def _write(out: Path, results: dict[str, Any]) -> None:
    texts: dict[str, Callable[[], str]] = {
        "results.json": lambda: json.dumps(results, indent=1) + "\n",
        "README.md": lambda: gpu_report.page(results),
    }
    for name, text in texts.items():
        draft = out / f".{name}"
        draft.write_text(text())
        draft.replace(out / name)


def _say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
