"""Batches and records of a collector and an evaluation by episodes, for ``tests/freeze.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torchrl.envs import Compose, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType

from tdcollect import Collector, EvaluationCollector, make_env
from tdcollect.envs.traits import base_of

from . import policies


def cartpole() -> Any:
    return TransformedEnv(
        make_env("CartPole-v1", 3), Compose(RewardSum(), StepCounter(max_steps=60), InitTracker())
    )


def pendulum() -> Any:
    return make_env("Pendulum-v1", 3, max_episode_steps=20)


CASES = {
    "categorical": (cartpole, policies.actor),
    "recurrent": (cartpole, partial(policies.recurrent, "gru")),
    "squashed": (pendulum, policies.actor),
}


def policy_of(name: str) -> Any:
    """The policy of a case, with the same weights each time; it reads what the env itself shows."""
    make, policy = CASES[name]
    torch.manual_seed(0)
    return policy(base_of(make()))


def main() -> dict[str, Any]:
    """The batches by frames, by episodes and of evaluations, for each kind of policy."""
    found: dict[str, Any] = {}
    for name, (make, _) in CASES.items():
        collector = Collector(make(), policy_of(name), frames_per_batch=30)
        torch.manual_seed(1)
        found[f"{name}, by frames"] = collector.collect(frames=60, seed=3)
        found[f"{name}, by episodes"] = collector.collect(episodes=7, seed=3)
        collector.shutdown()
        for kind in (ExplorationType.DETERMINISTIC, ExplorationType.RANDOM):
            episodes = EvaluationCollector(make(), policy_of(name), 5, exploration_type=kind)
            in_order = sorted(episodes, key=lambda e: int(e["collector", "traj_ids"][0]))
            found[f"{name}, evaluated {kind.name}"] = in_order
    return found
