"""The examples at small size, and the code of the README, run as a user would run them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import tdcollect

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(name: str, out: Path, **flags: int) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run an example in a process of its own; its result, and what it wrote to results.json."""
    arguments = [f"--{flag}={value}" for flag, value in flags.items()]
    command = [sys.executable, str(EXAMPLES / name), f"--out={out}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out, timeout=240)
    assert "Warning" not in done.stderr
    assert "Traceback" not in done.stderr
    return done, json.loads((out / "results.json").read_text())


def test_ppo_learns_and_writes_its_figures(tmp_path: Path) -> None:
    done, results = run("ppo.py", tmp_path, frames=12_288, episodes=5)
    for picture in ("learning_curve.png", "return_histogram.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    for row in ("mean", "standard deviation", "minimum", "maximum", "root seed"):
        assert re.search(rf"^  {row} +[\d.]+$", done.stdout, re.MULTILINE)
        assert row in results
    assert len(results["test returns"]) == 5
    assert results["mean"] == pytest.approx(np.mean(results["test returns"]))
    frames, returns = np.array(results["training episodes"]).T
    assert (np.diff(frames) > 0).all()
    assert frames[-1] <= 12_288
    assert returns[-20:].mean() > 2 * returns[:20].mean()


def test_ppo_fails_where_it_misses_the_goal(tmp_path: Path) -> None:
    done, results = run("ppo.py", tmp_path, frames=512, episodes=2)
    assert done.returncode == 1
    assert f"the mean return of {results['mean']:.1f} misses the goal of 475" in done.stderr


@pytest.mark.parametrize("root", [0, 7])
def test_ppo_tests_on_the_numbered_episodes(root: int) -> None:
    """As a plain loop over the seeds has it."""

    def push(observation: torch.Tensor) -> torch.Tensor:
        """To the side that the pole leans to: balances it for a while."""
        return (observation[..., 2] > 0).long()

    def policy(td: Any) -> Any:
        return td.set("action", torch.nn.functional.one_hot(push(td["observation"]), 2))

    returns = []
    for i in range(4):
        env = gym.make("CartPole-v1")
        observation, _ = env.reset(seed=tdcollect.env_seed(root, i))
        total, ended = 0.0, False
        while not ended:
            action = int(push(torch.from_numpy(observation)))
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
        returns.append(total)
    example = runpy.run_path(str(EXAMPLES / "ppo.py"))
    assert example["test"](policy, root, 4) == returns
    assert len(set(returns)) > 1


@pytest.mark.behaviour(22)
def test_dqn_trains_from_its_replay_buffer(tmp_path: Path) -> None:
    done, results = run("dqn.py", tmp_path, frames=2048, episodes=3)
    assert done.returncode == 0
    assert len(results["test returns"]) == 3
    assert 0 < sum(results["training returns"]) <= 2048
    assert f"mean return of 3 test episodes: {results['mean test return']:.1f}" in done.stdout


def test_recurrent_policy_trains(tmp_path: Path) -> None:
    done, results = run("recurrent.py", tmp_path, frames=2048)
    assert done.returncode == 0
    assert results["frames"] == 2048
    assert results["mean return of the last 50 episodes"] >= 8
    assert "mean return of the last 50 episodes" in done.stdout


@pytest.mark.behaviour(22)
def test_recurrent_dqn_trains_from_slices(tmp_path: Path) -> None:
    done, results = run("recurrent_dqn.py", tmp_path, frames=2048)
    assert done.returncode == 0
    assert results["frames"] == 2048
    assert results["mean return of the last 50 episodes"] >= 8
    assert "mean return of the last 50 episodes" in done.stdout


@pytest.mark.parametrize("block", range(len(README_BLOCKS)))
def test_readme_code_runs(block: int) -> None:
    exec(compile(README_BLOCKS[block], f"README.md, block {block}", "exec"), {})


def test_readme_has_code() -> None:
    assert README_BLOCKS
