"""examples/suite/: its policies train, the same each time, and evaluate as its suite names them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcollect

from ..forkserver import run_script

FOLDER = Path(__file__).parents[2] / "examples" / "suite"
SUITE = tomllib.loads((FOLDER / "suite.toml").read_text())


def trained(out: Path) -> Path:
    """Train for a moment."""
    small = ("--generations=1", "--population=10", f"--output-dir={out}")
    done = run_script(FOLDER / "train.py", *small, cwd=out)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a short training."""
    return trained(tmp_path_factory.mktemp("first"))


def states(folder: Path) -> dict[str, Any]:
    """The tensors of all files, by name."""
    return {
        f"{file.relative_to(folder)} {name}": value
        for file in sorted(folder.rglob("*.pt"))
        for name, value in torch.load(file, weights_only=True).items()
    }


@pytest.mark.slow
def test_training_writes_the_same_files_each_time(runs: Path, tmp_path: Path) -> None:
    first, second = states(runs), states(trained(tmp_path))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    named = next(policy for policy in SUITE["policies"] if policy["name"] == "linear")
    for task in SUITE["tasks"]:
        weights = []
        for run in named["runs"]:
            for key in ("checkpoints", "env_state"):
                pattern = named[key].removeprefix("../../runs/suite/")
                assert (runs / pattern.format(task=task["name"], run=run)).is_file()
            weights.append(first[f"linear/{task['name']}/{run}.pt module.0.module.weight"])
        assert not torch.equal(weights[0], weights[1])


def copied(folder: Path, runs: Path) -> Path:
    """Copy the suite to a folder, as it lies in a checkout, beside what a training has written."""
    shutil.copytree(FOLDER, folder / "examples" / "suite")
    shutil.copytree(runs, folder / "runs" / "suite")
    return folder / "examples" / "suite" / "suite.toml"


@pytest.mark.usefixtures("small_reports")
def test_the_suite_runs(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "policies", raising=False)  # that of examples/policies.py
    suite = tdcollect.Suite.read(copied(tmp_path, runs)).limited(2)
    results = suite.run(tmp_path / "out", progress=False)
    del sys.modules["policies"]
    assert results.finished
    assert results.aggregates is not None
    assert results.aggregates.runs == {"random": 1, "heuristic": 1, "linear": 3}
    for task in results.tasks:
        heuristic = results.cell(task.name, "heuristic")
        by_chance = results.cell(task.name, "random")
        assert heuristic.mean > by_chance.mean
        assert by_chance.score == 0.0
    assert "examples" not in (tmp_path / "out" / "results.json").read_text()


@pytest.mark.slow
def test_the_whole_suite_on_workers_after_the_whole_training(tmp_path: Path) -> None:
    """Two minutes on two cores."""
    done = run_script(FOLDER / "train.py", "--output-dir=runs", cwd=tmp_path, seconds=1800)
    assert done.returncode == 0, done.stderr
    file = copied(tmp_path, tmp_path / "runs")
    command = [sys.executable, "-m", "tdcollect", "suite", "run", str(file), "--workers", "2"]
    done = subprocess.run([*command, "--output-dir=out"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"leaked" not in done.stderr  # semaphores of the transforms in workers
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    estimates = found["aggregates"]["estimates"]
    assert estimates["linear"]["iqm"]["value"] > 0.6
    assert estimates["heuristic"]["iqm"]["value"] > 0.9
    again = subprocess.run([*command, "--output-dir=out"], cwd=tmp_path, capture_output=True)
    assert again.returncode == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found
