"""Questions by name, and the forms of their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tdcollect.testing.doctor.diagnosis import BROKEN, OK, WARNING
from tdcollect.testing.doctor.divergence import Divergence
from tdcollect.testing.doctor.patient import Patient
from tdcollect.testing.gymnasium_rules import RULES
from tdcollect.testing.report import Broken


@dataclass(frozen=True)
class Answer:
    """What came of one question; see :class:`Verdict`."""

    status: str
    evidence: str
    cause: str = ""
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def ok(evidence: str = "", **more: Any) -> Answer:
    return Answer(OK, evidence, **more)


def warning(evidence: str, **more: Any) -> Answer:
    return Answer(WARNING, evidence, **more)


def broken(evidence: str, **more: Any) -> Answer:
    return Answer(BROKEN, evidence, **more)


OWN_RANDOM = (
    "draw all random numbers from self.np_random, which gymnasium's Env.reset(seed=seed) seeds; "
    "call super().reset(seed=seed) first in reset"
)


def by_chance(patient: Patient, told: str, found: Divergence | None = None) -> Answer:
    """Broken: runs differ that should agree, though not in the same way when they are repeated."""
    patient.has_chance = len(patient.broken)
    return broken(
        f"{told}; run again, these do not differ there",
        cause="random numbers that reset(seed=) does not reach, drawn now and then, or the clock",
        advice=OWN_RANDOM,
        data={} if found is None else found.to_dict(),
    )


def outlives(found: Divergence) -> Answer:
    """Broken: a new env no longer does what the first ones did."""
    return broken(
        f"a new env, and another one made after some had been played: {found}",
        cause="state that outlives the envs: class attributes, module globals, a file",
        advice="keep state in self, made in __init__ or reset",
        data=found.to_dict(),
    )


Ask = Callable[[Patient], Answer]


class Questions(dict[str, tuple[str, Ask]]):
    """From a name to the question's sentence and what answers it."""

    def add(self, name: str, sentence: str) -> Callable[[Ask], Ask]:
        """Add what answers a question: it returns an answer, or raises ``NotChecked``."""

        def added(ask: Ask) -> Ask:
            self[name] = sentence, ask
            return ask

        return added


def by_rule(patient: Patient, *sentences: str, advice: str) -> Answer:
    """Broken where one of check_env's rules is; else ok with what they saw."""
    seen = []
    for sentence in sentences:
        try:
            seen.append(RULES[sentence](patient))
        except Broken as evidence:
            return broken(str(evidence), advice=advice)
    return ok("; ".join(filter(None, seen)))
