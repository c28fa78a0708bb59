"""Marks that choose the collector's loop for a test: they narrow the fixture ``arrays``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

array_loop = pytest.mark.parametrize("arrays", ["arrays"], indirect=True)
"""On arrays alone: on TorchRL's loop, the test would compare that loop with itself."""


def on_arrays(name: str, values: Iterable[Any], parent: Iterable[Any] = ()) -> Any:
    """Parametrize ``name``: ``values`` with the loop on arrays, ``parent`` with TorchRL's too."""
    cases = [*((value, "arrays") for value in values), *((value, "parent") for value in parent)]
    ids = []
    for value, way in cases:
        parts = value if isinstance(value, tuple) else (value,)
        ids.append("-".join(str(getattr(part, "__name__", part)) for part in (*parts, way)))
    return pytest.mark.parametrize((name, "arrays"), cases, indirect=["arrays"], ids=ids)
