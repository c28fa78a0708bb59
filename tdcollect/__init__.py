"""Collect and evaluate for TorchRL.

backend (numpy, [N]) -> EnvBase wrapper -> Collector -> batch [N, T]
"""

from tdcollect.collect import Collector, SyncDataCollector
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
    "NotReproducibleError",
    "SyncDataCollector",
    "compare",
    "env_seed",
    "evaluate",
    "make_env",
    "policy_seed",
    "split_trajectories",
]
