"""The question on resuming: can the env be brought back, and by which option?"""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import Any

from tdcollect.testing.doctor.divergence import row_difference, shown
from tdcollect.testing.doctor.patient import Patient
from tdcollect.testing.doctor.questions import Answer, Questions, ok, warning
from tdcollect.testing.doctor.repeating import needs_seed
from tdcollect.testing.gymnasium_probe import Env, Row
from tdcollect.testing.report import NotChecked
from tdcollect.workers.resumable import Resumable

_STEPS = 100
_SECONDS = 0.5

QUESTIONS = Questions()


@QUESTIONS.add("resumes", "an interrupted run can be brought back: make_env(resumable=...)")
def _resumes(patient: Patient) -> Answer:
    if patient.pooled:
        raise NotChecked("backend='envpool' cannot bring its envs back")
    needs_seed(patient)
    patient.needs("global-random", "neighbours")
    short = _why_not(patient, history=False)
    if short is None:
        return ok("resumable=True brings it back amid its second episode")
    whole = _why_not(patient, history=True)
    if whole is None:
        return ok(
            f"resumable='history' brings it back, playing all of its episodes again; "
            f"resumable=True does not: {short}",
            advice="make_env(..., resumable='history') for runs that are to be resumed",
        )
    return warning(
        f"resumable=True does not bring it back: {short}; nor does resumable='history': {whole}",
        advice="give it snapshot() and restore(snapshot); as it is, a resumed run begins new "
        "episodes in all slots",
    )


def _why_not(patient: Patient, history: bool) -> str | None:
    """The reason that a new env cannot take over from a used one; None if it can."""
    make = Resumable(patient.make, history)
    env, other = make(), make()
    try:
        steps = max(10, min(_STEPS, int(_SECONDS / max(patient.step_seconds, 1e-6))))
        first = list(islice(patient.rows(env, patient.seed), steps))
        # The second one begins without a seed, as episodes in a batch do.
        second = list(islice(patient.rows(env, None), max(2, len(first) // 2)))
        why: str | None = other.load_state(env.save_state())
        return why or _difference(patient, env, other, second[-1].ends, steps)
    finally:
        for made in (env, other):
            made.close()


def _difference(patient: Patient, env: Env, other: Env, ended: bool, steps: int) -> str | None:
    """The first difference between two envs in one state, played with the same actions."""
    actions = deepcopy(env.action_space)
    actions.seed(patient.seed)
    for step in range(steps):
        action = None if ended else actions.sample()
        one, two = (_row(each, action) for each in (env, other))
        found = row_difference(one, two)
        if found is not None:
            entry, a, b, _ = found
            return f"it comes back, but {step + 1} steps on {entry} is {shown(a)} and {shown(b)}"
        ended = one.ends
    return None


def _row(env: Env, action: Any) -> Row:
    """The result of a step; of a reset where there is no action."""
    if action is None:
        return Row(deepcopy(env.reset()[0]), None, False, False, {}, ())
    observation, reward, terminated, truncated, _ = env.step(deepcopy(action))
    return Row(deepcopy(observation), reward, terminated, truncated, {}, ())
