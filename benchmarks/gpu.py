"""Tests and benchmarks that need a GPU, in order of importance, within ten minutes or less.

    make gpu
    python benchmarks/gpu.py --minutes 4
    python benchmarks/gpu.py --only graphs --only settings --minutes 2
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
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
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
from gpu_setting import CORES, Setting
from machine import machine, versions

HERE = Path(__file__).parent
TESTS = "tests"
TEST_SECONDS, TEST_SHARE = 120, 0.25  # at most
THREADS = {"torch": 1, "EnvPool": CORES}

# In order of importance. Shares are seconds of a run of 9.5 minutes, in which the tests take their
# 120; a group that ends early leaves its rest to the others.
GROUPS = {
    "counts": Group(gpu_parts.counts, 45),
    "settings": Group(gpu_collectors.settings, 35),
    "graphs": Group(gpu_collectors.graphs, 75),
    "device_envs": Group(gpu_device_envs.device_envs, 35),
    "evaluation": Group(gpu_evaluation.evaluation, 65),
    "collectors": Group(gpu_collectors.eager, 60),
    "shares": Group(gpu_parts.shares, 25),
    "overlap": Group(gpu_parts.overlap, 35),
    "workers": Group(gpu_workers.workers, 30),
    "compiled": Group(gpu_collectors.compiled, 45),
}


def main(arguments: list[str]) -> int:
    """Run the tests and the benchmarks; 0 where nothing has failed."""
    options = _parse(arguments)
    end = time.monotonic() + 60 * options.minutes
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
        results["tests"] = _run_tests(out, min(TEST_SECONDS, 60 * options.minutes * TEST_SHARE))
        _write(out, results)
    _run_groups([name for name in GROUPS if name in wanted], start_method, options, results, end)
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
        "--minutes", type=float, default=9.5, help="time for all of it, tests included"
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


def _run_tests(out: Path, seconds: float) -> dict[str, Any]:
    """Run the tests that need a GPU; their output goes to tests.txt."""
    paths = [str(path) for path in sorted((HERE.parent / "tests").rglob("test_*.py"))
             if re.search(r"\bcuda\b", path.read_text())]  # fmt: skip
    # `addopts` is taken out: its strictness asks for plugins that may be missing.
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-o", "addopts=", "-ra",
               "-v", "--continue-on-collection-errors", "-p", "no:cacheprovider",
               "-p", "benchmarks.gpu_missing", *paths]  # fmt: skip
    if find_spec("xdist"):
        command += ["-n", str(min(4, CORES))]
    start, output = time.monotonic(), out / "tests.txt"
    with output.open("w") as file:
        try:
            ended = subprocess.run(
                command, cwd=HERE.parent, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            )
            code: int | None = ended.returncode
        except subprocess.TimeoutExpired:
            code = None
    text = output.read_text()
    outcome = text.strip().rpartition("\n")[2].strip("= ") or "no output"
    if code is None:
        known = Counter(re.findall(r"\b(PASSED|FAILED|SKIPPED)\b", text))
        counted = ", ".join(f"{count} {kind.lower()}" for kind, count in known.items())
        outcome = f"stopped after {seconds:.0f} s; until then: {counted or 'nothing'}"
    if missing := sorted(set(re.findall(r"(\S+) is not installed", text))):
        outcome += f"; files of tests are left out without {', '.join(missing)}"
    return {"status": code, "outcome": outcome, "seconds": round(time.monotonic() - start)}


def _run_groups(
    names: list[str],
    start_method: str,
    options: argparse.Namespace,
    results: dict[str, Any],
    end: float,
) -> None:
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
    """TorchRL's fastest correct options; without measurements, those that are always right."""
    rows = [r for r in results["groups"].get("settings", []) if r.get("us_per_step") is not None]
    fastest = min(rows, key=lambda row: row["us_per_step"], default=gpu_collectors.SAFE)
    return {key: fastest[key] for key in gpu_collectors.OPTIONS}


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
