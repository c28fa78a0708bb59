"""Questions by name, and the forms of their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tdcollect.testing.doctor.diagnosis import BROKEN, OK, WARNING
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
