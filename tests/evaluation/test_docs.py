"""docs/statistics.md: its snippets print what it shows, and its tables can be made."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "statistics.md").read_text()


def test_snippets_print_what_follows_them() -> None:
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", PAGE, re.S | re.M)
    assert len(pairs) == 2
    space: dict[str, Any] = {}
    for snippet, shown in pairs:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(snippet, space)
        assert printed.getvalue() == shown
    assert space["found"].differences[0].episodes_needed(1.0) == 830


def test_the_tables_are_those_of_the_script() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "intervals.py"]
    quick = ["--evaluations", "2", "--sizes", "10", "20"]
    done = subprocess.run(command + quick, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for table in done.stdout.strip().split("\n\n"):
        # The same rows; with fewer evaluations, other figures.
        names = [line.split(" | ")[0] for line in table.splitlines()[2:]]
        assert names
        assert all(f"\n{name} | " in PAGE for name in names)
    exact = next(table for table in done.stdout.split("\n\n") if "| success rate" in table)
    for line in exact.splitlines()[2:]:
        assert line.removesuffix(" |") in PAGE  # computed, not simulated: the same figures
