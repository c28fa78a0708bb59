"""Reports of workers, which they give whenever they are asked, also while they collect."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any

from tdcollect.collectors.inner import WorkerFailure, WorkerReport


class Reports:
    """The parent's ends of channels on which workers are asked for reports.

    Args:
        workers: how many there are.

    Attributes:
        ends: the workers' ends.
    """

    def __init__(self, workers: int):
        pairs = [multiprocessing.Pipe() for _ in range(workers)]
        self._channels: list[connection.Connection] = [ours for ours, _ in pairs]
        self.ends: Sequence[Any] = [theirs for _, theirs in pairs]

    def __bool__(self) -> bool:
        return bool(self._channels)

    def latest(self, procs: Callable[[], Sequence[Any]]) -> list[WorkerReport]:
        """The latest report of each worker.

        Args:
            procs: the processes; raises, or has another take the place, where one has died.
        """
        found = [self._ask(worker, procs) for worker in range(len(self._channels))]
        return found if None not in found else self.latest(procs)  # type: ignore[return-value]

    def _ask(self, worker: int, procs: Callable[[], Sequence[Any]]) -> WorkerReport | None:
        """The report of one worker; None where another has taken its place meanwhile."""
        channel = self._channels[worker]
        try:
            channel.send("report")
            while not channel.poll(0.2):
                procs()
                if self._channels[worker] is not channel:
                    return None
            answer = channel.recv()
        except (OSError, EOFError):
            answer = None
        if not isinstance(answer, WorkerReport):  # it ends, or has ended
            connection.wait([procs()[worker].sentinel], 5)
            procs()
            return None
        return answer

    def last_word(self, worker: int) -> str:
        """The error that a worker ended with; empty where it was killed."""
        last = None
        with suppress(OSError, EOFError):
            while self and self._channels[worker].poll():
                last = self._channels[worker].recv()
        return last.error if isinstance(last, WorkerFailure) else ""

    def replace(self, worker: int) -> Any:
        """Talk to another process; returns its end."""
        self._channels[worker].close()
        self._channels[worker], theirs = multiprocessing.Pipe()
        return theirs

    def close(self) -> None:
        """Close the parent's ends."""
        for channel in self._channels:
            channel.close()
