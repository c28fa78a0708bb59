"""However the processes of an evaluator end, its evaluations go on, and nothing is left running."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tdcollect
from tdcollect import Evaluator
from tdcollect.evaluation import background
from tdcollect.processes.child import Spawned, run_fork

from ..forkserver import start
from ..workers.test_process_exit import ROOT, gone
from .crews import descendants
from .envs import Walk
from .evaluators import Gated
from .policies import categorical

EPISODES = 4
forked = pytest.mark.usefixtures("quick_children")


def pid_of(evaluator: Evaluator) -> int:
    process = evaluator._courier._process
    assert process is not None
    return process.pid


def wait_for_resets(gate: Path, count: int) -> list[int]:
    """Wait until an env has been reset; the process of each reset."""
    file = gate.with_name(gate.name + ".resets")
    while not file.exists() or len(file.read_text().splitlines()) < count:
        time.sleep(0.005)
    return [int(line) for line in file.read_text().splitlines()]


@forked
@pytest.mark.parametrize("who", ["worker", "driver"])
def test_a_process_that_is_killed_at_work_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, who: str
) -> None:
    gate = tmp_path / "gate"
    env, policy = partial(Gated, str(gate)), categorical()
    with Evaluator(
        env, policy, num_trajectories=EPISODES, output_dir=tmp_path / "curve"
    ) as evaluator:
        futures = [evaluator.submit(step=step) for step in (1, 2)]
        (worker,) = wait_for_resets(gate, 1)
        driver = pid_of(evaluator)
        os.kill(worker if who == "worker" else driver, signal.SIGKILL)
        other = wait_for_resets(gate, 2)[1]
        assert other != worker
        assert (pid_of(evaluator) == driver) == (who == "worker")
        gate.touch()
        digests = {future.result(60).digest for future in futures}
    assert digests == {tdcollect.evaluate(env, policy, EPISODES, progress=False).digest}
    said = {
        "worker": f"worker 0 (process {worker}) was killed by SIGKILL",
        "driver": "was killed by SIGKILL at step 1; a new one goes on",
    }
    assert said[who] in caplog.text
    assert gone([worker, driver, other])


@pytest.mark.slow
@forked
def test_a_driver_that_dies_again_and_again_is_an_error_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    with Evaluator(partial(Gated, str(gate)), categorical(), num_trajectories=1) as evaluator:
        evaluator.trigger_eval(step=7)
        evaluator.trigger_eval(step=8)
        for count in range(1, 5):
            wait_for_resets(gate, count)
            os.kill(pid_of(evaluator), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"4 times in a row: .* by SIGKILL at step 7; see"):
            evaluator.wait(60)
        gate.touch()
        assert evaluator.wait(60)["eval/step"] == 8


@forked
def test_an_idle_process_that_is_killed_is_replaced_when_it_is_needed() -> None:
    with Evaluator(Walk, policy_factory=lambda: categorical(), num_trajectories=2) as evaluator:
        trained = categorical()
        trained.module[0].module[-1].bias.data[0] += 9
        expected = evaluator.submit(trained).result(60).digest
        os.kill(pid_of(evaluator), signal.SIGKILL)
        assert evaluator.submit().result(60).digest == expected  # the latest weights, still
        os.kill(pid_of(evaluator), signal.SIGTERM)
        assert evaluator.submit().result(60).digest == expected


def waits(name: str) -> bool:
    """Tell whether a thread of this name waits in a lock of the evaluator's."""
    frames = sys._current_frames()
    idents = [t.ident for t in threading.enumerate() if t.name.startswith(name)]
    return any(frames[i].f_code.co_name == "wait" for i in idents if i in frames)


@forked
@pytest.mark.filterwarnings("ignore:evaluations take longer")
def test_shutdown_ends_an_evaluation_at_work(tmp_path: Path) -> None:
    evaluator = Evaluator(partial(Gated, str(tmp_path / "gate")), categorical())
    evaluator.trigger_eval()
    futures = [evaluator.submit(), evaluator.submit()]
    (pid,) = wait_for_resets(tmp_path / "gate", 1)
    with ThreadPoolExecutor(1, "triggers") as pool:
        waiting = pool.submit(evaluator.trigger_eval)
        while not waits("triggers"):
            time.sleep(0.005)
        start = time.monotonic()
        evaluator.shutdown(timeout=120.0)
        assert time.monotonic() - start < 60
        with pytest.raises(RuntimeError, match="this Evaluator is shut down"):
            waiting.result(10)
    assert not evaluator.pending
    assert evaluator.wait() is None
    assert evaluator.poll(1) is None
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(1)
    assert gone([pid])
    evaluator.shutdown()
    for call in (evaluator.evaluate, evaluator.trigger_eval, evaluator.submit):
        with pytest.raises(RuntimeError, match="this Evaluator is shut down; make a new one"):
            call()
    assert "shut down" in repr(evaluator)


@forked
def test_a_with_block_waits_unless_it_raises_and_leaves_nothing(tmp_path: Path) -> None:
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    gate, pids = tmp_path / "gate", []
    for error in (None, ZeroDivisionError):
        with (
            suppress(ZeroDivisionError),
            Evaluator(partial(Gated, str(gate)), categorical(), num_trajectories=1) as evaluator,
        ):
            future = evaluator.submit()
            pids += [pid_of(evaluator), *wait_for_resets(gate, 1)]
            if error is not None:
                raise error
            gate.touch()
        assert future.done()
        gate = tmp_path / "other"
    with pytest.raises(RuntimeError, match="shut down before the evaluation at step 0"):
        future.result(1)
    assert gone(pids)
    del evaluator, future
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files + 1
    assert threading.active_count() <= threads


@forked
def test_an_evaluator_that_nobody_holds_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = threading.active_count()
    evaluator = Evaluator(partial(Gated, str(tmp_path / "gate")), categorical())
    evaluator.trigger_eval()
    (pid,) = wait_for_resets(tmp_path / "gate", 1)
    assert threading.active_count() > before
    with caplog.at_level(logging.WARNING, "tdcollect"):
        del evaluator
        gc.collect()
    assert "1 evaluation lost: the Evaluator ended first; call wait()" in caplog.text
    assert gone([pid])
    assert threading.active_count() <= before


@pytest.mark.slow
@forked
def test_a_fork_of_the_training_neither_ends_the_process_nor_keeps_it() -> None:
    evaluator = Evaluator(Walk, categorical(), num_trajectories=1)
    evaluator.evaluate()
    child = os.fork()
    if not child:
        evaluator.shutdown()
        del evaluator
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    sleeper = os.fork()
    if not sleeper:
        time.sleep(60)
        os._exit(0)
    try:
        assert evaluator.evaluate(step=3)["eval/step"] == 3
        pid = pid_of(evaluator)
        evaluator.shutdown()
        assert gone([pid], 2)
    finally:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)


# --- fresh interpreters ---------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
import torch
from tdcollect import Evaluator
print("once", flush=True)


def first(seen=sys.argv[1]):
    import sys
    with open(seen + ".part", "w") as file:
        file.write("torch" if "torch" in sys.modules else "nothing")
    os.rename(seen + ".part", seen)


policy = lambda td: td.set("action", torch.nn.functional.one_hot(torch.zeros(td.shape).long(), 2))
evaluator = Evaluator("CartPole-v1", policy, num_trajectories=100_000, init_fn=first)
evaluator.trigger_eval()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print(evaluator._courier._process.pid)
"""


@pytest.mark.slow
def test_a_training_that_ends_ends_its_process(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, seen],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    once, pid = done.stdout.splitlines()
    assert once == "once"
    assert gone([int(pid)])
    assert seen.read_text() == "nothing"  # init_fn came before torch
    assert done.returncode == 0
    assert "1 evaluation lost: the Evaluator ended first" in done.stderr
    assert "Traceback" not in done.stderr


def training(gate: str) -> None:
    """Have an evaluation at work, in a process that this one forks."""

    def begin(spawned: Any, lifeline: int, descriptors: Any) -> None:
        spawned.pid = os.fork()
        if not spawned.pid:
            run_fork(background.main, lifeline, *descriptors)

    Spawned._begin = begin
    evaluator = Evaluator(partial(Gated, gate), categorical())
    evaluator.trigger_eval()
    time.sleep(600)


def test_no_process_outlives_a_training_that_is_killed(tmp_path: Path) -> None:
    process = start(training, str(tmp_path / "gate"))
    (worker,) = wait_for_resets(tmp_path / "gate", 1)
    assert process.pid is not None
    children = descendants(process.pid)
    assert len(children) == 3  # that evaluates, the template and the worker
    assert worker in children
    process.kill()
    process.join()
    assert gone(children)
