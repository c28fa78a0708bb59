"""``diagnose``: is an env fit for collecting and testing, and if not, where and why."""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from tdcollect.envs.envpool_backend import check_task_id
from tdcollect.testing.doctor import collecting, keeping, repeating, resuming
from tdcollect.testing.doctor.diagnosis import (
    BROKEN,
    NOT_CHECKED,
    OK,
    Diagnosis,
    Verdict,
)
from tdcollect.testing.doctor.patient import Patient
from tdcollect.testing.doctor.questions import Answer, Ask
from tdcollect.testing.gymnasium_rules import RULES
from tdcollect.testing.report import Broken, NotChecked

_RUNS = "runs", "the env can be made, reset and stepped"
QUESTIONS: dict[str, tuple[str, Ask]] = {
    **repeating.QUESTIONS,
    **keeping.QUESTIONS,
    **resuming.QUESTIONS,
    **collecting.QUESTIONS,
}
"""In the order in which they are asked."""


def diagnose(
    env: str | Callable[[], gym.Env[Any, Any]],
    *,
    backend: str | None = None,
    max_episode_steps: int = 1000,
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
) -> Diagnosis:
    """Find out whether an env is fit for collecting and testing.

    Every run has an end: episodes are cut after ``max_episode_steps`` steps or about two seconds.
    An env that raises gets a verdict. Global random states are put back.

    Args:
        env: a gymnasium id, a callable that makes a new ``gymnasium.Env`` at each call, or with
            ``backend="envpool"`` an EnvPool id.
        backend: None, or ``"envpool"``.
        max_episode_steps: the most steps that an episode is played for.
        seed: the first of the seeds that are tried.
        env_kwargs: passed to ``gymnasium.make``, to the callable or to EnvPool.
        skip: names of questions to leave out: ``"speed"``, which takes some seconds, or what is
            known and meant to be so.

    Returns:
        A verdict a question; print it, or ``raise_if_broken()``.

    Raises:
        TypeError, ValueError: for arguments that cannot be honoured.
        gymnasium.error.Error: for an unknown id; ModuleNotFoundError for one in a module that is
            not there.

    Examples:
        >>> print(diagnose("CartPole-v1"))
        >>> diagnose(MyEnv).raise_if_broken()
    """
    _check_arguments(env, backend, max_episode_steps, skip)
    if isinstance(env, str):
        _check_id(env, backend)
    from tdcollect.evaluation.episodes.isolation import GlobalRandomness

    before = GlobalRandomness()
    verdicts: list[Verdict] = []
    patient = None
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                patient, answer = _admit(env, backend, env_kwargs or {}, max_episode_steps, seed)
            except Exception as error:
                answer = _raised(error)
            verdicts.append(_verdict(*_RUNS, answer))
            for name, (sentence, ask) in QUESTIONS.items():
                if name in skip:
                    verdicts.append(Verdict(name, sentence, NOT_CHECKED, "skipped as asked"))
                elif answer.status == BROKEN:
                    verdicts.append(Verdict(name, sentence, NOT_CHECKED, "see runs"))
                else:
                    assert patient is not None
                    found = _told_once(_answer(ask, patient), verdicts)
                    if found.status == BROKEN:
                        patient.broken.append(name)
                    verdicts.append(_verdict(name, sentence, found))
    finally:
        if patient is not None:
            _close(patient)
        before.restore()
    return Diagnosis(_name(env), tuple(verdicts))


def _check_arguments(env: Any, backend: Any, max_episode_steps: int, skip: Collection[str]) -> None:
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
    unknown = [name for name in skip if name not in QUESTIONS]
    if unknown:
        known = ", ".join(QUESTIONS)
        raise ValueError(f"expected the questions to skip to be of {known}; got {unknown}")


def _check_id(env: str, backend: Any) -> None:
    """Raise for an id that nobody knows: it is no env yet, so no verdict is due."""
    if backend == "envpool":
        check_task_id(env)
        return
    module, _, name = env.rpartition(":")
    if module:
        importlib.import_module(module)
    gym.spec(name)


def _admit(
    env: Any, backend: Any, kwargs: Mapping[str, Any], steps: int, seed: int
) -> tuple[Patient, Answer]:
    patient = Patient(env, backend, kwargs, steps, seed)
    try:
        patient.time()
        lengths = [len(episode) - 1 for episode in patient.episodes]
        RULES["episodes run: reset gives two values, step gives five"](patient)
    except BaseException:
        _close(patient)
        raise
    cut = "" if patient.steps == steps else f"; cut at {patient.steps}, to bound time or memory"
    told = f"episodes of {', '.join(map(str, lengths))} steps with random actions{cut}"
    return patient, Answer(OK, told)


def _answer(ask: Ask, patient: Patient) -> Answer:
    try:
        return ask(patient)
    except NotChecked as reason:
        return Answer(NOT_CHECKED, str(reason))
    except Exception as error:
        return _raised(error)


def _told_once(answer: Answer, verdicts: Collection[Verdict]) -> Answer:
    """The answer, unless the same evidence has been told by a question before."""
    for verdict in verdicts:
        if answer.status == verdict.status == BROKEN and answer.evidence == verdict.evidence:
            return Answer(NOT_CHECKED, f"it meets what is told above (see {verdict.name})")
    return answer


def _raised(error: Exception) -> Answer:
    if isinstance(error, Broken):
        return Answer(BROKEN, str(error), advice="make it as gymnasium.Env has it")
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    text = " ".join(str(error).split())[:300]
    return Answer(
        BROKEN,
        f"{type(error).__name__}: {text} ({at})",
        advice="mend what raises",
    )


def _verdict(name: str, sentence: str, answer: Answer) -> Verdict:
    given = answer.evidence, answer.cause, answer.advice, answer.data
    return Verdict(name, sentence, answer.status, *given)


def _close(patient: Patient) -> None:
    try:
        patient.close()
    except Exception as error:  # the verdicts stand; an env that cannot close is no crash
        warnings.warn(f"closing {patient.env} raised {error!r}", stacklevel=2)


def _name(env: Any) -> str:
    if isinstance(env, str):
        return env
    return getattr(env, "__name__", None) or type(env).__name__
