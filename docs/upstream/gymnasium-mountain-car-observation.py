"""MountainCarContinuous gives out its own state: writing into an observation moves the car."""

import sys

import gymnasium as gym
import numpy as np


def next_position(shift: float) -> float:
    """The position after two steps; the first observation is shifted in place."""
    env = gym.make("MountainCarContinuous-v0")
    env.reset(seed=0)
    observation = env.step(np.ones(1, np.float32))[0]
    observation += shift  # as a user does who normalises in place
    return float(env.step(np.ones(1, np.float32))[0][0])


def main() -> int:
    left, moved = next_position(0.0), next_position(0.25)
    print("position after two steps of the same seed and actions")
    print("expected:", left)
    print("got, after the first observation was changed in place:", moved)
    return int(left != moved)


if __name__ == "__main__":
    sys.exit(main())
