"""Who runs which episodes: indices handed out, records taken in, deaths of workers counted."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable

from tdcollect.evaluation.episodes.isolation import NotReproducibleError
from tdcollect.evaluation.ledger.records import Episode

_SECONDS = 0.5  # of work that a worker has beside the episodes that it runs
_MOST = 1024  # episodes beside those


class Schedule:
    """Hands out episodes.

    Workers get a little more than they can run at once, so that no slot waits for the driver; and
    near the end no more than a fair share, so that none has work left while another is idle.

    A worker that is lost gives its episodes back. One of them may have been the cause, so they run
    again in smaller groups, each with a worker to itself, and finally one by one. An episode that
    was alone when its worker was lost, for the ``max_lost``-th time, has failed.

    Args:
        indices: of the episodes to run.
        num_workers: the number of workers.
        max_lost: the workers that an episode may cost.
    """

    def __init__(self, indices: Iterable[int], num_workers: int, max_lost: int):
        self._waiting = deque(indices)
        self._num_workers = num_workers
        self._max_lost = max_lost
        self._suspects: deque[list[int]] = deque()
        self._held: dict[int, dict[int, None]] = {}  # by rank; in the order of handing out
        self._grouped: set[int] = set()  # ranks that run a group of suspects
        self._lost: Counter[int] = Counter()  # workers lost, by episode
        self._ended: dict[int, tuple[str | None, str]] = {}  # of episodes that may end twice
        self._paces: dict[int, _Pace] = {}

    @property
    def left(self) -> int:
        """The number of episodes that have not ended."""
        groups = sum(map(len, self._suspects))
        return len(self._waiting) + groups + sum(map(len, self._held.values()))

    def holds(self, rank: int) -> bool:
        """Tell whether a worker has episodes to run."""
        return bool(self._held.get(rank))

    def held(self, rank: int) -> int:
        """Return the number of episodes that a worker has to run."""
        return len(self._held.get(rank, ()))

    def hand_out(self, rank: int, slots: int) -> list[int]:
        """Return further episodes for a worker; none if it has enough.

        Args:
            rank: the worker.
            slots: its number of slots.
        """
        held = self._held.setdefault(rank, {})
        if rank in self._grouped:
            return []
        if self._suspects and not held:
            group = self._suspects.popleft()
            self._grouped.add(rank)
        else:
            pace = self._paces.setdefault(rank, _Pace())
            depth = slots + pace.episodes_in(_SECONDS)
            if len(held) > depth - max(1, depth // 4):
                return []
            # What others hold, they may be about to end; but at first nobody is.
            left = len(self._waiting) if pace.ended else self.left
            share = -(-left // self._num_workers)
            count = min(depth, share, len(held) + len(self._waiting)) - len(held)
            group = [self._waiting.popleft() for _ in range(count)]
        held.update(dict.fromkeys(group))
        return group

    def take_in(self, rank: int, name: str, record: Episode) -> bool:
        """Take a record in; False if the episode had ended before, with the same digest.

        Args:
            rank: the worker that ran it.
            name: its name.
            record: the record.

        Raises:
            NotReproducibleError: if the digests differ.
        """
        held = self._held.get(rank, {})
        if record.index in held:
            del held[record.index]
            if not held:
                self._grouped.discard(rank)
        self._paces.setdefault(rank, _Pace()).ended += 1
        before = self._ended.get(record.index)
        if before is None:
            if self._lost[record.index]:
                self._ended[record.index] = (record.digest, name)
            return True
        digest, by = before
        if digest != record.digest:
            raise NotReproducibleError(
                f"expected one digest of episode {record.index}, which ran twice, got {digest} "
                f"from {by} and {record.digest} from {name}: the machines differ, or something "
                "that no seed reaches decides the episode"
            )
        return False

    def lose(self, rank: int) -> list[int]:
        """Take the episodes of a worker back that was lost; return those that have failed."""
        held = [index for index in self._held.pop(rank, {}) if index not in self._ended]
        self._grouped.discard(rank)
        self._paces.pop(rank, None)
        if not held:
            return []
        for index in held:
            self._lost[index] += 1
        if len(held) == 1 and self._lost[held[0]] >= self._max_lost:
            return held
        most = max(self._lost[index] for index in held)
        size = 1 if most >= self._max_lost - 1 else -(-len(held) // 4)
        for at in range(0, len(held), size):
            self._suspects.append(held[at : at + size])
        return []


class _Pace:
    """The episodes that a worker has ended, and since when it runs them."""

    def __init__(self) -> None:
        self.ended = 0
        self._since = time.monotonic()

    def episodes_in(self, seconds: float) -> int:
        """Estimate how many it ends in some time; at least two."""
        passed = max(time.monotonic() - self._since, 1e-3)
        return int(min(_MOST, max(2, self.ended / passed * seconds)))
