"""The private names of TorchRL's collectors on Ray and torch.distributed, held against them.

The tests of tests/collectors that are slow run them.
"""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
)
from torchrl.collectors.distributed import generic as distributed

from tdcollect._upstream.distributed import DistributedState, RayState


def source(cls: Any) -> str:
    return inspect.getsource(cls)


@pytest.mark.parametrize(
    "name",
    [
        "self._collection_thread = None",
        "self._stop_event = threading.Event()",
        "self._frames_per_batch_corrected = frames_per_batch",
        "self._sync = sync",
        "self._remote_collectors = []",
        "self._external_weight_sender = True",
        "if not self._weight_sync_initialized and self._weight_sync_schemes is not None:",
        "self._remote_collectors.append(collector)",
        'other_params["worker_idx"] = i',
        "meth = self._sync_iterator",
        "meth = self._async_iterator",
        "target=self._run_collection_loop",
    ],
)
def test_ray(name: str) -> None:
    assert name in source(RayCollector)


@pytest.mark.parametrize(
    "name",
    [
        "self._tensordict_out = self._tensordict_out.unbind(0)",
        "data, total_frames = self._next_sync(total_frames)",
        "data, total_frames, ready_worker_idx = self._next_async(",
        'self._store.set(f"NODE_{rank}_in", b"continue")',
        "].irecv(src=rank, return_premature=True)",
        'if getattr(self, "_shutdown", False):',
        "yield from self._iterator_dist()",
        "self._make_container()",
        "self._weight_sync_schemes = weight_sync_schemes",
        "traj_ids[i] += traj_ids[i - 1].max()",
        "self._store, self._store_port = _create_tcpstore_with_retry(",
        'status = self._store.get(f"NODE_{rank}_out")',
    ],
)
def test_distributed(name: str) -> None:
    assert name in source(DistributedCollector)


def test_a_distributed_worker_calls_next() -> None:
    assert "data = collector.next()" in inspect.getsource(distributed)


@pytest.mark.parametrize(
    "name",
    [
        "self._tensordict_out = _data.expand((self.num_workers, *_data.shape))",
        "self._single_tds = self._tensordict_out.unbind(0)",
        "self._single_tds[i].irecv(src=rank, return_premature=True)",
        "traj_ids[i] += traj_ids[i - 1].max()",
    ],
)
def test_distributed_sync(name: str) -> None:
    """If one of them is gone, so may be the fault that ours puts right."""
    assert name in source(DistributedSyncCollector)


def test_the_view_of_ray_reads_these_names() -> None:
    stop = threading.Event()
    of = SimpleNamespace(_frames_per_batch_corrected=5, _sync=True, _stop_event=stop)
    of._collection_thread, of._weight_sync_initialized = threading.current_thread(), False
    view = RayState(of)
    assert (view.frames_per_worker, view.in_step, view.thread) == (5, True, of._collection_thread)
    assert [view.started, view.stopped, view.learner_sends] == [False] * 3
    stop.set()
    of._remote_collectors, of._external_weight_sender = [], True
    assert view.started
    assert view.stopped
    assert view.learner_sends
    view.need_no_connection()
    assert of._weight_sync_initialized


def test_the_view_of_distributed_collectors_reads_these_names() -> None:
    of = SimpleNamespace(_frames_per_batch_corrected=5)
    view = DistributedState(of)
    assert (view.frames_per_worker, view.in_step, view.schemes) == (5, True, None)
    assert [view.started, view.shut_down] == [False] * 2
    of.jobs, of._sync, of._weight_sync_schemes = [], False, {"policy": 1}
    view.shut_down = True
    assert (view.started, view.in_step, view.schemes) == (True, False, {"policy": 1})
    assert view.shut_down
    assert of._shutdown


def test_each_worker_has_memory_of_its_own() -> None:
    of = SimpleNamespace(_tensordict_out=TensorDict({"a": torch.zeros(3)}, [3]).expand(2, 3))
    DistributedState(of).separate()
    of._single_tds[0]["a"].fill_(1)
    assert DistributedState(of).received["a"].tolist() == [[1, 1, 1], [0, 0, 0]]


def test_a_worker_is_asked_by_the_store() -> None:
    told: dict[str, bytes] = {}
    memory = SimpleNamespace(irecv=lambda src, return_premature: (src, return_premature))
    of = SimpleNamespace(_store=SimpleNamespace(set=told.__setitem__), _tensordict_out=[0, memory])
    trackers: list[Any] = [None, None]
    DistributedState(of).ask_for_batch(1, trackers)
    assert told == {"NODE_2_in": b"continue"}
    assert trackers == [None, (2, True)]


def test_the_store_waits_as_long_as_it_is_told() -> None:
    limits: list[Any] = []
    DistributedState(
        SimpleNamespace(_store=SimpleNamespace(set_timeout=limits.append))
    ).wait_at_most(60)
    assert [limit.total_seconds() for limit in limits] == [60]
    assert callable(torch.distributed.TCPStore.set_timeout)
