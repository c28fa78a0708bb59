"""max_frames_per_traj makes Collector.state_dict() lose the state of a SerialEnv's transforms."""

import sys

from torchrl.collectors import Collector
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv, VecNormV2


def make():
    return TransformedEnv(GymEnv("CartPole-v1"), VecNormV2(in_keys=["observation"]))


def env_state(**options):
    collector = Collector(SerialEnv(2, make), None, frames_per_batch=20, total_frames=20, **options)
    next(iter(collector))
    return collector.state_dict()["env_state_dict"]


def main() -> int:
    without, limited = env_state(), env_state(max_frames_per_traj=50)
    print("expected: the statistics of both workers' VecNormV2")
    print("got:      without max_frames_per_traj:", list(without))
    print("          with max_frames_per_traj=50:", list(limited))
    return int(bool(without) and not limited)


if __name__ == "__main__":
    sys.exit(main())
