"""The part of a Ray worker that runs in the actor: it starts a process, and passes messages on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

from tdcollect.evaluation.workers.local import LocalWorker, LocalWorkers

_SECONDS = 3600.0  # any time: nothing is to be done until a worker answers


class Host:
    """Starts local workers beside the actor, one at a time, and passes messages on.

    Env and policy do not run in the actor itself. There, they would run outside of the main thread
    and beside Ray's threads, which do not survive a fork; an env that holds the interpreter's lock
    would stop all answers; and a crash would cost the actor, which takes seconds to start.

    Each worker has a number, its life, so that late messages to the one before do not reach it.
    Nothing here imports torch.

    Args:
        workers: starts the workers; of one.
    """

    def __init__(self, workers: LocalWorkers):
        self._workers = workers
        self._changed = threading.Condition()
        self._life = -1
        self._worker: LocalWorker | None = None

    def answers(self, life: int) -> Iterator[bytes | str | tuple[str, bool]]:
        """Start a worker; yield its place, then its pickled answers.

        At last how it ended, and whether the cause is known to lie outside of env and policy.
        """
        worker: Any = self._workers.start(0)
        worker.read = bytes
        with self._changed:
            self._life, self._worker = life, worker
            self._changed.notify_all()
        yield f"{worker.where} on {socket.gethostname()}"
        while self._worker is not None:
            for _, answer in self._workers.wait(_SECONDS):
                if answer is not None:
                    yield answer  # type: ignore[misc]  # bytes
                    continue
                with self._changed:
                    self._worker = None
                    how = worker.end(waits=True)
                yield how, worker.outside

    def put(self, life: int, message: bytes) -> None:
        """Pass a pickled message on, once the worker is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._life >= life)
            worker = self._worker if self._life == life else None
        if worker is not None:
            worker.send_bytes(message)

    def beats(self, life: int) -> int:
        """Return the number of steps that the worker has finished."""
        with self._changed:
            worker = self._worker if self._life == life else None
            return 0 if worker is None else worker.beats()

    def kill(self, life: int) -> None:
        """Kill the worker; the rest of its answers follows."""
        with self._changed:
            if self._worker is not None and self._life == life:
                self._worker.kill()
