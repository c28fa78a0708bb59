"""Seeded episodes of Evaluator.evaluate_episodes depend on how many envs play them."""

import sys
import warnings

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Evaluator
from torchrl.envs import ExplorationType, GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor


def returns(envs: int, exploration: ExplorationType) -> list[float]:
    torch.manual_seed(0)
    env = TransformedEnv(SerialEnv(envs, lambda: GymEnv("CartPole-v1")), RewardSum())
    module = TensorDictModule(MLP(4, 2), in_keys=["observation"], out_keys=["logits"])
    policy = ProbabilisticActor(module, ["logits"], distribution_class=OneHotCategorical)
    options = {"num_trajectories": 4, "max_steps": 500, "exploration_type": exploration}
    evaluator = Evaluator(env, policy, **options)
    seeded = evaluator.evaluate_episodes(seed=0)["episode_reward"].tolist()
    evaluator.shutdown()
    return seeded


def main() -> int:
    warnings.simplefilter("ignore")
    if not hasattr(Evaluator, "evaluate_episodes"):
        print("skipped: this TorchRL has no Evaluator.evaluate_episodes")
        return 77
    print("expected: the same four returns with one env and with four")
    for exploration in (ExplorationType.DETERMINISTIC, ExplorationType.RANDOM):
        one, four = returns(1, exploration), returns(4, exploration)
        print(f"got:      {exploration.name.lower()}: {one} and {four}")
    return int(one != four)


if __name__ == "__main__":
    sys.exit(main())
