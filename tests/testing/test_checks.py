"""The core of env checks: the difference of two runs, how checks run, and their table."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace as Valued
from typing import Any

import numpy as np
import pytest

from tdcollect.testing import Finding, Report, checks
from tdcollect.testing.checks import (
    Divergence,
    Failed,
    GymnasiumPlayer,
    Passed,
    Row,
    Warned,
    first_divergence,
    mismatch,
    rule,
    run_checks,
    select,
)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (object(), object(), None),  # without a value
        (count(1), count(1), None),  # equal as they are shown
        (count(1), count(2), "x is count(1) and count(2)"),
        (Valued(value=1), Valued(value=1), None),
        (Valued(value=1), Valued(value=2), "x is namespace(value=1) and namespace(value=2)"),
        (Valued(value=np.zeros(2)), Valued(value=np.zeros(2)), None),
        ("up", "down", "x is 'up' and 'down'"),
        (None, 1.0, "x is None and 1.0"),
        (None, None, None),
        ({"a": 1}, {"b": 1}, "the keys of x is ['a'] and ['b']"),
        ({"a": (0, 1)}, {"a": (0, 3)}, "x['a'][1] is 1 and 3 (2 apart)"),
        ((1, 2), (1,), "the length of x is 2 and 1"),
        (np.zeros(2), np.zeros(3), "the shape of x is [2] and [3]"),
        (np.array([1, np.nan]), np.array([1, np.nan]), None),
        (np.array([np.nan]), np.zeros(1), "x[0] is nan and 0 (inf apart)"),
        (np.array([1j]), np.array([2j]), "x[0] is 1j and 2j (1 apart)"),
        (np.array([1.0, 2, 3]), np.array([1.0, 2.5, 5]), "x[2] is 3 and 5 (2 apart)"),
        (2**60, 2**60 + 1, f"x is {2**60} and {2**60 + 1} (0 apart)"),
        (True, False, "x is True and False (1 apart)"),
        (0.0, -0.0, None),
    ],
)
def test_mismatch(first: Any, second: Any, expected: str | None) -> None:
    found = mismatch("x", first, second)
    assert (found and str(found)) == expected


def run(*values: Any) -> list[list[Row]]:
    """An episode with these rows."""
    return [[Row({"x": value}) for value in values]]


def test_first_divergence_is_the_first_of_all_episodes() -> None:
    found = first_divergence(4, run(0, 1) + run(0, 1, 2), run(0, 1) + run(0, 1.5, 5))
    assert found == Divergence(4, 1, 1, "x", 1, 1.5, 0.5)
    assert str(found) == "seed 4, episode 1, step 1: x is 1 and 1.5 (0.5 apart)"
    found = first_divergence(0, run(1, 1), run(1, 1, 1))
    assert found == Divergence(0, 0, 1, "length", 1, 2, 1.0)
    assert first_divergence(0, run(1, np.nan), run(1, np.nan)) is None
    found = first_divergence(0, [[Row({("next", "x"): 1})]], [[Row({})]])
    assert str(found) == "seed 0, episode 0, the reset: ('next', 'x') is there and gone"


def player() -> GymnasiumPlayer:
    return GymnasiumPlayer(None, None, None, 1, 0)


@pytest.fixture
def own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_CHECKS", [])

    def add(group: str, name: str, outcome: Any, sentence: str | None = None, **how: Any) -> None:
        def result(subject: Any) -> Any:
            if isinstance(outcome, Exception) and not isinstance(outcome, Passed):
                raise outcome
            return outcome

        rule(group, name, sentence, **how)(result)

    add("a", "runs", "it does")
    add("b", "fails", Failed("at 3", data={"step": 3}), "nothing fails", advice="mend it")
    add("b", "fails again", Failed("at 3"))
    add("b", "needs", AssertionError(), needs=["runs", "fails"])
    add("b", "raises", ValueError("gone"), advice="mend it")
    add("b", "warns", Warned("rather late"), advice="mend it")
    add("b", "measures", Passed("3 us", advice="take it", data={"us": 3}))


@pytest.mark.usefixtures("own_checks")
def test_checks_run_in_the_order_of_their_groups() -> None:
    subject = player()
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
    assert findings[3].evidence.endswith("would show here too (see fails)")
    assert findings[4].evidence.startswith("ValueError: gone (test_checks.py, line ")
    assert findings[6].evidence == "skipped as asked"
    assert subject.failed == ["fails", "raises"]
    subject = player()
    assert run_checks(select("b").values(), subject)[-1].evidence == (
        "the env does not run (see fails)"
    )
    (finding,) = run_checks([select("b")["measures"]], subject)
    assert (finding.status, finding.advice, finding.data) == ("passed", "take it", {"us": 3})


@pytest.mark.usefixtures("own_checks")
def test_only_selected_checks_can_be_skipped() -> None:
    assert list(select("a")) == ["runs"]
    with pytest.raises(ValueError, match=r"checks to skip to be of \['runs'\], got \['fails'\]"):
        select("a", skip=["fails"])


def test_table() -> None:
    findings = (
        Finding("seed", "a seed decides", "passed", "4 seeds"),
        Finding("leaks", "nothing leaks", "failed", "at 3", "a wind", "a" * 40 + " " + "b" * 40),
        Finding("final", "final observations", "skipped", ""),
        Finding("flags are bools", "flags are bools", "passed", ""),
    )
    report = Report("Windy-v0", findings)
    assert not report.passed
    assert str(report).splitlines() == [
        "Windy-v0: failed (2 passed, 1 failed, 1 skipped)",
        "",
        "  passed   seed             4 seeds",
        "  failed   leaks            at 3",
        "                            cause: a wind",
        f"                            do: {'a' * 40}",
        f"                              {'b' * 40}",
        "  skipped  final            final observations",
        "  passed   flags are bools",
    ]
    with pytest.raises(AssertionError) as error:
        report.raise_if_failed()
    assert str(error.value).splitlines()[:2] == [
        "Windy-v0: failed (2 passed, 1 failed, 1 skipped)",
        "  failed   leaks  at 3",
    ]
    with pytest.raises(KeyError, match=r"expected one of \['seed', 'leaks', .*, got 'wind'"):
        report["wind"]
    sound = Report("Windy-v0", findings[:1])
    sound.raise_if_failed()
    assert sound.passed
