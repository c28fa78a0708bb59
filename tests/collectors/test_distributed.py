"""Collectors on torch.distributed, with two worker processes of two slots."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors.distributed import RPCCollector
from torchrl.envs import GymEnv

from tdcollect import Collector, make_env
from tdcollect.collectors import (
    DistributedCollector,
    DistributedSyncCollector,
    MultiAsyncCollector,
    WorkerLostError,
    worker_of,
)
from tdcollect.envs.adopted import chain
from tdcollect.keys import TRAJ_IDS

from ..workers.test_process_exit import gone
from .made import ending, noisy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of ends of processes

N, T = 2, 10
make = partial(make_env, "CartPole-v1", N)
KINDS: dict[str, Callable[..., Any]] = {
    "gloo": partial(DistributedCollector, sync=True),
    "gloo, async": partial(DistributedCollector, sync=False),
    "gloo, ahead": partial(DistributedSyncCollector, total_frames=800),
}


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_ids_statistics_and_a_lost_worker(kind: str) -> None:
    """One start of workers takes ten seconds, so one test has all."""
    whole = Collector(make_env("CartPole-v1", 2 * N), noisy(), frames_per_batch=2 * N * T)
    whole.set_seed(3)
    expected = next(iter(whole))
    whole.shutdown()
    frames = N * T if "async" in kind else 2 * N * T
    options: Any = {"frames_per_batch": frames, "launcher": "mp", "tcp_port": free_port()}
    with ending(KINDS[kind]([make, make], noisy(), **options)) as collector:
        collector.set_seed(3)
        batches = iter(collector)
        rows = firsts_of(batches)
        assert torch.equal(rows["observation"], expected["observation"])
        assert torch.equal(rows["next", "done"], expected["next", "done"])
        assert worker_of(rows[TRAJ_IDS][:, 0]).tolist() == [0, 0, 1, 1]
        assert collector.stats.lifetime.steps >= 2 * N * T
        assert "2 workers of 2 slots" in str(collector.explain())
        processes = [job.pid for job in collector.jobs]
        os.kill(processes[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerLostError, match=rf"worker 1 \(pid {processes[1]}, slots 2 to 3"):
            for _ in batches:
                pass
        assert time.monotonic() - start < 30
        assert gone(processes)
        assert collector.lost.frames == N * T
        collector.shutdown()
    assert "shut down" in repr(collector)


def test_workers_of_workers_have_time_to_start_and_to_end() -> None:
    """They take longer on a busy machine than the 10 s that TorchRL waits."""
    options: Any = {"collector_class": MultiAsyncCollector, "frames_per_batch": N * T}
    options |= {"total_frames": 4 * N * T, "launcher": "mp", "tcp_port": free_port()}
    with ending(DistributedCollector([make], noisy(), **options)) as collector:
        node = collector.jobs[0].pid
        os.kill(node, signal.SIGSTOP)
        threading.Timer(12.0, os.kill, (node, signal.SIGCONT)).start()
        assert sum(batch.numel() for batch in collector) == 4 * N * T


def firsts_of(batches: Iterator[TensorDictBase]) -> TensorDictBase:
    """The first batch of each worker, as one ``[2N, T]``."""
    found: dict[int, TensorDictBase] = {}
    while len(found) < 2 * N:
        for row in next(batches).clone().reshape(-1, T).unbind(0):
            found.setdefault(int(row[TRAJ_IDS][0]), row)
    return torch.stack([found[each] for each in sorted(found)[: 2 * N]])


class Refusing:
    """Makes envs in the process that it comes from alone."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __call__(self) -> Any:
        if os.getpid() != self.pid:
            raise ValueError("no env here")
        return make()


def test_a_worker_that_cannot_begin_is_named() -> None:
    """It, and not the first, which is ended with it."""
    with pytest.raises(WorkerLostError, match=r"worker 1 .* ended with exit code 1"):
        DistributedCollector(
            [make, Refusing()], noisy(), frames_per_batch=40, launcher="mp", tcp_port=free_port()
        )


@pytest.mark.parametrize("kind", KINDS)
def test_envs_of_torchrl_keep_its_chain_of_seeds(kind: str) -> None:
    frames = T if "async" in kind else 2 * T
    envs = [partial(GymEnv, "CartPole-v1")] * 2
    options: Any = {"frames_per_batch": frames, "launcher": "mp", "tcp_port": free_port()}
    with ending(KINDS[kind](envs, noisy(), **options)) as collector:
        assert collector.set_seed(7) == chain(7, 3)[-1]
        first = next(iter(collector)).reshape(-1, T)[:, 0]
        worker = int(worker_of(first[TRAJ_IDS][0]))
        expected, _ = gym.make("CartPole-v1").reset(seed=chain(7, 2)[worker])
        assert first["observation"][0].tolist() == expected.tolist()


def test_rpc_is_torchrls_collector_with_ours_in_each_worker() -> None:
    collector = Collector(
        [make, make],
        noisy(),
        frames_per_batch=2 * N * T,
        total_frames=4 * N * T,
        backend="rpc",
        backend_options={"launcher": "mp", "tcp_port": free_port()},
        sync=True,
    )
    assert type(collector) is RPCCollector
    assert collector.collector_class is Collector
    assert [batch.shape for batch in collector] == [(2 * N, T)] * 2
    collector.shutdown()
