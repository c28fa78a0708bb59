"""What a conformance check found, rule by rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tdcollect.display import html_table, one_line
from tdcollect.text import visible


class Broken(Exception):
    """A rule does not hold; the text is the evidence."""


class NotChecked(Exception):
    """A rule says nothing about this env, or could not be tried; the text says why."""


def array_difference(first: Any, second: Any) -> str | None:
    """The first place where two arrays differ, or None. NaNs are equal."""
    a, b = np.asarray(first), np.asarray(second)
    if a.shape != b.shape:
        return f"shapes {a.shape} and {b.shape}"
    both_nan = (a != a) & (b != b)
    different = np.argwhere((a != b) & ~both_nan)
    if not len(different):
        return None
    at = tuple(different[0].tolist())
    return f"{a[at]} and {b[at]}" + (f" at {list(at)}" if at else "")


@dataclass(frozen=True)
class Finding:
    """What came of one rule.

    Attributes:
        rule: a sentence.
        passed: whether it holds; None where it was not checked.
        evidence: what was seen, or why it was not checked.
    """

    rule: str
    passed: bool | None
    evidence: str

    def __repr__(self) -> str:
        return one_line(self, _WORDS[self.passed], self.rule, self.evidence or "no evidence")


@dataclass(frozen=True)
class Report:
    """The findings about one env; printing it shows them.

    Attributes:
        env: what the env is called.
        findings: one a rule.
    """

    env: str
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The rules that do not hold."""
        return tuple(finding for finding in self.findings if finding.passed is False)

    @property
    def passed(self) -> bool:
        """Whether no rule was found broken."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raise AssertionError where a rule does not hold, with each such rule and its evidence."""
        if self.failures:
            lines = [f"{finding.rule}: {finding.evidence}" for finding in self.failures]
            raise AssertionError("\n".join([f"{self.env}: {self._summary()}", *lines]))

    def _summary(self) -> str:
        count = dict.fromkeys(_WORDS.values(), 0)
        for finding in self.findings:
            count[_WORDS[finding.passed]] += 1
        return (
            f"{len(self.findings)} rules: {count['ok']} ok, {count['FAIL']} failed, "
            f"{count['-']} not checked"
        )

    def __repr__(self) -> str:
        return one_line(self, self.env, self._summary())

    def _repr_html_(self) -> str:
        rows = [[_WORDS[f.passed], f.rule, f.evidence] for f in self.findings]
        return html_table(["", "rule", "evidence"], rows, before=[f"{self.env}: {self._summary()}"])

    def __str__(self) -> str:
        width = max((len(finding.rule) for finding in self.findings), default=0)
        lines = [
            f"  {_WORDS[finding.passed]:<4}  {finding.rule:<{width}}  {finding.evidence}".rstrip()
            for finding in self.findings
        ]
        return visible("\n".join([f"{self.env}: {self._summary()}", *lines]), lines=True)


_WORDS = {True: "ok", False: "FAIL", None: "-"}
