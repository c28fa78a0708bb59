"""The snippets of docs/monitoring.md run, in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def test_snippets_run() -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert snippets
    space: dict[str, Any] = {}
    for snippet in snippets:
        exec(snippet, space)
