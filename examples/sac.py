"""Train SAC on HalfCheetah-v5, and compare it with random actions on numbered test episodes.

    pip install 'gymnasium[mujoco]'
    python examples/sac.py --frames 25600

The collector fills the replay buffer; there is one update for each frame.
"""

import argparse

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

import tdcollect

ENV, NUM_ENVS, FRAMES_PER_BATCH, MINIBATCH = "HalfCheetah-v5", 8, 64, 256
RANDOM_FRAMES = 5_120  # before the policy acts
CELLS = {"num_cells": [256, 256], "activation_class": nn.ReLU}


def make_env(num_envs):
    return TransformedEnv(tdcollect.make_env(ENV, num_envs), DoubleToFloat())


def networks(env):
    """An actor and a critic with new weights."""
    observations, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    net = nn.Sequential(MLP(observations, 2 * actions, **CELLS), NormalParamExtractor())
    space = env.action_spec_unbatched.space
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec_unbatched,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high},
    )
    critic = ValueOperator(MLP(observations + actions, 1, **CELLS), ["observation", "action"])
    return actor, critic


def train(seed, frames):
    """Return the trained actor."""
    torch.manual_seed(seed)
    env = make_env(NUM_ENVS)
    actor, critic = networks(env)
    loss_module = SACLoss(actor, critic, num_qvalue_nets=2)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, eps=0.995)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-4)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(min(frames, 1_000_000) + NUM_ENVS, ndim=2), batch_size=MINIBATCH
    )
    random_frames = min(RANDOM_FRAMES, frames // 4)
    collector = tdcollect.Collector(
        env,
        actor,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=frames,
        init_random_frames=random_frames,
        replay_buffer=buffer,
    )
    collector.set_seed(seed)
    seen = 0
    for _ in collector:  # yields None: the batch is in the buffer
        seen += FRAMES_PER_BATCH
        if seen <= random_frames:
            continue
        for _ in range(FRAMES_PER_BATCH):
            losses = loss_module(buffer.sample())
            optimizer.zero_grad()
            sum(losses[name] for name in ("loss_actor", "loss_qvalue", "loss_alpha")).backward()
            optimizer.step()
            target.step()
        if seen % (100 * FRAMES_PER_BATCH) == 0:
            print(f"{seen} frames: {collector.stats.window}")
    collector.shutdown()
    return actor


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000, help="frames to train for")
    parser.add_argument("--episodes", type=int, default=10, help="number of test episodes")
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # faster: the networks are small

    actor = train(args.seed, args.frames)
    # The policy takes its most likely actions. Both run the same numbered episodes.
    trained, by_chance = (
        tdcollect.evaluate(make_env(args.episodes), tested, args.episodes)
        for tested in (actor, None)
    )
    print(trained.summary())
    print(tdcollect.compare(by_chance, trained, names=["random", "SAC"]))


if __name__ == "__main__":
    main()
