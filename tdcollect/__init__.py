"""Collect and evaluate for TorchRL.

backend (numpy, [N]) -> EnvBase wrapper -> Collector -> batch [N, T] -> test episodes -> report
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy, own_version

if TYPE_CHECKING:
    from tdcollect.collect import Collector as Collector
    from tdcollect.collect import Hooks as Hooks
    from tdcollect.collect import LogStatistics as LogStatistics
    from tdcollect.collect import Render as Render
    from tdcollect.collect import SyncDataCollector as SyncDataCollector
    from tdcollect.envs import GymnasiumEnv as GymnasiumEnv
    from tdcollect.envs import make_env as make_env
    from tdcollect.evaluation.comparison import compare as compare
    from tdcollect.evaluation.episodes.collector import EvaluationCollector as EvaluationCollector
    from tdcollect.evaluation.evaluate import evaluate as evaluate
    from tdcollect.evaluation.evaluator import Evaluator as Evaluator
    from tdcollect.evaluation.merging import merge as merge
    from tdcollect.evaluation.result import EvaluationResult as EvaluationResult
    from tdcollect.evaluation.verification import audit as audit
    from tdcollect.evaluation.verification import verify as verify
    from tdcollect.evaluation.workers.local import LocalWorkers as LocalWorkers
    from tdcollect.evaluation.workers.ray import RayWorkers as RayWorkers
    from tdcollect.lab.pages.view import view as view
    from tdcollect.lab.racing import race as race
    from tdcollect.lab.suite import Suite as Suite
    from tdcollect.randomness import NotReproducibleError as NotReproducibleError
    from tdcollect.seeding import env_seed as env_seed
    from tdcollect.seeding import policy_seed as policy_seed
    from tdcollect.seeding import slot_seed as slot_seed
    from tdcollect.states import load_checkpoint as load_checkpoint
    from tdcollect.states import save_checkpoint as save_checkpoint
    from tdcollect.trajectories import split_trajectories as split_trajectories

__version__ = own_version()

__getattr__, __dir__, __all__ = lazy(
    __name__,
    inner="view",
    modules=("collect collectors envs evaluation keys lab policies seeding testing trajectories"),
)
