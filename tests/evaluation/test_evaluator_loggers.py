"""TorchRL's loggers take the evaluator's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchrl.record.loggers import CSVLogger, TensorboardLogger

from tdcollect import Evaluator

from .envs import Walk
from .policies import categorical

NAMES = {
    f"eval/{name}"
    for name in (
        *("reward", "reward_std", "reward_low", "reward_high", "num_episodes", "failed"),
        *("episode_length", "fps", "step"),
    )
}


@pytest.fixture(scope="module")
def metrics(quick_children: None) -> list[Any]:
    """Of two evaluations: what ``evaluate`` returns, and what ``on_result`` is told."""
    told: list[Any] = []
    with Evaluator(Walk, categorical(), num_trajectories=3, on_result=told.append) as evaluator:
        return [evaluator.evaluate(step=10), evaluator.evaluate(step=20) and told[1]]


def log(logger: Any, metrics: list[Any]) -> list[Any]:
    """Log them; return the rewards."""
    for one in metrics:
        logger.log_metrics(one, step=int(one["eval/step"]))
    return [pytest.approx(float(one["eval/reward"]), rel=1e-6) for one in metrics]


def test_csv_and_tensorboard(metrics: Any, tmp_path: Path) -> None:
    first, second = log(CSVLogger("csv", log_dir=str(tmp_path)), metrics)
    files = {name: tmp_path / "csv" / "scalars" / f"{name}.csv" for name in NAMES}
    lines = {name: file.read_text().splitlines() for name, file in files.items()}
    assert all(line.startswith("10,") for line, _ in lines.values())
    rewards = [tuple(map(float, line.split(","))) for line in lines["eval/reward"]]
    assert rewards == [(10, first), (20, second)]
    logger = TensorboardLogger("board", log_dir=str(tmp_path))
    log(logger, metrics)
    logger.experiment.flush()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert {*events.Tags()["scalars"]} == NAMES
    there = [(event.step, event.value) for event in events.Scalars("eval/reward")]
    assert there == [(10, first), (20, second)]
