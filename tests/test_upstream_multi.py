"""The private names of TorchRL's collectors with workers, held against its own code."""

from __future__ import annotations

import inspect
import multiprocessing
import re
from multiprocessing import connection
from typing import Any

import pytest
import torch
import torchrl.collectors as upstream
from torchrl.collectors import _multi_async, _multi_base, _multi_sync, _runner
from torchrl.weight_update import SharedMemWeightSyncScheme

from tdcollect._upstream.multi import (
    MultiCollectorMeta,
    WorkersState,
    drop_generic_defaults,
    one_env_each,
    readers,
    same_threads,
)


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def test_the_metaclass_makes_a_collector_by_sync() -> None:
    assert isinstance(upstream.MultiSyncCollector, MultiCollectorMeta)
    assert "sync" in inspect.signature(MultiCollectorMeta.__call__).parameters


@pytest.mark.parametrize("by_name", [False, True])
def test_one_env_for_each_collector(by_name: bool) -> None:
    args, kwargs = ((), {"create_env_fn": str}) if by_name else ((str,), {})
    args, kwargs, count = one_env_each(args, kwargs, 3)
    assert (args[0] if args else kwargs["create_env_fn"]) == [str] * 3
    assert count == 3
    with pytest.raises(ValueError, match="3 != 2"):
        one_env_each(([str, str],), {}, 3)


def test_generic_defaults_are_dropped() -> None:
    kwargs = {"frames_per_batch": 8, "split_trajs": None, "cat_results": 0, "use_buffers": None}
    parameters = inspect.signature(upstream.MultiCollector.__init__).parameters
    generic = inspect.signature(upstream.Collector.__init__).parameters
    other = [
        name
        for name in parameters
        if name in generic and generic[name].default != parameters[name].default
    ]
    kwargs |= {name: generic[name].default for name in other if name != "policy"}
    drop_generic_defaults(upstream.MultiCollector, kwargs)
    assert not {*kwargs} & {*other} - {"frames_per_batch", "policy"}
    assert kwargs["frames_per_batch"] == 8
    assert kwargs["cat_results"] == 0


def test_queues_can_be_waited_for() -> None:
    queue: Any = multiprocessing.Queue()
    ends = readers([queue])
    assert connection.wait(ends, 0) == []
    queue.put(1)
    assert connection.wait(ends, 10) == ends
    queue.get()
    queue.close()


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    with same_threads():
        torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before


# --------------------------------------------------------------------------- the state of workers


class Fake:
    """Has the private state that TorchRL's collector has."""

    _frames, _iter, _running_free, _worker_trajs_per_batch = 3, 1, True, 7
    pipes = ("pipe",)

    def __init__(self) -> None:
        self.did: list[Any] = []
        self._weight_sync_schemes: Any = None

    def _flush_trajectory_assembly(self) -> None:
        self.did.append("flushed")

    def _recv_and_check(self, pipe: Any, worker_idx: int) -> Any:
        return pipe, worker_idx


def test_state_is_under_plain_names() -> None:
    fake: Any = Fake()
    state = WorkersState(fake)
    assert (state.frames, state.iteration, state.worker_trajectories) == (3, 1, 7)
    state.frames, state.iteration = 9, 2
    assert (fake._frames, fake._iter) == (9, 2)
    state.flush_trajectories()
    assert fake.did == ["flushed"]
    assert state.answer(0) == ("pipe", 0)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("self._frames", _multi_base),
        ("self._iter", _multi_base),
        ("self._worker_trajs_per_batch", _multi_base),
        ("self._flush_trajectory_assembly()", _multi_base.MultiCollector.reset),
        ("def _recv_and_check(", _multi_base),
        ("self._weight_sync_schemes", _multi_base),
    ],
)
def test_upstream_has_the_state(name: str, where: Any) -> None:
    assert name in source(where)


def test_nobody_waits_for_the_word_of_a_worker_that_is_released() -> None:
    class Queue:
        def __init__(self) -> None:
            self.put_: list[str] = []

        def put(self, word: str) -> None:
            self.put_.append(word)

    scheme: Any = SharedMemWeightSyncScheme()
    assert scheme._ack_queues == {}
    first, second = Queue(), Queue()
    scheme._ack_queues = {0: first, 1: second}
    fake: Any = Fake()
    fake._weight_sync_schemes = {"policy": scheme}
    WorkersState(fake).release_update(1)
    assert (first.put_, second.put_) == ([], ["updated"])
    assert 'ack != "updated"' in source(SharedMemWeightSyncScheme)
    scheme._ack_queues = {}
    WorkersState(fake).end_weight_sync()
    assert scheme._is_shutdown


# ------------------------------------------------------- the messages that channels.py knows about


def test_messages_to_workers() -> None:
    loop = source(_runner._main_async_collector_impl)
    for name in ("continue", "continue_random", "run_free", "pause", "restart", "cascade_execute"):
        assert f'"{name}"' in loop
    assert 'queue_out.put((idx, "paused")' in loop
    assert "queue_out.put((data, j)" in loop
    assert "queue_out.put((idx, j)" in loop


def test_messages_are_pairs_with_the_name_second() -> None:
    for module in (_multi_base, _multi_sync, _multi_async):
        sent = re.findall(r"\.send\(\s*\((.*?)\)\s*\)", source(module), re.S)
        assert sent
        for message in sent:
            assert re.search(r', (msg|"\w+")$', message.strip().rstrip(",")), message


def test_batches_are_asked_of_the_queue_with_a_timeout() -> None:
    assert "self.queue_out.get(timeout=_TIMEOUT)" in source(_multi_sync)
    assert "self.queue_out.get(timeout=timeout)" in source(_multi_async)
    assert "_check_for_faulty_process(self.procs)" in source(_multi_base)


def test_a_class_of_collectors_may_be_any_callable() -> None:
    loop = source(_runner._main_async_collector_impl)
    assert "collector_class._ignore_rb =" in loop
    assert "inner_collector = collector_class(" in loop
    assert "worker_idx=worker_idx" in loop
