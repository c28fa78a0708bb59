"""Collector.set_seed does not govern the first episode."""

import sys

import gymnasium
import torch
from torchrl.collectors import Collector
from torchrl.envs import GymEnv


def first_observation(seed: int) -> torch.Tensor:
    collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=4, total_frames=4)
    collector.set_seed(seed)
    (batch,) = collector
    return batch["observation"][0]


def main() -> int:
    torch.manual_seed(0)
    runs = [first_observation(seed=0) for _ in range(2)]
    seeded, _ = gymnasium.make("CartPole-v1").reset(seed=0)
    print("expected: two collectors with set_seed(0) begin with the same observation")
    for run in runs:
        print("got:     ", [round(x, 4) for x in run.tolist()])
    print("gymnasium's reset(seed=0):", [round(x, 4) for x in seeded.tolist()])
    return int(not torch.equal(*runs))


if __name__ == "__main__":
    sys.exit(main())
