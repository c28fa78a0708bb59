"""Train the linear policies of the suite: three runs for each task, about a minute in all.

    python examples/suite/train.py

Writes ``runs/suite/linear/{task}/{run}.pt``, the weights, and ``{run}.norm.pt``, the statistics
that observations are normalised with; suite.toml reads both. The method is the cross-entropy
method: each slot of the env acts by a candidate of its own, and the next candidates are drawn
around the best ones. The same run gives the same files.
"""

import argparse
import warnings
from pathlib import Path

import torch
from policies import linear
from tensordict.nn import TensorDictModule
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import VecNormV2
from tqdm import tqdm

import tdcollect

TASKS = {"cartpole": "CartPole-v1", "acrobot": "Acrobot-v1", "mountain-car": "MountainCar-v0"}
RUNS = 3
STEPS = 500  # of each candidate: one episode or more
ROOT = Path(__file__).parents[2]  # of the checkout


class Candidates(torch.nn.Module):
    """Linear policies, one per slot.

    Attributes:
        weight: float32 ``[N, actions, size]``.
        bias: float32 ``[N, actions]``.
    """

    def __init__(self, count, actions, size):
        super().__init__()
        self.register_buffer("weight", torch.zeros(count, actions, size))
        self.register_buffer("bias", torch.zeros(count, actions))

    def forward(self, observation):
        """Return one-hot actions ``[N, actions]`` for observations ``[N, size]``."""
        values = torch.einsum("nas,ns->na", self.weight, observation) + self.bias
        return torch.nn.functional.one_hot(values.argmax(-1), values.shape[-1])


def mean_returns(batch):
    """Return the mean return ``[N]`` over the episodes of each slot, the last one cut off."""
    episodes = 1 + batch["next", "done"].squeeze(-1)[:, :-1].sum(-1)
    return batch["next", "reward"].sum(dim=(1, 2)) / episodes


def train(env_id, seed, generations, population, bar):
    """Return the state_dict of a linear policy, and that of its env."""
    generator = torch.Generator().manual_seed(seed)
    norm = VecNormV2(in_keys=["observation"], reduce_batch_dims=True)
    env = TransformedEnv(tdcollect.make_env(env_id, population, seed=seed), norm)
    policy = linear(env)
    actions, size = policy.module[0].module.weight.shape
    candidates = Candidates(population, actions, size)
    collector = tdcollect.Collector(
        env,
        TensorDictModule(candidates, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=population * STEPS,
        total_frames=generations * population * STEPS,
        reset_at_each_iter=True,
    )
    mean, std = torch.zeros(actions, size + 1), torch.ones(actions, size + 1)
    batches = iter(collector)
    for _ in range(generations):
        noise = torch.randn(population, actions, size + 1, generator=generator)
        drawn = mean + std * noise
        candidates.weight.copy_(drawn[..., :-1])
        candidates.bias.copy_(drawn[..., -1])
        returns = mean_returns(next(batches))
        best = drawn[returns.topk(population // 5).indices]
        mean, std = best.mean(0), best.std(0) + 0.05
        bar.update()
        bar.set_postfix_str(f"return {returns.mean():.0f}")
    statistics = env.state_dict()
    collector.shutdown()
    with torch.no_grad():
        layer = policy.module[0].module
        layer.weight.copy_(mean[:, :-1])
        layer.bias.copy_(mean[:, -1])
    return policy.state_dict(), statistics


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs" / "suite")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--population", type=int, default=40)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Support of VecNormV2")  # for batches, by reduce_batch_dims
    # A progress bar on terminals only.
    total = len(TASKS) * RUNS * args.generations
    with tqdm(total=total, unit=" generations", disable=None) as bar:
        for task, env_id in TASKS.items():
            for run in range(RUNS):
                bar.set_description(f"{task} {run}")
                weights, statistics = train(env_id, run, args.generations, args.population, bar)
                folder = args.output_dir / "linear" / task
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(weights, folder / f"{run}.pt")
                torch.save(statistics, folder / f"{run}.norm.pt")
                bar.write(f"wrote {folder / str(run)}.pt and {run}.norm.pt")


if __name__ == "__main__":
    main()
