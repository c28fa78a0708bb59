"""The snippets of the docs run, page by page, in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["migration.md", "performance.md", "robustness.md"])
def test_snippets_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    assert blocks
    space: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), space)


@pytest.mark.parametrize("name", ["Tianshou", "RLlib", "Stable-Baselines3", "torch-ac", "ilpyt"])
def test_migration_shows_both_sides_for_each_system(name: str) -> None:
    page = (DOCS / "migration.md").read_text()
    section = page.split(f"\n## {name}", 1)[1].split("\n## ", 1)[0]
    assert "There:\n\n```py\n" in section
    assert "Here:\n\n```python\n" in section
    assert "| there | here |" in section
