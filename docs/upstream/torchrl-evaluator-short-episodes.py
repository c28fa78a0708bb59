"""Evaluator takes the episodes that end first: with many slots, the short ones."""

import sys

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.collectors import Evaluator
from torchrl.envs import GymWrapper
from torchrl.modules import RandomPolicy


class TwoLengths(gym.Env):  # episodes of 10 or of 200 steps, with equal chance
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.choice([10, 200]))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


def main() -> int:
    env = GymWrapper(SyncVectorEnv([TwoLengths] * 32, autoreset_mode=AutoresetMode.DISABLED))
    env.set_seed(0)
    sizes = {"num_trajectories": 20, "frames_per_batch": 320}
    evaluator = Evaluator(env, RandomPolicy(env.full_action_spec), **sizes)
    found = evaluator.evaluate()
    print("expected: a mean length near 105, since half of the episodes take 200 steps")
    print("got:     ", found["eval/episode_length"], "in", found["eval/num_episodes"], "episodes")
    return int(found["eval/episode_length"] < 60)


if __name__ == "__main__":
    sys.exit(main())
