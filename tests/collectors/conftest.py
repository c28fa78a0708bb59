"""Collectors with workers from the fork server, ended after each module."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from ..forkserver import forkserver


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Start workers from the fork server, and see that none is left."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(forkserver().get_start_method(), force=True)
    yield
    left = [child for child in multiprocessing.active_children() if "resource" not in child.name]
    for child in left:
        child.kill()
    multiprocessing.set_start_method(before, force=True)
    assert not left
