"""An evaluation changes nothing outside itself, and nothing outside changes it."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torchrl.envs import (
    ExplorationType,
    GymWrapper,
    TransformedEnv,
    exploration_type,
    set_exploration_type,
)
from torchrl.envs import transforms as T
from torchrl.modules import LSTMModule

from tdcollect import make_env
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.ledger import ledger_digest
from tdcollect.randomness import LIBRARIES

from .envs import Failing, Walk, Watched
from .ledger import RANDOM, digest, records
from .policies import Drawing, categorical, epsilon_greedy, gaussian_noise, net, recurrent


def outside(policy: Any = None) -> str:
    """The state that the rest of a program could notice: the global one, and a policy's."""
    modules = list(policy.modules()) if policy is not None else []
    return repr(
        {
            "torch": torch.get_rng_state().tolist(),
            "numpy": np.random.get_state()[1:3],  # noqa: NPY002
            "python": random.getstate(),
            "exploration": exploration_type(),
            "gradients": torch.is_grad_enabled(),
            "threads": torch.get_num_threads(),
            "modes": [module.training for module in modules],
            "specs": [id(getattr(module, "_spec", None)) for module in modules],
            "scales": [getattr(module, "scale", None) for module in modules],
            "state": policy and policy.state_dict(),
        }
    )


class Toggled(nn.Dropout):
    """A module whose ``train`` does more than set the flag."""

    scale = 1

    def train(self, mode: bool = True) -> Any:
        self.scale = 1 if mode else 2
        return super().train(mode)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) * self.scale


def toggled() -> Any:
    return categorical(network=nn.Sequential(net(3, 2), Toggled(0.5), nn.BatchNorm1d(2)))


def partly_frozen() -> Any:
    """In training mode, but for a part, as a backbone may be."""
    policy = toggled().train()
    policy.module[0].module[0].eval()
    return policy


@pytest.mark.parametrize("make", [partly_frozen, epsilon_greedy, gaussian_noise])
@pytest.mark.parametrize("ending", ["finished", "left", "raised"])
def test_nothing_outside_changes_however_the_loop_ends(make: Any, ending: str) -> None:
    policy = make()
    env = partial(Walk, spaces.Box(-1, 1, (1,)) if make is gaussian_noise else None)
    with set_exploration_type(ExplorationType.MEAN):
        before = outside(policy)
        with EvaluationCollector(env, policy, 6, **RANDOM) as collector, suppress(ArithmeticError):
            assert collector.policy_mode == "eval" or make is not partly_frozen
            for count, _ in enumerate(collector):
                assert outside(policy) == before
                if count == 2 and ending == "left":
                    break
                if count == 2 and ending == "raised":
                    raise ArithmeticError
        assert outside(policy) == before


class FromLibrary(Walk):
    """Draws its starts from a generator that a library holds for all envs, and seeds it."""

    held: ClassVar[list[Any]] = [0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        self.held[0] = (self.held[0] if seed is None else seed) * 5 % 1009
        return observation + self.held[0], info


def test_generators_that_libraries_hold_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    makes: list[Any] = [FromLibrary, lambda: GymWrapper(FromLibrary())]
    expected = [digest(make, categorical(), 4) for make in makes]
    monkeypatch.setitem(LIBRARIES, "mine", lambda: FromLibrary.held)
    FromLibrary.held[0] = 3
    assert [digest(make, categorical(), 4, num_envs=2) for make in makes] == expected
    assert FromLibrary.held == [3]


def test_draws_of_the_user_between_episodes_change_nothing_and_go_on() -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), np.random.normal(), random.random()]  # noqa: NPY002

    def seed() -> None:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)

    with EvaluationCollector(Walk, categorical(), 20, num_envs=3, **RANDOM) as collector:
        undisturbed = ledger_digest(ended.record for ended in collector.run())
        seed()
        drawn = [draw() for _ in collector.run()]
        assert ledger_digest(collector.episodes) == undisturbed
    seed()
    assert drawn == [draw() for _ in range(20)]


class Normed(T.ObservationTransform):
    """Runs batch norm."""

    def __init__(self, **given: Any) -> None:
        super().__init__(out_keys=["observation"], **given)
        self.norm = nn.BatchNorm1d(3, affine=False)

    def _apply_transform(self, observation: torch.Tensor) -> torch.Tensor:
        return self.norm(observation.reshape(-1, 3)).reshape(observation.shape)

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)


@pytest.mark.filterwarnings("ignore:.*VecNorm.*")
@pytest.mark.parametrize(
    ("kind", "frozen"),
    [(T.VecNorm, False), (partial(T.VecNormV2, reduce_batch_dims=True), True), (Normed, None)],
)
def test_transforms_learn_nothing_and_are_then_as_before(kind: Any, frozen: bool | None) -> None:
    def state(env: TransformedEnv) -> str:
        return repr([env.transform.training, *env.transform.state_dict().items()])

    ledgers = set()
    source = TransformedEnv(make_env(Walk, 3), kind(in_keys=["observation"]))
    source.set_seed(0)
    source.transform.train()  # TorchRL has put it in eval mode
    source.rollout(20, break_when_any_done=False)
    for slots in (3, 8):
        env = TransformedEnv(make_env(Walk, slots), kind(in_keys=["observation"]))
        env.transform.load_state_dict(copy.deepcopy(source.transform.state_dict()))
        env.transform.train()
        if frozen:
            env.transform.freeze()
        before = state(env)
        with EvaluationCollector(env, categorical(), 9) as collector:
            for ended in collector.run():
                assert getattr(env.transform, "frozen", None) is frozen
                ledgers.add(ended.record)
        assert state(env) == before
        env.rollout(20, break_when_any_done=False)
        assert (state(env) == before) is bool(frozen)
    assert len(ledgers) == 9


def test_modes_are_kept_on_request() -> None:
    dropout = nn.Sequential(net(3, 2), nn.Dropout(0.5))
    policy = categorical(network=dropout).train()
    plain = digest(Walk, policy, **RANDOM)
    assert plain == digest(Walk, copy.deepcopy(policy).eval(), **RANDOM)
    kept = EvaluationCollector(Walk, policy, 20, eval_mode=False, **RANDOM)
    assert kept.policy_mode == "train"
    assert ledger_digest(ended.record for ended in kept.run()) != plain
    kept.close()
    dropout[1].eval()
    mixed = EvaluationCollector(Walk, policy, 20, eval_mode=False, **RANDOM)
    assert mixed.policy_mode == "mixed"
    assert ledger_digest(ended.record for ended in mixed.run()) == plain
    mixed.close()


def test_an_env_that_is_given_gets_no_transforms() -> None:
    env = TransformedEnv(make_env(Walk, 3), T.RewardSum())
    keys = set(env.reset().keys(True, True))
    assert records(env, recurrent(LSTMModule), 5)
    assert type(env.transform) is T.RewardSum
    assert set(env.reset().keys(True, True)) == keys
    assert not env.is_closed


@pytest.mark.behaviour(32)
@pytest.mark.parametrize("how", ["finished", "abandoned", "envpool"])
def test_an_env_that_is_given_is_not_left_seeded(how: str) -> None:
    pool = pytest.importorskip("envpool") if how == "envpool" else None
    shown = []
    for _ in range(2):
        env = make_env("CartPole-v1", 3, backend="envpool") if pool else make_env(Walk, 3)
        policy = categorical(4 if pool else 3)
        for _ in EvaluationCollector(env, policy, 10, max_episode_steps=5):
            if how == "abandoned":
                break
        shown.append(env.reset()["observation"])
        env.close()
    assert not torch.equal(*shown)


def test_envs_made_here_are_closed_and_others_are_not() -> None:
    make = Watched(Walk)
    records(make, None, 5)
    # One to see what is made, one per episode, and one that the first to end runs on again.
    assert (make.made, make.open) == (1 + 5 + 1 + 1, [])  # and one that was looked at for masks
    env = make_env(make, 2)
    records(env, None, 5)
    assert len(make.open) == 2


def test_a_failure_in_the_middle_leaves_everything_as_before() -> None:
    def broken(value: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(3)
        random.random()
        raise ArithmeticError

    env = partial(Failing, seeds=tuple(range(100)))
    before = outside()
    with pytest.raises(RuntimeError, match="broken by seed"):
        records(env, categorical(), 10, env_seeds=range(10), on_env_error="raise", **RANDOM)
    assert outside() == before
    policy = categorical(network=nn.Sequential(Toggled(0.5), Drawing(broken))).train()
    before = outside(policy)
    with pytest.raises(ArithmeticError):
        records(Walk, policy)
    assert outside(policy) == before
