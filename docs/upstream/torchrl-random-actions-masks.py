"""Collector(env, policy=None) draws actions that the env's mask forbids; rollout does not."""

import sys

import torch
from torchrl.collectors import Collector
from torchrl.envs import TicTacToeEnv


def illegal(batch) -> int:
    """The number of moves to squares that are taken."""
    return int((~batch["mask"].gather(-1, batch["action"].unsqueeze(-1))).sum())


def main() -> int:
    torch.manual_seed(0)
    env = TicTacToeEnv()
    rollout = env.rollout(100, break_when_any_done=False)
    (batch,) = Collector(env, None, frames_per_batch=100, total_frames=100)
    print("expected: no illegal move of 100, as in env.rollout(100):", illegal(rollout))
    print("got:      Collector(env, policy=None):", illegal(batch))
    return int(illegal(batch) > 0)


if __name__ == "__main__":
    sys.exit(main())
