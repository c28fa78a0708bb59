"""The connection beside TorchRL's, with the workers' collectors in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tdcollect import make_env
from tdcollect.collectors import LinkedCollector, on_worker
from tdcollect.collectors.link import Links

from .noisy import noisy


def linked(links: Links, worker: int) -> LinkedCollector:
    env = make_env("CartPole-v1", 2)
    return LinkedCollector(env, noisy(1.0), frames_per_batch=8, link=links.addresses[worker])


def hang_up(collector: Any, really: bool) -> None:
    """End the connection."""
    if really:
        collector._connection.close()


@pytest.fixture
def pair() -> Iterator[tuple[Links, list[LinkedCollector]]]:
    links = Links("localhost", 2)
    collectors = [linked(links, worker) for worker in range(2)]
    links.accept(lambda: None)
    yield links, collectors
    links.close()
    for collector in collectors:
        collector.shutdown()


def test_calls_reach_each_worker(pair: tuple[Links, list[LinkedCollector]]) -> None:
    links, _ = pair
    assert [facts.slots for facts in links.call(on_worker.facts)] == [2, 2]
    links.call(on_worker.seeded, [3, 5], [3, 3], [0, 1])
    firsts = [collector.next()["observation"][:, 0] for collector in pair[1]]
    env = make_env("CartPole-v1", 4)
    env.set_seed(3)
    assert torch.equal(torch.cat(firsts), env.reset()["observation"])
    env.close()


def test_batches_tell_how_often_their_worker_was_seeded(
    pair: tuple[Links, list[LinkedCollector]],
) -> None:
    links, collectors = pair
    collectors[1].next()
    links.first_batch()
    links.call(on_worker.counted)
    collectors[1].next()
    assert [links.seedings_of_batch(1) for _ in range(2)] == [0, 1]


def test_an_error_of_a_call_comes_back(pair: tuple[Links, list[LinkedCollector]]) -> None:
    links, _ = pair
    with pytest.raises(RuntimeError, match=r"(?s)a call of worker 0 failed:.*expected compon"):
        links.call(LinkedCollector.state_dict, [["none"]] * 2)
    assert len(links.call(on_worker.report)) == 2


def test_the_end_of_a_connection_is_a_lost_worker(
    pair: tuple[Links, list[LinkedCollector]],
) -> None:
    links, _ = pair
    assert links.lost() == []
    with pytest.raises(EOFError):
        links.call(hang_up, [False, True])
    assert links.lost() == [1]


def test_iteration_waits_to_begin() -> None:
    links = Links("localhost", 1, begins_when_told=True)
    collector = linked(links, 0)
    links.accept(lambda: None)
    links.call(on_worker.seeded, [3], [3], [0])
    links.begin()
    assert next(iter(collector)).shape == (2, 4)
    links.close()
    collector.shutdown()
