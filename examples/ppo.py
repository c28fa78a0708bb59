"""Train PPO on Acrobot-v1, test it on 100 numbered episodes, and compare it with its half-way self.

    python examples/ppo.py --output-dir runs/demo

While it trains, an evaluator runs test episodes in a process of its own. The trained policy is then
tested on other episodes, and so is what it was after half of the training. Writes the weights of
both, reports on both, on their comparison and on the learning curve, and an index of all pages.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

import tdcollect
from tdcollect.evaluation import Request, export
from tdcollect.lab.pages.view import view

NUM_ENVS, FRAMES_PER_BATCH, EPOCHS, LEARNING_RATE = 16, 1024, 10, 1e-3
POINTS = 10  # of the curve of test episodes


def actor(env):
    """A policy with new weights."""
    size, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    return ProbabilisticActor(
        TensorDictModule(MLP(size, actions, num_cells=[64, 64]), ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def train(env_id, seed, frames, output_dir):
    """Write the weights after half of the training and at its end; return the best checkpoint.

    Test episodes run beside the training.
    """
    torch.manual_seed(seed)
    env = tdcollect.make_env(env_id, NUM_ENVS, episode_reward=True)
    policy = actor(env)
    size = env.observation_spec["observation"].shape[-1]
    critic = ValueOperator(MLP(size, 1, num_cells=[64, 64]), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(policy, critic, entropy_coeff=0.01, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), LEARNING_RATE)

    collector = tdcollect.Collector(
        env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=frames
    )
    collector.set_seed(seed)

    # Its process tests copies of the policy, on other episodes than the report; the training stays
    # the same to the bit.
    evaluator = tdcollect.Evaluator(
        env_id, policy, num_trajectories=20, seed=1, output_dir=output_dir / "curve",
        queue_size=POINTS,
    )  # fmt: skip
    batches = max(1, frames // FRAMES_PER_BATCH)
    # A progress bar on terminals only.
    with tqdm(total=frames, unit=" frames", unit_scale=True, disable=None) as bar:
        for number, batch in enumerate(collector, 1):  # [N, T]
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (number - 1) / batches)
            with torch.no_grad():
                advantage(batch)
            for _ in range(EPOCHS):
                losses = loss_module(batch)
                optimizer.zero_grad()
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
            if number % max(1, batches // POINTS) == 0:
                evaluator.trigger_eval(step=number * FRAMES_PER_BATCH)
            if number == (batches + 1) // 2:
                torch.save(policy.state_dict(), output_dir / "halfway.pt")
            bar.update(batch.numel())
            tell(evaluator.poll())
    torch.save(policy.state_dict(), output_dir / "trained.pt")
    collector.shutdown()
    while tell(evaluator.wait()):  # also raises the error of a test that failed
        pass
    evaluator.shutdown()
    return evaluator.best


def tell(metrics):
    """Print the mean return of test episodes, if there is one; also where a bar is not shown."""
    if metrics is not None:
        step, mean = int(metrics["eval/step"]), metrics["eval/reward"]
        tqdm.write(f"{step:>9,} frames: mean return of test episodes {mean:.1f}", sys.stdout)
        sys.stdout.flush()
    return metrics


def main(argv=None):
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs/ppo"), help="folder for results"
    )
    parser.add_argument("--env", default="Acrobot-v1", help="an env with discrete actions")
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    parser.add_argument("--frames", type=int, default=102_400, help="frames to train for")
    parser.add_argument("--episodes", type=int, default=100, help="number of test episodes")
    parser.add_argument("--root", type=int, default=0, help="root seed of the test episodes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # faster: the networks are small
    out = args.output_dir
    out.mkdir(parents=True, exist_ok=True)
    print(f"PPO trains on {args.env} for {args.frames:,} frames, with test episodes beside it.")
    print(f"Then {args.episodes} others test the trained policy, and what it was half-way.")
    print(f"It takes about half a minute. All goes to {out}.\n", flush=True)

    best = train(args.env, args.seed, args.frames, out)
    print(f"\nBest checkpoint: {best.step:,} frames, mean return {best.value:.1f}, {best.path}\n")

    # Both run the same numbered episodes, which are then compared in pairs. The policies take their
    # most likely actions. The names let `tdcollect replay` run episodes again.
    results, named = {}, f"{os.path.relpath(__file__)}:actor"
    env = tdcollect.make_env(args.env, 1)
    for name in ("halfway", "trained"):
        policy, file = actor(env), out / f"{name}.pt"
        policy.load_state_dict(torch.load(file, weights_only=True))
        request = Request(args.env, named, checkpoint=str(file))
        results[name] = tdcollect.evaluate(
            args.env, policy, args.episodes, seed=args.root, output_dir=out / name, request=request
        )
    comparison = tdcollect.compare(*results.values(), names=[*results])
    export(comparison, "html", out / "comparison")
    index, _ = view(out, out / "pages", overwrite=True)

    print(f"The trained policy\n\n{results['trained'].summary()}\n\n{comparison}\n")
    print(f"All of it on pages, after {time.monotonic() - started:.0f} s. Open {index}")


if __name__ == "__main__":
    main()
