"""Local workers for tests, forked from the fork server: a fresh interpreter takes seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from tdcollect import LocalWorkers


class Forked:
    """Stands for ``Spawned`` in a process that has one thread."""

    def __init__(self, module: str, descriptors: Sequence[int]):
        self.pid = os.fork()
        if not self.pid:
            try:
                import_module(module).main(*descriptors)
            finally:
                os._exit(1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


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


def pids(workers: LocalWorkers) -> list[int]:
    """The processes of the workers, by rank, and that of their template."""
    own = [worker.pid for _, worker in sorted(workers.crew.items())]
    return [*own, *(one._child.pid for one in workers._templates)]


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
    return {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)}


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")
