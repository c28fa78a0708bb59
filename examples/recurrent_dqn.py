"""Train a recurrent DQN on CartPole-v1 with its velocities hidden, from slices of a replay buffer.

    python examples/recurrent_dqn.py --output-dir runs/recurrent_dqn

Prints the mean return of the first and the last 50 training episodes, and writes results.json.
"""

import argparse
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.modules import MLP, EGreedyModule, GRUModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate
from tqdm import tqdm

import tdcollect

NUM_ENVS, FRAMES_PER_BATCH, UPDATES, HIDDEN = 8, 64, 8, 64
SLICES, SLICE_STEPS = 32, 8


def hide_velocities():
    """CartPole-v1 that observes positions only, as fractions of their limits."""
    env = gym.make("CartPole-v1")
    limits = np.array([2.4, 0.21], np.float32)  # of the cart in m, of the pole in rad
    space = gym.spaces.Box(-2.0, 2.0, (2,))
    return gym.wrappers.TransformObservation(env, lambda full: full[::2] / limits, space)


def train(seed, frames):
    """Train, and return the returns of the training episodes, in order."""
    torch.manual_seed(seed)
    env = tdcollect.make_env(hide_velocities, NUM_ENVS)
    gru = GRUModule(
        input_size=2,
        hidden_size=HIDDEN,
        in_keys=["observation", "recurrent_state", "is_init"],
        out_keys=["features", ("next", "recurrent_state")],
    )
    values = TensorDictModule(MLP(HIDDEN, 2, num_cells=[64]), ["features"], ["action_value"])
    actor = TensorDictSequential(gru, values, QValueModule("one_hot"))
    explore = EGreedyModule(env.action_spec, eps_end=0.05, annealing_num_steps=frames // 4)
    loss_module = DQNLoss(actor, action_space="one_hot", delay_value=True)
    loss_module.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss_module, eps=0.99)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    # The buffer keeps the steps of each slot together. A slice lies in one slot and one episode.
    # Its first row holds the hidden state from which the loss runs the policy again.
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames, ndim=2),
        sampler=SliceSampler(slice_len=SLICE_STEPS, traj_key=("collector", "traj_ids")),
        batch_size=SLICES * SLICE_STEPS,
    )
    collector = tdcollect.Collector(
        env,
        TensorDictSequential(actor, explore),
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=frames,
        replay_buffer=buffer,
        stats_window=50,
    )
    collector.set_seed(seed)
    returns = []
    # A progress bar on terminals only.
    with tqdm(total=frames, unit=" frames", unit_scale=True, disable=None) as bar:
        for _ in collector:  # yields None: the batch is in the buffer
            returns += collector.stats.latest.returns.tolist()
            bar.update(FRAMES_PER_BATCH)
            explore.step(FRAMES_PER_BATCH)
            if len(buffer) < 1000:
                continue
            for _ in range(UPDATES):
                slices = buffer.sample().reshape(SLICES, SLICE_STEPS)
                with set_recurrent_mode(True):
                    loss = loss_module(slices)["loss"]
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 10.0)
                optimizer.step()
                target.step()
            bar.set_postfix_str(f"return {np.mean(returns[-50:]):.0f}")
    collector.shutdown()
    return returns


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs/recurrent_dqn"), help="folder for results"
    )
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    parser.add_argument("--frames", type=int, default=30_720, help="frames to train for")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    returns = train(args.seed, args.frames)
    results = {
        "mean return of the first 50 episodes": float(np.mean(returns[:50])),
        "mean return of the last 50 episodes": float(np.mean(returns[-50:])),
        "frames": args.frames,
        "training seed": args.seed,
    }
    (args.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, result in results.items():
        print(f"{name}: {result:.0f}")


if __name__ == "__main__":
    main()
