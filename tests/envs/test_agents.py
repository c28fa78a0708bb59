"""PettingZoo's parallel envs as slots, beside TorchRL's PettingZooWrapper and plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from mpe2 import simple_spread_v3
from pettingzoo.classic import tictactoe_v3
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.collectors import Collector as ParentCollector
from torchrl.data import OneHot
from torchrl.envs import SerialEnv, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.envs.libs.pettingzoo import PettingZooWrapper
from torchrl.envs.utils import MarlGroupMapType
from torchrl.modules import MaskedCategorical, TanhNormal

from tdcollect import Collector, EvaluationCollector, make_env, slot_seed
from tdcollect.envs import Agents, SlotError
from tests.collect.oracle import UPSTREAM, assert_same
from tests.zoo.agents import BAD, GOOD, Walk

pytestmark = pytest.mark.filterwarnings(UPSTREAM, "ignore:PettingZoo in TorchRL is tested")

SPREAD = "pettingzoo/mpe2/simple_spread_v3"


def ours(options: Any, slots: int = 3, backend: str = "serial", **walk: Any) -> Any:
    """Slots of walks, each with a seed of its own."""

    def make(slot: int) -> Any:
        return Agents(Walk(slot, **walk), **options)

    encoding = options.pop("categorical_actions", None)
    return make_env(
        make, slots, backend=backend, device="cpu", categorical_action_encoding=encoding
    )


def theirs(options: Any, slots: int = 3, **walk: Any) -> Any:
    """The same in TorchRL's env."""
    makes = [
        lambda slot=slot: PettingZooWrapper(Walk(slot, **walk), **options) for slot in range(slots)
    ]
    return SerialEnv(slots, makes)


def actor(env: Any) -> Any:
    """A policy with a network and a distribution for each group."""
    torch.manual_seed(0)
    parts: list[Any] = []
    for group in sorted({key[0] for key in env.action_keys}):
        seen = next(k for k in env.observation_keys if k[:2] == (group, "observation"))
        net: Any = nn.Linear(3, 4)
        given: dict[str, Any] = {"logits": (group, "logits")}
        kind: Any = torch.distributions.Categorical
        if env.full_action_spec[group, "action"].dtype.is_floating_point:
            net, kind = nn.Sequential(net, NormalParamExtractor()), TanhNormal
            given = {"loc": (group, "loc"), "scale": (group, "scale")}
        elif isinstance(env.full_action_spec[group, "action"], OneHot):
            kind = torch.distributions.OneHotCategorical
        elif (group, "action_mask") in env.observation_keys:
            given, kind = {**given, "mask": (group, "action_mask")}, MaskedCategorical
        out = [key for name, key in given.items() if name != "mask"]
        draw = ProbabilisticTensorDictModule(
            given,
            [(group, "action")],
            distribution_class=kind,
            return_log_prob=True,
            log_prob_key=(group, "log_prob"),
        )
        parts += [TensorDictModule(net, in_keys=[seen], out_keys=out), draw]
    return ProbabilisticTensorDictSequential(*parts)


def collected(kind: Any, env: Any) -> list[Any]:
    torch.manual_seed(1)
    return list(kind(env, actor(env), frames_per_batch=60, total_frames=120))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "state and mask": ({"return_state": True, "use_mask": True}, {}),
    "one group": ({"group_map": MarlGroupMapType.ALL_IN_ONE_GROUP}, {}),
    "groups by name": ({"group_map": {"x": [GOOD[0], BAD[1]], "y": [BAD[0], *GOOD[1:]]}}, {}),
    "infos": ({}, {"tells": True}),
    "continuous": ({}, {"continuous": True}),
    "one-hot": ({"categorical_actions": False}, {}),
    "masks seen": ({}, {"masks": "seen"}),
    "masks told, and infos": ({}, {"masks": "told", "tells": True}),
    "some die": ({"use_mask": True}, {"dies": True}),
    "masks, and some die": (
        {"use_mask": True, "done_on_any": False},
        {"masks": "seen", "dies": True, "tells": True},
    ),
    "all die": ({"use_mask": True, "done_on_any": False, "return_state": True}, {"dies": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_torchrls_env(case: str) -> None:
    options, walk = CASES[case]
    # TorchRL resets other slots, too, if some of their agents have died.
    slots = 1 if options.get("done_on_any") is False else 3
    one, other = ours(dict(options), slots, **walk), theirs(options, slots, **walk)
    for name in ("observation", "action", "reward", "done"):
        if name != "action" or not walk.get("masks"):  # SerialEnv's has no masks
            assert getattr(one, f"full_{name}_spec") == getattr(other, f"full_{name}_spec")
    found, expected = collected(Collector, one), collected(ParentCollector, other)
    for batch, others in zip(found, expected, strict=True):
        if slots == 1:  # there, every step of an env with dead agents is a trajectory
            del batch["collector"], others["collector"]
        assert_same(batch, others, case)


def direct(**walk: Any) -> Any:
    return PettingZooWrapper(Walk(**walk), return_state=True)


def summed(env: Any) -> Any:
    return TransformedEnv(env, T.RewardSum(env.reward_keys, [("bad", "sum"), ("good", "sum")]))


TORCHRLS: dict[str, tuple[Any, str]] = {
    "alone": (direct, ""),
    "with transforms": (lambda: summed(theirs({"use_mask": True}, dies=True)), ""),
    "transforms in each": (lambda: SerialEnv(2, lambda: summed(direct(tells=True))), ""),
    "masks": (lambda: direct(masks="seen"), "it has masks of actions; make_env takes"),
    "ends once all are done": (lambda: theirs({"done_on_any": False}), "it has done_on_any=False"),
}


@pytest.mark.parametrize("case", TORCHRLS)
def test_torchrls_own_env_steps_on_arrays_where_it_is_right(case: str) -> None:
    make, obstacle = TORCHRLS[case]
    env = make()
    told = Collector(env, actor(env), frames_per_batch=60).explain()[0].how
    assert ("on arrays" in told) == (not obstacle)
    assert obstacle in told
    assert_same(collected(Collector, make()), collected(ParentCollector, make()), case)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_an_id_gives_the_episodes_of_its_seeds(backend: str) -> None:
    given = {"max_cycles": 4, "N": 2, "continuous_actions": True, "return_state": True}
    env = make_env(SPREAD, 2, backend=backend, env_kwargs=given)
    assert env.group_map == {"agent": ["agent_0", "agent_1"]}
    env.set_seed(5)
    taken = env.rollout(6, break_when_any_done=False)
    env.close()
    plain = simple_spread_v3.parallel_env(max_cycles=4, N=2, continuous_actions=True)
    for slot in range(2):
        seen = plain.reset(seed=slot_seed(5, slot))[0]
        for step in range(6):
            row = taken[slot, step]
            assert row["agent", "observation"].tolist() == [seen[a].tolist() for a in plain.agents]
            assert row["state"].tolist() == plain.state().tolist()
            agents = list(plain.agents)
            actions = dict(zip(agents, row["agent", "action"].numpy(), strict=True))
            seen, rewards, _, truncated, _ = plain.step(actions)
            told = row["next", "agent"]
            assert told["reward"].flatten().tolist() == [np.float32(rewards[a]) for a in agents]
            assert told["done"].flatten().tolist() == [truncated[a] for a in agents]
            assert told["observation"].tolist() == [seen[a].tolist() for a in agents]
            if all(truncated.values()):
                assert row["next", "done"].all()
                seen = plain.reset()[0]


def test_one_slot_is_reset_alone() -> None:
    env = ours({"use_mask": True, "done_on_any": False}, dies=True)
    before = env.reset(seed=0)
    for _ in range(2):
        before = env.step(before.update(env.full_action_spec.zero()))["next"]
    assert before["good", "done"][:, 0].all()
    assert not before["done"].any()
    marks = torch.tensor([[False], [True], [False]])
    after = env.reset(before.clone().set("_reset", marks))
    for key in env.full_observation_spec.keys(True, True):
        assert_same(after[key][[0, 2]], before[key][[0, 2]])
    assert after["good", "done"].flatten(1).any(1).tolist() == [True, False, True]
    assert after["good", "mask"].all(1).tolist() == [False, True, False]


def test_a_trajectory_ends_with_its_episode_though_agents_die_before() -> None:
    env = ours({"use_mask": True, "done_on_any": False}, dies=True)
    batch = collected(Collector, env)[0]
    ids = batch["collector", "traj_ids"]
    assert (ids.diff() != 0).tolist() == batch["next", "done"][:, :-1, 0].tolist()
    assert (batch["next", "good", "done"].any(2) & ~batch["next", "done"]).any()


def test_a_time_limit_truncates_agents() -> None:
    env = make_env(lambda: Walk(), 2, max_episode_steps=3, step_count=True)
    last = env.rollout(3)["next"][:, -1]
    assert last["step_count"].flatten().tolist() == [3, 3]
    for entries in (last, last["good"], last["bad"]):
        assert entries["truncated"].all()
        assert entries["done"].all()
        assert not entries["terminated"].any()


class Breaks(Walk):
    def step(self, actions: Any) -> Any:
        if self.steps == 2:
            raise OSError("broken")
        return super().step(actions)


def test_an_env_built_anew_truncates_its_agents() -> None:
    env = make_env(Breaks, 2, on_env_error="restart")
    last = env.rollout(3)["next"][:, -1]
    assert last["env_error"].all()
    assert last["good", "truncated"].all()
    assert not last["bad", "reward"].any()


@pytest.mark.parametrize("masks", ["seen", "told"])
@pytest.mark.parametrize("summed", [False, True])
def test_random_actions_are_legal(masks: str, summed: bool) -> None:
    env: Any = make_env(lambda slot: Walk(slot, masks=masks), 2)
    if summed:
        env = TransformedEnv(env, T.RewardSum(env.reward_keys, [("bad", "sum"), ("good", "sum")]))
    collector = Collector(env, frames_per_batch=80, total_frames=240)
    batch = torch.cat(list(collector), 1)
    taken = torch.nn.functional.one_hot(batch["good", "action"], 4).bool()
    assert (taken <= batch["good", "action_mask"]).all()
    assert (taken.sum((0, 1)) > 5).all()  # and every action that is legal at times


def test_random_actions_are_legal_in_envs_made_anew() -> None:
    env = make_env(lambda: Walk(masks="seen"), 2)  # which raises for an illegal action
    env.rebuild()
    assert env.rollout(40, break_when_any_done=False).shape == (2, 40)


@pytest.mark.parametrize("categorical", [None, False])
def test_random_actions_of_evaluations_are_legal(categorical: bool | None) -> None:
    def make() -> Any:
        return make_env(lambda: Walk(masks="seen"), 3, categorical_action_encoding=categorical)

    runs = EvaluationCollector(make, None, episodes=12)
    plain = Walk(masks="seen")  # which raises for an illegal action
    counts = np.zeros(4)
    for episode in runs:
        index = int(episode["collector", "traj_ids"][0])
        plain.reset(seed=runs.episode_seeds(index)[0])
        actions = [episode[group, "action"].numpy() for group in ("good", "bad")]
        rows = np.concatenate(actions, 1)
        rows = rows.argmax(-1) if categorical is False else rows
        for step, row in enumerate(rows):
            _, rewards, *_ = plain.step(dict(zip([*GOOD, *BAD], row, strict=True)))
            told = episode["next", "good", "reward"][step, :, 0]
            assert told.tolist() == [np.float32(rewards[agent]) for agent in GOOD]
            counts += np.bincount(row, minlength=4)
    assert (counts > counts.sum() / 8).all()


def test_agents_that_take_turns_play_legal_moves() -> None:
    def make() -> Any:
        return PettingZooWrapper(tictactoe_v3.env(), use_mask=True)

    for slots in (1, 3):
        runs = EvaluationCollector(make, None, episodes=8, num_envs=slots)
        for episode in runs:
            index = int(episode["collector", "traj_ids"][0])
            game = tictactoe_v3.env()
            game.reset(seed=runs.episode_seeds(index)[0])
            for row in episode:
                player = game.agent_selection
                action = int(row[player, "action"])
                assert game.observe(player)["action_mask"][action]
                game.step(action)
            assert all(game.terminations.values())


class Seeing(Walk):
    """Agents that observe what no array of a group holds."""

    def observation_space(self, agent: str) -> Any:
        return spaces.MultiDiscrete([6, 6])


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "takes turns": (simple_spread_v3.env, {}, TypeError, "take turns; pass its parallel_env"),
    "unlike": (
        SPREAD.replace("spread", "adversary"),
        {"env_kwargs": {"group_map": {"all": ["adversary_0", "agent_0", "agent_1"]}}},
        ValueError,
        "one space.*in the group 'all'; put unlike agents into groups of their own",
    ),
    "alike": (
        lambda: Seeing(0),
        {},
        ValueError,
        "wrap the env so that its MultiDiscrete becomes one of these",
    ),
    "no group": (SPREAD, {"env_kwargs": {"group_map": {}}}, ValueError, "each of the agents"),
    "no dict": (SPREAD, {"env_kwargs": {"group_map": {"a": 3}}}, ValueError, "got {'a': 3}"),
    "no flag": (SPREAD, {"env_kwargs": {"done_on_any": "no"}}, ValueError, "None, got 'no'"),
    "no such env": ("pettingzoo/mpe2/simple_v0", {}, ValueError, "install its package, or pass"),
    "turns": ("pettingzoo/classic/tictactoe_v3", {}, ValueError, "its agents take turns, or pass"),
    "returns": (SPREAD, {"episode_reward": True}, ValueError, "append RewardSum"),
    "shared": (lambda env=Walk(): env, {}, ValueError, "got that of slot 0 for slot 1 again"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused(case: str) -> None:
    env, given, error, told = REFUSED[case]
    with pytest.raises(error, match=told):
        make_env(env, 2, **given)


def test_dead_agents_need_a_mask() -> None:
    env = ours({"done_on_any": False}, 1, dies=True)
    with pytest.raises(SlotError, match="which have died; pass use_mask=True"):
        env.rollout(40)
