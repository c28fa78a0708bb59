"""Stable-Baselines3 and Tianshou 2, each with the network of its cell."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from bench import Program
from torch import nn
from torch.distributions import Categorical, Independent, Normal


def stable_baselines3(env_id: str, num_envs: int, net: nn.Module, steps: int) -> Program | None:
    """``PPO.collect_rollouts`` alone; None if the library is not installed.

    Value network and advantages are not part of the comparison: the former is one linear layer, the
    latter are left out. Continuous actions come from a clipped normal distribution.
    """
    if importlib.util.find_spec("stable_baselines3") is None:
        return None
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    model = PPO(
        "MlpPolicy",
        DummyVecEnv([lambda: gym.make(env_id)] * num_envs),
        n_steps=steps,
        batch_size=steps * num_envs,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": []}, "activation_fn": nn.Tanh},
        device="cpu",
    )
    copy_linears(net, [*model.policy.mlp_extractor.policy_net, model.policy.action_net])
    model.rollout_buffer.compute_returns_and_advantage = lambda *_, **__: None
    _, callback = model._setup_learn(total_timesteps=10**9)

    def run() -> None:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=steps)

    return Program(run, steps * num_envs, model.env.close)


def copy_linears(net: nn.Module, target: list[nn.Module]) -> None:
    sources = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    targets = [layer for layer in target if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for source, layer in zip(sources, targets, strict=True):
            # The last layer of a continuous actor also outputs the scales, which are separate here.
            layer.weight.copy_(source.weight[: len(layer.weight)])
            layer.bias.copy_(source.bias[: len(layer.bias)])


def tianshou(env_id: str, num_envs: int, net: nn.Module, steps: int) -> Program | None:
    """``Collector.collect`` into its buffer; None if the library is not installed.

    Its collector stores no log-probabilities.
    """
    if importlib.util.find_spec("tianshou") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.data import Collector, VectorReplayBuffer
        from tianshou.env import DummyVectorEnv

    envs = DummyVectorEnv([lambda: gym.make(env_id)] * num_envs)
    buffer = VectorReplayBuffer(steps * num_envs, num_envs)
    policy = _tianshou_policy(envs, net)
    collector = Collector(policy, envs, buffer, raise_on_nan_in_buffer=False)
    collector.reset()

    def run() -> None:
        collector.reset_buffer()
        collector.collect(n_step=steps * num_envs)

    return Program(run, steps * num_envs, envs.close)


def tianshou_async(
    make: Callable[[], gym.Env[Any, Any]], num_envs: int, net: nn.Module, steps: int, episodes: int
) -> dict[str, Program]:
    """``AsyncCollector.collect`` over a process per slot, by steps and by episodes.

    It takes every slot that is ready (``wait_num=1``). Its episodes are the first to finish.
    Nothing if the library is not installed.
    """
    if importlib.util.find_spec("tianshou") is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.data import AsyncCollector, VectorReplayBuffer
        from tianshou.env import SubprocVectorEnv

    # Forked, as fresh interpreters take 400 MiB and seconds of a core each.
    envs = SubprocVectorEnv([make] * num_envs, wait_num=1, context="fork")
    policy = _tianshou_policy(envs, net)

    def forward(*args: Any, forward: Any = policy.forward, **kwargs: Any) -> Any:
        acted = forward(*args, **kwargs)
        acted.state = np.zeros((len(acted.act), 1))  # AsyncCollector 2.0 raises where there is none
        return acted

    policy.forward = forward
    buffer = VectorReplayBuffer(4 * steps * num_envs, num_envs)
    collector = AsyncCollector(policy, envs, buffer, raise_on_nan_in_buffer=False)
    collector.reset()

    def run(**count: int) -> None:
        collector.reset_buffer()
        collector.collect(**count)

    return {
        "steps": Program(lambda: run(n_step=steps * num_envs), steps * num_envs, envs.close),
        "episodes": Program(lambda: run(n_episode=episodes), episodes),
    }


def _tianshou_policy(envs: Any, net: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy

    discrete = isinstance(envs.action_space[0], gym.spaces.Discrete)
    return ProbabilisticActorPolicy(
        actor=_TianshouActor(net),
        dist_fn=_categorical if discrete else _normal,
        action_space=envs.action_space[0],
        observation_space=envs.observation_space[0],
        action_scaling=not discrete,
        action_bound_method=None if discrete else "tanh",
    )


class _TianshouActor(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Any, Any]:
        return self.net(torch.as_tensor(obs, dtype=torch.float32)), state


def _categorical(logits: torch.Tensor) -> Categorical:
    return Categorical(logits=logits)


def _normal(parameters: tuple[torch.Tensor, torch.Tensor]) -> Independent:
    return Independent(Normal(*parameters), 1)
