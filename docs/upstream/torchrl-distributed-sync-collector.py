"""DistributedSyncCollector yields the data of one worker in the rows of all workers."""

import socket
import sys

import torch
from torchrl.collectors.distributed import DistributedSyncCollector
from torchrl.envs import GymEnv


def main() -> int:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    collector = DistributedSyncCollector(
        [lambda: GymEnv("CartPole-v1")] * 2,  # they are not seeded, so no two observations agree
        None,
        frames_per_batch=200,
        total_frames=200,
        launcher="mp",
        tcp_port=port,
    )
    (batch,) = collector
    collector.shutdown()
    first, second = batch["observation"]
    ids = [row.unique().tolist() for row in batch["collector", "traj_ids"]]
    shared = sorted({*ids[0]} & {*ids[1]})
    print("expected: rows of unlike data, and no trajectory id in both")
    print("got:      the rows of both workers are equal:", torch.equal(first, second))
    print("          trajectory ids in both:", shared)
    return int(torch.equal(first, second) or bool(shared))


if __name__ == "__main__":
    sys.exit(main())
