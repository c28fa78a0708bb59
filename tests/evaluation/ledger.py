"""Short ways to run an evaluation in tests."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torchrl.envs import ExplorationType

from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.ledger import Episode, ledger_digest

RANDOM = {"exploration_type": ExplorationType.RANDOM}


def records(env: Any, policy: Any, episodes: Any = 20, **settings: Any) -> list[Episode]:
    """The records of the episodes, in the order of their ending."""
    with EvaluationCollector(env, policy, episodes, **settings) as collector:
        return [finished.record for finished in collector.run()]


def digest(env: Any, policy: Any, episodes: Any = 20, **settings: Any) -> str:
    """The digest of the ledger."""
    return ledger_digest(records(env, policy, episodes, **settings))


def episodes_of(
    env: Any, policy: Any, episodes: Any = 20, **settings: Any
) -> dict[int, TensorDict]:
    """The data of the episodes, by index."""
    with EvaluationCollector(env, policy, episodes, **settings) as collector:
        return {ended.record.index: ended.data for ended in collector.run(keep_trajectories=True)}
