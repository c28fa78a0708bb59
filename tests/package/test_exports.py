"""The exports of the package, and the modules that its import loads."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

import tdcollect

from ..forkserver import run_anew

ROOT = Path(__file__).parents[2]


def exported(text: str) -> dict[str, list[str]]:
    """The names of each module, which stand below it."""
    blocks = (block.split() for block in text.strip().split("\n\n"))
    return {module.removesuffix(":"): names for module, *names in blocks}


EXPORTED = exported(
    """
tdcollect:
    Collector EvaluationCollector EvaluationResult Evaluator GymnasiumEnv Hooks LocalWorkers
    LogStatistics NotReproducibleError RayWorkers Render Suite SyncDataCollector audit compare
    env_seed evaluate load_checkpoint make_env merge policy_seed race save_checkpoint slot_seed
    split_trajectories verify

tdcollect.collect:
    RewardShaping Statistics

tdcollect.collectors:
    AsyncBatchedCollector AsyncCollector Collector DistributedCollector DistributedSyncCollector
    LostWorker MultiAsyncCollector MultiCollector MultiSyncCollector RayCollector
    SyncDataCollector WorkerLostError

tdcollect.envs:
    Agents EnvAction GymEnv ParallelEnv RestartsExhausted SerialEnv SlotError WorkerLost

tdcollect.evaluation:
    Comparison Difference Episode EvaluationSettings Problem Request Summary Verification
    episodes_needed export summarize

tdcollect.evaluation.sb3:
    EvalCallback SB3Policy load_policy

tdcollect.testing:
    Divergence Finding Report check_env diagnose

tdcollect.lab:
    Aggregates Policy RaceResult Score SuiteResults Task aggregate

tdcollect.trajectories:
    TrajectoryAssembler TrajectoryIndex discounted_returns first flatten_time join_trajectories
    last lengths returns segment_sum split_trajectories unflatten_time unpad
    """
)


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_names_have_docstrings(name: str) -> None:
    assert sorted(importlib.import_module(name).__all__) == sorted(EXPORTED[name])
    for one in EXPORTED[name]:
        found = getattr(importlib.import_module(name), one)
        # Of its own: a subclass would show its parent's.
        own = vars(found).get("__doc__") if isinstance(found, type) else found.__doc__
        assert (own or "").strip(), one


def test_names_that_are_imported_when_they_are_asked_for_are_listed() -> None:
    assert {*EXPORTED["tdcollect"], "trajectories"} <= {*dir(tdcollect)}
    with pytest.raises(AttributeError, match="module 'tdcollect' has no attribute 'nothing'"):
        tdcollect.nothing  # noqa: B018
    assert tdcollect.SyncDataCollector is tdcollect.Collector


def test_import_brings_no_extra() -> None:
    """Nothing beside the core packages and what these import on their own."""
    done = run_anew(
        """
import sys
extras = ("PIL", "click", "jinja2", "matplotlib", "pandas", "pytest", "scipy", "tqdm")
for name in [name for name in sys.modules if name.partition(".")[0] in extras]:
    del sys.modules[name]
before = {*sys.modules}
for package in ("", ".envs", ".evaluation", ".testing"):
    exec(f"from tdcollect{package} import *")
new = {name.partition(".")[0] for name in {*sys.modules} - before}
print(*sorted(new - sys.stdlib_module_names))
"""
    )
    assert done.stdout == "tdcollect\n"
    assert "Warning" not in done.stderr


def test_version_is_the_same_everywhere() -> None:
    version = importlib.metadata.version("tdcollect")
    assert tdcollect.__version__ == version
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
