"""Who runs which episodes: every episode ends once, and only those to blame fail."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.workers import dispatcher as module
from tdcollect.evaluation.workers.dispatcher import Schedule
from tdcollect.randomness import NotReproducibleError


def record(index: int, digest: str = "") -> Episode:
    return Episode(index, 2 * index, 3 * index, "completed", 0, digest=digest or f"{index:064x}")


@dataclass
class Worker:
    """Runs ``slots`` episodes at a time, in their order, each step in ``speed`` seconds."""

    slots: int
    speed: float
    queue: list[int] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)  # the steps that are left of each
    ready: float = 0.0

    def begin(self, lengths: dict[int, int]) -> None:
        while self.queue and len(self.running) < self.slots:
            index = self.queue.pop(0)
            self.running[index] = lengths[index]


class Simulation:
    """Workers in simulated time, each with its slots and seconds per step.

    Poisoned episodes end their worker at their last step; at ``deaths``, one ends for another
    reason. Index i is of evaluation i modulo ``evaluations``.
    """

    def __init__(
        self,
        lengths: dict[int, int],
        poisoned: set[int],
        workers: list[tuple[int, float]],
        max_lost: int,
        deaths: list[tuple[float, int]] = (),  # type: ignore[assignment]
        evaluations: int = 1,
    ):
        self.lengths, self.poisoned, self.max_lost = lengths, poisoned, max_lost
        self.evaluations = evaluations
        self.schedule = Schedule(len(workers), max_lost)
        for number in range(evaluations):
            self.schedule.add(number, None)
        self.opened: set[int] = set()
        self.openings = 0
        self.workers = [Worker(*worker) for worker in workers]
        self.deaths = sorted(deaths, reverse=True)
        self.ended: Counter[int] = Counter()
        self.failed: list[int] = []
        self.lost: Counter[int] = Counter()  # by episode that ran
        CLOCK.now = 0.0

    def run(self) -> None:
        for _ in range(100_000):
            if not self.left:
                return
            opened = len(self.opened)
            self.hand_out()
            if len(self.opened) > opened:
                continue  # one that was opened may have no episodes: its worker goes to another
            self.check_idle()
            if self.left:
                self.step()
        raise AssertionError("it does not finish")

    @property
    def left(self) -> int:
        """The episodes that have not ended; those of evaluations that nobody has opened count."""
        known = sum(map(self.schedule.left, self.opened))
        return known + sum(index % self.evaluations not in self.opened for index in self.lengths)

    def hand_out(self) -> None:
        for rank, worker in enumerate(self.workers):
            before, seat = self.schedule.seats.get(rank), self.schedule.place(rank)
            if seat is None:
                continue
            number = seat.evaluation
            if seat is not before:
                assert not worker.queue
                assert not worker.running
                self.openings += 1
            if number not in self.opened:
                own = [index for index in self.lengths if index % self.evaluations == number]
                self.schedule.add(number, own)
                self.opened.add(number)
            more = self.schedule.hand_out(rank, worker.slots)
            assert not set(more) & set(worker.queue)
            assert all(index % self.evaluations == number for index in more)
            worker.queue += more
            worker.begin(self.lengths)

    def check_idle(self) -> None:
        """No worker is idle while episodes wait that nobody has."""
        held = [len(seat.held) for seat in self.schedule.seats.values()]
        assert (len(held) == len(self.workers) and all(held)) or sum(held) == self.left

    def step(self) -> None:
        """Let the worker go on that is due next."""
        at_work = [rank for rank, worker in enumerate(self.workers) if worker.running]
        assert at_work
        rank = min(at_work, key=lambda rank: self.workers[rank].ready)
        worker = self.workers[rank]
        CLOCK.now = max(CLOCK.now, worker.ready)
        worker.ready = CLOCK.now + worker.speed
        if self.deaths and self.deaths[-1][0] <= CLOCK.now:
            victim = self.deaths.pop()[1] % len(self.workers)
            self.die(victim)
            if victim == rank:
                return
        for index in list(worker.running):
            worker.running[index] -= 1
            if worker.running[index]:
                continue
            if index in self.poisoned:
                self.lost[index] += 1
                self.die(rank)
                return
            del worker.running[index]
            number = index % self.evaluations
            assert self.schedule.take_in(number, rank, f"worker {rank}", record(index))
            self.ended[index] += 1
        worker.begin(self.lengths)

    def die(self, rank: int) -> None:
        self.workers[rank] = Worker(self.workers[rank].slots, self.workers[rank].speed)
        self.failed += self.schedule.lose(rank)


CLOCK = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations set the schedule's clock."""
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: CLOCK.now))


def simulated(*arguments: Any) -> Simulation:
    """Every episode ends once, and only the poisoned ones fail."""
    simulation = Simulation(*arguments)
    simulation.run()
    assert sorted(simulation.failed) == sorted(simulation.poisoned)
    assert simulation.ended == Counter(set(simulation.lengths) - simulation.poisoned)
    most = max(2, simulation.max_lost)
    assert all(simulation.lost[index] <= most for index in simulation.poisoned)
    return simulation


@given(st.data(), st.integers(0, 60), st.integers(1, 5), st.randoms())
@example(None, 2, 4, random.Random(0))  # evaluations without episodes
@hypothesis_settings(max_examples=60)
def test_every_episode_ends_once_and_only_poisoned_ones_fail(
    data: Any, episodes: int, evaluations: int, draw: random.Random
) -> None:
    """Workers end for other reasons, too, more seldom than costs an episode that runs alone."""
    lengths = {7 * index: draw.randint(1, 20) for index in range(episodes)}
    poisoned, workers, deaths, most = set[int](), [(1, 0.0625)], [], 1
    if data is not None:
        if lengths:
            poisoned = data.draw(st.sets(st.sampled_from(sorted(lengths)), max_size=4))
        worker = st.tuples(st.integers(1, 16), st.floats(0.0001, 0.1))
        workers = data.draw(st.lists(worker, min_size=1, max_size=7))
        deaths = data.draw(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 6)), max_size=9))
        most = data.draw(st.integers(1, 5)) + (len(deaths) + 1 if deaths else 0)
    simulated(lengths, poisoned, workers, most, deaths, evaluations)


@pytest.mark.parametrize(
    ("speeds", "episodes"),
    [((1, 1, 1, 1), 10), ((1, 2, 3), 100), ((1, 10), 300)],
)
def test_workers_end_at_about_the_same_time(speeds: tuple[int, ...], episodes: int) -> None:
    """Within two episodes on the slowest."""
    draw = random.Random(0)
    lengths = {index: draw.randint(1, 20) for index in range(episodes)}
    workers = [(1, 0.01 * speed) for speed in speeds]
    simulated(lengths, set(), workers, 3)
    least = sum(lengths.values()) / sum(1 / speed for _, speed in workers)
    assert CLOCK.now <= least + 35 * max(speed for _, speed in workers)


@pytest.mark.parametrize("evaluations", [2, 10])
def test_evaluations_that_share_workers_end_together_and_are_opened_seldom(
    evaluations: int,
) -> None:
    """Each is opened once, and by those that help at the end."""
    draw = random.Random(0)
    lengths = {n: draw.randint(1, 20) * (1 if n % evaluations else 5) for n in range(100)}
    simulation = simulated(lengths, set(), [(1, 0.01)] * 4, 3, [], evaluations)
    assert CLOCK.now <= sum(lengths.values()) / 4 * 0.01 + 3.0
    assert simulation.openings <= evaluations + 4


def test_two_records_of_one_episode_must_agree() -> None:
    """A worker that was lost may still answer, once another one runs its episodes."""
    schedule = Schedule(2, 3)
    schedule.add(0, [4, 5])
    CLOCK.now = 0.0
    for rank in (0, 1):
        schedule.place(rank)
    assert schedule.lose(0) == []  # it had no episode
    assert schedule.left(0) == 2
    schedule.place(0)
    assert schedule.hand_out(0, 16) == [4]
    assert schedule.hand_out(1, 16) == [5]
    assert schedule.lose(0) == []
    assert schedule.take_in(0, 0, "worker 0 (process 10)", record(4))
    assert schedule.take_in(0, 1, "worker 1 (process 11)", record(5))
    schedule.place(1)
    assert schedule.hand_out(1, 16) == [4]
    assert not schedule.take_in(0, 1, "worker 1 (process 11)", record(4))
    assert schedule.left(0) == 0
    with pytest.raises(
        NotReproducibleError,
        match=rf"one digest of episode 4, which ran twice, got {record(4).digest} from worker 0 "
        rf"\(process 10\) and {'f' * 64} from worker 1 \(process 11\): the machines differ",
    ):
        schedule.take_in(0, 1, "worker 1 (process 11)", record(4, "f" * 64))
