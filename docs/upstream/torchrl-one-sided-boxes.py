"""Random actions of a Box that is bounded on one side are infinite, or not a number."""

import sys

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torchrl.envs import GymWrapper

SPACES = {
    "from 0 on": Box(0, np.inf, (2,), np.float32),
    "one axis without bounds": Box(np.float32([-1, -np.inf]), np.float32([1, np.inf])),
    "very wide": Box(-3e38, 3e38, (2,), np.float32),
}


class Throttle(gymnasium.Env):
    observation_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, space):
        self.action_space = space


def main() -> int:
    torch.manual_seed(0)
    wrong = 0
    print("expected: finite numbers that differ, as gymnasium's action_space.sample() draws")
    for name, space in SPACES.items():
        spec = GymWrapper(Throttle(space)).action_spec
        drawn = torch.stack([spec.rand() for _ in range(3)])
        wrong += not drawn.isfinite().all() or len(drawn.unique()) < 6
        print(f"got:      {name}: {drawn.tolist()}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
