"""The snippets of the docs run, page by page, in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def blocks_of(page: str) -> list[str]:
    """The Python snippets of a page."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    assert blocks
    return blocks


PAGES = ["evaluating.md", "migration.md", "performance.md", "robustness.md"]


@pytest.mark.usefixtures("quick_children")
@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in blocks_of(page) if "RayWorkers" not in block]  # see test_ray.py
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
