"""A job for workers: an env, a policy and settings, sent once and kept there."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import torch
from torch import nn
from torchrl.envs import EnvBase, Transform
from torchrl.envs import transforms as T

from tdcollect.envs.transforms import all_transforms_of
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.inference import known_device
from tdcollect.evaluation.episodes.opening import open_one
from tdcollect.evaluation.episodes.requested_env import RequestedEnv
from tdcollect.evaluation.pickling import pickled_part
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.weights import set_policy, set_transforms, unpickled_weights
from tdcollect.evaluation.workers.surroundings import Surroundings
from tdcollect.states import global_states, set_global_states


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
        policy_factory: makes the policy, from an env; None for ``policy``.
        no_recorders: refuse envs that record videos.
    """

    env: Any
    policy: Any
    settings: EvaluationSettings
    num_workers: int = 1
    policy_factory: Callable[..., Any] | None = None
    no_recorders: bool = False

    def pickled(self) -> Pickled:
        """Pickle the job, for another process.

        Raises:
            TypeError: for a part that cannot be pickled, naming it.
        """
        how = (self.settings.env_kwargs, self.settings.backend, self.settings.fresh_envs)
        spec = _registered([self.env]) if isinstance(self.env, str) else {}
        env = pickled_part("env", (self.env, how, spec))
        policy = pickled_part("policy", self.policy)
        policy_factory = pickled_part("policy_factory", self.policy_factory)
        settings = (self.settings, self.num_workers, self.no_recorders)
        others = pickled_part("settings", settings)
        parts = (_modules(self.env), _registered(gym.registry), env, policy, policy_factory, others)
        job = pickle.dumps(parts)
        around = Surroundings.here()
        # A slot alone passes the probe where two that share something do not.
        slots = (self.settings.num_envs, min(self._share, 2))
        env_key = hashlib.sha256(env + repr((around, slots)).encode()).hexdigest()
        key = hashlib.sha256(env_key.encode() + policy + policy_factory + others).hexdigest()
        return Pickled(key, env_key, job, around)

    @property
    def _share(self) -> int:
        """The most episodes that a worker runs at once."""
        return max(1, -(-len(self.settings.episode_indices) // self.num_workers))

    def open(self) -> EvaluationCollector:
        """Return a collector of the job's episodes, for one of its workers."""
        policy, device = self.made_policy(), self.settings.device
        if isinstance(policy, nn.Module) and device is not None:
            policy.to(known_device(device))  # this worker's own
        collector = EvaluationCollector.from_settings(
            self.env, policy, self.settings, most_slots=self._share
        )
        if self.no_recorders:
            try:
                check_recorders(collector.env)
            except ValueError:
                collector.close()
                raise
        return collector

    def made_policy(self) -> Any:
        """Return the policy; a factory is called after ``torch.manual_seed(0)``.

        A factory with a parameter without default, or one named ``env``, is called with an env,
        made for it and closed afterwards. Global random states are as before.

        Raises:
            TypeError: if the factory gives no policy.
        """
        if self.policy_factory is None:
            return self.policy
        before = global_states()
        try:
            torch.manual_seed(0)
            policy = self._from_factory(self.policy_factory)
        finally:
            set_global_states(before)
        if not callable(policy):
            raise TypeError(f"expected policy_factory to give a policy, got {policy!r}")
        device = self.settings.device
        if not isinstance(policy, nn.Module) or device is None:
            return policy
        return policy.to(known_device(device))

    def _from_factory(self, factory: Callable[..., Any]) -> Any:
        if not _takes_env(factory):
            return factory()
        if isinstance(self.env, EnvBase):
            return factory(self.env)
        env = open_one(self.env, self.settings.env_kwargs)
        try:
            return factory(env)
        finally:
            if not env.is_closed:
                env.close()


def unpickled(job: bytes) -> Job:
    """Read a job that :meth:`Job.pickled` wrote."""
    modules, registered, *parts = pickle.loads(job)
    for module in modules:
        with suppress(ImportError):  # which the env raises again, with its id
            importlib.import_module(module)
    for name, spec in registered.items():
        gym.registry[name] = pickle.loads(spec)  # another one may have been of that id
    (env, *_), policy, policy_factory, others = map(pickle.loads, parts)
    settings, num_workers, no_recorders = others
    return Job(env, policy, settings, num_workers, policy_factory, no_recorders)


def set_weights(collector: EvaluationCollector, weights: Mapping[str, bytes]) -> None:
    """Set the weights of a policy, and the statistics of its env's transforms, in place.

    Args:
        collector: of a job.
        weights: pickled :class:`~tdcollect.evaluation.weights.Weights`, by model id.

    Raises:
        TypeError, ValueError: for weights of another model.
    """
    own, given = unpickled_weights(weights)

    def prepare(env: EnvBase) -> None:
        if given:
            set_transforms(env, given)

    collector.prepare_envs(prepare)
    if own is not None:
        set_policy(collector.policy, own)


def check_recorders(env: EnvBase) -> None:
    """Refuse an env whose transforms record videos, to be dumped after each evaluation.

    Raises:
        ValueError: naming the transform.
    """
    for transform in all_transforms_of(env):
        if type(transform).dump not in (Transform.dump, T.Compose.dump):
            raise ValueError(
                f"expected an env without {type(transform).__name__} for dump_video=True: test "
                "episodes run in several slots, and once more as a check, so that its frames "
                "would be mixed. Film an episode afterwards, result.replay(0, video='0.mp4') of a "
                "result of submit(), or pass dump_video=False"
            )


def _modules(env: Any) -> list[str]:
    """Return the module that an id such as ``"ale_py:ALE/Pong-v5"`` names, which registers envs.

    It is imported before the specs of this process are set, which may be others than its own.
    """
    name = env.env if isinstance(env, RequestedEnv) else env
    return [name.partition(":")[0]] if isinstance(name, str) and ":" in name else []


def _registered(ids: Iterable[str]) -> dict[str, bytes]:
    """Return the pickled specs of those ids that a fresh interpreter may not know, by id."""
    found = {}
    for name in ids:
        spec = gym.registry.get(name)
        entry = "gymnasium." if spec is None else spec.entry_point
        if not (isinstance(entry, str) and entry.startswith("gymnasium.")):
            with suppress(Exception):  # one that cannot travel is one that no other process has
                found[name] = cloudpickle.dumps(spec)
    return found


def _takes_env(factory: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in positional
        and (parameter.default is parameter.empty or parameter.name == "env")
        for parameter in inspect.signature(factory).parameters.values()
    )
