"""split_trajectories compares every frame with every trajectory."""

import sys
import time

import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.collectors.utils import split_trajectories


class Comparisons(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "aten.eq" in str(func):
            self.count += out.numel()
        return out


def main() -> int:
    quadratic = False
    print("expected: as many comparisons as frames, at most")
    for trajectories in (250, 500, 1000):
        ids = torch.arange(trajectories).repeat_interleave(20)  # 20 frames each
        batch = TensorDict({"x": ids.float(), ("collector", "traj_ids"): ids}, ids.shape)
        start = time.perf_counter()
        with Comparisons() as seen:
            split_trajectories(batch)
        seconds = time.perf_counter() - start
        print(f"got:      {len(ids):6} frames: {seen.count:11,} comparisons, {seconds:.2f} s")
        quadratic |= seen.count > 10 * len(ids)
    return int(quadratic)


if __name__ == "__main__":
    sys.exit(main())
