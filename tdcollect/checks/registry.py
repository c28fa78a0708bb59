"""Every env check by its name and group, and the one way to run them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from tdcollect.checks.report import FAILED, PASSED, SKIPPED, WARNED, Finding
from tdcollect.workers.slots import old_api


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
    """A check of an env.

    Attributes:
        group: the checks that it is selected with.
        name: its name, unique in a selection.
        rule: the sentence that holds if it passes.
        needs: the checks whose failure would show in this one too.
        advice: the advice of failures that bring none.
        run: the function.
    """

    group: str
    name: str
    rule: str
    needs: tuple[str, ...]
    advice: str
    run: Run


_CHECKS: list[Check] = []


def check(
    group: str,
    name: str,
    rule: str | None = None,
    *,
    needs: Sequence[str] = (),
    advice: str = "",
) -> Callable[[AnyRun], AnyRun]:
    """Register the decorated function as a check; see :class:`Check`.

    The first check of a selection makes and plays the env: if it fails, the others are skipped.

    Args:
        group: the checks that it is selected with.
        name: its name.
        rule: the sentence; None if the name is the sentence.
        needs: the checks whose failure would show in this one too.
        advice: the advice of failures that bring none.
    """

    def register(run: AnyRun) -> AnyRun:
        _CHECKS.append(Check(group, name, rule or name, tuple(needs), advice, run))
        return run

    return register


def select(*groups: str, skip: Collection[str] = ()) -> dict[str, Check]:
    """Return the checks of some groups by their names, in the order in which they run.

    Args:
        groups: in the order of the result.
        skip: names to look for among them.

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
    """Run checks in turn; a check that raises fails.

    Args:
        checks: the first one makes and plays the env.
        subject: the env; ``subject.failed`` gets the names of the checks that fail.
        skip: names of checks to leave out.

    Returns:
        One finding per check.
    """
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
