"""Train a DQN on CartPole-v1 from a replay buffer that the collector fills.

    python examples/dqn.py --output-dir runs/dqn

Prints the mean return of greedy test episodes and writes results.json.
"""

import argparse
import json
from pathlib import Path

import torch
from tensordict.nn import TensorDictSequential
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from tqdm import tqdm

import tdcollect

ENV, NUM_ENVS, FRAMES_PER_BATCH, MINIBATCH, UPDATES = "CartPole-v1", 8, 64, 128, 16


def train(seed, frames):
    """Return the greedy policy and the returns of the training episodes, in order."""
    torch.manual_seed(seed)
    env = tdcollect.make_env(ENV, NUM_ENVS, episode_reward=True)
    network = MLP(4, 2, num_cells=[128, 128], activation_class=torch.nn.ReLU)
    actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    explore = EGreedyModule(env.action_spec, eps_end=0.05, annealing_num_steps=frames // 4)
    loss_module = DQNLoss(actor, double_dqn=True, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, eps=0.995)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=5e-4)

    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames, ndim=2),  # stores batches [N, T], samples transitions
        batch_size=MINIBATCH,
    )
    returns = []

    def record(batch):  # [N, T]
        returns.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())

    collector = tdcollect.Collector(
        env,
        TensorDictSequential(actor, explore),
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=frames,
        replay_buffer=buffer,
        post_collect_hook=record,
    )
    collector.set_seed(seed)
    # A progress bar on terminals only.
    with tqdm(total=frames, unit=" frames", unit_scale=True, disable=None) as bar:
        for _ in collector:  # yields None: the batch is in the buffer
            bar.update(FRAMES_PER_BATCH)
            explore.step(FRAMES_PER_BATCH)
            if len(buffer) < 1000:
                continue
            for _ in range(UPDATES):
                loss = loss_module(buffer.sample())["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                target.step()
            bar.set_postfix_str(f"return {sum(returns[-50:]) / max(1, len(returns[-50:])):.0f}")
    collector.shutdown()
    return actor, returns


def test(actor, root, count):
    """Returns of the test episodes 0 .. count - 1 of root seed ``root``, one per slot."""
    env = tdcollect.make_env(ENV, count, episode_reward=True)
    start = env.reset(seed=[tdcollect.env_seed(root, i) for i in range(count)])
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        # A slot whose episode has ended waits, repeating its last row, until all have ended.
        rollout = env.rollout(
            500,
            actor,
            tensordict=start,
            auto_reset=False,
            break_when_any_done=False,
            break_when_all_done=True,
        )
    env.close()
    return rollout["next", "episode_reward"][:, -1, 0].tolist()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs/dqn"), help="folder for results"
    )
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    parser.add_argument("--frames", type=int, default=30_720, help="frames to train for")
    parser.add_argument("--episodes", type=int, default=20, help="number of test episodes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    actor, training = train(args.seed, args.frames)
    returns = test(actor, 0, args.episodes)
    results = {
        "mean test return": sum(returns) / len(returns),
        "test returns": returns,
        "training returns": training,
        "frames": args.frames,
        "training seed": args.seed,
    }
    (args.output_dir / "results.json").write_text(json.dumps(results) + "\n")
    print(f"mean return of {len(returns)} test episodes: {results['mean test return']:.1f}")


if __name__ == "__main__":
    main()
