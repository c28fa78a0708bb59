"""A job for workers: an env, a policy and settings, sent once and kept there."""

from __future__ import annotations

import hashlib
import pickle
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
from tdcollect.evaluation.workers.surroundings import Surroundings


class Pickled(NamedTuple):
    """A pickled job.

    Attributes:
        key: tells it from other jobs.
        env_key: tells its env, as the probe sees it, from other envs.
        job: the bytes that :func:`unpickled` reads.
        around: of the process that pickled it.
    """

    key: str
    env_key: str
    job: bytes
    around: Surroundings


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
        job = pickle.dumps((env, policy, settings))
        around = Surroundings.here()
        # A slot alone passes the probe where two that share something do not.
        slots = (self.settings.num_envs, min(self._share, 2))
        env_key = hashlib.sha256(env + repr((around, slots)).encode()).hexdigest()
        key = hashlib.sha256(env_key.encode() + policy + settings).hexdigest()
        return Pickled(key, env_key, job, around)

    @property
    def _share(self) -> int:
        """The most episodes that a worker runs at once."""
        return max(1, -(-len(self.settings.episode_indices) // self.num_workers))

    def open(self) -> EvaluationCollector:
        """Return a collector of the job's episodes."""
        return EvaluationCollector.from_settings(
            self.env, self.policy, self.settings, most_slots=self._share
        )


def unpickled(job: bytes) -> Job:
    """Read a job that :meth:`Job.pickled` wrote."""
    (env, spec, _), policy, (settings, num_workers) = map(pickle.loads, pickle.loads(job))
    if spec is not None:
        gym.registry[spec.id] = spec  # another one may have been of that id
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
