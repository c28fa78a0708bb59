"""The listing of docs/architecture.md: every file, with what its docstring says that it is.

``python tests/docs/listing.py`` writes it into the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tdcollect"
PAGE = PACKAGE.parent / "docs" / "architecture.md"
STAGES = (
    ("", "_upstream", "processes"),
    ("trajectories",),
    ("envs", "envs/process"),
    ("collect",),
    ("collectors",),
    ("evaluation", "evaluation/episodes", "evaluation/sb3", "evaluation/workers", "pages"),
    ("testing",),
    ("cli",),
    ("lab", "lab/pages"),
)
"""In the order of the flow: no folder imports one of a later stage."""
_BLOCK = re.compile(r"```\ntdcollect/\n.*?```\n", re.DOTALL)


def listing() -> str:
    """The block of the page."""
    there = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    folders = [folder for stage in STAGES for folder in stage]
    assert {folder or "." for folder in folders} == there, "correct STAGES"
    lines = ["```", "tdcollect/"]
    for folder in folders:
        depth = "  " * (folder.count("/") + 1 if folder else 0)
        paths = sorted((PACKAGE / folder).glob("*.py"))
        if folder:
            (init,) = (path for path in paths if path.name == "__init__.py")
            lines.append(f"{depth + folder.rpartition('/')[2] + '/':<26}{_said(init)}")
        for path in paths:
            if not path.name.startswith("__"):
                lines.append(f"{depth + '  ' + path.name:<26}{_said(path)}")
    return "\n".join([*lines, "```", ""])


def _said(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(said.partition("\n\n")[0].split()).removesuffix(".")


def shown() -> str:
    """The block that stands in the page."""
    found = _BLOCK.search(PAGE.read_text())
    assert found is not None
    return found[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(shown(), listing()))
