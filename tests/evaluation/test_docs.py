"""The code and tables of docs/statistics.md and docs/reproducibility.md can be reproduced."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from ..forkserver import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "statistics.md").read_text()


def test_snippets_print_what_follows_them() -> None:
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", PAGE, re.S | re.M)
    assert len(pairs) == 5
    space: dict[str, Any] = {}
    for snippet, shown in pairs:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(snippet, space)
        assert printed.getvalue() == shown
    assert space["found"].differences[0].episodes_needed(1.0) == 830


def test_the_tables_are_those_of_the_script() -> None:
    quick = ["--evaluations", "2", "--sizes", "10", "20"]
    done = run_script(ROOT / "benchmarks" / "intervals.py", *quick)
    assert done.returncode == 0, done.stderr
    for table in done.stdout.strip().split("\n\n"):
        # The same rows; with fewer evaluations, other figures.
        names = [line.split(" | ")[0] for line in table.splitlines()[2:]]
        assert names
        assert all(f"\n{name} | " in PAGE for name in names)
    exact = [table for table in done.stdout.strip().split("\n\n") if "| success rate" in table]
    assert len(exact) == 2
    for line in "\n".join(exact).splitlines():
        if "%" in line:
            assert line.removesuffix(" |") in PAGE  # computed, not simulated: the same figures


@pytest.mark.slow
def test_the_tables_of_races_are_those_of_their_script() -> None:
    # The script compares its races with those of the package before it prints anything.
    done = run_script(ROOT / "benchmarks" / "races.py", "--races", "10", "--processes", "1")
    assert done.returncode == 0, done.stderr
    tables = done.stdout.strip().split("\n\n")
    assert len(tables) == 8
    for table in tables:
        head, _, *rows = table.splitlines()
        assert head in PAGE
        assert all(f"\n{row.split(' | ')[0]} | " in PAGE for row in rows)


@pytest.mark.slow
def test_the_tables_of_reproducibility_are_those_of_its_script() -> None:
    page = (ROOT / "docs" / "reproducibility.md").read_text()
    done = run_script(ROOT / "benchmarks" / "reproducibility.py", "--episodes", "4")
    assert done.returncode == 0, done.stderr
    tables = done.stdout.strip().split("\n\n")
    assert len(tables) == 6
    for table in tables:
        head, _, *rows = table.splitlines()
        assert head.replace(" 4 episodes", " 20 episodes") in page
        names = [row.split(" | ")[0] for row in rows]
        assert all(f"\n{name} | " in page for name in names)
    invariance = next(table for table in tables if "different ledgers" in table)
    assert all(row.endswith("| 1 |") for row in invariance.splitlines()[2:])
