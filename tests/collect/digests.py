"""Batches and records of a collector and an evaluation by episodes, for ``tests/freeze.py``."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import Compose, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType
from torchrl.modules import (
    GRUModule,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from tdcollect import Collector, EvaluationCollector, make_env


def categorical(env: Any) -> Any:
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    return ProbabilisticActor(
        net, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )


def recurrent(env: Any) -> Any:
    torch.manual_seed(0)
    gru = GRUModule(4, 8, in_key="observation", out_key="hidden")
    net = TensorDictSequential(gru, TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"]))
    return ProbabilisticActor(net, ["logits"], distribution_class=OneHotCategorical)


def squashed(env: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )


def cartpole() -> Any:
    return TransformedEnv(
        make_env("CartPole-v1", 3), Compose(RewardSum(), StepCounter(max_steps=60), InitTracker())
    )


def pendulum() -> Any:
    return make_env("Pendulum-v1", 3, max_episode_steps=20)


CASES = {
    "categorical": (cartpole, categorical),
    "recurrent": (cartpole, recurrent),
    "squashed": (pendulum, squashed),
}


def main() -> dict[str, Any]:
    """The batches by frames, by episodes and of evaluations, for each kind of policy."""
    found: dict[str, Any] = {}
    for name, (make, policy) in CASES.items():
        env = make()
        collector = Collector(env, policy(env), frames_per_batch=30)
        torch.manual_seed(1)
        found[f"{name}, by frames"] = collector.collect(frames=60, seed=3)
        found[f"{name}, by episodes"] = collector.collect(episodes=7, seed=3)
        collector.shutdown()
        for kind in (ExplorationType.DETERMINISTIC, ExplorationType.RANDOM):
            env = make()
            episodes = EvaluationCollector(env, policy(env), episodes=5, exploration_type=kind)
            in_order = sorted(episodes, key=lambda e: int(e["collector", "traj_ids"][0]))
            found[f"{name}, evaluated {kind.name}"] = in_order
    return found
