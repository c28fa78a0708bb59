"""Collect and evaluate for TorchRL.

backend (numpy, [N]) -> EnvBase wrapper -> Collector -> batch [N, T] -> test episodes -> report
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tdcollect.versions import check_versions, own_version

if TYPE_CHECKING:
    from tdcollect.checkpoint import load_checkpoint, save_checkpoint
    from tdcollect.collect import (
        Collector,
        Hooks,
        LogStatistics,
        Render,
        SyncDataCollector,
        log_stats,
    )
    from tdcollect.envs import GymnasiumEnv, make_env
    from tdcollect.evaluation.beside.evaluator import Evaluator
    from tdcollect.evaluation.episodes.collector import EvaluationCollector
    from tdcollect.evaluation.episodes.isolation import NotReproducibleError
    from tdcollect.evaluation.merging import merge
    from tdcollect.evaluation.reports.comparison import compare
    from tdcollect.evaluation.result import EvaluationResult
    from tdcollect.evaluation.run import evaluate
    from tdcollect.evaluation.verification import verify
    from tdcollect.evaluation.workers.local import LocalWorkers
    from tdcollect.evaluation.workers.ray_actors import RayWorkers
    from tdcollect.seeding import env_seed, policy_seed
    from tdcollect.suites.suite import Suite
    from tdcollect.trajectories import split_trajectories

__all__ = [
    "Collector",
    "EvaluationCollector",
    "EvaluationResult",
    "Evaluator",
    "GymnasiumEnv",
    "Hooks",
    "LocalWorkers",
    "LogStatistics",
    "NotReproducibleError",
    "RayWorkers",
    "Render",
    "Suite",
    "SyncDataCollector",
    "compare",
    "env_seed",
    "evaluate",
    "load_checkpoint",
    "log_stats",
    "make_env",
    "merge",
    "policy_seed",
    "save_checkpoint",
    "split_trajectories",
    "verify",
]

check_versions()

# Imported when they are asked for: torch takes seconds, and the command line should not make
# someone wait for it who wants to read its help.
_MODULES = {
    "Collector": "collect",
    "EvaluationCollector": "evaluation.episodes.collector",
    "EvaluationResult": "evaluation.result",
    "Evaluator": "evaluation.beside.evaluator",
    "GymnasiumEnv": "envs",
    "Hooks": "collect",
    "LocalWorkers": "evaluation.workers.local",
    "LogStatistics": "collect",
    "NotReproducibleError": "evaluation.episodes.isolation",
    "RayWorkers": "evaluation.workers.ray_actors",
    "Render": "collect",
    "Suite": "suites.suite",
    "SyncDataCollector": "collect",
    "compare": "evaluation.reports.comparison",
    "env_seed": "seeding",
    "evaluate": "evaluation.run",
    "load_checkpoint": "checkpoint",
    "log_stats": "collect",
    "make_env": "envs",
    "merge": "evaluation.merging",
    "policy_seed": "seeding",
    "save_checkpoint": "checkpoint",
    "split_trajectories": "trajectories",
    "verify": "evaluation.verification",
}
_PACKAGES = (
    "collect",
    "collectors",
    "envs",
    "evaluation",
    "keys",
    "seeding",
    "suites",
    "testing",
    "trajectories",
    "view",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = getattr(import_module(f"tdcollect.{_MODULES[name]}"), name)
    elif name in _PACKAGES:
        found = import_module(f"tdcollect.{name}")
    elif name == "__version__":
        found = own_version()
    else:
        raise AttributeError(f"module 'tdcollect' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES, "__version__"})
