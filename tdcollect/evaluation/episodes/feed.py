"""Indices of the episodes to run: all from the start, or more while episodes run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Feed(Protocol):
    """Gives the indices of the episodes to run, and is told of each step.

    Attributes:
        seconds: finished episodes are yielded at least this often.
    """

    seconds: float

    def __iter__(self) -> Iterator[int]: ...

    def __next__(self) -> int:
        """Return the next index.

        Raises:
            StopIteration: if there is none at present.
        """

    def arrived(self) -> bool:
        """Tell whether there is an index now; asked at each step while slots are free."""

    def goes_on(self) -> bool:
        """Wait for further indices once all episodes have ended; False if none will come."""

    def stepped(self) -> None:
        """A step of the running episodes has begun."""


class AllAtOnce:
    """Episodes that are known from the start."""

    seconds = 1.0

    def __init__(self, indices: Sequence[int]):
        self._indices = iter(indices)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._indices)

    def arrived(self) -> bool:
        return False  # free slots have asked for them all

    def goes_on(self) -> bool:
        return False

    def stepped(self) -> None:
        pass
