"""However the parent of worker processes ends, no process and no shared memory is left."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..forkserver import run_script
from ..forkserver import start as begin

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from tests.zoo.process_envs import Odd
from functools import partial
from tdcollect import make_env

signal.signal(signal.SIGTERM, signal.SIG_DFL)
env = make_env(partial(Odd, {what!r}), 4, backend="process", num_workers=2, start_method={method!r})
print(*(p.pid for p in env.stepper.backend._pool.processes), flush=True)
td = env.reset()
action = env.action_spec.zero()
print("ready", flush=True)
{rest}
"""
STEP = "td = env.step(td.set('action', action))['next']"
STEPS = f"""{STEP}
print("stepping", flush=True)
while True: {STEP}"""
ROOT = str(Path(__file__).parents[2])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Return whether all processes have ended within a time."""
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def run_program(code: str, out: str, errors: str) -> None:
    """Run a program in a session of its own, to its end."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.dup2(os.open(out, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    try:
        exec(code, {})
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


class Program:
    """A program that makes an env with two workers, in a session of its own."""

    def __init__(self, code: str, folder: Path) -> None:
        self.errors, out = folder / "errors", folder / "out"
        self.errors.touch()
        os.mkfifo(out)
        self.process = begin(run_program, code, str(out), str(self.errors))
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.lines = out.open()
        self.workers = [int(pid) for pid in self.lines.readline().split()]
        assert len(self.workers) == 2, self.told()
        self.prints("ready")

    def prints(self, line: str) -> None:
        assert self.lines.readline() == line + "\n"

    def wait(self) -> int | None:
        """Wait for the program; its exit code."""
        self.process.join()
        return self.process.exitcode

    def told(self) -> str:
        """The program's standard error."""
        return self.errors.read_text()

    def named_memory(self) -> set[str]:
        """Named shared memory of its workers."""
        texts = [Path(f"/proc/{pid}/maps").read_text() for pid in self.workers]
        assert all("/memfd:tdcollect (deleted)" in text for text in texts)
        return {word for text in texts for word in text.split() if word.startswith("/dev/shm")}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts programs; kills what is left of them at the end, and says so."""
    started: list[Program] = []

    def launch(method: str, rest: str, what: str = "") -> Program:
        code = SCRIPT.format(root=ROOT, what=what, method=method, rest=rest)
        started.append(Program(code, tmp_path))
        return started[-1]

    yield launch
    for program in started:
        program.process.kill()
        program.wait()
        program.lines.close()
    left = [pid for program in started for pid in program.workers if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_normal_end(start: Any) -> None:
    program = start("spawn", STEP)
    assert program.wait() == 0
    # From Python 3.13 on, a child of multiprocessing forgets its finalizers: the kernel does it.
    assert gone(program.workers)
    assert program.told() == ""


def test_ctrl_c_ends_with_the_parents_traceback_alone(start: Any) -> None:
    program = start("fork", STEPS)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to parent and workers
    assert program.wait() != 0
    assert gone(program.workers)
    assert program.told().count("Traceback") == 1
    assert program.told().endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("method", "number", "what"),
    [("fork", signal.SIGTERM, "spin"), ("spawn", signal.SIGKILL, "hold the lock")],
)
def test_a_parent_that_is_killed(start: Any, method: str, number: int, what: str) -> None:
    program = start(method, STEPS, what)
    program.prints("stepping")
    program.prints("hangs")
    assert not program.named_memory()
    os.kill(program.pid, number)
    assert program.wait() == -number
    assert gone(program.workers)


def test_a_parent_that_is_killed_while_idle_and_whose_fork_lives_on(start: Any) -> None:
    fork = "child = os.fork() or time.sleep(600); print(child, flush=True)\n"
    program = start("fork", f"{STEP}\n{fork}time.sleep(600)")
    child = int(program.lines.readline())
    try:
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        assert gone(program.workers)
        assert runs(child)
    finally:
        os.kill(child, signal.SIGKILL)


# --- programs as users write them --------------------------------------------------------------

UNGUARDED = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from tdcollect import make_env

class Mine(CartPoleEnv):
    pass

gymnasium.register("Mine-v0", Mine)
print("once")
for env in ("Mine-v0", lambda: Mine()):
    env = make_env(env, 2, backend="process", num_workers=1)
    assert env.rollout(4)["next", "reward"].eq(1).all()
    env.close()
"""


def test_a_program_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\n"
