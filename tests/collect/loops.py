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
    ids = ["-".join(map(str, v if isinstance(v, tuple) else [v])) + f"-{way}" for v, way in cases]
    return pytest.mark.parametrize((name, "arrays"), cases, indirect=["arrays"], ids=ids)
