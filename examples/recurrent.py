"""Train a recurrent policy (PPO with a GRU) on CartPole-v1 with its velocities hidden.

    python examples/recurrent.py --output-dir runs/recurrent

Prints the mean return of the first and the last 50 training episodes, and writes results.json.
"""

import argparse
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.modules import (
    MLP,
    GRUModule,
    OneHotCategorical,
    ProbabilisticActor,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

import tdcollect

NUM_ENVS, STEPS, EPOCHS, SLOTS_PER_MINIBATCH, HIDDEN = 16, 32, 10, 8, 64


def hide_velocities():
    """CartPole-v1 that observes positions only, as fractions of their limits."""
    env = gym.make("CartPole-v1")
    limits = np.array([2.4, 0.21], np.float32)  # of the cart in m, of the pole in rad
    space = gym.spaces.Box(-2.0, 2.0, (2,))
    return gym.wrappers.TransformObservation(env, lambda full: full[::2] / limits, space)


def train(seed, frames):
    """Train, and return the returns of the training episodes, in order."""
    torch.manual_seed(seed)
    env = tdcollect.make_env(hide_velocities, NUM_ENVS, episode_reward=True)
    # The hidden state is read at step t and written for step t + 1; is_init resets it to zero. The
    # collector adds both entries to the env.
    gru = GRUModule(
        input_size=2,
        hidden_size=HIDDEN,
        in_keys=["observation", "recurrent_state", "is_init"],
        out_keys=["features", ("next", "recurrent_state")],
    )
    logits = TensorDictModule(MLP(HIDDEN, 2, num_cells=[64]), ["features"], ["logits"])
    policy = ProbabilisticActor(
        TensorDictSequential(gru, logits),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    value = ValueOperator(MLP(HIDDEN, 1, num_cells=[64]), in_keys=["features"])
    critic = TensorDictSequential(gru, value)
    advantage = GAE(gamma=0.98, lmbda=0.9, value_network=critic, deactivate_vmap=True)
    loss_module = ClipPPOLoss(
        policy, critic, critic_coeff=0.05, entropy_coeff=0.0, normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    def with_advantages(batch):
        # Run along time: each episode starts from its first hidden state in the batch. (Otherwise
        # GAE would compute the value after an episode's first step from a zero state.)
        with set_recurrent_mode(True):
            return advantage(batch)

    collector = tdcollect.Collector(
        env,
        policy,
        frames_per_batch=NUM_ENVS * STEPS,
        total_frames=frames,
        postproc=with_advantages,
    )
    collector.set_seed(seed)
    returns = []
    # A progress bar on terminals only.
    with tqdm(total=frames, unit=" frames", unit_scale=True, disable=None) as bar:
        for batch in collector:  # [N, T]
            returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
            # Losses run along time, too.
            with set_recurrent_mode(True):
                for _ in range(EPOCHS):
                    for slots in torch.randperm(NUM_ENVS).split(SLOTS_PER_MINIBATCH):
                        losses = loss_module(batch[slots])
                        optimizer.zero_grad()
                        (losses["loss_objective"] + losses["loss_critic"]).backward()
                        torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                        optimizer.step()
            bar.set_postfix_str(f"return {np.mean(returns[-50:]):.0f}")
            bar.update(batch.numel())
    collector.shutdown()
    return returns


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs/recurrent"), help="folder for results"
    )
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    parser.add_argument("--frames", type=int, default=51_200, help="frames to train for")
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
