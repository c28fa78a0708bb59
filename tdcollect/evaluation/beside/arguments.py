"""Checks of the arguments of :class:`tdcollect.Evaluator`, before a process starts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.evaluation.ledger.records import is_count
from tdcollect.evaluation.weights import check_model_ids
from tdcollect.evaluation.workers.local import LocalWorkers, as_workers
from tdcollect.evaluation.workers.protocol import Workers
from tdcollect.extras import extra_module

BACKENDS = ("thread", "process", "ray")
BUSY_POLICIES = ("queue", "skip", "error")

# Keyword arguments of TorchRL's collectors, and what takes their place.
_INSTEAD = {
    "max_frames_per_traj": "max_steps",
    "trajs_per_batch": "num_trajectories",
    "exploration_type": "exploration_type",
    "device": "device",
    "policy_device": "device",
    "init_fn": "init_fn",
    "weight_sync_schemes": "weight_sync_schemes",
}


def check_subject(env: Any, policy: Any, policy_factory: Any) -> None:
    """Check env and policy.

    Raises:
        TypeError: for what is no env.
        ValueError: unless there is either a policy or a factory.
    """
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)) or not (
        isinstance(env, (str, EnvBase)) or callable(env)
    ):
        raise TypeError(
            "expected a gymnasium id, a callable that makes an env, or a TorchRL env, got "
            f"{env!r}; pass a function that makes it"
        )
    if policy is not None and policy_factory is not None:
        raise ValueError("expected policy or policy_factory, not both; leave one out")
    if policy is None and policy_factory is None:
        raise ValueError(
            "expected that policy or policy_factory must be provided, got neither; for random "
            "actions pass torchrl.modules.RandomPolicy(env.action_spec)"
        )
    for name, value in (("policy", policy), ("policy_factory", policy_factory)):
        if value is not None and not callable(value):
            raise TypeError(f"expected {name} to be callable, got {value!r}")


def check_torchrl(
    frames_per_batch: int | None,
    collector_cls: Any,
    collector_kwargs: Mapping[str, Any] | None,
    weight_sync_schemes: Mapping[str, Any] | None,
    done_keys: Any,
) -> None:
    """Check arguments that TorchRL's evaluator has, and that do not change an evaluation here.

    Raises:
        TypeError, ValueError: for a value that cannot be honoured.
    """
    if frames_per_batch is not None and not (is_count(frames_per_batch) and frames_per_batch > 0):
        raise ValueError(
            f"expected frames_per_batch to be a positive int or None, got {frames_per_batch!r}"
        )
    name = collector_cls if isinstance(collector_cls, str) else None
    kind = collector_cls if isinstance(collector_cls, type) else None
    known = name in ("Collector", "SyncDataCollector") or kind is TorchRLCollector
    if not (collector_cls is None or known or _is_ours(kind)):
        raise ValueError(
            f"expected collector_cls to be None or 'Collector', got {collector_cls!r}: test "
            "episodes are collected by tdcollect.EvaluationCollector; leave it out"
        )
    for key in collector_kwargs or ():
        instead = _INSTEAD.get(key)
        advice = f"pass {instead}= instead" if instead else "leave it out"
        raise ValueError(
            f"expected no collector_kwargs, got {key!r}: test episodes are collected by "
            f"tdcollect.EvaluationCollector; {advice}"
        )
    if weight_sync_schemes is not None:
        check_model_ids(weight_sync_schemes, "weight_sync_schemes")
    if _without_next(done_keys) not in (keys.DONE, (keys.DONE,)):
        raise ValueError(
            f"expected done_keys to be ('next', 'done'), got {done_keys!r}: an episode ends where "
            "the env's done entry says; leave it out"
        )


def _is_ours(kind: type | None) -> bool:
    from tdcollect.collect import Collector

    return kind is Collector


def check_functions(**functions: Callable[..., Any] | None) -> None:
    """Raise TypeError for what is neither callable nor None."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(f"expected {name} to be callable or None, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError for a value that is no choice."""
    if value not in choices:
        raise ValueError(
            f"expected {name} to be one of {', '.join(map(repr, choices))}, got {value!r}"
        )


def check_positive(**counts: Any) -> None:
    """Raise ValueError for what is no positive int."""
    for name, value in counts.items():
        if not is_count(value) or value < 1:
            raise ValueError(f"expected {name} to be a positive int, got {value!r}")


def crew_of(
    workers: Any,
    backend: str,
    init_fn: Callable[[], Any] | None,
    num_gpus: int,
    ray_kwargs: Mapping[str, Any] | None,
) -> Workers:
    """Return the workers that run the episodes, not started.

    Raises:
        TypeError, ValueError: for arguments of Ray without it, and for what asks for no worker.
    """
    if backend != "ray" and ray_kwargs:
        raise ValueError(
            f"expected ray_kwargs for backend='ray' only, got some for backend={backend!r}; leave "
            "them out"
        )
    if workers is not None:
        crew = as_workers(workers)
        if crew is None or init_fn is not None or backend == "ray":
            raise ValueError(
                f"expected workers without backend='ray' and without init_fn, and at least one, "
                f"got workers={workers!r}, backend={backend!r}; pass LocalWorkers(init_fn=...) or "
                "RayWorkers(...)"
            )
        return crew
    if backend == "ray":
        from tdcollect.evaluation.workers.ray_actors import RayWorkers

        return RayWorkers(1, num_gpus=num_gpus, init_fn=init_fn, **(ray_kwargs or {}))
    return LocalWorkers(1, init_fn=init_fn)


def check_extras(with_files: bool) -> None:
    """Raise ModuleNotFoundError for packages that intervals and figures need."""
    for name in ("scipy", "matplotlib") if with_files else ("scipy",):
        extra_module(name, "tdcollect.Evaluator")


def reward_keys_of(reward_keys: Any) -> Any:
    """Return reward keys as evaluations take them, without TorchRL's leading ``"next"``."""
    if isinstance(reward_keys, list):
        return [_without_next(key) for key in reward_keys]
    return _without_next(reward_keys)


def _without_next(key: Any) -> Any:
    if isinstance(key, tuple) and len(key) > 1 and key[0] == keys.NEXT:
        return key[1] if len(key) == 2 else key[1:]
    return key


def step_of(step: Any) -> int:
    """Return a training step as an int.

    Raises:
        ValueError: for what is no int, or is negative.
    """
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if found < 0 or isinstance(step, bool):
        raise ValueError(f"expected step to be an int and not negative, got {step!r}")
    return found
