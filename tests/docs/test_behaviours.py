"""Each numbered behaviour of the collectors that tdcollect succeeds is shown by some test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def shown(path: Path) -> Iterator[int]:
    """The numbers in the ``behaviour`` marks of a file's tests."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.behaviour":
            yield from (ast.literal_eval(argument) for argument in node.args)


SHOWN = {number for path in TESTS.rglob("test_*.py") for number in shown(path)}


@pytest.mark.parametrize("number", range(1, 32))
def test_a_behaviour_is_shown(number: int) -> None:
    assert number in SHOWN, f"no test carries @pytest.mark.behaviour({number})"


def test_no_mark_names_a_behaviour_that_is_not_there() -> None:
    assert set(range(1, 34)) >= SHOWN
