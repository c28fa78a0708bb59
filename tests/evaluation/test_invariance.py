"""The ledger is bit-identical however the episodes are run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, ExplorationType, ModelBasedEnvBase, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import CEMPlanner, GRUModule, LSTMModule, WorldModelWrapper

from tdcollect import EvaluationCollector, make_env
from tdcollect.evaluation.episodes.policy import Inference
from tdcollect.evaluation.ledger import ledger_digest

from ..collect.envs import make_dict_action_toy, make_many_actions_toy, make_nested_toy
from .envs import Pictures, Walk
from .ledger import digest, episodes_of, records
from .policies import (
    DRAWS,
    Plain,
    categorical,
    convolutional,
    deterministic,
    drawing,
    epsilon_greedy,
    gaussian_noise,
    net,
    on_tensordicts,
    ornstein_uhlenbeck,
    recurrent,
    soft_actor,
    tanh_normal,
)

torch.set_num_threads(1)

Make = Callable[[], Any]
RANDOM = {"exploration_type": ExplorationType.RANDOM}
cartpole = partial(gym.make, "CartPole-v1", max_episode_steps=25)
push = partial(Walk, spaces.Box(-1, 1, (1,)))


def train_mode_dropout() -> TensorDictModule:
    network = torch.nn.Sequential(net(3, 2), torch.nn.Dropout(0.5), torch.nn.Softmax(-1))
    return categorical(network=network).train()


POLICIES: dict[str, tuple[Make, Any]] = {
    "deterministic": (deterministic, Walk),
    "most-likely": (categorical, Walk),
    "one-hot": (categorical, Walk),
    "tanh-normal": (tanh_normal, push),
    "lstm": (partial(recurrent, LSTMModule), Walk),
    "gru": (partial(recurrent, GRUModule), Walk),
    "pixels": (convolutional, Pictures),
    "epsilon-greedy": (epsilon_greedy, Walk),
    "gaussian-noise": (gaussian_noise, push),
    "ornstein-uhlenbeck": (ornstein_uhlenbeck, push),
    "soft-actor": (soft_actor, push),
    "plain-module": (Plain, Walk),
    "on-tensordicts": (on_tensordicts, Walk),
    "dropout": (train_mode_dropout, Walk),
    "random-box": (lambda: None, push),
    "random-discrete": (lambda: None, Walk),
    "random-multi-discrete": (lambda: None, make_many_actions_toy),
    "random-dict": (lambda: None, make_dict_action_toy),
    "random-nested-observations": (lambda: None, make_nested_toy),
    **{f"draws-{name}": (partial(drawing, draw), Walk) for name, draw in DRAWS.items()},
}


@pytest.mark.parametrize("name", POLICIES)
def test_any_number_of_slots_gives_one_ledger(name: str) -> None:
    make_policy, env = POLICIES[name]
    settings = {} if name == "most-likely" else {**RANDOM, "eval_mode": name != "dropout"}
    ledgers = {digest(env, make_policy(), 18, num_envs=slots, **settings) for slots in (16, 18)}
    assert len(ledgers) == 1


@pytest.mark.behaviour(32)
@pytest.mark.parametrize("exploration", [ExplorationType.DETERMINISTIC, ExplorationType.RANDOM])
def test_one_to_sixty_four_slots_give_one_ledger(exploration: ExplorationType) -> None:
    run = partial(digest, cartpole, categorical(4), 66, exploration_type=exploration)
    ledgers = {run(num_envs=slots) for slots in (1, 7, 16, 64)}
    assert len(ledgers) == 1
    assert run(num_envs=64, seed=1) not in ledgers


def products(dtype: torch.dtype) -> TensorDictModule:
    """Its actions are ``x @ w``, so that every bit shows; rows of 11 begin at unlike alignments."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = torch.nn.Linear(11, 4).to(dtype)
    return TensorDictModule(lambda x: network(x.to(dtype)), ["observation"], ["action"])


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, torch.float32), (5, torch.float64), (16, torch.float32)]
)
def test_products_that_round_by_the_place_in_memory_give_one_ledger(
    size: int, dtype: torch.dtype
) -> None:
    make = partial(Walk, spaces.Box(-1, 1, (4,)), size=11)
    ledgers = {
        digest(make, products(dtype), num_envs=slots, inference_batch_size=size)
        for slots in (1, 5, 16)  # as many as the batch holds, too
    }
    assert len(ledgers) == 1


def vector(kind: type, mode: AutoresetMode, make: Any = cartpole, slots: int = 3) -> EnvBase:
    return make_env(kind([make] * slots, autoreset_mode=mode))


def async_vector(mode: AutoresetMode, make: Any = cartpole) -> EnvBase:
    return vector(partial(AsyncVectorEnv, context="fork"), mode, make)


BACKENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "process": (cartpole, {"backend": "process", "num_envs": 5}),
    "process-factory": (lambda: make_env(cartpole, 3, backend="process", num_workers=2), {}),
    "unbatched": (lambda: make_env(cartpole), {}),
    **{f"sync-{m.name}": (partial(vector, SyncVectorEnv, m), {}) for m in AutoresetMode},
    "async": (partial(async_vector, AutoresetMode.NEXT_STEP), {}),
}


@pytest.fixture(scope="module")
def cartpole_ledger() -> str:
    return digest(cartpole, categorical(4), 12, **RANDOM)


@pytest.mark.parametrize("name", BACKENDS)
def test_any_backend_gives_one_ledger(name: str, cartpole_ledger: str) -> None:
    env, settings = BACKENDS[name]
    assert digest(env, categorical(4), 12, **settings, **RANDOM) == cartpole_ledger


def test_success_is_told_alike_by_every_backend() -> None:
    told = [
        {record.index: record.success for record in records(env, deterministic(), 9, **settings)}
        for env, settings in (
            (Walk, {}),
            *((partial(vector, SyncVectorEnv, mode, Walk), {}) for mode in AutoresetMode),
            (partial(async_vector, AutoresetMode.SAME_STEP, Walk), {}),
            (Walk, {"backend": "process", "num_envs": 2}),
        )
    ]
    assert all(one == told[0] for one in told)
    assert set(told[0].values()) == {True, False}


def test_any_pool_of_envpool_gives_one_ledger() -> None:
    pytest.importorskip("envpool")
    settings = {"backend": "envpool", "env_kwargs": {"max_episode_steps": 15}, **RANDOM}
    policy = categorical(4)
    ledgers = {digest("CartPole-v1", policy, 7, num_envs=slots, **settings) for slots in (1, 5)}
    assert len(ledgers) == 1


def test_the_order_of_numbers_does_not_matter() -> None:
    shuffled = [7, 3, 11, 0, 9, 1, 4, 8, 2, 10, 6, 5]
    policy = recurrent(LSTMModule)
    assert digest(Walk, policy, shuffled, num_envs=4) == digest(Walk, policy, 12, num_envs=5)


def test_episodes_in_two_halves_are_those_of_the_whole() -> None:
    policy = categorical()
    whole = records(Walk, policy, 30, **RANDOM)
    halves = [
        *records(Walk, policy, range(15), num_envs=3, **RANDOM),
        *records(Walk, policy, range(15, 30), **RANDOM),
    ]
    assert {r.index: r for r in whole} == {r.index: r for r in halves}


def test_in_order_only_the_order_of_giving_changes() -> None:
    policy = categorical()
    ordered = records(Walk, policy, 30, in_order=True, **RANDOM)
    ended = records(Walk, policy, 30, **RANDOM)
    assert [record.index for record in ordered] == list(range(30))
    assert [record.index for record in ended] != list(range(30))
    assert sorted(ended, key=lambda r: r.index) == ordered


def transformed(*transforms: Any, slots: int | None = 3, make: Any = Walk) -> EnvBase:
    return TransformedEnv(make_env(make, slots), T.Compose(*[each() for each in transforms]))


def norm() -> T.ObservationNorm:
    return T.ObservationNorm(loc=0.3, scale=1.7, in_keys=["observation"])


TRANSFORMS: dict[str, list[Callable[[], T.Transform]]] = {
    "on-rows": [norm, T.StepCounter, T.RewardSum],
    "not-on-rows": [
        norm,
        lambda: T.CatFrames(3, dim=-1, in_keys=["observation"]),
        T.StepCounter,
        T.RewardSum,
    ],
    "limit": [lambda: T.StepCounter(max_steps=4)],
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("on-rows", LSTMModule), ("not-on-rows", None), ("not-on-rows", LSTMModule), ("limit", None)],
)
def test_transforms_give_one_ledger(name: str, kind: Any) -> None:
    ins = 9 if name == "not-on-rows" else 3
    policy = categorical(ins) if kind is None else recurrent(kind, ins)
    ledgers = {
        digest(partial(transformed, *TRANSFORMS[name], slots=slots), policy, 9, **RANDOM)
        for slots in (None, 7)
    }
    assert len(ledgers) == 1


def shared_norm(in_keys: list[str]) -> T.VecNormV2:
    return T.VecNormV2(in_keys=in_keys, reduce_batch_dims=True)


@pytest.mark.parametrize(("kind", "frozen"), [(T.VecNorm, False), (shared_norm, True)])
def test_running_statistics_stand_still(kind: Any, frozen: bool) -> None:
    ledgers = set()
    for slots in (3, 8):
        env = transformed(lambda: kind(in_keys=["observation"]), slots=slots)
        if slots == 3:
            env.set_seed(0)
            env.rollout(20, break_when_any_done=False)
            learned = env.transform.state_dict()
        env.transform.load_state_dict(learned)
        if frozen:
            env.transform[0].freeze()
        ledgers.add(digest(env, categorical(), 9))
        assert env.transform[0].frozen is frozen
    assert len(ledgers) == 1


def test_integers_for_actions_are_as_good() -> None:
    policy = categorical(kind=torch.distributions.Categorical)
    ledgers = {
        digest(
            lambda n=slots: make_env(Walk, n, categorical_action_encoding=True), policy, **RANDOM
        )
        for slots in (1, 8)
    }
    assert len(ledgers) == 1


ENVS = {
    "MuJoCo": ("HalfCheetah-v5", 17, 6, "mujoco"),
    "Box2D": ("LunarLander-v3", 8, 4, "Box2D"),
}


@pytest.mark.parametrize("name", ENVS)
def test_simulations_give_one_ledger(name: str) -> None:
    env, ins, actions, package = ENVS[name]
    pytest.importorskip(package)
    policy = tanh_normal(ins, actions).double() if name == "MuJoCo" else categorical(ins, actions)
    ledgers = {
        digest(env, policy, 4, num_envs=slots, max_episode_steps=20, **RANDOM) for slots in (1, 3)
    }
    assert len(ledgers) == 1


def test_an_env_that_carries_something_on_runs_each_episode_anew() -> None:
    """BipedalWalker draws its hardcore terrain, and more, from what earlier episodes left."""
    pytest.importorskip("Box2D")
    policy = tanh_normal(24, 4)
    ledgers = {
        digest("BipedalWalker-v3", policy, 3, num_envs=slots, max_episode_steps=10, **RANDOM)
        for slots in (1, 2)
    }
    assert len(ledgers) == 1


def test_the_data_are_the_same_not_the_digest_alone() -> None:
    policy = recurrent(LSTMModule)
    one, other = (episodes_of(Walk, policy, num_envs=slots, **RANDOM) for slots in (2, 9))
    assert sorted(one) == sorted(other) == list(range(20))
    for index, data in one.items():
        assert (data == other[index]).all()
        assert data["collector", "traj_ids"].unique().tolist() == [index]


@pytest.mark.parametrize("name", ["dropout", "lstm", "pixels"])
def test_rows_that_come_out_alike_run_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run_group = Inference._run_group

    def counted(self: Inference, rows: Any, first: int, stop: int, streams: Any) -> Any:
        calls.append(stop - first)
        return run_group(self, rows, first, stop, streams)

    monkeypatch.setattr(Inference, "_run_group", counted)
    make_policy, env = POLICIES[name]
    digest(env, make_policy(), num_envs=20, eval_mode=name != "dropout", **RANDOM)
    assert set(calls) == {16, 4}


def test_blocks_may_end_at_any_step(monkeypatch) -> None:
    """As they do by the clock, where envs are slow."""
    steps: list[int] = []

    class Counted(Walk):
        def step(self, action: Any) -> Any:
            steps.append(1)
            return super().step(action)

    def first_of(seconds: float) -> tuple[int, Any]:
        monkeypatch.setattr("tdcollect.evaluation.episodes.collector.Feed.seconds", seconds)
        with EvaluationCollector(Counted, recurrent(GRUModule), 12, num_envs=3, **RANDOM) as run:
            ended = run.run()
            before = len(steps)
            first = next(ended)
            return len(steps) - before, ledger_digest([first.record, *(e.record for e in ended)])

    late, whole = first_of(1e9)
    soon, cut = first_of(0.0)
    assert cut == whole
    assert soon < late  # the first episode comes out when it ends


class _Joined(nn.Module):
    """A fixed layer on what it is given, joined."""

    def __init__(self, ins: int, outs: int):
        super().__init__()
        self.layer = net(ins, outs)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat(given, -1))


class _Imagined(ModelBasedEnvBase):
    """The walk as a model imagines it."""

    def __init__(self) -> None:
        model = WorldModelWrapper(
            TensorDictModule(_Joined(4, 3), ["observation", "action"], ["observation"]),
            TensorDictModule(_Joined(3, 1), ["observation"], ["reward"]),
        )
        super().__init__(model)
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.state_spec = Composite(observation=Unbounded((3,)))
        self.action_spec, self.reward_spec = Bounded(-1, 1, (1,)), Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.select("observation")


def test_a_planner_is_shown_no_ended_row() -> None:
    """It would roll out its model from there."""
    planner = CEMPlanner(_Imagined(), planning_horizon=2, optim_steps=2, num_candidates=6, top_k=3)
    env = partial(Walk, spaces.Box(-1, 1, (1,)))
    assert len({digest(env, planner, 4, num_envs=slots) for slots in (1, 3)}) == 1
