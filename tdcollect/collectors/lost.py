"""Workers that were lost: the record of one, and the error that names it."""

from __future__ import annotations

from dataclasses import dataclass

ON_WORKER_LOST = ("raise", "restart")


@dataclass(frozen=True)
class LostWorker:
    """A worker that was lost.

    Attributes:
        worker: its index.
        pid: of its process.
        host: the address of its machine.
        frames: the number of frames that it was collecting, which nobody gets.
        seed: of its first slot; None if it was not seeded.
        reason: the end of its process, in words.
        replaced: True if another is in its place.
    """

    worker: int
    pid: int
    host: str
    frames: int
    seed: int | None
    reason: str
    replaced: bool

    def __str__(self) -> str:
        where = f"process {self.pid} on {self.host}"
        return f"worker {self.worker} ({where}), {self.frames} frames in flight: {self.reason}"


class WorkerLostError(RuntimeError):
    """A worker's process ended before its collection did.

    Attributes:
        lost: the record of it.
    """

    def __init__(self, lost: LostWorker, advice: str):
        super().__init__(f"expected all workers to go on, got the end of {lost}; {advice}")
        self.lost = lost
