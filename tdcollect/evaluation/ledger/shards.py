"""Shards: parts of an evaluation that run on their own, and are merged afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tdcollect.evaluation.ledger.records import is_count


class Shard(NamedTuple):
    """The episodes at every ``shards``-th position of an evaluation, from ``position`` on.

    Attributes:
        position: the position of its first episode, from 0.
        shards: the number of shards.
    """

    position: int
    shards: int

    @classmethod
    def of(cls, value: Any) -> Shard:
        """Return the shard that a pair ``(i, n)`` stands for, checked.

        Raises:
            ValueError: for anything but two ints with ``0 <= i < n``.
        """
        if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_count, value)):
            position, shards = map(int, value)
            if position < shards:
                return cls(position, shards)
        raise ValueError(
            "expected shard to be (i, n) with two ints, i from 0 to n - 1, got "
            f"{value!r}; pass (0, 4), (1, 4), (2, 4) and (3, 4) for four shards"
        )

    def select(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the indices of its episodes, out of those of the evaluation."""
        return indices[self.position :: self.shards]

    def __str__(self) -> str:
        return f"shard {self.position}/{self.shards}"
