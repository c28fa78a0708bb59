"""Policies of groups of agents: whatever they are, the episodes of one policy for all groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Categorical, OneHot
from torchrl.modules import GRUModule

import tdcollect
from tdcollect import EvaluationResult, Evaluator, evaluate
from tdcollect.cli import main
from tdcollect.lab import Suite
from tdcollect.policies import from_agent, from_function

from .ledger import RANDOM
from .test_any_env import on_teams
from .torchrl_envs import Masked, Teams, teams

pytestmark = pytest.mark.usefixtures("small_reports", "quick_children")
SELF = "tests.evaluation.test_group_policies"


def layer(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 1), nn.Tanh())


def module(seed: int = 0, *group: str) -> TensorDictModule:
    """A policy on the entries of its group, or with a group's name on those of the env."""
    return TensorDictModule(layer(seed), [(*group, "observation")], [(*group, "action")])


def clipped(observations: Any) -> Any:
    """Each agent's action is its first observation; also of batches."""
    return observations[..., :1].clip(-1, 1)


def by_group() -> dict[str, Any]:
    return {"red": module(1), "blue": from_function(clipped)}


class Remembers:
    """Goes on from the sum of all that its group has seen in this episode."""

    def reset(self) -> None:
        self.seen = np.zeros(1)

    def select_action(self, observations: Any) -> Any:
        self.seen = self.seen + observations.sum()
        return np.tanh(np.full((len(observations), 1), self.seen) + np.random.rand())  # noqa: NPY002


def digest(policy: Any, env: Any = Teams, **settings: Any) -> str:
    return evaluate(env, policy, 5, progress=False, **settings).digest


def test_they_act_as_one_policy_for_all_groups() -> None:
    joint = digest(TensorDictSequential(module(0, "red"), module(1, "blue")))
    for red, blue in [(module(0, "red"), module(1, "blue")), (module(0), module(1))]:
        assert digest({"red": red, "blue": blue}) == joint
    net = layer()
    same = [
        module(),
        from_function(lambda x: net(torch.as_tensor(x)).detach()),
        from_function(lambda x: net(torch.as_tensor(x)).detach().numpy(), batched=True),
    ]
    joint = evaluate(Teams, TensorDictSequential(module(0, "red"), module(0, "blue")), 5)
    for one in same:  # which round by their batch sizes
        found = evaluate(Teams, {"red": one, "blue": one}, 5, progress=False)
        assert found.returns == pytest.approx(joint.returns, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("red", ["random", "agent", "stochastic"])
def test_episodes_do_not_depend_on_slots_nor_draws_on_those_of_the_other_group(red: str) -> None:
    policy: Any = {"random": None, "agent": from_agent(Remembers)}.get(red, on_teams().module[1])
    both = {"red": policy, "blue": policy if red != "stochastic" else None}
    run = partial(evaluate, teams, episodes=5, progress=False, keep_trajectories=True, **RANDOM)
    first = run(both)
    assert len({record.digest for record in first.episodes}) == 5
    assert run(both, num_envs=2).digest == first.digest
    other = run({**both, "blue": from_function(clipped)})
    for index in range(5):
        one, two = (r.trajectory(index)["red", "action"][0] for r in (first, other))
        assert torch.equal(one, two)
    assert other.digest != first.digest


@pytest.mark.parametrize("kind", [OneHot, Categorical])
def test_random_actions_are_legal_and_numbers_are_encoded(kind: Any) -> None:
    envs: list[Masked] = []

    def make() -> Masked:
        envs.append(Masked(True, kind))
        return envs[-1]

    evaluate(make, {"group": None}, 4, progress=False)
    assert sum(env.taken for env in envs) > 0
    # The env is probed with legal actions, too.
    assert not any(env.illegal for env in envs)
    with pytest.raises(ValueError, match="expected observations of group 'group'"):
        evaluate(make, {"group": from_function(clipped)}, 1)


class Chooses(Teams):
    """The teams with three choices for each agent, as one-hot rows or numbers."""

    def __init__(self, kind: Any):
        super().__init__()
        for name, count in self.groups.items():
            shape = (count,) if kind is Categorical else (count, 3)
            self.full_action_spec[name, "action"] = kind(3, shape=shape)

    def _step(self, tensordict: Any) -> Any:
        given = tensordict.clone()
        for name, count in self.groups.items():
            chosen = given[name, "action"].long()
            number = chosen.argmax(-1) if chosen.ndim == 2 else chosen
            given[name, "action"] = number.reshape(count, 1) - 1.0
        return super()._step(given)


def test_functions_choose_by_number_whatever_the_encoding() -> None:
    policy = from_function(lambda seen: (seen[:, 0] > 0).astype(int) + (seen[:, 1] > 0))
    returns = [
        evaluate(partial(Chooses, kind), {"red": policy, "blue": policy}, 3).returns.tolist()
        for kind in (OneHot, Categorical)
    ]
    assert returns[0] == returns[1]


GRU = GRUModule(2, 1, in_key="observation", out_key="action")


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (
            {"red": module()},
            "for each of the env's groups of agents, blue and red, got none of blue",
        ),
        ({**by_group(), "green": None}, "got one of green"),
        ({"red": module(0, "blue"), "blue": None}, "'red' to write 'action', and to read"),
        (
            {"red": TensorDictSequential(module(0, "red"), module(0, "blue")), "blue": None},
            r"'red' to write \('red', 'action'\), and to read and write .* alone",
        ),
        ({"red": GRU, "blue": None}, r"without a hidden state .* from_agent\(make\)"),
        ({"red": clipped, "blue": None}, r"got function; pass from_function\(f\)"),
        (
            {"red": from_function(lambda seen: seen), "blue": None},
            r"(?s)group 'red' as an array of shape \[2, 1\], one for .* got .*\(2, 2\)",
        ),
        ({"red": from_function(lambda seen: None), "blue": None}, r"got None \(NoneType\)"),
        (from_function(lambda seen: seen), r"make_env.* each has a policy: \{'GROUP': from_func"),
    ],
)
def test_policies_that_cannot_act_are_refused(policy: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        evaluate(Teams, policy, 2, progress=False)


def test_an_env_without_groups_takes_one_policy() -> None:
    with pytest.raises(ValueError, match="groups of agents, of which it has none, got one of blue"):
        evaluate("CartPole-v1", by_group(), 2)


def test_the_manifest_has_each_group(tmp_path: Path) -> None:
    found = [
        evaluate(Teams, {"red": module(seed), "blue": from_function(clipped)}, 2, progress=False)
        for seed in (0, 1)
    ]
    first, second = (one.manifest["policy"] for one in found)
    assert first["class"] == "blue: clipped, red: TensorDictModule"
    assert first["groups"]["blue"]["class"] == f"{SELF}.clipped"
    assert first["groups"]["blue"]["kind"] == "function"
    assert first["groups"]["blue"] == second["groups"]["blue"]
    assert first["groups"]["red"]["digest"] != second["groups"]["red"]["digest"]
    run = partial(evaluate, Teams, episodes=2, output_dir=tmp_path, progress=False)
    run({"red": module(), "blue": None})
    with pytest.raises(ValueError, match=r"policy.groups.red.digest"):
        run({"red": module(1), "blue": None})


def test_an_evaluator_takes_them_with_their_weights(tmp_path: Path) -> None:
    policies = {"red": module(), "blue": from_function(clipped)}
    with Evaluator(teams, policies, num_trajectories=3, output_dir=tmp_path) as evaluator:
        evaluator.evaluate(step=0)
        policies["red"].load_state_dict(module(1).state_dict())
        evaluator.evaluate(step=1)
    for step, seed in enumerate((0, 1)):
        wanted = digest({"red": module(seed), "blue": policies["blue"]}, teams)
        loaded = EvaluationResult.load(next(tmp_path.glob(f"**/*{step}/manifest.json")).parent)
        whole = evaluate(teams, {**policies, "red": module(seed)}, 3, progress=False)
        assert loaded.digest == whole.digest != wanted


def test_a_function_that_is_named_makes_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = f"{teams.__module__}:teams --policy {SELF}:by_group"
    assert main(f"evaluate {typed} --episodes 5 --quiet --output-dir run".split()) == 0
    assert EvaluationResult.load("run").digest == digest(by_group(), teams)
    assert main(f"replay run 2 --env {typed}".split()) == 0
    (cell,) = Suite.of(
        {
            "suite": {"name": "teams", "version": 1, "episodes": 5},
            "tasks": [{"name": "teams", "env": f"{teams.__module__}:teams"}],
            "policies": [{"name": "ours", "factory": f"{SELF}:by_group"}],
        }
    ).cells()
    assert digest(cell.request().make()[1], teams) == digest(by_group(), teams)
    raced = {"ours": by_group(), "random": {"red": None, "blue": None}}
    result = tdcollect.race(teams, raced, 5, on="return/red", block=5, progress=False)
    assert result.results["ours"].digest != result.results["random"].digest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PettingZoo in TorchRL")
def test_groups_of_pettingzoo() -> None:
    simple_tag = pytest.importorskip("mpe2.simple_tag_v3", reason="needs pettingzoo and mpe2")
    from torchrl.envs import PettingZooWrapper

    def make() -> Any:
        return PettingZooWrapper(simple_tag.parallel_env(max_cycles=9), use_mask=False)

    flee = from_function(lambda seen: (seen[:, 0] > 0).astype(int))
    metrics = {"by": "agent"}
    run = partial(evaluate, make, {"adversary": None, "agent": flee}, 5, metrics=metrics)
    first = run(keep_trajectories=True, progress=False)
    assert run(num_envs=2, progress=False).digest == first.digest
    seen = first.trajectory(0)["agent"]
    assert torch.equal(seen["action"].flatten(), (seen["observation"][:, 0, 0] > 0).long())
    names = ["agent_0", "adversary_0", "adversary_1", "adversary_2"]
    assert all(first.metrics[f"length/{n.split('_')[0]}/{n}"].tolist() == [9] * 5 for n in names)
    hits = sum(first.metrics[f"return/adversary/{name}"] for name in names[1:])
    assert first.metrics["return/adversary"] == pytest.approx(hits / 3)
