"""Workers that die: noticed, and named."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
from torchrl._utils import _check_for_faulty_process
from torchrl.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter

from tdcollect import make_env
from tdcollect.collectors import (
    MultiAsyncCollector,
    MultiSyncCollector,
    WorkerLostError,
    multi,
    worker_of,
)
from tdcollect.collectors.asking import LostWorker
from tdcollect.processes import child

from ..collect.oracle import UPSTREAM
from ..workers.test_process_exit import gone
from ..zoo.process_envs import Odd
from .made import assert_same, batches, drawing, ending, kill, two_slots, wait_until

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

IDS = ("collector", "traj_ids")


def made(cls: Any, **options: Any) -> Any:
    return ending(cls([two_slots] * 2, drawing(), **{"frames_per_batch": 64, **options}))


def shared() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(2_000, ndim=2), shared=True)


def kill_between_writes(collector: Any, worker: int) -> int:
    """Kill a worker that waits for the lock of the replay buffer, or does not need it; its pid."""
    pid: int = collector.procs[worker].pid
    with collector.replay_buffer._write_lock:
        kill(pid)
        assert gone([pid])
    return pid


class Deadly(RoundRobinWriter):
    """Its process is killed as it writes what worker 1 has collected, with the lock in its hand."""

    def extend(self, data: Any) -> Any:
        if len(self._storage) and (worker_of(data[IDS]) == 1).any():
            kill(os.getpid())
        return super().extend(data)


def odd(what: str) -> Any:
    """Makes two envs that misbehave at their second step."""
    return partial(make_env, partial(Odd, what), 2)


def assert_names(error: WorkerLostError, worker: int, pid: int) -> None:
    slots = f"slots {2 * worker} to {2 * worker + 1}"
    assert str(error).startswith(f"worker {worker} (pid {pid}, {slots}) was killed by SIGKILL; ")


# ------------------------------------------------------------------------------------------ raise


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_a_death_is_noticed_while_batches_are_awaited(cls: Any) -> None:
    before = {*multiprocessing.active_children()}
    with made(cls, frames_per_batch=400_000) as collector:
        pid = collector.procs[1].pid
        stream = iter(collector)
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid}"])
        start = time.monotonic()
        with pytest.raises(WorkerLostError) as raised:
            next(stream)
        assert time.monotonic() - start < 30
        assert_names(raised.value, 1, pid)
        assert killer.wait() == 0
        assert collector.closed
        assert not {*multiprocessing.active_children()} - before
        assert repr(collector) == f"{cls.__name__}(shut down)"


def test_a_death_is_noticed_under_start() -> None:
    before = {*multiprocessing.active_children()}
    with made(MultiAsyncCollector, replay_buffer=shared()) as collector:
        collector.start()
        wait_until(lambda: collector.replay_buffer.write_count > 0)
        pid = kill_between_writes(collector, 0)
        start = time.monotonic()
        with pytest.raises(WorkerLostError) as raised:
            time.sleep(60)
        assert time.monotonic() - start < 30
        assert_names(raised.value, 0, pid)
        assert not {*multiprocessing.active_children()} - before


def test_a_death_with_the_lock_of_the_replay_buffer_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(multi, "_PATIENCE", 0.5)
    storage = LazyTensorStorage(2_000, ndim=2)
    buffer = ReplayBuffer(storage=storage, writer=Deadly(), shared=True)
    with made(MultiAsyncCollector, replay_buffer=buffer) as one:

        def run() -> None:
            one.start()
            time.sleep(60)

        with pytest.raises(WorkerLostError, match=r"worker 1 .* SIGKILL; .* ended, make a new"):
            run()
    assert "rows of the replay buffer may be incomplete" in caplog.text
    assert buffer.sample(4).shape == (4,)  # it would wait for ever


def test_an_update_and_torchrls_own_look_at_processes_find_the_death() -> None:
    with made(MultiSyncCollector) as collector:
        procs = collector.procs  # taken before the death, as TorchRL does
        kill(procs[1].pid)
        # It dies before the update, or while that waits for its word.
        with pytest.raises(WorkerLostError, match=f"pid {procs[1].pid}"):
            collector.update_policy_weights_()
        with pytest.raises(RuntimeError, match="the collector is shut down"):
            collector.explain()
    with made(MultiSyncCollector) as collector:
        procs = collector.procs
        kill(procs[1].pid)
        procs[1].join()
        with pytest.raises(WorkerLostError, match=r"worker 1 .* was killed by SIGKILL"):
            _check_for_faulty_process(procs)


def dies() -> Any:
    kill(os.getpid())


def test_a_death_at_the_start_is_named() -> None:
    text = r"pid \d+\) was killed by SIGKILL as it started; .* ended, mend what ended it"
    with pytest.raises(WorkerLostError, match=text):
        MultiSyncCollector([two_slots, dies], drawing(), frames_per_batch=64)


def test_the_error_of_a_worker_is_in_the_message() -> None:
    collector = MultiSyncCollector([odd("raise_")], None, frames_per_batch=64)
    text = r"worker 0 .* exit code 1 after SlotError: the env failed in .* the cart; the other"
    with pytest.raises(WorkerLostError, match=text):
        batches(collector, 2)
    assert collector.closed


def test_a_training_goes_on_with_a_new_collector() -> None:
    taken = []
    for seed in (3, 3, 4):
        with made(MultiSyncCollector) as collector:
            collector.set_seed(seed)
            taken += batches(collector, 1)
            kill(collector.procs[0].pid)
            with pytest.raises(WorkerLostError):
                batches(collector, 2)
    assert_same(taken[0], taken[1])
    assert not torch.equal(taken[0]["observation"], taken[2]["observation"])


# ----------------------------------------------------------------------------------------- record


def test_record_is_readable() -> None:
    ends = [child.ending(code) for code in (3, -9, -200, None)]
    killed = ["was killed by SIGKILL", "was killed by signal 200"]
    assert ends == ["ended with exit code 3", *killed, "ended"]
    lost = LostWorker(1, 42, "was killed by SIGSEGV", range(2, 3))
    assert str(lost) == "worker 1 (pid 42, slot 2) was killed by SIGSEGV"
    error = pickle.loads(pickle.dumps(WorkerLostError(lost)))
    assert error.lost == lost
    assert str(error).endswith("the other workers have been ended, make a new collector")


# ------------------------------------------------------------------------------------------- exit

FORGETFUL = """
import multiprocessing, sys
from tdcollect.collectors import MultiSyncCollector
from tests.collectors.made import drawing, two_slots

def collect():
    collector = MultiSyncCollector([two_slots] * 2, drawing(), frames_per_batch=64)
    for batch in collector:
        sys.exit(3)

if __name__ == "__main__":
    multiprocessing.set_start_method("fork", force=True)
    child = multiprocessing.Process(target=collect)
    child.start()
    child.join()
    print(child.exitcode)
    collect()
"""


@pytest.mark.slow
def test_processes_and_programs_that_forget_to_shut_down_end() -> None:
    """They would wait for their workers for ever."""
    ran = subprocess.run(
        [sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (3, "3\n"), ran.stderr
