"""Train an agent in CleanRL's style, and test two of its checkpoints on the same episodes.

    python examples/cleanrl_agent.py --frames 50000

The agent is a plain ``nn.Module`` with ``get_value`` and ``get_action_and_value``, and its training
is a loop over gymnasium's vector env. Nothing here knows of TensorDict.
"""

import argparse
import copy

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical

import tdcollect
from tdcollect.policies import from_function

ENV, NUM_ENVS, STEPS, EPOCHS, MINIBATCHES, GAMMA, LAMBDA = "CartPole-v1", 4, 128, 4, 4, 0.99, 0.95


def network(inputs, outputs, std):
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, std), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """As in CleanRL's ppo.py."""

    def __init__(self, envs):
        super().__init__()
        size = envs.single_observation_space.shape[0]
        self.critic = network(size, 1, std=1.0)
        self.actor = network(size, int(envs.single_action_space.n), std=0.01)

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def policy_of(agent):
    """The agent as a policy to evaluate: it draws its actions, as in training."""
    return from_function(lambda x: agent.get_action_and_value(torch.Tensor(x))[0], batched=True)


def train(seed, frames):
    """Return the agents after each quarter of the training."""
    torch.manual_seed(seed)
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.make(ENV)] * NUM_ENVS, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    observations, _ = envs.reset(seed=seed)
    done = torch.zeros(NUM_ENVS)
    saved = []
    updates = max(frames // (NUM_ENVS * STEPS), 4)
    for update in range(1, updates + 1):
        rows = []
        for _ in range(STEPS):
            x = torch.as_tensor(observations)
            with torch.no_grad():
                action, log_prob, _, value = agent.get_action_and_value(x)
            observations, reward, terminated, truncated, _ = envs.step(action.numpy())
            rows.append((x, action, log_prob, value[:, 0], done, torch.as_tensor(reward).float()))
            done = torch.as_tensor(terminated | truncated).float()
        x, action, log_prob, value, ended, reward = map(torch.stack, zip(*rows, strict=True))
        with torch.no_grad():
            next_value, next_ended = agent.get_value(torch.as_tensor(observations))[:, 0], done
        advantage, last = torch.zeros_like(reward), torch.zeros(NUM_ENVS)
        for t in reversed(range(STEPS)):
            delta = reward[t] + GAMMA * next_value * (1 - next_ended) - value[t]
            advantage[t] = last = delta + GAMMA * LAMBDA * (1 - next_ended) * last
            next_value, next_ended = value[t], ended[t]
        data = (x, action, log_prob, advantage, advantage + value)
        x, action, log_prob, advantage, target = (rows.flatten(0, 1) for rows in data)
        for _ in range(EPOCHS):
            for i in torch.randperm(len(x)).chunk(MINIBATCHES):
                _, new, entropy, value = agent.get_action_and_value(x[i], action[i])
                ratio, a = (new - log_prob[i]).exp(), advantage[i]
                a = (a - a.mean()) / (a.std() + 1e-8)
                loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
                loss = loss + 0.25 * (value[:, 0] - target[i]).square().mean()
                optimizer.zero_grad()
                (loss - 0.01 * entropy.mean()).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if update % (updates // 4) == 0:
            saved.append(copy.deepcopy(agent))
    return saved


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=500_000, help="frames to train for")
    parser.add_argument("--episodes", type=int, default=100, help="number of test episodes")
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)

    early, _, _, last = train(args.seed, args.frames)
    first, final = (
        tdcollect.evaluate(ENV, policy_of(agent), args.episodes) for agent in (early, last)
    )
    print(final.summary())
    print(tdcollect.compare(first, final, names=["early", "final"]))


if __name__ == "__main__":
    main()
