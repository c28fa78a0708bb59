"""NormalizeReward scales the same rewards otherwise in each autoreset mode."""

import sys

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from gymnasium.wrappers.vector import NormalizeReward


class Ones(gymnasium.Env):
    """Each step has reward 1; a time limit ends episodes."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


def mean(mode: AutoresetMode) -> float:
    """Of the discounted sums, by which rewards are scaled, over three episodes of three steps."""
    env = NormalizeReward(SyncVectorEnv([lambda: TimeLimit(Ones(), 3)], autoreset_mode=mode))
    env.reset(seed=0)
    steps, ended = 0, False
    while steps < 9:
        if ended and mode == AutoresetMode.DISABLED:
            env.reset(options={"reset_mask": np.array([True])})
            ended = False
        truncated = env.step(np.zeros(1, int))[3]
        steps += not (ended and mode == AutoresetMode.NEXT_STEP)  # else it was the reset
        ended = bool(truncated[0])
    env.close()
    return round(float(env.return_rms.mean), 2)


def main() -> int:
    modes = (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)
    means = [mean(mode) for mode in modes]
    print("expected: in all modes 1.99, the mean of 1, 1.99 and 2.97")
    print("got:     ", {mode.name: mean for mode, mean in zip(modes, means, strict=True)})
    return int(len({*means}) > 1)


if __name__ == "__main__":
    sys.exit(main())
