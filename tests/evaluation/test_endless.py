"""Episodes that never end: a bound where no limit is set."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tdcollect import evaluate
from tdcollect.evaluation.episodes import collector
from tdcollect.evaluation.ledger import read_directory

from ..counting import CountingEnv, CountingRules


def counting(length: int | None = None) -> CountingEnv:
    """An episode has the given number of steps; None for no end."""
    rules = CountingRules(length or 10**9, ends="terminated")
    return CountingEnv(rules=rules, wrong_action="record")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> int:
    assert collector.ENDLESS == 10**6
    monkeypatch.setattr(collector, "ENDLESS", 200)
    return 200


TOLD = r"but episode 0 \(seed \d+\) has taken 200 steps: pass max_episode_steps=1000, say"


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("length", [None, 201])
def test_an_episode_that_does_not_end_ends_the_run_and_is_not_recorded(
    bound: int, length: int | None, num_envs: int, tmp_path: Path
) -> None:
    """Whatever the blocks are in which it comes."""
    how: dict[str, Any] = {"env_kwargs": {"length": length}, "num_envs": num_envs}
    with pytest.raises(RuntimeError, match=TOLD):
        evaluate(counting, None, 3, output_dir=tmp_path / "run", progress=False, **how)
    assert not (tmp_path / "run").exists()


def test_the_bound_is_no_limit(bound: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {"num_envs": 2, "progress": False}
    result = evaluate(counting, None, 3, env_kwargs={"length": bound}, **how)
    assert [(e.length, e.terminated, e.truncated) for e in result.episodes] == 3 * [
        (bound, True, False)
    ]
    how["max_episode_steps"] = bound + 50
    result = evaluate(counting, None, 2, **how)
    assert [(e.length, e.truncated) for e in result.episodes] == 2 * [(bound + 50, True)]


def test_infinity_takes_the_bound_off_and_the_manifest_stays(bound: int, tmp_path: Path) -> None:
    run, how = tmp_path / "run", {"env_kwargs": {"length": bound + 1}, "progress": False}
    result = evaluate(counting, None, 2, output_dir=run, max_episode_steps=math.inf, **how)
    assert [episode.length for episode in result.episodes] == [bound + 1] * 2
    assert json.loads((run / "manifest.json").read_text())["max_episode_steps"] is None
    again = type(result).load(run, counting, env_kwargs=how["env_kwargs"])
    assert len(again.replay(1)) == bound + 1
    assert evaluate(counting, None, 2, output_dir=run, **how).digest == result.digest
    assert len(read_directory(run).episodes) == 2
