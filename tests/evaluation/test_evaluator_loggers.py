"""TorchRL's loggers take the evaluator's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchrl.record.loggers import CSVLogger, MLFlowLogger, TensorboardLogger, WandbLogger

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
def evaluator(quick_children: None) -> Iterator[Evaluator]:
    with Evaluator(Walk, categorical(), num_trajectories=3) as made:
        yield made


@pytest.fixture
def logged(evaluator: Evaluator) -> Callable[[Any], list[float]]:
    """Log two evaluations: the dict that ``evaluate`` returns, and what ``on_result`` is told."""

    def log(logger: Any) -> list[float]:
        def on_result(metrics: Any) -> None:
            logger.log_metrics(metrics, step=int(metrics["eval/step"]))

        found = [evaluator.evaluate(step=10)]
        logger.log_metrics(found[0], step=10)
        evaluator._outcomes.on_result = on_result
        try:
            found.append(evaluator.evaluate(step=20))
        finally:
            evaluator._outcomes.on_result = None
        return [pytest.approx(metrics["eval/reward"], rel=1e-6) for metrics in found]

    return log


def test_csv(logged: Any, tmp_path: Path) -> None:
    found = logged(CSVLogger("run", log_dir=str(tmp_path)))
    for name in NAMES:
        lines = (tmp_path / "run" / "scalars" / f"{name}.csv").read_text().splitlines()
        steps, values = zip(*(map(float, line.split(",")) for line in lines), strict=True)
        assert steps == (10, 20)
        assert name != "eval/reward" or [*values] == found


def test_tensorboard(logged: Any, tmp_path: Path) -> None:
    logger = TensorboardLogger("run", log_dir=str(tmp_path))
    found = logged(logger)
    logger.experiment.flush()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert {*events.Tags()["scalars"]} == NAMES
    rewards = events.Scalars("eval/reward")
    assert [(event.step, event.value) for event in rewards] == [(10, found[0]), (20, found[1])]


def test_wandb(logged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger("run", offline=True, save_dir=str(tmp_path))
    found = logged(logger)
    assert logger.experiment.summary["eval/reward"] == found[1]


def test_mlflow(logged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("run", tracking_uri=(tmp_path / "mlruns").as_uri())
    found = logged(logger)
    run = mlflow.get_run(mlflow.active_run().info.run_id)
    mlflow.end_run()
    assert run.data.metrics["eval/reward"] == found[1]
