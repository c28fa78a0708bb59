"""``diagnose``: checks whether an env is fit for collecting and testing."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium as gym
import torch

from tdcollect.checks.registry import check, run_checks, select
from tdcollect.checks.report import Report
from tdcollect.envs.envpool_backend import check_task_id
from tdcollect.testing import gymnasium_checks
from tdcollect.testing.doctor import collecting, outputs, repeating
from tdcollect.testing.doctor.examination import Examination
from tdcollect.workers.slots import spec_of

GROUPS = (repeating.GROUP, outputs.GROUP, collecting.GROUP)
"""The checks that follow ``"runs"``, in the order in which they run."""


def diagnose(
    env: str | Callable[[], gym.Env[Any, Any]],
    *,
    backend: str | None = None,
    max_episode_steps: int = 1000,
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
) -> Report:
    """Check whether an env is fit for collecting and testing.

    Each run is bounded: episodes are cut after ``max_episode_steps`` steps or about two seconds.
    An env that raises gets a finding. Global random states are restored.

    Args:
        env: a gymnasium id, a callable that makes a new ``gymnasium.Env`` at each call, or with
            ``backend="envpool"`` an EnvPool id.
        backend: None, or ``"envpool"``.
        max_episode_steps: the most steps that an episode is played for.
        seed: the first of the seeds that are tried.
        env_kwargs: passed to ``gymnasium.make``, to the callable or to EnvPool.
        skip: names of checks to leave out: ``"speed"``, which takes some seconds, or faults that
            are known and intended.

    Returns:
        A report with one finding per check; print it, or call ``raise_if_failed()``.

    Raises:
        TypeError, ValueError: for arguments that cannot be honoured.
        gymnasium.error.Error: for an unknown id.
        ModuleNotFoundError: for an id whose module does not exist.

    Examples:
        >>> print(diagnose("CartPole-v1"))
        >>> diagnose(MyEnv).raise_if_failed()
    """
    _check_arguments(env, backend, max_episode_steps)
    checks = select("runs") | select(*GROUPS, skip=skip)
    if isinstance(env, str):
        _check_id(env, backend)
    from tdcollect.evaluation.episodes.isolation import GlobalRandomness

    before = GlobalRandomness()
    exam = Examination(env, backend, env_kwargs or {}, max_episode_steps, seed)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            findings = run_checks(checks.values(), exam, skip)
    finally:
        _close(exam)
        before.restore()
    return Report(_name(env), findings)


@check("runs", "runs", "the env can be made, reset and stepped")
def _runs(exam: Examination) -> str:
    asked = exam.max_episode_steps
    exam.open()
    exam.time()
    evidence = gymnasium_checks.episodes_run(exam)
    steps = exam.max_episode_steps
    cut = "" if steps == asked else f"; cut at {steps}, to bound time or memory"
    return f"{evidence} with random actions{cut}"


def _check_arguments(env: Any, backend: Any, max_episode_steps: int) -> None:
    if isinstance(env, gym.Env) or not (isinstance(env, str) or callable(env)):
        raise TypeError(
            "expected a gymnasium id or a callable that makes a new env at each call, as new envs "
            f"are compared with used ones, got {env!r}"
        )
    if backend not in (None, "envpool"):
        raise ValueError(f"expected backend to be None or 'envpool', got {backend!r}")
    if backend == "envpool" and not isinstance(env, str):
        raise TypeError(f"backend='envpool' expects an EnvPool id, got {env!r}")
    if max_episode_steps < 1:
        raise ValueError(f"expected max_episode_steps to be positive, got {max_episode_steps}")


def _check_id(env: str, backend: Any) -> None:
    """Raise for an unknown id: a typo says nothing about an env."""
    if backend == "envpool":
        check_task_id(env)
        return
    module, _, name = env.rpartition(":")
    if module:
        importlib.import_module(module)
    spec_of(name)


def _close(exam: Examination) -> None:
    try:
        exam.close()
    except Exception as error:  # the findings stand
        warnings.warn(f"closing the env raised {error!r}", stacklevel=2)


def _name(env: Any) -> str:
    if isinstance(env, str):
        return env
    return getattr(env, "__name__", None) or type(env).__name__
