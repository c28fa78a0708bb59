"""A job for workers: an env, a policy and settings, sent once and kept there."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDictBase
from torchrl.weight_update import WeightStrategy

from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.settings import EvaluationSettings


class Pickled(NamedTuple):
    """A pickled job.

    Attributes:
        key: tells it from other jobs.
        env_key: tells its env from other envs.
        job: the bytes that :func:`unpickled` reads.
    """

    key: str
    env_key: str
    job: bytes


@dataclass(frozen=True)
class Job:
    """Test episodes of one policy in one env.

    Attributes:
        env: as :func:`tdcollect.evaluate` takes it; and the policy and the settings.
        policy: likewise.
        settings: likewise.
        num_workers: the number of workers that share the episodes.
    """

    env: Any
    policy: Any
    settings: EvaluationSettings
    num_workers: int

    def pickled(self) -> Pickled:
        """Pickle the job, for another process.

        Raises:
            TypeError: for an env or a policy that cannot be pickled.
        """
        how = (self.settings.env_kwargs, self.settings.backend, self.settings.fresh_envs)
        env = _dumped("env", (self.env, _spec(self.env), how))
        policy = _dumped("policy", self.policy)
        settings = _dumped("settings", (self.settings, self.num_workers))
        path = [entry for entry in sys.path if isinstance(entry, str)]
        job = pickle.dumps((path, env, policy, settings))
        key = hashlib.sha256(env + policy + settings).hexdigest()
        return Pickled(key, hashlib.sha256(env).hexdigest(), job)

    def open(self) -> EvaluationCollector:
        """Return a collector of the job's episodes."""
        share = -(-len(self.settings.episode_indices) // self.num_workers)
        return EvaluationCollector.from_settings(
            self.env, self.policy, self.settings, most_slots=max(share, 1)
        )


def unpickled(job: bytes) -> Job:
    """Read a job that :meth:`Job.pickled` wrote, in a process that looks for modules as it did."""
    path, *parts = pickle.loads(job)
    sys.path += [entry for entry in path if entry not in sys.path]
    (env, spec, _), policy, (settings, num_workers) = map(pickle.loads, parts)
    if spec is not None:
        gym.registry.setdefault(spec.id, spec)
    return Job(env, policy, settings, num_workers)


def set_weights(collector: EvaluationCollector, weights: Mapping[str, TensorDictBase]) -> None:
    """Set the weights of a policy in place; by id, as ``"policy"``."""
    strategy = WeightStrategy(extract_as="tensordict")
    for name, values in weights.items():
        if name != "policy":
            raise ValueError(f"expected weights of the policy, got {name!r}")
        strategy.apply_weights(collector.policy, values.to(collector.device))


def _spec(env: Any) -> EnvSpec | None:
    """Return the specification of an id, which may have been registered in this process only."""
    if not isinstance(env, str) or ":" in env:
        return None
    try:
        return gym.spec(env)
    except gym.error.Error:
        return None  # of EnvPool, or of nobody: the worker says so


def _dumped(what: str, value: Any) -> bytes:
    try:
        dumped: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever a class's own __reduce__ raises
        advice = "pass a function that makes it" if what == "env" else "make it without such parts"
        raise TypeError(
            f"expected the {what} to be picklable, as workers are other processes, got "
            f"{type(error).__name__}: {error}; {advice}, or evaluate without workers"
        ) from error
    return dumped
