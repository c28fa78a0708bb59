"""Groups of agents in evaluations: their numbers in records, comparisons and races."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded

import tdcollect
from tdcollect import EvaluationResult, compare, evaluate
from tdcollect.cli import main

from .test_any_env import on_teams
from .torchrl_envs import Teams, teams

pytestmark = pytest.mark.usefixtures("small_reports")
AGENTS = [(group, agent) for group, count in Teams.groups.items() for agent in range(count)]


class Told(Teams):
    """The teams, whose agents tell of success: those whose last reward is positive."""

    group_map = {"blue": ["b/0", "b 1", "b_2"], "red": ["r", "s"]}  # noqa: RUF012

    def __init__(self, root: bool = True):
        super().__init__(root)
        for name, count in self.groups.items():
            flag = Categorical(2, shape=(count, 1), dtype=torch.bool)
            self.observation_spec[name] = Composite(
                observation=Unbounded((count, 2)),
                info=Composite(success=flag, shape=(count,)),
                shape=(count,),
            )

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        found = super()._reset(tensordict)
        for name, count in self.groups.items():
            found[name, "info"] = {"success": torch.zeros(count, 1, dtype=torch.bool)}
        return found

    def _step(self, tensordict: Any) -> Any:
        found = super()._step(tensordict)
        for name in self.groups:
            found[name, "info"] = {"success": found[name, "reward"] > 0}
        return found


def measured(data: TensorDict) -> dict[str, float]:
    """The numbers of an episode of ``Told`` by plain loops, under the names of metrics."""
    found = {}
    for group, names in {"blue": ["b_0", "b_1", "b_2"], "red": ["r", "s"]}.items():
        following = data["next", group]
        for agent, name in enumerate(names):
            rewards = following["reward"][:, agent, 0].tolist()
            length = following["done"][:, agent, 0].tolist().index(True) + 1
            found[f"return/{group}/{name}"] = sum(map(np.float64, rewards))
            found[f"length/{group}/{name}"] = length
            found[f"success/{group}/{name}"] = float(rewards[length - 1] > 0)
        for kind, of in (("return", np.mean), ("length", max), ("success", min)):
            found[f"{kind}/{group}"] = of([found[f"{kind}/{group}/{name}"] for name in names])
    return found


def test_records_have_the_numbers_of_groups_and_agents() -> None:
    result = evaluate(Told, on_teams(), 4, metrics={"by": "agent"}, keep_trajectories=True)
    for record in result.episodes:
        wanted = measured(result.trajectory(record.index))
        assert record.metrics == pytest.approx({name: wanted[name] for name in sorted(wanted)})
        assert list(record.metrics or {}) == sorted(wanted)
        assert record.metrics["return/red"] == record.group_returns["red/reward"]
    lengths = [result.metrics[f"length/blue/{name}"].tolist() for name in ("b_0", "b_1", "b_2")]
    assert lengths == [[2] * 4, [3] * 4, [4] * 4]


def test_they_are_asked_for_one_by_one_too_and_change_no_episode(tmp_path: Path) -> None:
    asked = {"by": "group", "first": "return/blue/0", "info": lambda data: len(data)}
    result = evaluate(teams, None, 3, metrics=asked, output_dir=tmp_path)
    assert [*result.metrics] == sorted(
        [*asked.keys() - {"by"}, "length/blue", "length/red", "return/blue", "return/red"]
    )
    bare = evaluate(teams, None, 3)
    assert [r.digest for r in bare.episodes] == [r.digest for r in result.episodes]
    again = EvaluationResult.load(tmp_path, teams)  # with no function, which no file holds
    assert torch.equal(
        again.replay(1)["next", "red", "reward"], result.replay(1)["next", "red", "reward"]
    )
    page = (tmp_path / "report.html").read_text()
    assert "return/red" in page


@pytest.mark.parametrize(
    ("env", "metrics", "match"),
    [
        (teams, {"x": "return/green"}, "length/blue.* got return/green"),
        (teams, {"x": "success/red"}, "got success/red"),
        ("CartPole-v1", {"by": "agent"}, "an env without groups of agents, got by=agent"),
        (teams, {"by": "agents"}, "'return/GROUP' or 'return/GROUP/AGENT'"),
    ],
)
def test_groups_that_the_env_lacks_are_refused(env: Any, metrics: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        evaluate(env, None, 1, metrics=metrics)


def test_comparisons_are_on_groups_also_where_no_metric_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        evaluate(teams, on_teams(seed), 6, output_dir=tmp_path / str(seed)) for seed in (0, 1)
    )
    (found,) = compare(first, second).differences
    gain = second.group_returns["red/reward"] - first.group_returns["red/reward"]
    assert found.metrics["return/red"].difference.mean == pytest.approx(gain.mean())
    asked = evaluate(teams, on_teams(1), 6, metrics={"by": "group"})
    (other,) = compare(first, asked).differences
    assert other.metrics == found.metrics
    on = ["--on", "return/red", "--fail-if-worse", "100"]
    assert main(["compare", *map(str, (tmp_path / "0", tmp_path / "1")), *on]) == 0
    assert "mean return/red" in capsys.readouterr().out


def test_races_are_on_groups() -> None:
    policies = {"a": on_teams(0), "b": on_teams(1)}
    run = partial(tdcollect.race, teams, policies, 20, on="return/red", progress=False)
    result = run(return_range=(-50, 50))
    assert "mean return/red" in result.plan.rule.question
    for one in result.results.values():
        assert [*one.metrics] == ["return/red"]
    with pytest.raises(ValueError, match=r"expected values of return/red from 0 to 0.1"):
        run(return_range=(0, 0.1))
