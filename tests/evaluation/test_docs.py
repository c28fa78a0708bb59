"""The code and tables of docs/statistics.md and docs/reproducibility.md can be reproduced."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tdcollect.lab.aggregates import COVERAGE

from ..forkserver import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "statistics.md").read_text()


def test_snippets_print_what_follows_them() -> None:
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", PAGE, re.S | re.M)
    assert len(pairs) == 6
    space: dict[str, Any] = {}
    for snippet, shown in pairs:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(snippet, space)
        assert printed.getvalue() == shown
    assert space["found"].differences[0].episodes_needed(1.0) == 830


def tables_of(script: str, *arguments: str) -> list[str]:
    """The tables that a script prints."""
    done = run_script(ROOT / "benchmarks" / script, *arguments, seconds=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("\n\n")


def check_rows(page: str, table: str, named: int = 1) -> None:
    """The page has the same rows, by their first cells; of fewer runs, other figures."""
    _, _, *rows = table.splitlines()
    assert rows
    assert all(f"\n{' | '.join(row.split(' | ')[:named])} | " in page for row in rows)


def test_the_tables_are_those_of_the_script() -> None:
    tables = tables_of("intervals.py", "--evaluations", "2", "--sizes", "10", "20")
    for table in tables:
        check_rows(PAGE, table)
    exact = [table for table in tables if "| success rate" in table]
    assert len(exact) == 2
    for line in "\n".join(exact).splitlines():
        if "%" in line:
            assert line.removesuffix(" |") in PAGE  # computed, not simulated: the same figures


@pytest.mark.slow
def test_the_tables_of_races_are_those_of_their_script() -> None:
    # The script compares its races with those of the package before it prints anything.
    tables = tables_of("races.py", "--races", "10", "--processes", "1")
    assert len(tables) == 8
    for table in tables:
        assert table.partition("\n")[0] in PAGE
        check_rows(PAGE, table)


@pytest.mark.slow
def test_the_tables_of_reproducibility_are_those_of_its_script() -> None:
    page = (ROOT / "docs" / "reproducibility.md").read_text()
    tables = tables_of("reproducibility.py", "--episodes", "4")
    assert len(tables) == 6
    for table in tables:
        assert table.partition("\n")[0].replace(" 4 episodes", " 20 episodes") in page
        check_rows(page, table)
    invariance = next(table for table in tables if "different ledgers" in table)
    assert all(row.endswith("| 1 |") for row in invariance.splitlines()[2:])


@pytest.mark.slow
def test_the_tables_on_suites_have_the_rows_of_the_script() -> None:
    tables = tables_of("suite_intervals.py", "--suites", "1", "--runs", "3", "--many", "100")
    assert len(tables) == 2
    for table in tables:
        head, _, *rows = table.splitlines()
        name = head.split(" | ")[0]
        shown = PAGE.split(f"\n{name} | ", 1)[1].split("\n\n", 1)[0].splitlines()
        assert [row.split(" | ")[:2] for row in shown[2:]] == [row.split(" | ")[:2] for row in rows]


def test_the_notes_of_few_runs_have_the_figures_of_the_tables() -> None:
    for drawn_runs, figures in COVERAGE.items():
        table = PAGE.split(f'drawn_runs="{drawn_runs}" | ', 1)[1].split("\n\n", 1)[0]
        columns = table.splitlines()[0].split(" | ")
        rows = [row for row in table.splitlines() if "| interquartile mean |" in row]
        assert len(rows) == 6
        for runs, (low, high) in figures.items():
            place = columns.index(f"{runs} runs") - 1
            shown = [float(re.findall(r"([\d.]+)%", row)[place]) for row in rows]
            assert (round(min(shown)), round(max(shown))) == (low, high)
