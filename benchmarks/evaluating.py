"""Test episodes: tdcollect's evaluate against other evaluators, all with the same policy.

CartPole-v1, 16 slots, 64x64 tanh, a controller that balances for hundreds of steps, so that steps
take most of the time. Envs are made beforehand. Every evaluator runs its own episodes; the time per
step of a counted episode is compared.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from bench import QUICK, Effort, spread
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from others import copy_linears
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Evaluator
from torchrl.envs import GymWrapper
from torchrl.envs.utils import ExplorationType
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import tdcollect

ENV, SLOTS, EPISODES = "CartPole-v1", 16, 100
TARGETS = {
    ("deterministic", "Stable-Baselines3"): 1.6,
    ("stochastic", "Stable-Baselines3"): 1.5,
}

Evaluate = Callable[[], int]
"""Runs test episodes and returns the number of their steps."""


def evaluating(effort: Effort) -> list[dict[str, Any]]:
    """Ratios of time per step; the evaluators take turns."""
    warnings.filterwarnings("ignore", module="torchrl")
    episodes = 2 if effort == QUICK else EPISODES
    rows = []
    for kind in ("deterministic", "stochastic"):
        programs = {
            "tdcollect": _tdcollect(kind, episodes),
            "Stable-Baselines3": _stable_baselines3(kind, episodes),
            "TorchRL Evaluator": _torchrl(kind, episodes),
        }
        times: dict[str, list[float]] = {name: [] for name, run in programs.items() if run}
        for turn in range(effort.rounds + 1):
            for name, run in programs.items():
                if run is not None:
                    start = time.perf_counter()
                    steps = run()
                    took = time.perf_counter() - start
                    if turn:  # the first warms up
                        times[name].append(took / steps)
        for name, values in times.items():
            if name == "tdcollect":
                continue
            ratios = [a / b for a, b in zip(values, times["tdcollect"], strict=True)]
            rows.append(
                {
                    "policy": kind,
                    "other": name,
                    "episodes": episodes,
                    "target": TARGETS.get((kind, name)),
                    "ratio": spread(ratios)._asdict(),
                }
            )
    return rows


def controller() -> nn.Sequential:
    """A network whose output has the sign of a linear controller of the pole."""
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    with torch.no_grad():
        for layer in net[::2]:
            layer.weight.zero_()
            layer.bias.zero_()
        net[0].weight[0] = torch.tensor([0.01, 0.03, 0.1, 0.1])
        net[2].weight[0, 0] = 1.0
        net[4].weight[:, 0] = torch.tensor([-100.0, 100.0])
    return net


def _actor(env: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(controller(), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
    )


def _exploration(kind: str) -> ExplorationType:
    return ExplorationType.DETERMINISTIC if kind == "deterministic" else ExplorationType.RANDOM


def _tdcollect(kind: str, episodes: int) -> Evaluate:
    env = tdcollect.make_env(ENV, num_envs=SLOTS)
    policy = _actor(env)

    def run() -> int:
        result = tdcollect.evaluate(
            env, policy, episodes, exploration_type=_exploration(kind), progress=False
        )
        return int(result.lengths.sum())

    return run


def _stable_baselines3(kind: str, episodes: int) -> Evaluate | None:
    if importlib.util.find_spec("stable_baselines3") is None:
        return None
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    env = make_vec_env(ENV, SLOTS)
    model = PPO(
        "MlpPolicy",
        env,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": []}, "activation_fn": nn.Tanh},
        device="cpu",
    )
    copy_linears(controller(), [*model.policy.mlp_extractor.policy_net, model.policy.action_net])

    def run() -> int:
        _, lengths = evaluate_policy(
            model,
            env,
            n_eval_episodes=episodes,
            deterministic=kind == "deterministic",
            return_episode_rewards=True,
        )
        return sum(lengths)

    return run


def _torchrl(kind: str, episodes: int) -> Evaluate:
    vector = SyncVectorEnv([lambda: gym.make(ENV)] * SLOTS, autoreset_mode=AutoresetMode.DISABLED)
    env = GymWrapper(vector)
    counted: list[int] = []

    def count(batch: Any) -> dict[str, float]:
        # Trajectories are padded; padding is not counted.
        counted.append(int(batch["collector", "mask"].sum()))
        return {}

    evaluator = Evaluator(
        env,
        _actor(env),
        num_trajectories=episodes,
        exploration_type=_exploration(kind),
        metrics_fn=count,
    )

    def run() -> int:
        counted.clear()
        evaluator.evaluate()
        return counted[-1]

    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in evaluating(Effort()):
        print(row)
