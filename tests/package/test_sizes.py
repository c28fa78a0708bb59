"""The package stays small: each size is at most its limit in tests/limits.toml."""

from __future__ import annotations

import ast

from .. import sizes
from ..forkserver import run_anew


def test_each_size_is_at_most_its_limit() -> None:
    measured = sizes.measured() | sizes.traced(lambda program: run_anew(program).stdout)
    assert measured.keys() == sizes.limits().keys()
    assert sizes.above(measured) == {}, "python tests/sizes.py prints all of them"


def test_what_a_size_may_be_today_is_above_its_limit() -> None:
    for name, limit in sizes.limits().items():
        assert limit.get("now", limit["limit"] + 1) > limit["limit"], name


def test_imports_in_functions_and_for_types_are_seen() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from tdcollect import lab\n"
        "def late():\n    from ..keys import ACTION\n"
    )
    names = set(sizes.imported(ast.parse(source), "tdcollect.collect"))
    assert names == {"typing.TYPE_CHECKING", "tdcollect.lab", "tdcollect.keys.ACTION"}


def test_lines_are_counted_without_docstrings_comments_and_blanks() -> None:
    source = '"""What it is.\n\nMore.\n"""\n\n# why\nx = [\n    1,  # one\n]\n'
    assert sizes.lines_of(source) == ({7, 8, 9}, 4)
