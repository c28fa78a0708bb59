"""Whatever ends the parent of worker processes, nothing is left: no process, no shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from process_envs import Odd
from functools import partial
from tdcollect import make_env

env = make_env(partial(Odd, {what!r}), 4, backend="process", num_workers=2, start_method={method!r})
print(*(p.pid for p in env.stepper.backend._crew.processes), flush=True)
td = env.reset()
print("ready", flush=True)
{rest}
"""
STEP = "td = env.rand_step(td)['next']"
STEPS = f"while True: {STEP}"
TESTS = str(Path(__file__).parent)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether none of some processes runs, within a time."""
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts a program that makes an env with two workers; kills what is left of it at the end."""
    started: list[Any] = []
    before = set(os.listdir("/dev/shm"))

    def launch(method: str, rest: str, what: str = "") -> tuple[Any, list[int]]:
        code = SCRIPT.format(tests=TESTS, what=what, method=method, rest=rest)
        program = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2, program.communicate()[1]
        started.append((program, pids))
        assert program.stdout.readline() == "ready\n"
        return program, pids

    yield launch
    left = []
    for program, pids in started:
        program.kill()
        program.communicate()
        left += [pid for pid in pids if runs(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left
    assert set(os.listdir("/dev/shm")) <= before


every_method = pytest.mark.parametrize("method", ["spawn", "fork"])


@every_method
@pytest.mark.parametrize("rest", [f"{STEP}; env.close()", STEP, f"{STEP}; del env, td"])
def test_a_normal_end(start: Any, method: str, rest: str) -> None:
    program, pids = start(method, rest)
    assert program.wait(20) == 0
    assert not any(map(runs, pids))
    assert program.stderr.read() == ""


@every_method
def test_an_exception(start: Any, method: str) -> None:
    program, pids = start(method, f"{STEP}; raise KeyError('mine')")
    assert program.wait(20) == 1
    assert not any(map(runs, pids))
    assert program.stderr.read().endswith("KeyError: 'mine'\n")


@every_method
def test_an_env_that_raises(start: Any, method: str) -> None:
    program, pids = start(method, STEPS, what="raise_")
    assert program.wait(20) == 1
    assert not any(map(runs, pids))
    told = program.stderr.read()
    assert "SlotError: the env raised in step() of slot 0: ZeroDivisionError: the pole" in told
    assert 'raise ZeroDivisionError("the pole' in told


@every_method
def test_ctrl_c_ends_with_the_parents_traceback_alone(start: Any, method: str) -> None:
    program, pids = start(method, STEPS)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to parent and workers
    assert program.wait(20) == -signal.SIGINT
    assert not any(map(runs, pids))
    assert program.stderr.read().count("Traceback") == 1


@every_method
def test_ctrl_c_may_be_caught_and_the_env_used_on(start: Any, method: str) -> None:
    rest = f"""
try:
    {STEPS}
except KeyboardInterrupt:
    td = env.reset()
    assert {STEP.split(" = ")[1]}["observation"].eq(1).all()
    print("went on")
"""
    program, pids = start(method, rest)
    os.killpg(program.pid, signal.SIGINT)
    assert program.wait(20) == 0, program.stderr.read()
    assert program.stdout.read() == "went on\n"
    assert not any(map(runs, pids))


@every_method
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
@pytest.mark.parametrize("what", ["", "sleep", "spin", "hold the lock"])
def test_a_parent_that_is_killed(start: Any, method: str, number: int, what: str) -> None:
    program, pids = start(method, STEPS, what)
    time.sleep(0.2)
    program.send_signal(number)
    assert program.wait(20) == -number
    assert gone(pids)


@every_method
def test_a_parent_that_is_killed_while_idle(start: Any, method: str) -> None:
    program, pids = start(method, f"{STEP}; time.sleep(600)")
    program.kill()
    program.wait(20)
    assert gone(pids)


@every_method
def test_a_killed_parent_whose_fork_lives_on(start: Any, method: str) -> None:
    program, pids = start(
        method, "child = os.fork() or time.sleep(600); print(child, flush=True)\n" + STEPS
    )
    child = int(program.stdout.readline())
    try:
        program.kill()
        program.wait(20)
        assert gone(pids)
        assert runs(child)
    finally:
        os.kill(child, signal.SIGKILL)


@every_method
def test_a_killed_worker(start: Any, method: str) -> None:
    program, pids = start(method, STEPS)
    os.kill(pids[1], signal.SIGKILL)
    assert program.wait(20) == 1
    assert "the worker of slots 2 to 3 was killed by SIGKILL" in program.stderr.read()
    assert not any(map(runs, pids))


# --- programs as users write them --------------------------------------------------------------

UNGUARDED = """
import gymnasium, numpy
from tdcollect import make_env

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(2, numpy.float32), {}

    def step(self, action):
        return numpy.ones(2, numpy.float32), 1.0, False, False, {}

gymnasium.register("Mine-v0", Mine)
print("once")
for env in (Mine, "Mine-v0", lambda: Mine()):
    env = make_env(env, 3, backend="process", num_workers=2)
    assert env.rollout(4)["next", "observation"].eq(1).all()
    env.close()
"""


@pytest.mark.parametrize("through", ["file", "stdin"])
def test_a_program_needs_no_main_guard(through: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, *([str(script)] if through == "file" else ["-"])]
    done = subprocess.run(command, input=UNGUARDED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\n"


def _use(method: str) -> None:
    from tdcollect import make_env

    env = make_env("CartPole-v1", 2, backend="process", num_workers=2, start_method=method)
    env.rollout(3)
    env.close()


@every_method
def test_it_runs_inside_a_daemonic_process_of_multiprocessing(method: str) -> None:
    child = multiprocessing.get_context("fork").Process(target=_use, args=(method,), daemon=True)
    child.start()
    child.join(20)
    assert child.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_it_runs_inside_processes_of_any_start_method(context: str) -> None:
    child = multiprocessing.get_context(context).Process(target=_use, args=("spawn",), daemon=True)
    child.start()
    child.join(120)
    assert child.exitcode == 0
