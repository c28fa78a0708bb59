"""AsyncVectorEnv(shared_memory=False) resets a slot twice after a reset with a mask."""

import sys

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv


class OneStep(gym.Env):  # the observation is the step in the episode, which has one
    observation_space = gym.spaces.Box(0, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, True, False, {}


def play(env) -> tuple[float, float]:
    """An episode, a reset with a mask, and the observation and reward of the step after it."""
    env.reset()
    env.step(np.array([0]))
    env.reset(options={"reset_mask": np.array([True])})
    observation, reward, *_ = env.step(np.array([0]))
    env.close()
    return observation.item(), reward.item()


def main() -> int:
    expected = play(SyncVectorEnv([OneStep]))
    piped = play(AsyncVectorEnv([OneStep], shared_memory=False))
    print("expected, as SyncVectorEnv:", expected, play(AsyncVectorEnv([OneStep])))
    print("got, shared_memory=False:  ", piped)
    return int(piped != expected)


if __name__ == "__main__":
    sys.exit(main())
