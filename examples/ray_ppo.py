"""Train PPO on CartPole-v1 with two workers on Ray, and test it on 100 numbered episodes.

    python examples/ray_ppo.py --output-dir runs/ray

Without a Ray that runs, one starts on this machine and stops at the end; on a cluster, the workers
go where it has room: see docs/ray-training.md. A worker that is lost is replaced. Writes the
weights and a report. The exit status is 1 if the mean test return misses the goal.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

import tdcollect
from tdcollect.collectors import RayCollector
from tdcollect.evaluation import Request

ENV, GOAL = "CartPole-v1", 400
SLOTS, FRAMES_PER_BATCH, EPOCHS, LEARNING_RATE = 4, 512, 10, 2e-3


def actor(env):
    """A policy with new weights."""
    return ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def train(seed, frames, workers):
    """Return the trained policy."""
    torch.manual_seed(seed)
    make_env = partial(tdcollect.make_env, ENV, SLOTS)
    env = make_env()
    policy = actor(env)
    env.close()
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
    advantage = GAE(gamma=0.98, lmbda=0.8, value_network=critic)
    loss_module = ClipPPOLoss(policy, critic, entropy_coeff=0.0, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), LEARNING_RATE)

    collector = RayCollector(
        make_env,
        policy,
        num_collectors=workers,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=frames,
        sync=True,  # all workers have the same weights, those of this process
        remote_configs={"num_cpus": 1},
    )
    collector.set_seed(seed)
    # A progress bar on terminals only.
    with tqdm(total=frames, unit=" frames", unit_scale=True, disable=None) as bar:
        for batch in collector:  # [workers, N, T]
            with torch.no_grad():
                advantage(batch)
            for _ in range(EPOCHS):
                losses = loss_module(batch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
            collector.update_policy_weights_()
            bar.update(batch.numel())
    collector.shutdown()
    return policy


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/ray"), help="for results")
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    parser.add_argument("--frames", type=int, default=102_400, help="frames to train for")
    parser.add_argument("--workers", type=int, default=2, help="number of Ray actors")
    parser.add_argument("--episodes", type=int, default=100, help="number of test episodes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # faster: the networks are small
    args.output_dir.mkdir(parents=True, exist_ok=True)

    policy = train(args.seed, args.frames, args.workers)
    checkpoint = args.output_dir / "policy.pt"
    torch.save(policy.state_dict(), checkpoint)
    request = Request(ENV, f"{__file__}:actor", checkpoint=str(checkpoint))
    tested = tdcollect.evaluate(
        ENV, policy, args.episodes, output_dir=args.output_dir / "trained", request=request
    )
    print(f"\nThe trained policy on {ENV}\n\n{tested.summary()}\n")
    print(args.output_dir / "trained" / "report.html")
    mean = tested.summary().returns.mean
    if mean < GOAL:
        return f"the mean return of {mean:.1f} misses the goal of {GOAL}"
    return None


if __name__ == "__main__":
    sys.exit(main())
