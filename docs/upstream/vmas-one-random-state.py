"""All VMAS envs of a process draw from one random state, with a seed each or not."""

import sys

import torch
import vmas


def starts(between=lambda: None) -> list[float]:
    """Start positions of an agent of a seeded env, in three episodes."""
    env = vmas.make_env("navigation", num_envs=1, n_agents=2, seed=0, device="cpu")
    found = []
    for _ in range(3):
        observations = env.reset()
        found.append(round(observations[0][0, 0].item(), 3))
        between()
    return found


def main() -> int:
    torch.manual_seed(0)
    other = vmas.make_env("navigation", num_envs=1, n_agents=2, seed=1, device="cpu")
    alone, beside = starts(), starts(other.reset)
    print("three starts of an env with seed 0, alone and where another env is reset in between")
    print("expected:", alone, alone)
    print("got:     ", alone, beside)
    return int(alone != beside)


if __name__ == "__main__":
    sys.exit(main())
