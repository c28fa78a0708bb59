"""examples/suite/: its policies train, the same each time, and evaluate as its suite names them."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcollect
from tdcollect.evaluation import Request

from ..forkserver import run_script

FOLDER = Path(__file__).parents[2] / "examples" / "suite"
SUITE = tomllib.loads((FOLDER / "suite.toml").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What two short trainings have written."""
    outs = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for out in outs:
        small = ("--generations=1", "--population=10", f"--output-dir={out}")
        done = run_script(FOLDER / "train.py", *small, cwd=out)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
    return outs


def states(folder: Path) -> dict[str, Any]:
    """The tensors of all files, by name."""
    return {
        f"{file.relative_to(folder)} {name}": value
        for file in sorted(folder.rglob("*.pt"))
        for name, value in torch.load(file, weights_only=True).items()
    }


def test_training_writes_the_same_files_each_time(runs: tuple[Path, Path]) -> None:
    first, second = map(states, runs)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    named = next(policy for policy in SUITE["policies"] if policy["name"] == "linear")
    for task in SUITE["tasks"]:
        weights = []
        for run in named["runs"]:
            for key in ("checkpoints", "env_state"):
                pattern = named[key].removeprefix("../../runs/suite/")
                assert (runs[0] / pattern.format(task=task["name"], run=run)).is_file()
            weights.append(first[f"linear/{task['name']}/{run}.pt module.0.module.weight"])
        assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("task", SUITE["tasks"], ids=lambda task: task["name"])
def test_policies_evaluate_as_the_suite_names_them(task: Any, runs, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "policies", raising=False)  # examples/policies.py
    means = {}
    for policy in SUITE["policies"]:
        places = {
            field: str(runs[0] / policy[key].removeprefix("../../runs/suite/")).format(
                task=task["name"], run=0
            )
            for field, key in [("checkpoint", "checkpoints"), ("env_state", "env_state")]
            if key in policy
        }
        transforms = policy.get("transforms", [])
        request = Request(
            task["env"], policy["factory"], transforms=transforms, directory=str(FOLDER), **places
        )
        env, made = request.make()
        result = tdcollect.evaluate(env, made, 2, num_envs=2, progress=False)
        means[policy["name"]] = result.returns.mean()
    del sys.modules["policies"]
    assert means["heuristic"] > means["random"]
