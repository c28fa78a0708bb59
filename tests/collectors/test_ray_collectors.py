"""RayCollector on a real Ray of this machine, with two workers of two slots."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDictBase

from tdcollect import Collector, make_env
from tdcollect._upstream.others import ActorState, state_of
from tdcollect.collectors import WorkerLostError, worker_of
from tdcollect.keys import TRAJ_IDS

from ..workers.test_process_exit import gone
from .made import noisy

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
from tdcollect.collectors import RayCollector  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:RayCollector iteration started:UserWarning", "ignore::DeprecationWarning"
)
N, T = 2, 10
make = partial(make_env, "CartPole-v1", N)


def in_one_process(seed: int) -> Collector:
    collector = Collector(make_env("CartPole-v1", 2 * N), noisy(), frames_per_batch=2 * N * T)
    collector.set_seed(seed)
    return collector


@pytest.fixture(scope="module")
def policy() -> Any:
    return noisy()


@pytest.fixture(scope="module")
def collector(cluster: str, policy: Any) -> Iterator[Any]:
    """The collector that all tests share; those at the end kill its workers."""
    collector = RayCollector(
        [make, make],
        policy,
        frames_per_batch=2 * N * T,
        sync=True,
        remote_configs={"num_cpus": 1},
        collector_kwargs={"track_policy_version": True},
    )
    yield collector
    collector.shutdown()


def take(collector: Any, seed: int, count: int = 3) -> list[TensorDictBase]:
    collector.set_seed(seed)
    return [next(stream(collector)) for _ in range(count)]


def stream(collector: Any) -> Iterator[TensorDictBase]:
    """The one iteration of a collector: it has no end."""
    if not hasattr(collector, "stream"):
        collector.stream = iter(collector)
    found: Iterator[TensorDictBase] = collector.stream
    return found


def pids(collector: Any) -> list[int]:
    return [state_of(actor).pid for actor in collector.remote_collectors]


def assert_same(batch: TensorDictBase, expected: TensorDictBase) -> None:
    """Compare all entries but trajectory ids; the batch has also versions of the policy."""
    for key, value in expected.exclude("collector").items(True, True):
        assert torch.equal(batch[key], value), key


def test_slots_count_on_over_workers(collector: Any) -> None:
    expected = in_one_process(3)
    for batch, whole in zip(take(collector, 3), expected, strict=False):
        assert batch.shape == (2, N, T)
        assert_same(batch.flatten(0, 1), whole)
        workers = worker_of(batch[TRAJ_IDS])
        assert [workers[w].unique().tolist() for w in range(2)] == [[0], [1]]
    expected.shutdown()
    text = str(collector.explain())
    assert "steps on arrays" in text
    assert "2 workers of 2 slots" in text
    assert repr(collector) == "RayCollector(2 workers, sync=True)"


def test_drawn_actions_repeat_with_the_seed(collector: Any, policy: Any) -> None:
    policy.module.noise.data.fill_(1.0)
    collector.update_policy_weights_()
    one, again, other = (take(collector, seed) for seed in (5, 5, 6))
    for batch, same in zip(one, again, strict=True):
        assert_same(batch, same)
        assert (batch["next", "policy_version"] == 1).all()
    assert not torch.equal(one[0]["action"], other[0]["action"])
    assert not torch.equal(one[0]["action"][0], one[0]["action"][1])
    policy.module.noise.data.fill_(0.0)
    collector.update_policy_weights_()
    assert_same(take(collector, 3)[0].flatten(0, 1), next(iter(in_one_process(3))))


def test_statistics_are_merged(collector: Any) -> None:
    life = collector.stats.lifetime
    steps, episodes = life.steps, life.episodes
    batches = take(collector, 4, 5)
    after = collector.stats.lifetime
    assert after.steps - steps == sum(batch.numel() for batch in batches)
    ended = sum(int(batch["next", "done"].sum()) for batch in batches)
    assert after.episodes - episodes == ended
    assert collector.stats()["workers"] == 2


def test_an_error_of_a_worker_comes_back(collector: Any) -> None:
    actor = collector.remote_collectors[0]
    with pytest.raises(ValueError, match="expected components to be"):
        ray.get(actor.__ray_call__.remote(Collector.state_dict, ["no component"]))
    assert state_of(actor).name == "ALIVE"


def test_a_lost_worker_ends_the_collection(collector: Any) -> None:
    processes = pids(collector)
    os.kill(processes[0], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match=rf"worker 0 \(pid {processes[0]} on .*slots 0 to 1"):
        collector.update_policy_weights_()
    assert time.monotonic() - start < 20
    assert gone(processes)
    collector.shutdown()
    assert repr(collector) == "RayCollector(shut down)"
    with pytest.raises(RuntimeError, match="the collector is shut down"):
        collector.set_seed(0)
    assert ray.is_initialized()  # others have started it


@pytest.mark.parametrize(
    "kind", ["OutOfMemory", "NodeDied", "ActorUnschedulable", "WorkerCrashed", "RuntimeEnvSetup"]
)
def test_each_of_rays_errors_of_a_lost_worker_is_a_loss(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = getattr(ray.exceptions, f"{kind}Error")("the machine is gone")
    collector = RayCollector.__new__(RayCollector)
    collector.num_collectors = 2
    monkeypatch.setattr(RayCollector, "remote_collectors", [None, None])
    collector.num_collectors, collector._collection_thread = 2, None
    monkeypatch.setattr(collector, "shutdown", lambda: None)
    dead = ActorState("DEAD", 7, "host", "")
    monkeypatch.setattr("tdcollect.collectors.ray.state_of", lambda actor: dead)
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=error))
    lost = "worker 1 (pid 7 on host) was lost: " + " ".join(str(error).split())
    with pytest.raises(WorkerLostError, match=re.escape(lost)):
        collector._result(1, None)
