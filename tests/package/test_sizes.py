"""The package stays as small as it is: each size is at most its limit in tests/limits.toml."""

from __future__ import annotations

import ast

from .. import sizes
from ..forkserver import run_anew

MEASURED_BY_OTHER_TESTS = {  # tests/collect/test_one_step.py
    "files that run in one batch",
    "frames from iteration to the env",
    "frames below the loop",
}


def test_each_size_is_at_most_its_limit() -> None:
    measured, limits = sizes.measured(lambda program: run_anew(program).stdout), sizes.limits()
    assert measured.keys() | MEASURED_BY_OTHER_TESTS == limits.keys()
    above = {name: size for name, size in measured.items() if size > limits[name]}
    assert above == {}, "python tests/sizes.py prints all of them"


def test_imports_in_functions_are_seen_and_those_for_types_are_not() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from tdcollect import suites\n"
        "def late():\n    from ..keys import ACTION\n"
    )
    found = set(sizes.imported(ast.parse(source), "tdcollect.collect"))
    assert found == {"typing.TYPE_CHECKING", "tdcollect.keys.ACTION"}


def test_lines_are_counted_without_docstrings_comments_and_blanks() -> None:
    source = '"""What it is.\n\nMore.\n"""\n\n# why\nx = [\n    1,  # one\n]\n'
    assert sizes.lines_of(source) == (3, 4)
