"""Collect and evaluate for TorchRL.

backend (numpy, [N]) -> EnvBase wrapper -> Collector -> batch [N, T] -> test episodes -> report
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.lazy import lazy
from tdcollect.versions import check_versions, own_version

if TYPE_CHECKING:
    from tdcollect.checkpoint import load_checkpoint, save_checkpoint
    from tdcollect.collect import (
        Collector,
        Hooks,
        LogStatistics,
        Render,
        SyncDataCollector,
    )
    from tdcollect.envs import GymnasiumEnv, make_env
    from tdcollect.evaluation.comparison import compare
    from tdcollect.evaluation.episodes.collector import EvaluationCollector
    from tdcollect.evaluation.evaluate import evaluate
    from tdcollect.evaluation.evaluator import Evaluator
    from tdcollect.evaluation.merging import merge
    from tdcollect.evaluation.result import EvaluationResult
    from tdcollect.evaluation.verification import verify
    from tdcollect.evaluation.workers.local import LocalWorkers
    from tdcollect.evaluation.workers.ray import RayWorkers
    from tdcollect.randomness import NotReproducibleError
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
    "make_env",
    "merge",
    "policy_seed",
    "save_checkpoint",
    "split_trajectories",
    "verify",
]

check_versions()
__version__ = own_version()

__getattr__, __dir__ = lazy(
    __name__,
    {
        "checkpoint": "load_checkpoint save_checkpoint",
        "collect": "Collector Hooks LogStatistics Render SyncDataCollector",
        "envs": "GymnasiumEnv make_env",
        "evaluation.episodes.collector": "EvaluationCollector",
        "evaluation.evaluate": "EvaluationResult evaluate",
        "evaluation.evaluator": "Evaluator",
        "evaluation.merging": "merge",
        "evaluation.comparison": "compare",
        "evaluation.verification": "verify",
        "evaluation.workers.local": "LocalWorkers",
        "evaluation.workers.ray": "RayWorkers",
        "pages": "view",
        "randomness": "NotReproducibleError",
        "seeding": "env_seed policy_seed",
        "suites.suite": "Suite",
        "trajectories": "split_trajectories",
    },
    modules="collect collectors envs evaluation keys seeding suites testing trajectories",
)
