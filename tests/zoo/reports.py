"""Reports and intervals that take no time, for tests of the other files of evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tdcollect.evaluation import statistics
from tdcollect.files import write_atomically
from tdcollect.pages import evaluation


def write_small(directory: Any, manifest: Any, episodes: Any, summary: Any) -> list[Path]:
    """A figure and a page, of the same bytes for the same manifest, and records."""
    about = [manifest, [episode.to_json() for episode in episodes]]
    told = json.dumps(about, sort_keys=True)
    files = [Path(directory) / name for name in ("figures/returns.svg", "report.html")]
    return [write_atomically(file, told.encode()) for file in files]


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Have this process write reports without figures, and intervals of few resamples."""
    patch.setattr(evaluation, "write_report", write_small)
    patch.setattr(statistics, "MOST_RESAMPLES", 100)
    patch.setattr(statistics, "FEWEST_RESAMPLES", 100)


@pytest.fixture(scope="module")
def small_reports() -> Iterator[None]:
    """`shrink`, for a module."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        yield
