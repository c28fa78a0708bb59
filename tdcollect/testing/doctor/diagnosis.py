"""What the doctor says of an env: a verdict a question, as a table, as JSON, as an exit code."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tdcollect.display import html_table, one_line
from tdcollect.text import visible

OK, WARNING, BROKEN, NOT_CHECKED = STATUSES = "ok", "warning", "broken", "not checked"

_WIDTH = 100


@dataclass(frozen=True)
class Verdict:
    """The answer to one question.

    Attributes:
        name: the question's short name, ``"leaks"`` say.
        question: as a sentence that holds where the verdict is ok.
        status: ``"ok"``; ``"warning"``, the env can be collected from, but mind the advice;
            ``"broken"``; or ``"not checked"``.
        evidence: what was seen, or why the question was not tried.
        cause: why it is so, most likely; empty where there is nothing to explain.
        advice: what to do about it.
        data: the evidence in numbers.
    """

    name: str
    question: str
    status: str
    evidence: str
    cause: str = ""
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(self, self.name, self.status, self.evidence or self.question)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "data": dict(self.data)}

    def lines(self, width: int) -> list[str]:
        """The verdict's part of the table, with names ``width`` wide."""
        head = f"  {self.status:<11}  {self.name:<{width}}  "
        parts = [self.evidence or self.question]
        parts += [f"{name}: {text}" for name, text in (("cause", self.cause), ("do", self.advice))]
        told = []
        for i, part in enumerate(parts):
            if i == 0 or not part.endswith(": "):
                inner = "" if i == 0 else "  "
                told += textwrap.wrap(part, _WIDTH - len(head), subsequent_indent=inner)
        return [(head if i == 0 else " " * len(head)) + line for i, line in enumerate(told)]


@dataclass(frozen=True)
class Diagnosis:
    """The verdicts on one env; printing it shows the table.

    Attributes:
        env: what the env is called.
        verdicts: one a question.
    """

    env: str
    verdicts: tuple[Verdict, ...]

    def __getitem__(self, name: str) -> Verdict:
        """The verdict on the question of that short name."""
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise KeyError(f"expected one of {[v.name for v in self.verdicts]}, got {name!r}")

    @property
    def broken(self) -> tuple[Verdict, ...]:
        """The verdicts that are ``"broken"``."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == BROKEN)

    @property
    def sound(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken

    @property
    def exit_code(self) -> int:
        """0 where the env is sound, else 1."""
        return 0 if self.sound else 1

    def raise_if_broken(self) -> None:
        """Raise AssertionError with each broken verdict."""
        if self.broken:
            width = max(len(verdict.name) for verdict in self.broken)
            lines = [line for verdict in self.broken for line in verdict.lines(width)]
            raise AssertionError("\n".join([self._headline(), *lines]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: ``env``, ``sound`` and the verdicts."""
        verdicts = [verdict.to_dict() for verdict in self.verdicts]
        return {"env": self.env, "sound": self.sound, "verdicts": verdicts}

    def _headline(self) -> str:
        counts = {
            status: sum(verdict.status == status for verdict in self.verdicts)
            for status in STATUSES
        }
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{self.env}: {'sound' if self.sound else 'broken'} ({told})"

    def __repr__(self) -> str:
        return one_line(self, self._headline())

    def _repr_html_(self) -> str:
        rows = [
            [v.status, v.name, v.evidence or v.question, v.cause, v.advice] for v in self.verdicts
        ]
        header = ["", "question", "evidence", "cause", "do"]
        return html_table(header, rows, before=[self._headline()])

    def __str__(self) -> str:
        width = max((len(verdict.name) for verdict in self.verdicts), default=0)
        lines = [line for verdict in self.verdicts for line in verdict.lines(width)]
        return visible("\n".join([self._headline(), "", *lines]), lines=True)
