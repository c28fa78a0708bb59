"""The benchmarks run, and write their table and figures."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ..forkserver import run_script

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


def bench(out: Path, *names: str) -> tuple[str, dict[str, Any]]:
    only = [part for name in names for part in ("--only", name)]
    done = run_script(RUN, "--quick", "--output-dir", out, *only, cwd=out)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((out / "results.json").read_text())


def need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; the bench extra brings it")


def test_a_quick_run_prints_the_table_and_writes_the_page_and_the_figures(tmp_path: Path) -> None:
    need("envpool", "mujoco")
    printed, results = bench(tmp_path, "transforms-8", "hot-loop", "numpy-8")
    page = (tmp_path / "README.md").read_text()

    others = "hand-written | TorchRL Collector | TorchRL Collector, ParallelEnv"
    others += " | Stable-Baselines3 | Tianshou 2 | hand-written, default autoreset"
    others += " | hand-written, slots reset singly | envs alone | policy alone"
    others += " | envs and policy alone | envs and policy in turns"
    head = " ".join(printed.partition("\n")[0].split())
    assert head == f"| workload | tdcollect, frames/s | {others} |"
    assert printed.split("\n\n")[0] in page
    numpy, cell = sorted(results["cells"], key=lambda each: str(each["name"]))
    assert numpy["slots"] == 8
    assert numpy["shares"]
    assert cell["targets"] == {"TorchRL Collector": 2.5}
    assert set(cell["ratios"]["TorchRL Collector"]) == {"median", "low", "high"}
    assert len(cell["seconds_per_frame"]["tdcollect"]) == results["settings"]["rounds"]
    assert {"cpu", "cores", "memory_GiB"} <= set(results["machine"])
    assert {"torch", "torchrl", "tdcollect"} <= set(results["versions"])
    assert [row["N"] for row in results["hot-loop"]] == [1, 8, 64]


def test_pipelines_of_torchrls_scripts_are_compared(tmp_path: Path) -> None:
    need("envpool")
    names = ("dqn_cartpole", "discrete_iql", "cat-frames")
    only = [part for name in names for part in ("--only", name)]
    done = run_script(
        RUN.with_name("pipelines.py"), "--quick", "--output-dir", tmp_path, *only, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "pipelines.json").read_text())

    assert [row["name"] for row in results["scripts"]] == ["dqn_cartpole", "discrete_iql"]
    for row in results["scripts"]:
        level = row["levels"]["1"]
        assert level["differs"] == ""
        assert level["ratio"]["median"] > 0
        assert level["explained"][0][0] == "env"
    (short,) = results["short"]
    assert short["floor_us_per_frame"] > 0
    (line, *_) = results["summary"]
    assert (line["level"], line["scripts"], line["equal"], line["on_arrays"]) == (1, 2, 2, 2)
    assert "Level 1, only the collector's import changed; training scripts" in done.stdout
    assert done.stdout.strip() == (tmp_path / "pipelines.md").read_text().strip()


@pytest.mark.slow
def test_the_other_parts_run(tmp_path: Path) -> None:
    """Each library in its turn, statistics, workers, and evaluators."""
    need("envpool", "stable_baselines3", "tianshou")
    _, results = bench(tmp_path, "cartpole-1", "monitoring", "workers", "evaluating")
    page = (tmp_path / "README.md").read_text()

    (cell,) = results["cells"]
    assert set(cell["ratios"]) == {
        *("hand-written", "hand-written, default autoreset", "TorchRL Collector"),
        *("Stable-Baselines3", "Tianshou 2", "envs alone", "policy alone", "envs and policy alone"),
    }
    assert sum(cell["shares"].values()) == pytest.approx(1)

    (row,) = results["monitoring"]  # the cost of statistics
    assert set(row["ratios"]) >= {"statistics", "statistics, timers"}
    assert all(ratio["median"] > 0 for ratio in row["ratios"].values())
    assert "target at most 1.02" in page

    alone, collected = results["workers"]  # against one process
    cores = str(len(os.sched_getaffinity(0)))
    assert set(alone["gains"]) == {cores, "AsyncVectorEnv"}
    assert set(collected["gains"]) == {cores}
    assert "us per step, N=2" in page

    compared = {(row["policy"], row["other"]) for row in results["evaluating"]}
    others = ("Stable-Baselines3", "TorchRL Evaluator")
    assert compared == {(p, o) for p in ("deterministic", "stochastic") for o in others}
    assert "## Test episodes" in page


@pytest.mark.slow
def test_slots_that_are_ready_are_compared(tmp_path: Path) -> None:
    need("envpool", "stable_baselines3", "tianshou")
    _, results = bench(tmp_path, "ready")
    rows = results["ready"]["rows"]
    sides = {row["side"] for row in rows if row["measured"] == "training"}
    ours = {"tdcollect, in step", "tdcollect, [N, T]", "tdcollect, by arrival"}
    assert {*ours, "TorchRL AsyncEnvPool"} <= sides
    assert {row["measured"] for row in rows} == {"training", "whole episodes", "test episodes"}
    assert all(row["gain"]["median"] > 0 for row in rows)
    assert "## Slots that are ready" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_many_agents_are_compared(tmp_path: Path) -> None:
    need("envpool", "vmas")
    _, results = bench(tmp_path, "many-agents")
    rows = results["many-agents"]
    assert len({row["workload"] for row in rows}) == 2
    assert all(row["ratio"]["median"] > 0 for row in rows)
    assert "## Many agents" in (tmp_path / "README.md").read_text()


def test_an_unknown_cell_is_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    done = run_script(RUN, "--only", "pong", cwd=tmp_path)

    assert done.returncode == 2
    assert "invalid choice: 'pong'" in done.stderr
    assert "pong-16" in done.stderr


def test_cartpole_in_numpy_steps_as_gymnasiums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RUN.parent))
    several = importlib.import_module("numpy_cartpole").NumPyCartPole(2)
    one: Any = gym.make("CartPole-v1").unwrapped
    observation, _ = several.reset(seed=0)
    one.reset(seed=0)
    one.state = several._state[:, 1].copy()
    for action in [0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]:
        theirs, _, ended, *_ = one.step(action)
        observation, _, terminated, _, _ = several.step(np.array([1 - action, action]))
        np.testing.assert_allclose(observation[1], theirs, rtol=1e-6)
        assert terminated[1] == ended
    assert ended
    first, _ = several.reset(options={"reset_mask": np.array([False, True])})
    assert (first[0] == observation[0]).all()
    assert (abs(first[1]) <= 0.05).all()
