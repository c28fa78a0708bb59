"""Results of env checks: one finding per check, as a table, as JSON, as an exit code."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tdcollect.display import html_table, one_line
from tdcollect.text import visible

PASSED, WARNED, FAILED, SKIPPED = STATUSES = "passed", "warned", "failed", "skipped"

_WIDTH = 100
_NARROWEST = 60  # characters; long names make wider lines instead


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the check's name, ``"leaks"`` say.
        rule: the sentence that holds if the check passed.
        status: ``"passed"``; ``"warned"``: the env can be collected from, but mind the advice;
            ``"failed"``; or ``"skipped"``.
        evidence: what the check observed, or the reason that it was skipped.
        cause: the most likely cause; empty if there is nothing to explain.
        advice: what to do about it.
        data: the evidence in numbers.
    """

    name: str
    rule: str
    status: str
    evidence: str
    cause: str = ""
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(self, self.name, self.status, self.text)

    @property
    def text(self) -> str:
        """The evidence; the rule if there is none to show."""
        return self.evidence or ("" if self.rule == self.name else self.rule)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "data": dict(self.data)}

    def lines(self, width: int) -> list[str]:
        """Return the finding's lines of the table, with names ``width`` wide."""
        head = f"  {self.status:<7}  {self.name:<{width}}  "
        wrapped = textwrap.TextWrapper(max(_WIDTH - len(head), _NARROWEST))
        lines = wrapped.wrap(self.text) or [""]
        wrapped.subsequent_indent = "  "
        for label, text in (("cause", self.cause), ("do", self.advice)):
            if text:
                lines += wrapped.wrap(f"{label}: {text}")
        return [(" " * len(head) if i else head) + line for i, line in enumerate(lines)]


@dataclass(frozen=True)
class Report:
    """The findings about one env; print it for the table.

    Attributes:
        env: the env's name.
        findings: one per check.
    """

    env: str
    findings: tuple[Finding, ...]

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of the check of that name.

        Raises:
            KeyError: if there is none.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"expected one of {[f.name for f in self.findings]}, got {name!r}")

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that are ``"failed"``."""
        return tuple(finding for finding in self.findings if finding.status == FAILED)

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def exit_code(self) -> int:
        """0 if no check failed, else 1."""
        return 0 if self.passed else 1

    def raise_if_failed(self) -> None:
        """Raise AssertionError with each failed check, if any failed."""
        if self.failures:
            raise AssertionError("\n".join([self._headline(), *_table(self.failures)]))

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON: ``env``, ``passed`` and the findings."""
        findings = [finding.to_dict() for finding in self.findings]
        return {"env": self.env, "passed": self.passed, "findings": findings}

    def _headline(self) -> str:
        statuses = [finding.status for finding in self.findings]
        counts = [f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses]
        return f"{self.env}: {PASSED if self.passed else FAILED} ({', '.join(counts)})"

    def __repr__(self) -> str:
        return one_line(self, self._headline())

    def _repr_html_(self) -> str:
        rows = [[f.status, f.name, f.text, f.cause, f.advice] for f in self.findings]
        header = ["", "check", "evidence", "cause", "do"]
        return html_table(header, rows, before=[self._headline()])

    def __str__(self) -> str:
        lines = [self._headline(), "", *_table(self.findings)]
        return visible("\n".join(lines), lines=True)


def _table(findings: tuple[Finding, ...]) -> list[str]:
    width = max((len(finding.name) for finding in findings), default=0)
    return [line.rstrip() for finding in findings for line in finding.lines(width)]
