"""The package's promises, end to end, through public names alone: any redesign must pass them.

Those of the command line, and of suites, are in tests/cli and in tests/lab/test_suite_cli.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector as ParentCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs import (
    ExplorationType,
    GymEnv,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import tdcollect
from tdcollect import cli, trajectories

from .evaluation.ledgers import contents
from .zoo.reports import small_reports

__all__ = ["small_reports"]  # a fixture

CARTPOLE = "CartPole-v1"

pytestmark = pytest.mark.usefixtures("quick_children", "forked_workers", "small_reports")


def actor() -> ProbabilisticActor:
    torch.manual_seed(0)
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def evaluated(policy: Any = None, episodes: Any = 6, **options: Any) -> tdcollect.EvaluationResult:
    policy = actor() if policy is None else policy
    options = {"exploration_type": ExplorationType.RANDOM, **options}
    return tdcollect.evaluate(CARTPOLE, policy, episodes, progress=False, **options)


def equal(batch: TensorDictBase, other: TensorDictBase) -> bool:
    return set(batch.keys(True, True)) == set(other.keys(True, True)) and bool(
        (batch == other).all()
    )


def collected(kind: Any, env: Any, batches: int = 3, **options: Any) -> list[TensorDictBase]:
    """Batches of a collector, and the state of torch's generator after them."""
    policy = actor()
    torch.manual_seed(1)
    collector = kind(env, policy, frames_per_batch=40, total_frames=40 * batches, **options)
    return [batch.clone() for batch in collector]


def stock_env() -> TransformedEnv:
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv(CARTPOLE)), InitTracker())
    env = TransformedEnv(env, RewardSum())
    env = TransformedEnv(env, StepCounter(max_steps=15))
    env.set_seed(0)
    return env


def test_batches_are_torchrls_to_the_bit() -> None:
    ours = collected(tdcollect.Collector, stock_env())
    after = torch.get_rng_state()
    theirs = collected(ParentCollector, stock_env())
    assert all(map(equal, ours, theirs))
    assert torch.equal(after, torch.get_rng_state())
    collector = tdcollect.Collector(stock_env(), actor(), frames_per_batch=40, total_frames=40)
    assert "RewardSum" in str(collector.explain())
    collector.shutdown()


def test_worker_processes_give_the_same_rows() -> None:
    found = []
    for how in ({}, {"backend": "process", "num_workers": 2}):
        env = tdcollect.make_env(CARTPOLE, 4, **how)
        env.set_seed(3)
        found.append(collected(tdcollect.Collector, env))
    assert all(map(equal, *found))


def test_a_resumed_collection_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def collector() -> tdcollect.Collector:
        env = TransformedEnv(tdcollect.make_env(CARTPOLE, 2, resumable=True), RewardSum())
        return tdcollect.Collector(env, actor(), frames_per_batch=40, total_frames=200)

    torch.manual_seed(1)
    first = collector()
    first.set_seed(0)
    batches = iter(first)
    next(batches)
    tdcollect.save_checkpoint(tmp_path / "run.pt", collector=first)
    expected = [batch.clone() for batch in batches]

    second = collector()
    tdcollect.load_checkpoint(tmp_path / "run.pt", collector=second)
    assert all(equal(one, other) for one, other in zip(second, expected, strict=True))


def test_collectors_in_worker_processes_seed_their_slots_in_one_row() -> None:
    def first_rows(**options: Any) -> torch.Tensor:
        collector = tdcollect.Collector(
            **options, policy=actor(), frames_per_batch=8, total_frames=8
        )
        collector.set_seed(0)
        rows = [batch["observation"].reshape(-1, 2, 4)[0] for batch in collector]
        return torch.cat(rows)

    def make() -> Any:
        return tdcollect.make_env(CARTPOLE, 2)

    alone = first_rows(create_env_fn=make)
    many = first_rows(create_env_fn=make, num_collectors=2, sync=True)
    assert torch.equal(alone, many[: len(alone)])


def test_trajectories_are_split_as_by_torchrl_and_joined_again() -> None:
    batch = collected(tdcollect.Collector, tdcollect.make_env(CARTPOLE, 4), batches=1)[0]
    index = trajectories.TrajectoryIndex.of(batch)
    padded = tdcollect.split_trajectories(batch, index=index)
    assert equal(padded, split_trajectories(batch, prefix="collector"))
    assert equal(trajectories.join_trajectories(padded, index), batch)


def test_episodes_do_not_depend_on_slots_backends_or_workers(tmp_path: Path) -> None:
    ways: list[Any] = [{"num_envs": 4}, {"num_envs": 1, "backend": "process"}, {"workers": 1}]
    for i, way in enumerate(ways):
        evaluated(output_dir=tmp_path / str(i), **way)
    ledgers = [(tmp_path / str(i) / "episodes.jsonl").read_bytes() for i in range(len(ways))]
    assert len(set(ledgers)) == 1


def test_shards_merge_to_the_files_of_one_run(tmp_path: Path) -> None:
    evaluated(output_dir=tmp_path / "whole")
    for i in range(2):
        evaluated(output_dir=tmp_path / f"part-{i}", shard=(i, 2))
    tdcollect.merge([tmp_path / "part-0", tmp_path / "part-1"], tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_any_episode_is_replayed_and_an_altered_ledger_is_found(tmp_path: Path) -> None:
    result = evaluated(output_dir=tmp_path / "one")
    data = result.replay(3)
    assert float(data["next", "reward"].sum()) == result.returns[3]
    assert not tdcollect.verify(tmp_path / "one").problems

    ledger = tmp_path / "one" / "episodes.jsonl"
    first, *others = ledger.read_text().splitlines(keepends=True)
    record = json.loads(first)
    record["return"] += 1
    ledger.write_text("".join([json.dumps(record) + "\n", *others]))
    assert tdcollect.verify(tmp_path / "one").problems
    assert cli.main(["verify", str(tmp_path / "one")]) == 1


def test_policies_are_compared_on_the_same_episodes_alone() -> None:
    drawn, greedy = evaluated(), evaluated(exploration_type=ExplorationType.DETERMINISTIC)
    comparison = tdcollect.compare(drawn, greedy)
    mean = (greedy.returns - drawn.returns).mean()
    assert f"{mean:.3g}" in str(comparison)
    with pytest.raises(ValueError, match="seed"):
        tdcollect.compare(drawn, evaluated(seed=1))


def test_an_evaluator_beside_training_gives_what_evaluate_gives(tmp_path: Path) -> None:
    policy = actor()
    with tdcollect.Evaluator(
        CARTPOLE, policy, num_trajectories=3, output_dir=tmp_path / "curve"
    ) as evaluator:
        evaluator.trigger_eval(step=0)
        results = evaluator.wait()
    alone = evaluated(policy, 3, exploration_type=ExplorationType.DETERMINISTIC)
    assert results is not None
    assert results["eval/reward"] == pytest.approx(float(alone.returns.mean()))
    assert (tmp_path / "curve" / "curve.csv").exists()
