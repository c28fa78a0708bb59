"""Fixtures for all tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from .forkserver import forkserver


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """Let TorchRL start its worker processes from the fork server: spawned, each imports torch."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(forkserver().get_start_method(), force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
