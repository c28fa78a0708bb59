"""Evaluator takes no seed: two evaluations of one policy cannot be compared."""

import inspect
import sys

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Evaluator
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor


def main() -> int:
    torch.manual_seed(0)
    policy = ProbabilisticActor(
        TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    makers = (Evaluator.__init__, Evaluator.evaluate, Evaluator.trigger_eval)
    seeds = {name for f in makers for name in inspect.signature(f).parameters if "seed" in name}
    env, sizes = GymEnv("CartPole-v1"), {"num_trajectories": 10, "frames_per_batch": 100}
    evaluator, rewards = Evaluator(env, policy, **sizes), []
    for _ in range(3):
        torch.manual_seed(0)
        rewards.append(round(evaluator.evaluate()["eval/reward"], 2))
    evaluator.shutdown()
    print("expected: an argument for a seed, and the same mean reward for the same seed")
    print("got:      arguments with 'seed' in their names:", sorted(seeds))
    print("          mean reward of ten episodes, three times:", rewards)
    return int(not seeds)


if __name__ == "__main__":
    sys.exit(main())
