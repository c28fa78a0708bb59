"""Time of our trajectory functions and TorchRL's, and its growth with the steps (a minute).

python benchmarks/trajectories.py [--rounds 15]

Each round runs every program once, in turn; figures are medians over rounds, in milliseconds.
Batches are synthetic: the entries of CartPole-v1, episodes of 47 steps on average.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import tensordict
import torch
import torchrl
from tensordict import TensorDict
from torchrl.collectors.utils import split_trajectories as stock

from tdcollect import trajectories

MEAN_LENGTH = 47


def make_batch(slots: int, steps: int, seed: int = 0) -> TensorDict:
    """A batch ``[N, T]`` with the entries of a CartPole collection."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*feature: int) -> torch.Tensor:
        return torch.rand(slots, steps, *feature, generator=generator)

    done = rand(1) < 1 / MEAN_LENGTH
    # A new id after each done row, and at the start of each slot.
    starts = torch.cat([torch.ones(slots, 1, dtype=torch.bool), done[:, :-1, 0]], 1)
    ids = starts.flatten().cumsum(0).view(slots, steps) - 1
    flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    return TensorDict(
        {
            "observation": rand(4),
            "action": rand(2) < 0.5,
            "action_log_prob": rand(),
            "logits": rand(2),
            **{name: torch.zeros_like(done) for name in flags},
            "next": {"observation": rand(4), "reward": rand(1), **flags},
            "collector": {"traj_ids": ids},
        },
        [slots, steps],
        names=[None, "time"],
    )


def programs(batch: TensorDict) -> dict[str, Callable[[], object]]:
    """The programs to time on a batch."""
    split = trajectories.split_trajectories
    index = trajectories.TrajectoryIndex.of(batch)
    padded = split(batch)

    def assemble() -> None:
        assembler = trajectories.TrajectoryAssembler()
        for chunk in batch.split(batch.shape[1] // 8, dim=1):
            assembler.feed(chunk)

    return {
        "padded, TorchRL": lambda: stock(batch, prefix="collector"),
        "padded": lambda: split(batch),
        "jagged": lambda: split(batch, layout="jagged"),
        "flat": lambda: split(batch, layout="flat"),
        "list": lambda: split(batch, layout="list"),
        "index": lambda: trajectories.TrajectoryIndex.of(batch),
        "padded, joined again": lambda: trajectories.join_trajectories(padded, index),
        "returns": lambda: trajectories.returns(batch),
        "discounted_returns": lambda: trajectories.discounted_returns(batch, 0.99),
        "assembled from 8 batches": assemble,
    }


def medians(sizes: list[tuple[int, int]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each program, for each size; all take turns, after one unmeasured round."""
    cells = [(name, run) for size in sizes for name, run in programs(make_batch(*size)).items()]
    times: list[list[float]] = [[] for _ in cells]
    for turn in range(rounds + 1):
        for taken, (_, run) in zip(times, cells, strict=True):
            start = time.perf_counter()
            run()
            if turn:
                taken.append((time.perf_counter() - start) * 1e3)
    found: dict[str, list[float]] = {}
    for taken, (name, _) in zip(times, cells, strict=True):
        found.setdefault(name, []).append(statistics.median(taken))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    sizes = [(64, 1024), (64, 4096)]
    found = medians(sizes, rounds)
    print(
        f"{platform.machine()}, one thread; torch {torch.__version__}, torchrl "
        f"{torchrl.__version__}, tensordict {tensordict.__version__}; medians of {rounds} rounds"
    )
    for size in sizes:
        index = trajectories.TrajectoryIndex.of(make_batch(*size))
        print(f"{size[0]}x{size[1]}: {len(index)} trajectories, the longest {index.longest} steps")
    heads = [f"{slots}x{steps}, ms" for slots, steps in sizes]
    print("\n| | " + " | ".join(heads) + " | growth for 4 times the steps | TorchRL / this |")
    print("|---|---|---|---|---|")
    base = found["padded, TorchRL"]
    for name, (small, large) in found.items():
        print(
            f"| {name} | {small:.2f} | {large:.2f} | {large / small:.1f} | "
            f"{base[0] / small:.0f} and {base[1] / large:.0f} |"
        )


if __name__ == "__main__":
    main()
