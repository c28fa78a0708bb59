"""An evaluation changes nothing outside itself, and nothing outside changes it."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torchrl.envs import ExplorationType, TransformedEnv, exploration_type, set_exploration_type
from torchrl.envs import transforms as T
from torchrl.modules import LSTMModule

from tdcollect import Collector, make_env
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.ledger import ledger_digest

from .envs import Failing, Walk
from .ledger import digest, records
from .policies import (
    Drawing,
    categorical,
    epsilon_greedy,
    gaussian_noise,
    net,
    recurrent,
)

torch.set_num_threads(1)

RANDOM = {"exploration_type": ExplorationType.RANDOM}


def outside(policy: Any = None) -> str:
    """What the rest of a program could notice: the global state, and a policy's."""
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


def test_the_policy_is_in_eval_mode() -> None:
    assert digest(Walk, partly_frozen(), **RANDOM) == digest(Walk, toggled().eval(), **RANDOM)


def test_draws_of_the_user_between_episodes_change_nothing_and_go_on() -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), np.random.normal(), random.random()]  # noqa: NPY002

    def seed() -> None:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)

    with EvaluationCollector(Walk, categorical(), 20, num_envs=3, **RANDOM) as collector:
        undisturbed = ledger_digest(record for record, _ in collector.run())
        seed()
        drawn = [draw() for _ in collector.run()]
        assert ledger_digest(collector.episodes) == undisturbed
    seed()
    assert drawn == [draw() for _ in range(20)]


def test_transforms_are_in_eval_mode_and_then_as_before() -> None:
    class Normed(T.ObservationTransform):
        def __init__(self) -> None:
            super().__init__(in_keys=["observation"], out_keys=["observation"])
            self.norm = nn.BatchNorm1d(3, affine=False)

        def _apply_transform(self, observation: torch.Tensor) -> torch.Tensor:
            return self.norm(observation.reshape(-1, 3)).reshape(observation.shape)

        def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
            return self._call(tensordict_reset)

    ledgers = set()
    for slots in (2, 5):
        transform = Normed()
        before = {name: value.clone() for name, value in transform.state_dict().items()}
        env = TransformedEnv(make_env(Walk, slots), transform)
        transform.train()  # TorchRL has put it in eval mode
        ledgers.add(digest(env, categorical()))
        assert transform.training
        assert transform.norm.training
        assert all(torch.equal(v, before[name]) for name, v in transform.state_dict().items())
    assert len(ledgers) == 1


def test_modes_are_kept_on_request() -> None:
    dropout = nn.Sequential(net(3, 2), nn.Dropout(0.5))
    policy = categorical(network=dropout).train()
    plain = digest(Walk, policy, **RANDOM)
    kept = EvaluationCollector(Walk, policy, 20, eval_mode=False, **RANDOM)
    assert kept.policy_mode == "train"
    assert ledger_digest(record for record, _ in kept.run()) != plain
    kept.close()
    dropout[1].eval()
    mixed = EvaluationCollector(Walk, policy, 20, eval_mode=False, **RANDOM)
    assert mixed.policy_mode == "mixed"
    assert ledger_digest(record for record, _ in mixed.run()) == plain
    mixed.close()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.filterwarnings("ignore:.*VecNorm.*")
def test_running_statistics_stand_still(frozen: bool) -> None:
    def norm() -> Any:
        if frozen:
            return T.VecNormV2(in_keys=["observation"], reduce_batch_dims=True)
        return T.VecNorm(in_keys=["observation"])

    def state(env: TransformedEnv) -> str:
        return repr(list(env.transform.state_dict().items()))

    ledgers = set()
    source = TransformedEnv(make_env(Walk, 3), norm())
    source.set_seed(0)
    source.rollout(20, break_when_any_done=False)
    for slots in (3, 8):
        env = TransformedEnv(make_env(Walk, slots), norm())
        env.transform.load_state_dict(copy.deepcopy(source.transform.state_dict()))
        if frozen:
            env.transform.freeze()
        before = state(env)
        with EvaluationCollector(env, categorical(), 9) as collector:
            for record, _ in collector.run():
                assert env.transform.frozen is frozen
                ledgers.add(record)
        assert state(env) == before
        env.rollout(20, break_when_any_done=False)
        assert (state(env) == before) is frozen
    assert len(ledgers) == 9


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
    made = []

    class Closing(Walk):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            self.closed = False

        def close(self) -> None:
            self.closed = True

    records(Closing, None, 5)
    assert len(made) == 1 + 5  # one to see what is made, and no more slots than episodes
    assert all(env.closed for env in made)
    made.clear()
    env = make_env(Closing, 2)
    records(env, None, 5)
    assert not any(env.closed for env in made)


def train(evaluating: bool) -> list[torch.Tensor]:
    """A few steps of policy gradient, with all the random numbers of training."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    policy = categorical(4)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    dropout = nn.Dropout(0.1)
    norm = T.VecNormV2(in_keys=["observation"], reduce_batch_dims=True)
    env = TransformedEnv(make_env("CartPole-v1", 4), norm)
    env.set_seed(0)
    collector = Collector(env, policy, frames_per_batch=128, total_frames=256)
    collector.set_seed(0)
    for batch in collector:
        rows = batch.reshape(-1)[torch.randperm(128)]
        shown = rows.set("observation", dropout(rows["observation"]))
        log_probs = policy.get_dist(shown).log_prob(rows["action"])
        loss = -(log_probs * rows["next", "reward"].squeeze(-1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluating:
            test_env = TransformedEnv(make_env("CartPole-v1", 3), norm.clone())
            assert digest(test_env, policy, 5, max_episode_steps=20, **RANDOM)
            assert digest("CartPole-v1", policy, 5, max_episode_steps=20)
            assert policy.training
    weights = [value.clone() for value in policy.state_dict().values()]
    collector.shutdown()
    return weights


@pytest.mark.behaviour(32)
def test_training_with_evaluation_in_the_middle_is_the_same_to_the_bit() -> None:
    with_, without = train(True), train(False)
    assert all(map(torch.equal, with_, without))
    torch.manual_seed(0)
    untrained = categorical(4).state_dict().values()
    assert not all(map(torch.equal, with_, untrained))


def test_a_failure_in_the_middle_leaves_everything_as_before() -> None:
    def broken(value: torch.Tensor) -> torch.Tensor:
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
