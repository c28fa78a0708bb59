"""A reset of one slot makes RecordEpisodeStatistics and NormalizeReward forget all slots."""

import sys

import numpy as np
from gymnasium import make_vec
from gymnasium.wrappers.vector import NormalizeReward, RecordEpisodeStatistics


def main() -> int:
    options = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": "Disabled"}}
    env = NormalizeReward(RecordEpisodeStatistics(make_vec("Pendulum-v1", 2, **options)))
    env.reset(seed=0)
    for _ in range(5):
        env.step(np.zeros((2, 1), np.float32))
    before = env.env.episode_lengths.tolist(), (env.accumulated_reward != 0).tolist()
    env.reset(options={"reset_mask": np.array([True, False])})
    after = env.env.episode_lengths.tolist(), (env.accumulated_reward != 0).tolist()
    print("lengths of RecordEpisodeStatistics, and where NormalizeReward has a return")
    print("before:                   ", *before)
    print("expected after slot 0's reset: [0, 5] [False, True]")
    print("got:                      ", *after)
    return int(after != ([0, 5], [False, True]))


if __name__ == "__main__":
    sys.exit(main())
