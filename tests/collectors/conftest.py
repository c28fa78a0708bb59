"""Collectors with workers from the fork server, ended after each module."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def forked(forked_workers: None) -> Iterator[None]:
    """Start workers from the fork server, and see that none is left."""
    yield
    left = [child for child in multiprocessing.active_children() if "resource" not in child.name]
    for child in left:
        child.kill()
    assert not left
