"""BenchMARL's experiments collect with this package's collector, by one line."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.collectors

import tdcollect

from .oracle import UPSTREAM, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(UPSTREAM, "ignore:::benchmarl")]

FRAMES = 80


def trained(name: str, folder: Path) -> tuple[list[Any], Any]:
    """The batches of a short experiment on VMAS's balance, and the policy's state at its end."""
    from benchmarl import algorithms
    from benchmarl.environments import VmasTask
    from benchmarl.experiment import Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig

    config = ExperimentConfig.get_from_yaml()
    config.loggers, config.create_json, config.evaluation = [], False, False
    config.render, config.save_folder, config.max_n_frames = False, str(folder), 3 * FRAMES
    config.checkpoint_interval, config.checkpoint_at_end = 0, False
    config.prefer_continuous_actions = name == "Mappo"
    for way in ("on", "off"):
        setattr(config, f"{way}_policy_n_envs_per_worker", 4)
        setattr(config, f"{way}_policy_collected_frames_per_batch", FRAMES)
    config.on_policy_n_minibatch_iters, config.on_policy_minibatch_size = 1, 40
    config.off_policy_n_optimizer_steps, config.off_policy_train_batch_size = 2, 16
    task = VmasTask.BALANCE.get_from_yaml()
    task.config["max_steps"] = 12
    batches: list[Any] = []
    experiment = Experiment(
        task=task,
        algorithm_config=getattr(algorithms, f"{name}Config").get_from_yaml(),
        model_config=MlpConfig.get_from_yaml(),
        critic_model_config=MlpConfig.get_from_yaml(),
        seed=0,
        config=config,
    )
    experiment._on_batch_collected = lambda batch: batches.append(batch.clone())
    experiment.run()
    return batches, copy.deepcopy(experiment.policy.state_dict())


@pytest.mark.parametrize("name", ["Mappo", "Iql"])
def test_an_experiment_collects_the_same_batches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("benchmarl", "vmas"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: it asks for other versions of TorchRL")
    # What BenchMARL 1.5.2 itself needs for TorchRL 0.14.1: docs/migration-from-torchrl.md.
    parent = torchrl.collectors.Collector
    monkeypatch.setattr(torchrl.collectors, "SyncDataCollector", parent, raising=False)
    import benchmarl.algorithms.iql as iql
    from benchmarl.experiment import experiment

    exact = partial(torchrl.modules.QValueModule, strict_shape=False)
    monkeypatch.setattr(iql, "QValueModule", exact)
    theirs, policy = trained(name, tmp_path)
    monkeypatch.setattr(experiment, "SyncDataCollector", tdcollect.Collector)
    ours, other = trained(name, tmp_path)
    assert len(ours) == 3
    for found, expected in zip(ours, theirs, strict=True):
        assert_same(found, expected, name)
    torch.testing.assert_close(other, policy, rtol=0, atol=0)
