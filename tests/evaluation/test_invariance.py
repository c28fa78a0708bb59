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
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import GRUModule, LSTMModule

from tdcollect import EvaluationCollector, make_env
from tdcollect.evaluation.episodes.inference import Inference
from tdcollect.evaluation.ledger import Episode, ledger_digest

from ..collect.envs import make_dict_action_toy, make_many_actions_toy
from .envs import Walk, pictures
from .ledger import RANDOM, digest, records
from .policies import (
    DRAWS,
    Plain,
    attention,
    categorical,
    convolutional,
    drawing,
    drawn_by_row,
    epsilon_greedy,
    gaussian_noise,
    net,
    on_tensordicts,
    ornstein_uhlenbeck,
    recurrent,
    soft_actor,
    tanh_normal,
)

Make = Callable[[], Any]
cartpole = partial(gym.make, "CartPole-v1", max_episode_steps=12)
push = partial(Walk, spaces.Box(-1, 1, (1,)))


def train_mode_dropout() -> TensorDictModule:
    network = torch.nn.Sequential(net(3, 2), torch.nn.Dropout(0.5), torch.nn.Softmax(-1))
    return categorical(network=network).train()


POLICIES: dict[str, tuple[Make, Any]] = {
    "most-likely": (categorical, Walk),
    "one-hot": (categorical, Walk),
    "tanh-normal": (tanh_normal, push),
    "lstm": (partial(recurrent, LSTMModule), Walk),
    "gru": (partial(recurrent, GRUModule), Walk),
    "attention": (attention, Walk),
    "pixels": (convolutional, pictures),
    "epsilon-greedy": (epsilon_greedy, Walk),
    "gaussian-noise": (gaussian_noise, push),
    "ornstein-uhlenbeck": (ornstein_uhlenbeck, push),
    "soft-actor": (soft_actor, push),
    "plain-module": (Plain, Walk),
    "on-tensordicts": (on_tensordicts, Walk),
    "dropout": (train_mode_dropout, Walk),
    "random-box": (lambda: None, push),
    "random-multi-discrete": (lambda: None, make_many_actions_toy),
    "random-dict": (lambda: None, make_dict_action_toy),
    "draws": (lambda: drawing(DRAWS["gamma"]), Walk),
}


@pytest.mark.parametrize("name", POLICIES)
def test_any_number_of_slots_gives_one_ledger(name: str) -> None:
    make_policy, env = POLICIES[name]
    settings = {} if name == "most-likely" else {**RANDOM, "eval_mode": name != "dropout"}
    ledgers = {digest(env, make_policy(), 18, num_envs=slots, **settings) for slots in (16, 18)}
    assert len(ledgers) == 1


@pytest.mark.parametrize("name", DRAWS)
def test_a_row_draws_the_same_alone_and_beside_others(name: str) -> None:
    logits = torch.linspace(-1, 1, 16).view(8, 2)

    whole = drawn_by_row(name, logits)
    for row in range(8):
        assert torch.equal(drawn_by_row(name, logits[row : row + 1], row)[0], whole[row])
    assert len({tuple(row.tolist()) for row in whole - logits}) > 1


@pytest.mark.behaviour(32)
def test_one_to_sixty_four_slots_give_one_ledger() -> None:
    run = partial(digest, cartpole, categorical(4), 66, **RANDOM)
    ledgers = {run(num_envs=slots) for slots in (1, 7, 64)}
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


def vector(kind: type, mode: AutoresetMode, make: Any) -> EnvBase:
    return make_env(kind([make] * 3, autoreset_mode=mode))


BACKENDS: dict[str, Callable[[Make], tuple[Any, dict[str, Any]]]] = {
    "process": lambda make: (make, {"backend": "process", "num_envs": 3}),
    "unbatched": lambda make: (lambda: make_env(make), {}),
    **{
        f"sync-{mode.name}": lambda make, m=mode: (lambda: vector(SyncVectorEnv, m, make), {})
        for mode in AutoresetMode
    },
    "async": lambda make: (
        lambda: vector(partial(AsyncVectorEnv, context="fork"), AutoresetMode.SAME_STEP, make),
        {},
    ),
}


@pytest.mark.usefixtures("quick_children")
@pytest.mark.parametrize("name", BACKENDS)
def test_any_backend_gives_one_ledger(name: str) -> None:
    """The flags of success too, which infos tell."""

    def ended(env: Any, **settings: Any) -> dict[int, Episode]:
        return {one.index: one for one in records(env, categorical(), 9, **settings, **RANDOM)}

    expected = ended(Walk)
    env, settings = BACKENDS[name](Walk)
    assert ended(env, **settings) == expected
    assert {record.success for record in expected.values()} == {True, False}


def test_any_pool_of_envpool_gives_one_ledger() -> None:
    pytest.importorskip("envpool")
    settings = {"backend": "envpool", "env_kwargs": {"max_episode_steps": 9}, **RANDOM}
    policy = categorical(4)
    ledgers = {digest("CartPole-v1", policy, 4, num_envs=slots, **settings) for slots in (1, 3)}
    assert len(ledgers) == 1


def test_neither_halves_nor_any_order_change_an_episode() -> None:
    policy = recurrent(LSTMModule)
    ordered = sorted(records(Walk, policy, 20, **RANDOM), key=lambda record: record.index)
    mixed = [7, 3, 0, 9, 1, 4, 8, 2, 6, 5]
    halves = (mixed, range(10, 20))
    apart = [one for half in halves for one in records(Walk, policy, half, num_envs=3, **RANDOM)]
    assert sorted(apart, key=lambda record: record.index) == ordered


def transformed(limited: bool, slots: int | None) -> EnvBase:
    known = T.ObservationNorm(0.3, 1.7, ["observation"])
    stack = T.CatFrames(3, dim=-1, in_keys=["observation"])
    limit = T.StepCounter(max_steps=4) if limited else T.StepCounter()
    return TransformedEnv(make_env(Walk, slots), T.Compose(known, stack, limit, T.RewardSum()))


@pytest.mark.parametrize(
    ("limited", "make"), [(False, partial(recurrent, LSTMModule)), (True, categorical)]
)
def test_transforms_give_one_ledger(limited: bool, make: Any) -> None:
    envs = [partial(transformed, limited, slots) for slots in (None, 7)]
    assert len({digest(env, make(ins=9), 9, **RANDOM) for env in envs}) == 1


def test_a_simulation_gives_one_ledger() -> None:
    pytest.importorskip("mujoco")
    run = partial(digest, "HalfCheetah-v5", tanh_normal(17, 6).double(), 3, max_episode_steps=10)
    assert run(num_envs=1, **RANDOM) == run(num_envs=2, **RANDOM)


@pytest.mark.parametrize("name", ["dropout", "lstm", "pixels"])
def test_rows_that_come_out_alike_run_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    padded = Inference._padded

    def counted(self: Inference, rows: Any, first: int, stop: int) -> Any:
        calls.append(stop - first)
        return padded(self, rows, first, stop)

    monkeypatch.setattr(Inference, "_padded", counted)
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


def test_a_policy_is_shown_no_ended_row() -> None:
    """A planner would roll out its model from there."""
    inner, ended = on_tensordicts(), []

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        ended.append(bool(tensordict["done"].any()))
        return inner(tensordict)

    records(Walk, policy, 9, num_envs=4)
    assert not any(ended)
