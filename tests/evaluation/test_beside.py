"""Evaluation while another thread works: cases that are refused, and isolation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torchrl.envs import GymWrapper

from tdcollect import Collector, env_seed, make_env
from tdcollect.randomness import GlobalRandomness, NotReproducibleError, Outside
from tdcollect.threads import collecting, evaluating, turn

from .envs import GlobalNumpy, Walk
from .ledger import digest, records
from .policies import categorical

COLLECTS = (
    "expected no other thread to collect during an evaluation, but a Collector is at work in the "
    "thread '.*': .*Evaluate between two batches"
)
DRAWS = "expected no other thread to draw random numbers during an evaluation.*busy threads: .*"


@contextmanager
def beside(work: Callable[[], Any]) -> Iterator[None]:
    """A thread that repeats some work."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=run, name="trainer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def batches(between: Callable[[], Any]) -> list[Any]:
    """Batches of training, with a call after each."""
    torch.manual_seed(0)
    env = make_env(Walk, 2)
    collector = Collector(env, categorical(), frames_per_batch=16, total_frames=48)
    collector.set_seed(0)
    found = []
    for batch in collector:
        found.append((batch, torch.rand(())))
        between()
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    return all((a == b).all() and x == y for (a, x), (b, y) in zip(one, other, strict=True))


def test_an_evaluation_beside_training_is_refused_and_changes_nothing() -> None:
    """Another thread tries to evaluate, over and over, from the first batch to the last."""
    expected = batches(lambda: None)
    refused: list[BaseException] = []
    started = threading.Event()
    policy = categorical(3)

    def between() -> None:
        started.set()
        seen = len(refused)
        while len(refused) < seen + 2:  # busy, as training is
            pass

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(batches, between)
        started.wait()
        while not result.done():
            try:
                digest(Walk, policy, 2)
            except RuntimeError as error:
                refused.append(error)
        assert same(result.result(), expected)
    assert len(refused) >= 6
    assert all(type(error) is RuntimeError for error in refused)


def test_an_evaluation_is_refused_before_an_env_is_made() -> None:
    made: list[int] = []
    before = GlobalRandomness()
    with collecting(), pytest.raises(RuntimeError, match=COLLECTS.replace(".*'", "MainThread'")):
        in_a_thread(lambda: records(lambda: made.append(1), categorical()))
    assert not made
    assert not before.moved()
    assert records(Walk, categorical(), 3)  # now that it is over


def test_a_collection_that_begins_meanwhile_waits_for_the_end_of_the_evaluation() -> None:
    collector = Collector(make_env(Walk, 2), categorical(), frames_per_batch=16)
    begun = threading.Event()
    trainer = threading.Thread(target=lambda: (collector.rollout(), begun.set()))
    with evaluating():
        trainer.start()
        time.sleep(0.05)
        assert not begun.is_set()
    trainer.join()
    assert begun.is_set()
    collector.shutdown()


def test_an_evaluation_in_a_thread_that_is_waited_for_is_as_any_other() -> None:
    """Also between two batches: nobody draws meanwhile."""
    policy = categorical()
    expected = digest(Walk, policy, 5)
    assert in_a_thread(lambda: digest(Walk, policy, 5)) == expected
    found = []
    undisturbed = batches(lambda: None)
    disturbed = batches(lambda: found.append(in_a_thread(lambda: digest(Walk, policy, 5))))
    assert same(disturbed, undisturbed)
    collector = Collector(make_env(Walk, 2), policy, frames_per_batch=16)
    for _ in collector:  # a loop that is left does not count
        break
    with beside(lambda: None):
        found.append(in_a_thread(lambda: digest(Walk, policy, 5)))
    collector.shutdown()
    assert set(found) == {expected}


class Acting(Walk):
    """Does something at a reset behind the probe, whose seeds are others."""

    def __init__(self, act: Callable[[], Any]):
        super().__init__()
        self.act = act

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed == env_seed(0, 100):
            self.act()
        return super().reset(seed=seed)


def test_a_thread_that_begins_to_draw_later_is_found_and_not_set_back() -> None:
    drawn: list[torch.Tensor] = []
    threads = ExitStack()

    def begin() -> None:
        threads.enter_context(beside(lambda: drawn.append(torch.rand(()))))
        while not drawn:
            pass

    torch.manual_seed(0)
    with threads, pytest.raises(RuntimeError, match=DRAWS + "trainer"):
        records(partial(Acting, begin), categorical(), 200)
    torch.manual_seed(0)
    assert torch.equal(torch.stack(drawn), torch.stack([torch.rand(()) for _ in drawn]))


def test_an_env_that_draws_beside_a_thread_that_does_not_is_told_with_both_reasons() -> None:
    drew = "the env GlobalNumpy or the policy, at some step, drew .* of numpy"
    text = drew + r".* Or another thread drew from them \(.*trainer"
    before = GlobalRandomness()
    with beside(lambda: None), pytest.raises(NotReproducibleError, match=text):
        records(GlobalNumpy, categorical())
    assert before.moved()  # who drew is not known


def test_numbers_drawn_by_a_thread_that_waits_again_are_not_set_back() -> None:
    """As it draws no more, the env is named too; but what was drawn stays drawn."""
    numbers: list[torch.Tensor] = []
    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as pool:
        pool.submit(int).result()

        def act() -> None:
            numbers.append(pool.submit(torch.rand, ()).result())

        torch.manual_seed(0)
        with pytest.raises(NotReproducibleError, match=r"another thread drew .*\(.*trainer"):
            records(partial(Acting, act), categorical(), 200)
    numbers.append(torch.rand(()))
    torch.manual_seed(0)
    assert numbers == [torch.rand(()), torch.rand(())]


def test_two_evaluations_in_two_threads_take_turns() -> None:
    policies = [categorical(), categorical()]
    expected = digest(Walk, policies[0], 40)
    before = GlobalRandomness()
    with ThreadPoolExecutor(2) as pool:
        assert {*pool.map(lambda policy: digest(Walk, policy, 40), policies)} == {expected}
    assert not before.moved()


def test_global_states_are_swapped_in_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that finds them swapped would take it for draws, or restore them so."""
    taken, enter = [], Outside.__enter__

    def take() -> bool:
        lock: Any = turn()
        got: bool = lock.acquire(blocking=False)
        if got:
            lock.release()
        return got

    def entered(outside: Outside) -> Outside:
        taken.append(in_a_thread(take))
        return enter(outside)

    monkeypatch.setattr(Outside, "__enter__", entered)
    for env in (Walk, GymWrapper(Walk())):
        digest(env, categorical(), 4)
    assert taken
    assert not any(taken)


def test_an_env_that_draws_beside_a_thread_that_reads_is_told_alone() -> None:
    """A thread that stays where it is has drawn nothing: states are set back."""
    reading, writing = os.pipe()
    thread = threading.Thread(target=os.read, args=(reading, 1), name="reader")
    thread.start()
    before = GlobalRandomness()
    with pytest.raises(NotReproducibleError, match=r"Draw from env.np_random .* in policies$"):
        records(make_env(GlobalNumpy, 2), categorical())
    assert not before.moved()
    os.close(writing)
    thread.join()
    os.close(reading)
