"""GymEnv(num_envs=N) loses final observations and adds a row per episode that is no step."""

import sys

import torch
from torchrl.envs import GymEnv


def main() -> int:
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", num_envs=2)
    env.set_seed(0)
    slot = env.rollout(100, break_when_any_done=False)[0]
    env.close(raise_if_closed=False)
    end = int(slot["next", "done"].flatten().nonzero()[0])  # the last step of the first episode
    last, after = slot[end], slot[end + 1]
    start = after["observation"]
    fallen = bool(start[0].abs() > 2.4 or start[2].abs() > 0.2095)  # CartPole's own limits
    print("expected: the final observation of the episode; then a row that starts a new episode")
    print("got:      next observation of the last step:", last["next", "observation"].tolist())
    print("          the row after it starts from a fallen pole:", fallen)
    print("          its reward is", after["next", "reward"].item(), "(CartPole always gives 1)")
    zeros = not last["next", "observation"].any()
    return int(zeros or fallen or after["next", "reward"].item() != 1)


if __name__ == "__main__":
    sys.exit(main())
