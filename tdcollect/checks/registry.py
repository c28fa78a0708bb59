"""Checks of envs, by name and group: how they run, and the table of their findings."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from tdcollect.display import html_table, one_line, visible
from tdcollect.envs.process.worker import old_api

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
        """Return the finding of the check of that name."""
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


class Passed(NamedTuple):
    """The result of a check that passed, and has more to show than its evidence."""

    evidence: str
    advice: str = ""
    data: Mapping[str, Any] = {}


@dataclass(eq=False)  # by identity, as exceptions are
class Outcome(Exception):
    """A check did not pass; see :class:`Finding` for the fields."""

    evidence: str
    cause: str = ""
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    status = FAILED

    def __str__(self) -> str:
        return self.evidence


class Failed(Outcome):
    """The rule does not hold."""


class Warned(Outcome):
    """The rule holds with a reservation: mind the advice."""

    status = WARNED


class Skipped(Outcome):
    """The rule says nothing about this env, or could not be checked."""

    status = SKIPPED


class Subject(Protocol):
    """An env to check: it knows the checks that failed so far."""

    failed: list[str]

    def require(self, *checks: str) -> None:
        """Raise ``Skipped`` if one of these checks found a fault that would show again."""


Run: TypeAlias = Callable[[Any], str | Passed]
"""A check's function: returns its evidence, or raises ``Failed``, ``Warned`` or ``Skipped``."""
AnyRun = TypeVar("AnyRun", bound=Run)


class Check(NamedTuple):
    """A check of an env; ``needs`` are the checks whose failure would show in this one too."""

    group: str
    name: str
    rule: str
    needs: tuple[str, ...]
    advice: str
    run: Run


_CHECKS: list[Check] = []


def rule(
    group: str,
    name: str,
    sentence: str | None = None,
    *,
    needs: Sequence[str] = (),
    advice: str = "",
) -> Callable[[AnyRun], AnyRun]:
    """Register the decorated function as a check; without a sentence, the name is it.

    The first check of a selection makes and plays the env: if it fails, the others are skipped.
    """

    def register(run: AnyRun) -> AnyRun:
        _CHECKS.append(Check(group, name, sentence or name, tuple(needs), advice, run))
        return run

    return register


def select(*groups: str, skip: Collection[str] = ()) -> dict[str, Check]:
    """Return the checks of some groups by their names, in the order in which they run.

    Raises:
        ValueError: for names to skip that are not among them.
    """
    checks = {c.name: c for group in groups for c in _CHECKS if c.group == group}
    unknown = [name for name in skip if name not in checks]
    if unknown:
        raise ValueError(f"expected the checks to skip to be of {list(checks)}, got {unknown}")
    return checks


def run_checks(
    checks: Iterable[Check], subject: Subject, skip: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Run checks in turn, one finding each; a check that raises fails."""
    findings: list[Finding] = []
    for one in checks:
        if one.name in skip:
            found = _finding(one, Skipped("skipped as asked"))
        elif findings and findings[0].status == FAILED:
            found = _finding(one, Skipped(f"the env does not run (see {findings[0].name})"))
        else:
            found = _report_once(_run_check(one, subject), findings)
        if found.status == FAILED:
            subject.failed.append(one.name)
        findings.append(found)
    return tuple(findings)


def _run_check(one: Check, subject: Subject) -> Finding:
    try:
        subject.require(*one.needs)
        result = one.run(subject)
    except Outcome as outcome:
        return _finding(one, outcome)
    except Exception as error:
        return _finding(one, _raised(error))
    passed = Passed(result) if isinstance(result, str) else result
    return Finding(one.name, one.rule, PASSED, passed.evidence, "", passed.advice, passed.data)


def _finding(one: Check, outcome: Outcome) -> Finding:
    advice = outcome.advice or (one.advice if outcome.status == FAILED else "")
    found = outcome.status, outcome.evidence, outcome.cause, advice, outcome.data
    return Finding(one.name, one.rule, *found)


def _report_once(found: Finding, findings: Collection[Finding]) -> Finding:
    """Return the finding, skipped if an earlier check failed with the same evidence."""
    for earlier in findings:
        if found.status == earlier.status == FAILED and found.evidence == earlier.evidence:
            reason = f"it meets the fault reported above (see {earlier.name})"
            return Finding(found.name, found.rule, SKIPPED, reason)
    return found


def _raised(error: Exception) -> Failed:
    """Return the failure of a check in which the env raised: the error and its place."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    text = " ".join(str(error).split())[:300]
    return Failed(
        f"{type(error).__name__}: {text} ({at})", advice=old_api(text) or "mend what raises"
    )
