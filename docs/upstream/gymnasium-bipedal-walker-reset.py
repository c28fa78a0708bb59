"""BipedalWalker: reset(seed=) of a used env does not begin the episode of a new one."""

import sys

import gymnasium as gym
import numpy as np


def episode(env: gym.Env, seed: int) -> np.ndarray:
    """The observations of an episode with the random actions of a seed, in up to 200 steps."""
    seen = [env.reset(seed=seed)[0]]
    draw, ended = np.random.default_rng(seed), False
    while not ended and len(seen) < 200:
        observation, _, ended, _, _ = env.step(draw.uniform(-1, 1, 4).astype(np.float32))
        seen.append(observation)
    return np.stack(seen)


def main() -> int:
    used, unlike = gym.make("BipedalWalker-v3"), {}
    for seed in range(10):
        new, again = episode(gym.make("BipedalWalker-v3"), seed), episode(used, seed)
        length = min(len(new), len(again))
        apart = np.abs(new[:length] - again[:length]).max()
        if apart > 0 or len(new) != len(again):
            unlike[seed] = f"{apart:.1g}"
    print("expected: each of ten seeds gives one episode, in a new env and in a used one")
    print("got:      seeds with unlike episodes, and how far observations are apart:", unlike)
    return int(bool(unlike))


if __name__ == "__main__":
    sys.exit(main())
