"""Collector(env, env_device=...) moves the env that it is given, and leaves it moved."""

import sys

import torch
from torchrl.collectors import Collector
from torchrl.envs import GymEnv


def main() -> int:
    env = GymEnv("CartPole-v1", device=None)
    before = env.device
    sizes = {"frames_per_batch": 10, "total_frames": 10}
    collector = Collector(env, None, env_device="cpu", **sizes)
    collector.shutdown(close_env=False)
    print("the caller's env, before the collector and after it was shut down without closing it")
    print("expected:", before, before)
    print("got:     ", before, env.device, "and actions of", env.action_spec.device)
    assert torch.device("cpu") == env.action_spec.device
    return int(env.device != before)


if __name__ == "__main__":
    sys.exit(main())
