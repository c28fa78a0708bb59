"""Local workers for tests, forked from the fork server: a fresh interpreter takes seconds."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tdcollect import LocalWorkers
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.evaluate import Recording, run
from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.workers.dispatcher import Evaluation
from tdcollect.evaluation.workers.worker import Job


@pytest.fixture(scope="module")
def seven(quick_children: None) -> Iterator[LocalWorkers]:
    """Seven warm workers for the tests of a module."""
    with LocalWorkers(7) as workers:
        for rank in range(7):
            workers.start(rank)
        yield workers


def some(workers: LocalWorkers, count: int) -> LocalWorkers:
    """Return the first workers of a crew; those after them stay idle."""
    workers.num_workers = count
    return workers


def started(
    workers: LocalWorkers, job: Job, keep: bool = False
) -> tuple[Evaluation, Generator[Episode, None, None]]:
    """Return an evaluation of a job on workers, without files, and its records as they come."""

    def record(manifest: Any) -> Recording:
        return Recording(manifest, job.settings.episode_indices, recheck=False)

    def records() -> Generator[Episode, None, None]:
        with closing(run([evaluation], workers, note=lambda line: None)) as events:
            for _, what in events:
                if isinstance(what, Exception):
                    raise what
                if isinstance(what, Finished):
                    yield what.record

    evaluation = Evaluation(lambda: job, record, keep)
    return evaluation, records()


def pids(workers: LocalWorkers) -> list[int]:
    """The processes of the workers, by rank, and that of their template."""
    own = [worker.pid for _, worker in sorted(workers.crew.items())]
    return [*own, *(one.child.pid for one in workers._templates)]


def descendants(pid: int) -> list[int]:
    """All processes that descend from one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found, more = [], {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more}
        found += more
    return found


def open_files() -> set[str]:
    """The files that this process has open, without those that are opened to look."""
    return {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if os.path.lexists(file)}
