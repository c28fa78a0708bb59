"""The GPU benchmarks run, in small sizes on the CPU, and keep what they have measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ..forkserver import run, run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_every_part_runs_on_the_cpu(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--quick", "--minutes", "30", "--output-dir", tmp_path)
    done = run_script(SCRIPT, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    page = (tmp_path / "README.md").read_text()

    for name, rows in results["groups"].items():
        assert rows, name
        assert not [row for row in rows if row.get("failed")], name
        for row in rows:
            assert not row.get("differs"), row["name"]  # the batches are TorchRL's
    assert "recompile_limit" not in (tmp_path / "log.txt").read_text()  # it would run eagerly
    for title in ("Launches, copies and waits", "CUDA graphs", "Overlap of policy and envs"):
        assert f"## {title}" in page
    assert "speed of tdcollect, graph over TorchRL" in done.stdout


@pytest.mark.slow
def test_a_measurement_that_fails_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu_group import run_group
    from gpu_setting import LeftOut, Setting

    def leave_out() -> Any:
        raise LeftOut("there is no such env")

    plan = {"good": dict, "left out": leave_out, "bad": lambda: 1 / 0, "dies": lambda: os._exit(7)}
    setting, rows = Setting("cpu", True, {}), []
    log = tmp_path / "log.txt"
    run_group(lambda _: iter([*plan.items(), ("last", dict)]), setting, 60, log, rows.append)

    assert [(row.get("problem"), row.get("failed", False)) for row in rows] == [
        (None, False),
        ("there is no such env", False),
        ("ZeroDivisionError: division by zero", True),
        ("the process ended with status 7", True),
        ("the process ended with status 7", True),
    ]
    assert "ZeroDivisionError" in log.read_text()
    rows.clear()
    run_group(lambda _: iter(plan.items()), setting, 0, log, rows.append)
    assert {row["problem"] for row in rows} == {"out of time: the group had 0 s"}


def test_tests_without_their_packages_are_skipped_by_name(tmp_path: Path) -> None:
    for name, text in {"missing": "import there_is_no_such", "broken": "1 / 0"}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    options = ["-p", "benchmarks.gpu_missing", "-ra", "-o", "addopts=", str(tmp_path)]
    done = run(pytest.main, options, cwd=tmp_path)
    assert "SKIPPED [1] test_missing.py:1: there_is_no_such is not installed" in done.stdout
    assert "ERROR test_broken.py - ZeroDivisionError" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--output-dir", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("expected a CUDA device, found none")
