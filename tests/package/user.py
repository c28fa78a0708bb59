"""A user's file, which mypy checks in strict mode against the installed package."""

from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import tdcollect
from tdcollect.evaluation import Comparison, Request, export
from tdcollect.evaluation.sb3 import load_policy
from tdcollect.lab import Suite
from tdcollect.testing import check_env, diagnose
from tdcollect.trajectories import TrajectoryAssembler


def policy_for(env: tdcollect.GymnasiumEnv) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
    )


def train(frames: int) -> list[float]:
    env = tdcollect.make_env("CartPole-v1", num_envs=8, episode_reward=True)
    collector = tdcollect.Collector(
        env, policy_for(env), frames_per_batch=64, total_frames=frames, hooks=tdcollect.Hooks()
    )
    collector.set_seed(0)
    assembler = TrajectoryAssembler()
    means: list[float] = []
    for batch in collector:
        whole: list[TensorDictBase] | TensorDictBase | None = assembler.feed(batch)
        split = tdcollect.split_trajectories(batch)
        print(whole, split.shape, collector.stats.latest.steps_per_second)
        spread = collector.stats.window.return_stats
        if spread is not None:
            means.append(spread.mean)
    more = collector.collect(episodes=3, seed=0)
    print(more["next", "done"], collector.explain())
    collector.shutdown()
    return means


def test(folder: Path) -> Comparison:
    env = tdcollect.make_env("CartPole-v1", num_envs=8)
    result: tdcollect.EvaluationResult = tdcollect.evaluate(
        env, policy_for(env), episodes=10, seed=0, output_dir=folder / "policy", workers=2
    )
    mean: float | None = result.summary().returns.mean
    digest: str = result.digest
    print(mean, digest, result.replay(3), [episode.env_seed for episode in result.episodes])
    model = tdcollect.evaluate(env, load_policy("model.zip", env), episodes=range(10))
    comparison = tdcollect.compare(model, result, names=["model", "policy"])
    export(comparison, "html", folder / "comparison")
    return comparison


def beside(folder: Path) -> float:
    with tdcollect.Evaluator("CartPole-v1", None, num_trajectories=5, output_dir=folder) as beside:
        beside.trigger_eval(step=0)
        beside.wait()
        return beside.best.value if beside.best is not None else float("nan")


def others(folder: Path) -> None:
    request = Request("CartPole-v1", "random")
    env, policy = request.make()
    with tdcollect.LocalWorkers(2, timeout=60) as workers:
        tdcollect.evaluate(env, policy, shard=(0, 2), workers=workers)
    tdcollect.merge([folder / "0", folder / "1"], folder / "whole")
    print(tdcollect.verify(folder / "whole"), tdcollect.env_seed(0, 3))
    Suite.read(folder / "suite.toml").run(folder / "report")
    check_env("CartPole-v1")
    print(diagnose("CartPole-v1"), tdcollect.__version__)
