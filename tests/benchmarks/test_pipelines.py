"""TorchRL's training scripts: their pipelines give the same batches under both collectors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.collectors import Collector as ParentCollector

from tdcollect import Collector

from ..collect.oracle import UPSTREAM, assert_same, copy_of, random_states, seed_everything
from ..forkserver import starting

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import torchrl_scripts as scripts

pytestmark = [
    pytest.mark.filterwarnings(UPSTREAM),
    pytest.mark.filterwarnings("ignore:::torchrl_scripts"),
]

SIZE = scripts.Size(frames=24, slots=2, random_frames=24, steps=9)
"""Episodes are shorter than the rows of a slot; actions are random in the first of two batches."""

ENVS = {1: scripts.TORCHRL, 2: scripts.ours()}
LEVELS = [level for level, envs in ENVS.items() if envs is not None]

STARTED = {"sac", "sac_async", "tqc", "td3", "coding_ddpg"}
"""Scripts whose ParallelEnv starts its own workers, at level 1."""

OTHERS = {"dreamer", "maddpg", "mappo", "module_transform", "multi_step", "qmix"}
OTHERS |= {"serial_rand_step"}
"""Scripts with a part that is not on arrays."""

ALIKE = {
    "tqc": "sac",
    "td3": "sac and td3_trainer",
    "sac_trainer": "sac and td3_trainer",
    "dqn_trainer": "dqn_cartpole and ppo_trainer",
    "ppo_atari": "ppo_atari_serial and impala",
    "a2c_atari": "ppo_atari_serial and impala",
}
"""Scripts that are made of the parts of others: they are among the slow ones."""


@pytest.fixture(autouse=True)
def _light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log file
    torch.set_num_threads(1)
    with starting("fork"):  # spawned, workers import torch
        yield


def _in_turns() -> Iterator[Any]:
    """Each script at one level, and at the other among the slow ones."""
    for turn, name in enumerate(scripts.SCRIPTS):
        quick = LEVELS[turn % len(LEVELS)]
        for level in LEVELS:
            marks = () if level == quick and name not in ALIKE else pytest.mark.slow
            yield pytest.param(name, level, marks=marks, id=f"{name}-{level}")


@pytest.mark.parametrize(("name", "level"), [*_in_turns()])
def test_a_script_gives_the_same_bits(name: str, level: int) -> None:
    missing = scripts.SCRIPTS[name].missing()
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot be imported")

    theirs = parents_record(name)
    ours, obstacles = record(Collector, name, level)

    for i, ((batch, state), (expected, expected_state)) in enumerate(
        zip(ours, theirs, strict=True)
    ):
        assert_same(batch, expected, f"batch {i}")
        assert_same(state, expected_state, f"random state after batch {i}")
    if name not in OTHERS and (level == 2 or name not in STARTED):
        assert obstacles == []


@functools.cache
def parents_record(name: str) -> list[Any]:
    return record(ParentCollector, name, level=1)[0]


def record(kind: Any, name: str, level: int) -> tuple[list[Any], list[str]]:
    """Two batches, each with the random states after it; and what keeps parts off the arrays."""
    seed_everything(0)
    pipeline = scripts.SCRIPTS[name].make(ENVS[level], SIZE)
    env = pipeline.seeded_env()
    seed_everything(1)
    collector = kind(env, pipeline.policy, **pipeline.options)
    try:
        batches = iter(collector)
        found = [(copy_of(next(batches)), random_states()) for _ in range(2)]
        return found, scripts.obstacles(collector.explain()) if kind is Collector else []
    finally:
        collector.shutdown()


def test_a_script_that_sets_the_collectors_seed_has_other_batches_as_written() -> None:
    import pipelines
    from bench import QUICK

    script = scripts.SCRIPTS["discrete_sac"]
    case = pipelines.Case(script.name, functools.partial(script.make, size=SIZE), script.sets_seed)
    found = pipelines.measure(case, QUICK, levels=(1,))["levels"]["1"]
    assert found["differs"] == ""
    assert "observation" in found["as_written"]
