"""Evaluation beside training changes no bit of the training, and equals the one made afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn
from torchrl.envs import EnvCreator, GymEnv
from torchrl.envs.utils import ExplorationType
from torchrl.modules import LSTMModule
from torchrl.weight_update import WeightStrategy

import tdcollect
from tdcollect import Collector, Evaluator, LocalWorkers, make_env

from .envs import Leaking, Walk
from .evaluators import normalized, statistics
from .policies import categorical, deterministic, net, recurrent, tanh_normal
from .torchrl_envs import Seeded

pytestmark = pytest.mark.usefixtures("quick_children")


def train(evaluate: Callable[[nn.Module, int], Any] | None) -> list[Any]:
    """The batches of a short training, the weights after each, and random numbers drawn between."""
    torch.manual_seed(0)
    policy = categorical(network=nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    collector = Collector(make_env(Walk, 2), policy, frames_per_batch=16, total_frames=80)
    collector.set_seed(0)
    found: list[Any] = []
    for step, batch in enumerate(collector):
        losses = policy.log_prob(batch) * batch["next", "reward"].squeeze(-1)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        if evaluate is not None:
            evaluate(policy, step)
        found.append((batch, TensorDict.from_module(policy).data.clone(), torch.rand(())))
    return found


def test_training_is_the_same_to_the_bit_with_and_without_evaluations() -> None:
    expected = train(None)
    evaluators: list[Evaluator] = []
    told: list[Any] = []
    kept = []

    def evaluate(policy: nn.Module, step: int) -> None:
        if not evaluators:  # in the middle of the training
            options: dict[str, Any] = {"num_trajectories": 3, "on_result": told.append}
            evaluators.append(Evaluator(Walk, policy, queue_size=9, **options))
        kept.append((evaluators[0].submit(step=step), Evaluator.extract_weights(policy)))
        evaluators[0].trigger_eval(policy, step=step)

    found = train(evaluate)
    for (batch, weights, number), (other, others, another) in zip(expected, found, strict=True):
        assert (batch == other).all()
        assert (weights == others).all()
        assert number == another

    # And each point of the curve is that of the weights at its step.
    policy = categorical(network=nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    digests = set()
    while evaluators[0].wait(60) is not None:
        pass
    for future, weights in kept:
        weights.to_module(policy)
        offline = tdcollect.evaluate(Walk, policy, 3, progress=False)
        assert future.result(60).digest == offline.digest
        assert future.result().manifest == offline.manifest
        digests.add(offline.manifest["policy"]["digest"])
    assert len(digests) == len(kept) == 5
    assert len(told) == 10
    evaluators[0].shutdown()


CASES: dict[str, Any] = {
    "continuous": (partial(Walk, spaces.Box(-1, 1, (1,))), tanh_normal, {}),
    "drawn": (Walk, categorical, {"exploration_type": ExplorationType.RANDOM, "seed": 3}),
    "recurrent": (Walk, partial(recurrent, LSTMModule), {}),
    "torchrl's env": (Seeded, deterministic, {"num_envs": 3, "inference_batch_size": 4}),
    "carries state, on two workers": (Leaking, categorical, {"workers": LocalWorkers(2)}),
    "an instance": (make_env("CartPole-v1", 2), partial(deterministic, 4), {"max_steps": 9}),
    "an id": ("CartPole-v1", partial(deterministic, 4), {"env_kwargs": {"sutton_barto_reward": 1}}),
    "a creator": (EnvCreator(partial(GymEnv, "CartPole-v1")), partial(deterministic, 4), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_is_the_one_of_the_same_arguments(case: str) -> None:
    env, make_policy, settings = CASES[case]
    settings = dict(settings)
    policy = make_policy()
    with Evaluator(env, policy, num_trajectories=4, **settings) as evaluator:
        found = [future.result(60) for future in (evaluator.submit(), evaluator.submit())]
    settings = {"max_episode_steps": settings.pop("max_steps", None), **settings, "workers": None}
    offline = tdcollect.evaluate(env, policy, 4, progress=False, **settings)
    for result in found:
        assert result.episodes == offline.episodes
        assert result.manifest == offline.manifest
    assert len(found[1].replay(3)) == offline.record(3).length


def with_statistics(seed: int) -> Any:
    env = normalized()
    env.transform[0].set_extra_state(statistics(seed).get_extra_state())
    env.transform[0].initialized.fill_(True)
    return env


@pytest.mark.filterwarnings("ignore:VecNorm wasn't initialized")
def test_running_statistics_are_part_of_the_snapshot() -> None:
    policy = deterministic(4)
    vecnorm = statistics(2)
    moving = statistics(1)
    with Evaluator(normalized, policy, num_trajectories=2, num_envs=2) as evaluator:
        futures = [evaluator.submit(weights_dict={"env.transform[0]": moving})]
        moving.set_extra_state(statistics(5).get_extra_state())  # as training goes on
        futures.append(evaluator.submit(weights_dict={"env.transform[0]": vecnorm}))
        futures.append(evaluator.submit(policy))  # they hold until others are given
        weights = WeightStrategy(extract_as="tensordict").extract_weights(statistics(3))
        futures.append(evaluator.submit(weights_dict={"env.transform[0]": weights}))
        found = [future.result(60) for future in futures]
        loc = moving.get_extra_state()["loc.-|-.observation"]
        one = evaluator.submit(weights_dict={"env.transform[0]": moving})
        loc[0] = torch.nextafter(loc[0], loc.new_tensor(9.0))  # digests tell the last bit
        two = evaluator.submit(weights_dict={"env.transform[0]": moving})
        told = [future.result(60).manifest["env"]["transforms"] for future in (one, two)]
        assert told[0] != told[1]
        weights_of_three = evaluator.submit(weights_dict={"env.transform[0]": weights})
        with pytest.raises(
            ValueError, match=r"got 'env.transform\[2\]'; the env's .* VecNormV2, S"
        ):
            evaluator.evaluate(weights_dict={"env.transform[2]": vecnorm})
        with pytest.raises(ValueError, match=r"entries of the transform 'env.transform\[1\]'"):
            evaluator.evaluate(weights_dict={"env.transform[1]": vecnorm})
        # A refused request leaves nothing behind.
        assert evaluator.submit().result(60).digest == found[3].digest
        assert weights_of_three.result(60).digest == found[3].digest
    assert found[1].digest == found[2].digest
    for seed, result in ((1, found[0]), (3, found[3])):
        offline = tdcollect.evaluate(
            partial(with_statistics, seed), policy, 2, num_envs=2, progress=False
        )
        assert result.digest == offline.digest
        assert result.manifest == offline.manifest
    assert len(result.replay(1)) == result.record(1).length
    assert len({result.digest for result in found}) == 3


class Counted(nn.Module):
    """Actions that depend on a number which is no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + torch.tensor([float(self.count), 0.0])


def test_extra_states_of_modules_travel() -> None:
    counted = categorical(network=nn.Sequential(net(3, 2), Counted()))
    with Evaluator(Walk, counted, num_trajectories=5) as evaluator:
        digests = set()
        for count in (0, 7, -7):
            counted.module[0].module[1].count = count
            found = evaluator.submit(counted).result(60)
            assert found.digest == tdcollect.evaluate(Walk, counted, 5, progress=False).digest
            digests.add(found.digest)
    assert len(digests) > 1
