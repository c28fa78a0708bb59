"""Train PPO on CartPole-v1, test it on 100 numbered episodes, and compare it with random actions.

    python examples/ppo.py --output-dir runs/demo

While it trains, an evaluator runs test episodes in a process of its own. Prints the statistics.
Writes the weights, the learning curve with its best checkpoint, and three reports: on the trained
policy, on random actions, and on their comparison. The exit status is 1 if the mean test return
misses the goal.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

import tdcollect
from tdcollect.evaluation import Request, export

ENV, MOST, GOAL = "CartPole-v1", 500, 475
NUM_ENVS, FRAMES_PER_BATCH, EPOCHS, LEARNING_RATE = 8, 256, 20, 1e-3
POINTS = 10  # of the curve of test episodes


def actor(env):
    """A policy with new weights."""
    return ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def train(seed, frames, output_dir):
    """Return the trained policy, its training episodes, and an evaluator with the learning curve.

    Training episodes are pairs (frames so far, return). Test episodes run meanwhile.
    """
    torch.manual_seed(seed)
    env = tdcollect.make_env(ENV, NUM_ENVS, episode_reward=True)
    policy = actor(env)
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
    advantage = GAE(gamma=0.98, lmbda=0.8, value_network=critic)
    loss_module = ClipPPOLoss(policy, critic, entropy_coeff=0.0, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), LEARNING_RATE)

    collector = tdcollect.Collector(
        env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=frames
    )
    collector.set_seed(seed)
    # Its process tests copies of the policy, on other episodes than the report; the training stays
    # the same to the bit.
    evaluator = tdcollect.Evaluator(
        ENV, policy, num_trajectories=20, seed=1, output_dir=output_dir, queue_size=POINTS
    )
    every = max(1, frames // FRAMES_PER_BATCH // POINTS)
    episodes, seen, batches = [], 0, 0
    # A progress bar on terminals only.
    with tqdm(total=frames, unit=" frames", unit_scale=True, disable=None) as bar:
        for batch in collector:  # [N, T]
            for step, slot in batch["next", "done"].squeeze(-1).t().nonzero().tolist():
                frame = seen + step * NUM_ENVS + slot + 1
                episodes.append((frame, batch["next", "episode_reward"][slot, step].item()))
            seen, batches = seen + batch.numel(), batches + 1
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * max(1 - seen / frames, 0)
            with torch.no_grad():
                advantage(batch)
            for _ in range(EPOCHS):
                losses = loss_module(batch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
            if batches % every == 0:
                evaluator.trigger_eval(step=seen)
            bar.set_postfix_str(f"return {np.mean([r for _, r in episodes[-50:]]):.0f}")
            bar.update(batch.numel())
    collector.shutdown()
    while evaluator.wait() is not None:  # also raises the error of a test that failed
        pass
    evaluator.shutdown()
    return policy, episodes, evaluator


def draw(file, episodes, curve):
    """Draw returns of training episodes, and mean returns of test episodes with intervals."""
    frames, training = np.array(episodes).T
    window = min(20, len(training))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.scatter(frames, training, s=8, alpha=0.35, linewidths=0, label="episode")
    mean = np.convolve(training, np.ones(window) / window, "valid")
    axes.plot(frames[window - 1 :], mean, color="C1", label=f"mean of {window} episodes")
    steps, tested = [p.step for p in curve], [p.mean for p in curve]
    axes.plot(steps, tested, "o-", color="C2", markersize=3, label="mean of test episodes")
    low, high = [p.low for p in curve], [p.high for p in curve]
    axes.fill_between(steps, low, high, color="C2", alpha=0.2, linewidth=0, label="95% interval")
    axes.axhline(GOAL, color="0.4", linestyle="--", linewidth=1, label=f"goal of {GOAL}")
    axes.set(xlabel="frames", ylabel="return", title=f"PPO on {ENV}")
    axes.set(xlim=(0, frames[-1]), ylim=(0, MOST * 1.05))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=150)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs/ppo"), help="folder for results"
    )
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    parser.add_argument("--frames", type=int, default=102_400, help="frames to train for")
    parser.add_argument("--episodes", type=int, default=100, help="number of test episodes")
    parser.add_argument("--root", type=int, default=0, help="root seed of the test episodes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # faster: the networks are small
    args.output_dir.mkdir(parents=True, exist_ok=True)

    policy, training, evaluator = train(args.seed, args.frames, args.output_dir / "curve")
    torch.save(policy.state_dict(), args.output_dir / "policy.pt")
    draw(args.output_dir / "learning_curve.png", training, evaluator.curve)

    # Both run the same numbered episodes, which are then compared in pairs. The policy takes its
    # most likely actions. The names let `tdcollect replay` run episodes again.
    names = Request(ENV, f"{__file__}:actor", checkpoint=str(args.output_dir / "policy.pt"))
    trained, by_chance = (
        tdcollect.evaluate(
            ENV,
            tested,
            args.episodes,
            seed=args.root,
            output_dir=args.output_dir / name,
            request=request,
        )
        for name, tested, request in [
            ("trained", policy, names),
            ("random", None, Request(ENV, "random")),
        ]
    )
    comparison = tdcollect.compare(by_chance, trained, names=["random", "trained"])
    report = export(comparison, "html", args.output_dir / "comparison")

    print(f"\nThe trained policy on {ENV}\n\n{trained.summary()}\n\n{comparison}\n")
    best = evaluator.best
    print(f"Best checkpoint: {best.step:,} frames, mean return of test episodes {best.value:.1f}")
    print(f"Its weights: {best.path}\n")
    for file in ("learning_curve.png", "trained/report.html", "random/report.html"):
        print(args.output_dir / file)
    print(report)
    mean = trained.summary().returns.mean
    if mean < GOAL:
        return f"the mean return of {mean:.1f} misses the goal of {GOAL}"
    return None


if __name__ == "__main__":
    sys.exit(main())
