"""Intervals that take no time, for tests of the other files of evaluations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tdcollect.evaluation import statistics


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Have this process compute intervals of few resamples."""
    patch.setattr(statistics, "MOST_RESAMPLES", 100)
    patch.setattr(statistics, "FEWEST_RESAMPLES", 100)


@pytest.fixture(scope="module")
def small_reports() -> Iterator[None]:
    """`shrink`, for a module."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        yield
