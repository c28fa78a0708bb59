"""The connection beside TorchRL's, with the workers' collectors in this process."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from tdcollect import make_env
from tdcollect.collectors import distributed as link
from tdcollect.collectors.asking import facts_of, report_of, seeded
from tdcollect.collectors.distributed import LinkedCollector, Links

from .made import noisy


def linked(links: Links, worker: int) -> LinkedCollector:
    env = make_env("CartPole-v1", 2)
    return LinkedCollector(env, noisy(1.0), frames_per_batch=8, link=links.addresses[worker])


def hang_up(collector: Any, really: bool) -> None:
    """End the connection."""
    if really:
        collector._connection.close()


def test_calls_reach_each_worker_until_one_is_lost() -> None:
    links = Links("localhost", 2)
    collectors = [linked(links, worker) for worker in range(2)]
    links.accept(lambda: None)
    everyone: dict[int, tuple[Any, ...]] = {0: (), 1: ()}
    assert [facts.slots for facts in links.call(facts_of, everyone)] == [2, 2]
    collectors[1].next()
    links.first_batch()
    links.call(seeded, {0: (3, 3, 0), 1: (3, 3, 1, 0, False, 2)})
    assert not collectors[0]._begun.is_set()
    links.call(LinkedCollector.begin, {0: ()})
    firsts = [next(iter(collectors[0])), collectors[1].next()]
    env = make_env("CartPole-v1", 4)
    env.set_seed(3)
    assert torch.equal(torch.cat(firsts)["observation"][:, 0], env.reset()["observation"])
    env.close()
    # Batches tell how often their worker was seeded.
    assert [links.seedings_of_batch(1) for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match=r"(?s)a call of worker 0 failed:.*expected compon"):
        links.call(LinkedCollector.state_dict, dict.fromkeys(range(2), (["none"],)))
    assert len(links.call(report_of, everyone)) == 2
    assert links.lost() == []
    with pytest.raises(EOFError):
        links.call(hang_up, {0: (False,), 1: (True,)})
    assert links.lost() == [1]
    links.close()
    for collector in collectors:
        collector.shutdown()


def test_strays_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections as a port scan makes them: one says something, another closes at once."""
    monkeypatch.setattr(link, "_GREETING", 1)
    links = Links("localhost", 1)
    address = links.addresses[0].host, links.addresses[0].port
    strays = [socket.create_connection(address) for _ in range(4)]
    for stray, words in zip(strays, (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\7#WEL"), strict=False):
        stray.sendall(words)
    strays.pop().close()
    collector = linked(links, 0)
    links.accept(lambda: None)
    assert [facts.slots for facts in links.call(facts_of, {0: ()})] == [2]
    links.close()
    for stray in strays:
        stray.close()
    collector.shutdown()


def test_workers_that_never_connect_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_CONNECT_WITHIN", 0.0)
    links = Links("localhost", 2)
    with pytest.raises(TimeoutError, match=r"expected 2 workers to connect to .* got 0; see"):
        links.accept(lambda: None)
    links.close()


def test_a_name_that_means_this_machine_alone_is_no_address_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert link.own_address() == "10.1.2.3"
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert link.own_address() != "127.0.1.1"
