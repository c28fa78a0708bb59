"""The manifest of an env is the same on every backend."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from tdcollect import EvaluationCollector, make_env
from tdcollect.evaluation.manifest import describe


def halved(reward: Any) -> float:
    return float(reward) / 2


def wrapped() -> Any:
    env = gym.make("CartPole-v1", max_episode_steps=50)
    return gym.wrappers.TransformReward(env, halved)


def manifest(env: Any, **options: Any) -> dict[str, Any]:
    with EvaluationCollector(env, None, 3, **options) as collector:
        return describe(collector)


forked = partial(AsyncVectorEnv, context="fork")  # spawned, each would import this module and torch


@pytest.mark.parametrize("backend", ["process", SyncVectorEnv, forked])
def test_backends_and_numbers_of_slots_have_one_manifest(backend: Any) -> None:
    one = manifest(wrapped)
    changed, limit, made = one["env"]["wrappers"]
    assert "halved" in changed
    assert limit == "TimeLimit(50)"
    assert made == "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    if backend == "process":
        other = manifest(partial(make_env, wrapped, 2, backend=backend, start_method="fork"))
    else:
        made = backend([wrapped] * 2, autoreset_mode=AutoresetMode.DISABLED)
        env = make_env(made)
        other = manifest(env)
        env.close()
        other["env"]["id"] = one["env"]["id"]  # a function's name here, the spec's there
    assert other == one


def test_arguments_are_told_without_addresses() -> None:
    kwargs = {"reward": halved, "limits": (1, 2.5), "name": "x", "none": None}
    whole = manifest(lambda **_: gym.make("CartPole-v1"), env_kwargs=kwargs, seed=np.int64(3))
    assert whole == json.loads(json.dumps(whole))
    told = whole["env"]["kwargs"]
    assert told["limits"] == {"object": "(1, 2.5)"}  # as JSON has no tuples
    assert (told["name"], told["none"]) == ("x", None)
    assert "0x" not in str(told)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_and_whether_files_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        asked = subprocess.run(["git", *who, *arguments], capture_output=True, check=True)
        return asked.stdout.decode().strip()

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert manifest("CartPole-v1")["git"] is None
    git("init")
    assert manifest("CartPole-v1")["git"] is None  # no commit yet
    (tmp_path / "policy.py").write_text("weights = 1")
    git("add", ".")
    git("commit", "-m", "a policy")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "results.txt").write_text("not tracked")
    assert manifest("CartPole-v1")["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "policy.py").write_text("weights = 2")
    assert manifest("CartPole-v1")["git"] == {"commit": commit, "dirty": True}
