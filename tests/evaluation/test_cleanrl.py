"""Agents with the shapes of CleanRL's, unchanged: the oracle is a plain loop, as their scripts'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal

import tdcollect
from tdcollect.policies import from_function


def cartpole() -> gym.Env[Any, Any]:
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1", max_episode_steps=30))


def pendulum() -> gym.Env[Any, Any]:
    made = gym.make("Pendulum-v1", max_episode_steps=8)
    return gym.wrappers.ClipAction(gym.wrappers.RecordEpisodeStatistics(made))


def layers(envs: Any, outputs: int) -> nn.Sequential:
    inputs = int(np.prod(envs.single_observation_space.shape))
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Discrete(nn.Module):
    """As in ppo.py."""

    def __init__(self, envs: Any):
        super().__init__()
        self.actor = layers(envs, envs.single_action_space.n)
        self.critic = layers(envs, 1)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Continuous(nn.Module):
    """As in ppo_continuous_action.py and in sac_continuous_action.py."""

    def __init__(self, envs: Any):
        super().__init__()
        self.actor_mean = layers(envs, int(np.prod(envs.single_action_space.shape)))
        self.scale = torch.as_tensor(envs.single_action_space.high)

    def get_action_and_value(self, x: Any) -> Any:
        probs = Normal(self.actor_mean(x), 0.5)
        action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), None

    def get_action(self, x: Any) -> Any:
        mean = self.actor_mean(x)
        drawn = torch.tanh(Normal(mean, 0.5).rsample()) * self.scale
        return drawn, None, torch.tanh(mean) * self.scale


class Atoms(nn.Module):
    """As in c51.py, which keeps its env."""

    def __init__(self, envs: Any):
        super().__init__()
        self.env, self.n = envs, int(envs.single_action_space.n)
        self.register_buffer("atoms", torch.linspace(-10, 10, steps=5))
        self.network = layers(envs, self.n * 5)

    def get_action(self, x: Any, action: Any = None) -> Any:
        of = torch.softmax(self.network(x).view(len(x), self.n, 5), dim=2)
        action = torch.argmax((of * self.atoms).sum(2), 1) if action is None else action
        return action, of[torch.arange(len(x)), action]


class Values(nn.Module):
    """As in dqn.py."""

    def __init__(self, envs: Any):
        super().__init__()
        self.network = layers(envs, envs.single_action_space.n)

    def forward(self, x: Any) -> Any:
        return self.network(x)


SHAPES: dict[str, Any] = {
    "ppo": (Discrete, cartpole, lambda agent: lambda x: agent.get_action_and_value(t(x))[0]),
    "ppo, greedy": (Discrete, cartpole, lambda agent: lambda x: agent.actor(t(x)).argmax(-1)),
    "ppo, continuous": (
        *(Continuous, pendulum),
        lambda agent: lambda x: agent.get_action_and_value(t(x))[0],
    ),
    "dqn": (Values, cartpole, lambda network: lambda x: network(t(x)).argmax(-1)),
    "dqn, epsilon": (
        *(Values, cartpole),
        lambda network: (
            lambda x: torch.where(
                torch.rand(len(x)) < 0.3, torch.randint(2, (len(x),)), network(t(x)).argmax(-1)
            )
        ),
    ),
    "c51": (Atoms, cartpole, lambda network: lambda x: network.get_action(t(x))[0]),
    "sac": (Continuous, pendulum, lambda actor: lambda x: actor.get_action(t(x))[0]),
    "sac, its mean": (Continuous, pendulum, lambda actor: lambda x: actor.get_action(t(x))[2]),
}
t = torch.Tensor


def made(name: str, seed: int) -> tuple[Any, Any]:
    """An env, and the function of an agent with weights of a seed."""
    kind, env, acts = SHAPES[name]
    torch.manual_seed(seed)
    return env, acts(kind(gym.vector.SyncVectorEnv([env])))


def by_loop(env: Callable[[], Any], act: Any, episodes: int) -> list[float]:
    """The returns of test episodes by a loop over gymnasium's vector env of one."""
    returns = []
    for i in range(episodes):
        one = env()
        observation, _ = one.reset(seed=tdcollect.env_seed(0, i))
        torch.manual_seed(tdcollect.policy_seed(0, i))
        total, ended = 0.0, False
        while not ended:
            with torch.no_grad():
                action = np.asarray(act(observation[None]))[0]
            observation, reward, terminated, truncated, info = one.step(action)
            total, ended = total + float(np.float32(reward)), terminated or truncated
        assert info["episode"]["r"] == pytest.approx(total, rel=1e-5)
        returns.append(total)
    return returns


@pytest.mark.parametrize("name", SHAPES)
def test_an_agent_acts_as_in_its_script(name: str) -> None:
    env, act = made(name, 0)
    results = []
    for agent in (act, made(name, 1)[1]):
        policy = from_function(agent, batched=True)
        options: Any = {"inference_batch_size": 1, "progress": False}
        results.append(tdcollect.evaluate(env, policy, 4, **options))
        assert results[-1].returns.tolist() == pytest.approx(by_loop(env, agent, 4), rel=1e-6)
    first, second = (result.manifest["policy"]["digest"] for result in results)
    assert first != second
    difference = tdcollect.compare(*results).differences[0].difference
    assert difference.mean == pytest.approx(np.mean(results[1].returns - results[0].returns))


def test_statistics_of_normalized_observations_are_carried_and_frozen(tmp_path: Path) -> None:
    """In ppo_continuous_action.py they are in the env, and no file has them."""

    def normalized(frozen: Any = None) -> gym.Env[Any, Any]:
        env = gym.wrappers.NormalizeObservation(pendulum())
        if frozen is not None:
            env.obs_rms, env.update_running_mean = frozen, False
        return gym.wrappers.TransformObservation(env, lambda o: np.clip(o, -10, 10), None)

    training = normalized()
    training.reset(seed=0)
    for _ in range(7):
        training.step(training.action_space.sample())
    rms = training.get_wrapper_attr("obs_rms")
    _, act = made("ppo, continuous", 0)
    mean, deviation = rms.mean, np.sqrt(rms.var + 1e-8)
    policy = from_function(
        lambda x: act(np.clip((x - mean) / deviation, -10, 10).astype(np.float32)), batched=True
    )
    options: Any = {"inference_batch_size": 1, "progress": False}
    evaluate = partial(tdcollect.evaluate, pendulum, policy, 4, output_dir=tmp_path, **options)
    result = evaluate()
    expected = by_loop(lambda: normalized(rms), act, 4)
    assert result.returns.tolist() == pytest.approx(expected, rel=1e-6)
    # Other statistics are another policy.
    assert evaluate().digest == result.digest
    mean = mean + 1
    with pytest.raises(ValueError, match="holds an evaluation of another policy or env"):
        evaluate()
    # An env with statistics of its own begins each episode with none: another agent's numbers.
    own, fresh = from_function(act, batched=True), []
    for slots in (1, 4):
        with pytest.warns(UserWarning, match="NormalizeObservation"):
            fresh.append(tdcollect.evaluate(normalized, own, 4, num_envs=slots, **options))
    assert fresh[0].digest == fresh[1].digest != result.digest
    assert fresh[0].returns.tolist() == pytest.approx(by_loop(normalized, act, 4), rel=1e-6)
    assert fresh[0].returns.tolist() != pytest.approx(expected, rel=1e-2)
