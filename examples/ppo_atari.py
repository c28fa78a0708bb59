"""Train PPO on Pong from pixels, with TorchRL's transforms, and test it on whole games.

    pip install ale-py torchvision
    python examples/ppo_atari.py --frames 8192

Training ends an episode with each life and clips rewards to their sign. Test episodes are whole
games, with the game's own score.
"""

import argparse

import ale_py
import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import ExplorationType, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import ActorValueOperator, ConvNet, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import tdcollect
from tdcollect.envs import GymEnv, ParallelEnv

gym.register_envs(ale_py)
ENV, NUM_ENVS, STEPS, EPOCHS, MINIBATCHES = "ALE/Pong-v5", 8, 128, 4, 4


def game(training=True):
    """One game, which starts with up to 30 steps of no operation."""
    env = TransformedEnv(GymEnv(ENV, categorical_action_encoding=True), T.NoopResetEnv(noops=30))
    return env.append_transform(T.EndOfLifeTransform()) if training else env


def image():
    """Observations are the latest four frames, grey, 84 by 84."""
    return T.ToTensorImage(), T.GrayScale(), T.Resize(84, 84), T.CatFrames(N=4, dim=-3)


def test_env():
    return game(training=False).append_transform(T.Compose(*image()))


def actor_and_critic(env):
    """An actor and a critic that share the convolutions."""
    convolutions = ConvNet(4, None, [32, 64, 64], [8, 4, 3], [4, 2, 1], activation_class=nn.ReLU)
    features = nn.Sequential(convolutions, nn.Linear(3136, 512), nn.ReLU())
    logits = TensorDictModule(nn.Linear(512, env.action_spec.space.n), ["features"], ["logits"])
    both = ActorValueOperator(
        TensorDictModule(features, ["pixels"], ["features"]),
        ProbabilisticActor(
            logits,
            in_keys=["logits"],
            spec=env.action_spec_unbatched,
            distribution_class=Categorical,
            return_log_prob=True,
        ),
        ValueOperator(nn.Linear(512, 1), in_keys=["features"]),
    )
    return both.get_policy_operator(), both.get_value_operator()


def train(seed, frames):
    """Return the trained policy."""
    torch.manual_seed(seed)
    clipped = T.SignTransform(in_keys=["reward"])
    env = TransformedEnv(ParallelEnv(NUM_ENVS, game), T.Compose(*image(), clipped))
    policy, critic = actor_and_critic(env)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(policy, critic, clip_epsilon=0.1, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=2.5e-4, eps=1e-5)
    collector = tdcollect.Collector(
        env, policy, frames_per_batch=NUM_ENVS * STEPS, total_frames=frames
    )
    collector.set_seed(seed)
    print(collector.explain())
    for batch in collector:  # [N, T]
        with torch.no_grad():
            advantage(batch)
        rows = batch.reshape(-1)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(rows)).chunk(MINIBATCHES):
                losses = loss_module(rows[chosen])
                optimizer.zero_grad()
                sum(v for name, v in losses.items() if name.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
        print(collector.stats.window)
    collector.shutdown()
    return policy


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=10_000_000, help="frames to train for")
    parser.add_argument("--episodes", type=int, default=10, help="number of test episodes")
    parser.add_argument("--max-steps", type=int, default=27_000, help="of a test episode")
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    args = parser.parse_args(argv)

    policy = train(args.seed, args.frames)
    options = {
        "max_episode_steps": args.max_steps,
        "exploration_type": ExplorationType.RANDOM,  # draw actions
    }
    trained, by_chance = (
        tdcollect.evaluate(test_env, p, args.episodes, **options) for p in (policy, None)
    )
    print(trained.summary())
    print(tdcollect.compare(by_chance, trained, names=["random", "PPO"]))


if __name__ == "__main__":
    main()
