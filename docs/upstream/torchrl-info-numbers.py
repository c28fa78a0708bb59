"""GymWrapper.auto_register_info_dict fails on infos that are Python numbers."""

import sys

import gymnasium as gym
import numpy as np
from torchrl.envs import GymWrapper


class Lives(gym.Env):
    """Its info is an int, as that of Atari's lives is."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {"lives": 3}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"lives": 3}


def main() -> int:
    print("expected: an entry 'lives' with the value 3")
    try:
        env = GymWrapper(Lives()).auto_register_info_dict()
        print("got:     ", env.reset()["lives"])
    except AttributeError as error:
        print("got:      AttributeError:", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
