"""The core of env checks: the difference of two values, the registry, and how checks run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tdcollect.envs.differences import Divergence, Row, first_divergence, mismatch
from tdcollect.testing import checks
from tdcollect.testing.checks import (
    Failed,
    Passed,
    Skipped,
    Warned,
    rule,
    run_checks,
    select,
)


class Plain:
    """An object without a value."""


@dataclass
class Valued:
    value: Any


class Shown:
    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (Plain(), Plain(), None),
        (Shown("a"), Shown("a"), None),
        (Shown("a"), Shown("b"), "x is a and b"),
        (Valued(1), Valued(1), None),
        (Valued(1), Valued(2), "x is Valued(value=1) and Valued(value=2)"),
        (Valued(np.zeros(2)), Valued(np.zeros(2)), None),
        (None, 1.0, "x is None and 1.0"),
        (None, None, None),
        ({"a": 1}, {"b": 1}, "the keys of x is ['a'] and ['b']"),
        ((1, 2), (1,), "the length of x is 2 and 1"),
        (np.array([1, np.nan]), np.array([1, np.nan]), None),
        (np.array([1j]), np.array([2j]), "x[0] is 1j and 2j (1 apart)"),
        (2**60, 2**60 + 1, f"x is {2**60} and {2**60 + 1} (0 apart)"),
        (0.0, -0.0, None),
    ],
)
def test_mismatch(first: Any, second: Any, expected: str | None) -> None:
    found = mismatch("x", first, second)
    assert (found and str(found)) == expected


def test_exact_comparison_tells_signs_of_zero() -> None:
    first, second = (Row({"x": np.array([0.0, value])}) for value in (0.0, -0.0))
    assert first_divergence(3, [[first]], [[second]]) is None
    found = first_divergence(3, [[first]], [[second]], exact=True)
    assert found == Divergence(3, 0, 0, "x[1]", 0.0, -0.0, 0.0)
    assert first_divergence(3, [[second]], [[second]], exact=True) is None


def test_an_entry_that_is_gone_is_a_difference() -> None:
    found = first_divergence(0, [[Row({("next", "x"): 1})]], [[Row({})]])
    assert str(found) == "seed 0, episode 0, the reset: ('next', 'x') is there and gone"


class Subject:
    def __init__(self) -> None:
        self.failed: list[str] = []

    def require(self, *checks: str) -> None:
        for name in checks:
            if name in self.failed:
                raise Skipped(f"see {name}")


@pytest.fixture
def own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_CHECKS", [])

    @rule("a", "runs")
    def runs(subject: Subject) -> str:
        return "it does"

    @rule("b", "fails", "nothing fails", advice="mend it")
    def fails(subject: Subject) -> str:
        raise Failed("at 3", data={"step": 3})

    @rule("b", "fails again")
    def fails_again(subject: Subject) -> str:
        raise Failed("at 3")

    @rule("b", "needs", needs=["runs", "fails"])
    def needs(subject: Subject) -> str:
        raise AssertionError

    @rule("b", "raises", advice="mend it")
    def raises(subject: Subject) -> str:
        raise ValueError("gone")

    @rule("b", "warns", advice="mend it")
    def warns(subject: Subject) -> str:
        raise Warned("rather late")

    @rule("b", "measures")
    def measures(subject: Subject) -> Passed:
        return Passed("3 us", advice="take it", data={"us": 3})


@pytest.mark.usefixtures("own_checks")
def test_checks_run_in_the_order_of_their_groups() -> None:
    subject = Subject()
    findings = run_checks(select("a", "b").values(), subject, skip=["measures"])
    assert [(f.name, f.status, f.advice) for f in findings] == [
        ("runs", "passed", ""),
        ("fails", "failed", "mend it"),
        ("fails again", "skipped", ""),
        ("needs", "skipped", ""),
        ("raises", "failed", "mend what raises"),
        ("warns", "warned", ""),
        ("measures", "skipped", ""),
    ]
    assert findings[1].rule == "nothing fails"
    assert findings[1].data == {"step": 3}
    assert findings[2].evidence == "it meets the fault reported above (see fails)"
    assert findings[3].evidence == "see fails"
    assert findings[4].evidence.startswith("ValueError: gone (test_checks.py, line ")
    assert findings[6].evidence == "skipped as asked"
    assert subject.failed == ["fails", "raises"]
    assert run_checks(select("b").values(), Subject())[-1].evidence == (
        "the env does not run (see fails)"
    )


@pytest.mark.usefixtures("own_checks")
def test_a_passed_check_may_have_advice_and_data() -> None:
    (finding,) = run_checks([select("b")["measures"]], Subject())
    assert (finding.status, finding.advice, finding.data) == ("passed", "take it", {"us": 3})


@pytest.mark.usefixtures("own_checks")
def test_only_selected_checks_can_be_skipped() -> None:
    assert list(select("a")) == ["runs"]
    with pytest.raises(ValueError, match=r"checks to skip to be of \['runs'\], got \['fails'\]"):
        select("a", skip=["fails"])
