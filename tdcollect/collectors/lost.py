"""Workers that were lost: the record of each, and the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tdcollect.display import count_text, one_line

_ADVICE = (
    "make a new collector, or pass on_worker_lost='restart' to have another worker take its place"
)


@dataclass(frozen=True)
class LostWorker:
    """One worker that ended before its time.

    Attributes:
        worker: its index.
        pid: of its process, or a name of it on another machine.
        how: the way in which it ended: ``"was killed by SIGKILL"``, ``"ended with exit code 3"``.
        slots: those that it held, counted over all workers; empty if it had not started.
        frames: how many frames were lost with it at most: those of the batch at hand.
        replaced: another worker took its place.
    """

    worker: int
    pid: int | str | None
    how: str
    slots: range
    frames: int
    replaced: bool

    def __str__(self) -> str:
        first, last = self.slots.start, self.slots.stop - 1
        slots = f", slots {first} to {last}" if first < last else f", slot {first}"
        return f"worker {self.worker} (pid {self.pid}{slots if self.slots else ''}) {self.how}"


class LostWorkers(tuple[LostWorker, ...]):
    """The workers that a collector has lost, in order."""

    @property
    def frames(self) -> int:
        """The number of frames that were lost with them, at most."""
        return sum(lost.frames for lost in self)

    def __repr__(self) -> str:
        if not self:
            return one_line(self, "none")
        return one_line(self, *map(str, self), f"at most {count_text(self.frames, 'frame')} lost")

    def __str__(self) -> str:
        return "\n".join(f"{lost}; at most {lost.frames} frames lost" for lost in self) or "none"


class WorkerLostError(RuntimeError):
    """A worker of a collector ended before its time.

    Attributes:
        lost: the record of it.
    """

    def __init__(self, lost: LostWorker, advice: str = _ADVICE):
        self.lost = lost
        self._advice = advice
        super().__init__(f"{lost}; the other workers have been ended, {advice}")

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[LostWorker, str]]:
        return type(self), (self.lost, self._advice)


def slots_of(worker: int, slots: Sequence[int]) -> range:
    """The slots of a worker, counted over all workers.

    Args:
        worker: its index.
        slots: N of each worker.
    """
    first = sum(slots[:worker])
    return range(first, first + slots[worker])
