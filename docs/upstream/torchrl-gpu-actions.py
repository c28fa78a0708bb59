"""Collector(policy_device="cuda") steps a CPU env on actions that have not arrived. Needs a GPU."""

import sys

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv

STEPPED = []  # with these actions


class Recording(GymEnv):
    def _step(self, tensordict):
        STEPPED.append(tensordict["action"].clone())
        return super()._step(tensordict)


def slow(observation):  # draws an action after some milliseconds of work on the GPU
    work = torch.full((4096, 4096), 1 / 4096, device=observation.device).matrix_power(2**20)
    return torch.rand_like(observation[:1]) * work.sum(0)[:1]  # times 1


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: this needs a GPU")
        return 77
    print("expected: 0 steps of 100 with other actions than the policy's")
    for options in ({"env_device": "cpu"}, {}):
        env = Recording("Pendulum-v1", device="cpu")
        policy = TensorDictModule(slow, ["observation"], ["action"])
        sizes = {"frames_per_batch": 100, "total_frames": 100}
        (batch,) = Collector(env, policy, policy_device="cuda", **sizes, **options)
        late = int((torch.stack(STEPPED[-100:]) != batch["action"].cpu()).sum())
        print(f"got:      {late}, with {options}")
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
