"""Collect and evaluate for TorchRL.

backend (numpy, [N]) -> EnvBase wrapper -> Collector -> batch [N, T]
"""

from tdcollect.collect import Collector, Hooks, LogStatistics, Render, SyncDataCollector, log_stats
from tdcollect.envs import GymnasiumEnv, make_env
from tdcollect.evaluation.collector import EvaluationCollector
from tdcollect.evaluation.comparison import compare
from tdcollect.evaluation.errors import NotReproducibleError
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.run import evaluate
from tdcollect.seeding import env_seed, policy_seed
from tdcollect.trajectories import split_trajectories

__all__ = [
    "Collector",
    "EvaluationCollector",
    "EvaluationResult",
    "GymnasiumEnv",
    "Hooks",
    "LogStatistics",
    "NotReproducibleError",
    "Render",
    "SyncDataCollector",
    "compare",
    "env_seed",
    "evaluate",
    "log_stats",
    "make_env",
    "policy_seed",
    "split_trajectories",
]
