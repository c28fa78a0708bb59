"""The subject of evaluations beside training: env, policy and settings, sent to their process."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import torch
from torch import nn
from torchrl.envs import EnvBase, Transform
from torchrl.envs import transforms as T

from tdcollect.envs.make import make_env
from tdcollect.envs.transforms import all_transforms_of
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.states import global_states, set_global_states


class Job(NamedTuple):
    """The subject of all evaluations of one :class:`tdcollect.Evaluator`.

    Attributes:
        env: as :func:`tdcollect.evaluate` takes it.
        policy: the policy; None if a factory makes it.
        policy_factory: makes the policy, from an env.
        settings: of each evaluation.
        metrics_fn: returns further metrics, given the padded episodes.
        dump_video: refuse envs that record videos.
    """

    env: Any
    policy: Any
    policy_factory: Callable[..., Any] | None
    settings: EvaluationSettings
    metrics_fn: Callable[[Any], Any] | None
    dump_video: bool


_ADVICE = {
    "env": "pass a function that makes it: Evaluator(lambda: make_env(), ...)",
    "policy": "pass a function that makes it: policy_factory=lambda env: make_policy(env)",
}


def packed(job: Job) -> bytes:
    """Pickle a job.

    Raises:
        TypeError: for a part that cannot be pickled, naming it.
    """
    parts = {name: pickled(value, name) for name, value in job._asdict().items()}
    return pickle.dumps((_registered(), parts))


def unpacked(blob: bytes) -> Job:
    """Return the job that :func:`packed` was given, and register the envs known there."""
    registered, parts = pickle.loads(blob)
    for name, spec in registered.items():
        if name not in gym.registry:
            gym.registry[name] = pickle.loads(spec)
    return Job(**{name: pickle.loads(part) for name, part in parts.items()})


def _registered() -> dict[str, bytes]:
    """Return the pickled specs of gymnasium's envs that a fresh interpreter may not know, by id."""
    found = {}
    for name, spec in gym.registry.items():
        if not (isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.")):
            with suppress(Exception):  # one that cannot travel is one that no other process has
                found[name] = cloudpickle.dumps(spec)
    return found


def pickled(value: Any, name: str) -> bytes:
    """Pickle an argument, functions of any kind included.

    Raises:
        TypeError: if it cannot be, naming the argument.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        advice = _ADVICE.get(name, "let it refer to nothing that is bound to this process")
        text = " ".join(f"{type(value).__name__} {value}".split())
        raise TypeError(
            f"expected {name} to be picklable, as evaluations run in a process of their own, got "
            f"{text[:120]} ({type(error).__name__}: {error}); {advice}"
        ) from error


def make_policy(job: Job) -> Any:
    """Return the policy of a job; a factory is called after ``torch.manual_seed(0)``.

    A factory with a parameter without default, or one named ``env``, is called with an env, made
    for it and closed afterwards. Global random states are as before.

    Raises:
        TypeError: if the factory gives no policy.
    """
    policy = job.policy
    if job.policy_factory is not None:
        before = global_states()
        try:
            torch.manual_seed(0)
            policy = _made(job, job.policy_factory)
        finally:
            set_global_states(before)
        if not callable(policy):
            raise TypeError(f"expected policy_factory to give a policy, got {policy!r}")
    if isinstance(policy, nn.Module) and job.settings.device is not None:
        policy = policy.to(job.settings.device)
    return policy


def _made(job: Job, factory: Callable[..., Any]) -> Any:
    if not _takes_env(factory):
        return factory()
    if isinstance(job.env, EnvBase):
        return factory(job.env)
    kwargs = job.settings.env_kwargs or {}
    made = make_env(job.env, env_kwargs=kwargs) if isinstance(job.env, str) else job.env(**kwargs)
    env = made if isinstance(made, EnvBase) else make_env(made)
    try:
        return factory(env)
    finally:
        if not env.is_closed:
            env.close()


def _takes_env(factory: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in positional
        and (parameter.default is parameter.empty or parameter.name == "env")
        for parameter in inspect.signature(factory).parameters.values()
    )


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
