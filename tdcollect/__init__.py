"""Collect and evaluate for TorchRL.

backend (numpy, [N]) -> EnvBase wrapper -> Collector -> batch [N, T]
"""

from tdcollect.collect import Collector, SyncDataCollector
from tdcollect.envs import GymnasiumEnv, make_env
from tdcollect.evaluate.comparison import compare
from tdcollect.seeding import env_seed, policy_seed
from tdcollect.trajectories import split_trajectories

__all__ = [
    "Collector",
    "GymnasiumEnv",
    "SyncDataCollector",
    "compare",
    "env_seed",
    "make_env",
    "policy_seed",
    "split_trajectories",
]
