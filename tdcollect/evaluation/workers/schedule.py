"""Who runs which episodes: indices handed out, records taken in, deaths of workers counted."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable

from tdcollect.evaluation.episodes.isolation import NotReproducibleError
from tdcollect.evaluation.ledger.records import Episode

_SECONDS = 0.5  # of work that a worker has beside the episodes that it runs
_MOST = 1024  # episodes beside those

WEIGHT = 10
"""The weight of a lost worker. One that is known to be lost by a cause outside of its episodes has
a weight of 1, so that nothing goes on for ever."""


class Schedule:
    """Hands out the episodes of one evaluation, or of several that share the workers.

    A worker runs episodes of one evaluation at a time. It begins with one that nobody is at, which
    opens the fewest envs, and helps where most is left once there is none.

    Workers get a little more than they can run at once, so that no slot waits for the driver; and
    near the end no more than a fair share, so that none has work left while another is idle.

    A worker that is lost gives its episodes back. One of them may have been the cause, so they run
    again in smaller groups, each with a worker to itself, and finally one by one. An episode that
    was alone when its worker was lost, for the ``max_lost``-th time, is given up as lost. A loss
    that is known to come from outside weighs a tenth, and leads to no suspicion at first.

    Args:
        num_workers: the number of workers.
        max_lost: the workers that an episode may cost.
    """

    def __init__(self, num_workers: int, max_lost: int):
        self._num_workers = num_workers
        self._max_lost = max_lost
        self._queues: dict[int, _Queue] = {}  # by evaluation
        self._at: dict[int, int] = {}  # the evaluation of each rank
        self._held: dict[int, dict[int, None]] = {}  # by rank; in the order of handing out
        self._grouped: set[int] = set()  # ranks that run a group of suspects
        self._paces: dict[int, _Pace] = {}

    def add(self, evaluation: int, indices: Iterable[int] | None) -> None:
        """Add the episodes of an evaluation; None if they are not known before it is opened."""
        self._queues[evaluation] = _Queue(indices)

    def drop(self, evaluation: int) -> list[int]:
        """Forget an evaluation; return the ranks that are at it, which hold nothing afterwards."""
        self._queues.pop(evaluation, None)
        ranks = [rank for rank, at in self._at.items() if at == evaluation]
        for rank in ranks:
            self._leave(rank)
        return ranks

    def left(self, evaluation: int) -> int:
        """Return the number of episodes of an evaluation that have not ended."""
        held = sum(self.held(rank) for rank, at in self._at.items() if at == evaluation)
        return self._queues[evaluation].left + held

    def at(self, rank: int) -> int | None:
        """Return the evaluation that a worker is at."""
        return self._at.get(rank)

    def holds(self, rank: int) -> bool:
        """Tell whether a worker has episodes to run."""
        return bool(self._held.get(rank))

    def held(self, rank: int) -> int:
        """Return the number of episodes that a worker has to run."""
        return len(self._held.get(rank, ()))

    def place(self, rank: int) -> int | None:
        """Put a worker at an evaluation with episodes to hand out, unless it is at one.

        Returns:
            The evaluation that it is at now; None if it is at none, and none has any.
        """
        at = self._at.get(rank)
        if self.holds(rank) or (at in self._queues and self._queues[at].waits):
            return at
        staff = Counter(self._at.values())
        waiting = [number for number, queue in self._queues.items() if queue.waits]
        if waiting:
            # In the order in which they were added, unless somebody is at each.
            at = min(waiting, key=lambda n: (staff[n] > 0, -self._queues[n].left / (1 + staff[n])))
            self.put(rank, at)
        return at

    def put(self, rank: int, evaluation: int) -> None:
        """Put a worker at an evaluation, whatever there is to run."""
        self._leave(rank)
        self._at[rank] = evaluation

    def hand_out(self, rank: int, slots: int) -> list[int]:
        """Return further episodes for a worker, of its evaluation; none if it has enough.

        Args:
            rank: the worker.
            slots: its number of slots.
        """
        queue = self._queues.get(self._at.get(rank, -1))
        held = self._held.setdefault(rank, {})
        if queue is None or rank in self._grouped:
            return []
        if queue.suspects and not held:
            group = queue.suspects.popleft()
            self._grouped.add(rank)
        else:
            pace = self._paces.setdefault(rank, _Pace())
            depth = slots + pace.episodes_in(_SECONDS)
            if len(held) > depth - max(1, depth // 4):
                return []
            # What others hold, they may be about to end; but at first nobody is.
            left = sum(len(other.waiting or ()) for other in self._queues.values())
            if not pace.ended:
                left += sum(map(len, self._held.values())) + queue.suspected
            share = -(-left // self._num_workers)
            waiting = queue.waiting or deque()
            count = min(depth, share, len(held) + len(waiting)) - len(held)
            group = [waiting.popleft() for _ in range(count)]
        held.update(dict.fromkeys(group))
        return group

    def take_in(self, evaluation: int, rank: int, name: str, record: Episode) -> bool:
        """Take a record in; False if the episode had ended before, with the same digest.

        Args:
            evaluation: whose episode it is.
            rank: the worker that ran it, which may have been lost since.
            name: its name.
            record: the record.

        Raises:
            NotReproducibleError: if the digests differ.
        """
        queue = self._queues[evaluation]
        held = self._held.get(rank, {}) if self._at.get(rank) == evaluation else {}
        if record.index in held:
            del held[record.index]
            if not held:
                self._grouped.discard(rank)
        self._paces.setdefault(rank, _Pace()).ended += 1
        before = queue.ended.get(record.index)
        if before is None:
            if queue.lost[record.index]:
                queue.ended[record.index] = (record.digest, name)
            return True
        digest, by = before
        if digest != record.digest:
            raise NotReproducibleError(
                f"expected one digest of episode {record.index}, which ran twice, got {digest} "
                f"from {by} and {record.digest} from {name}: the machines differ, or something "
                "that no seed reaches decides the episode"
            )
        return False

    def lose(self, rank: int, outside: bool = False) -> list[int]:
        """Take the episodes of a worker back that was lost; return those that are given up.

        Args:
            rank: the worker.
            outside: it is known to be lost by a cause outside of its episodes.
        """
        queue = self._queues.get(self._at.get(rank, -1))
        held = list(self._held.get(rank, ()))
        self._leave(rank)
        if queue is None:
            return []
        held = [index for index in held if index not in queue.ended]
        if not held:
            return []
        for index in held:
            queue.lost[index] += 1 if outside else WEIGHT
        most = max(queue.lost[index] for index in held)
        if len(held) == 1 and most >= WEIGHT * (self._max_lost + outside):
            return held
        if most < WEIGHT:
            assert queue.waiting is not None
            queue.waiting.extendleft(reversed(held))
            return []
        size = 1 if most >= WEIGHT * (self._max_lost - 1) else -(-len(held) // 4)
        for at in range(0, len(held), size):
            queue.suspects.append(held[at : at + size])
        return []

    def _leave(self, rank: int) -> None:
        self._at.pop(rank, None)
        self._held.pop(rank, None)
        self._paces.pop(rank, None)
        self._grouped.discard(rank)


class _Queue:
    """The episodes of an evaluation that nobody runs.

    Attributes:
        waiting: those that have not been handed out; None if they are not known yet.
        suspects: groups of those whose worker was lost.
        lost: the weight of the workers lost, by episode.
        ended: digest and worker of episodes that may end twice.
    """

    def __init__(self, indices: Iterable[int] | None):
        self.waiting = None if indices is None else deque(indices)
        self.suspects: deque[list[int]] = deque()
        self.lost: Counter[int] = Counter()
        self.ended: dict[int, tuple[str | None, str]] = {}

    @property
    def suspected(self) -> int:
        return sum(map(len, self.suspects))

    @property
    def left(self) -> int:
        return len(self.waiting or ()) + self.suspected

    @property
    def waits(self) -> bool:
        """Episodes can be handed out, or it must be opened to know them."""
        return self.waiting is None or bool(self.left)


class _Pace:
    """The episodes that a worker has ended, and since when it runs them."""

    def __init__(self) -> None:
        self.ended = 0
        self._since = time.monotonic()

    def episodes_in(self, seconds: float) -> int:
        """Estimate how many it ends in some time; at least two."""
        passed = max(time.monotonic() - self._since, 1e-3)
        return int(min(_MOST, max(2, self.ended / passed * seconds)))
