"""GymEnv(id) passes frameskip=1 unasked: another game for envs that take this argument."""

import sys

import gymnasium
import numpy as np
from torchrl.envs import GymEnv


class Game(gymnasium.Env):
    """Each step plays ``frameskip`` frames, as those of Atari do."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, frameskip=1):
        self.frameskip = frameskip

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}


def main() -> int:
    gymnasium.register("Game-v0", Game, kwargs={"frameskip": 4})
    made = gymnasium.make("Game-v0").unwrapped.frameskip
    got = GymEnv("Game-v0").unwrapped.frameskip
    print("expected: frameskip of the id as it is registered, and as gymnasium.make has it:", made)
    print("got:     ", got)
    return int(got != made)


if __name__ == "__main__":
    sys.exit(main())
