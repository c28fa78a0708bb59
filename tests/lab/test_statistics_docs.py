"""The tables on suites in docs/statistics.md are those of their script, and of the notes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tdcollect.lab.aggregates import COVERAGE

from ..forkserver import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "statistics.md").read_text()


@pytest.mark.slow
def test_the_tables_have_the_rows_of_the_script() -> None:
    quick = ["--suites", "1", "--runs", "3", "--many", "100"]
    done = run_script(ROOT / "benchmarks" / "suite_intervals.py", *quick)
    assert done.returncode == 0, done.stderr
    tables = done.stdout.strip().split("\n\n")
    assert len(tables) == 4
    for table in tables[:2]:
        head, _, *rows = table.splitlines()
        name = head.split(" | ")[0]
        shown = PAGE.split(f"\n{name} | ", 1)[1].split("\n\n", 1)[0].splitlines()
        # The same rows; with fewer suites, other figures.
        assert [row.split(" | ")[:2] for row in shown[2:]] == [row.split(" | ")[:2] for row in rows]

    for table, named in zip(tables[2:], (4, 1), strict=True):
        head, _, *rows = table.splitlines()
        assert head in PAGE
        for row in rows:
            assert f"\n{' | '.join(row.split(' | ')[:named])} | " in PAGE


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
