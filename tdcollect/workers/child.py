"""Child processes: a fresh interpreter for one, and the pipe that ends it with its parent.

Whatever happens to the parent, no child outlives it: each holds the read end of a pipe whose other
end the parent alone has, and the kernel ends it when that closes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import NoReturn

import numpy as np

import tdcollect

# The package comes from where it is here, wherever a relative sys.path leads by now.
_BOOT = """
import json, sys
path, root, module, *descriptors = sys.argv[1:]
sys.path[:0] = [root]
import tdcollect
sys.path[:] = json.loads(path)
from importlib import import_module
import_module(module).main(*map(int, descriptors))
"""
_ROOT = str(Path(tdcollect.__file__).absolute().parent.parent)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Lifeline:
    """A pipe whose write end the parent alone holds.

    Attributes:
        descriptor: the read end, for the child; the parent closes its own copy of it.
    """

    def __init__(self) -> None:
        self.descriptor, self._held = os.pipe()
        _lifelines.add(self)

    def close(self) -> None:
        """Let go of the pipe: the child ends, if it has not."""
        _lifelines.discard(self)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _let_go() -> None:
    """In a fork of the parent: its copies of our ends would keep children from seeing us go."""
    for lifeline in list(_lifelines):
        lifeline.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Spawned:
    """A fresh interpreter that runs ``main`` of a module; the main program is not imported again.

    Args:
        module: its full name.
        descriptors: files that the child inherits, and the arguments of ``main``.
    """

    def __init__(self, module: str, descriptors: Sequence[int]):
        # One thread each, unless the environment says otherwise: children may use all cores.
        threads = {name: "1" for name in _THREADS if name not in os.environ}
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        executable = spawn.get_executable()
        if isinstance(executable, bytes):
            executable = os.fsdecode(executable)
        self._process = subprocess.Popen(
            [executable, "-c", _BOOT, path, _ROOT, module, *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **threads},
        )
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None if the child runs for longer than this."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> int:
        """End the child at once, unless it has ended; return the exit code."""
        self._process.kill()
        return self._process.wait()


class Forked:
    """A fork of this process that runs a function and ends."""

    def __init__(self, run: Callable[[], object]):
        sys.stdout.flush()  # else both would print the buffered text
        sys.stderr.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            run_fork(run)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None if the fork runs for longer than this."""
        deadline, pause = time.monotonic() + seconds, 0.0005
        while self._code is None and time.monotonic() < deadline:
            self._reap(os.WNOHANG)
            if self._code is None:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        return self._code

    def kill(self) -> int | None:
        """End the fork at once, unless it has ended; return the exit code."""
        self._reap(os.WNOHANG)
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap(0)
        return self._code

    def _reap(self, options: int) -> None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # someone else reaped it
                self._code = 0
                return
            if pid:
                self._code = os.waitstatus_to_exitcode(status)


def run_fork(run: Callable[[], object]) -> NoReturn:
    """Run a function in a fork, and never return into the code of the parent."""
    code = 1
    try:
        # A collection visits what is new: what the parent made is the parent's to remove, and to
        # visit it would copy every page.
        gc.freeze()
        _reseed()
        run()
        gc.collect()  # what has a semaphore, say, removes it: nothing else runs at this exit
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def begin(lifeline: int) -> None:
    """Set up signals in a child: interrupts are for the parent, and it ends with the parent."""
    # The launch may have kept signals from us so far.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with_parent(lifeline)


def end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process when the parent's end of a pipe closes.

    This also ends a child that hangs in an env, were it in C code that holds the interpreter's
    lock, which no thread and no handler of ours could do. Where the kernel does not signal pipes,
    an idle child still sees its socket close.
    """
    try:
        import fcntl

        signal.signal(signal.SIGIO, signal.SIG_DFL)  # which ends the process
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    except (ImportError, AttributeError, OSError):
        return
    waiting = select.poll()
    waiting.register(lifeline, 0)
    if waiting.poll(0):  # it closed before the kernel was asked
        os._exit(1)


def _reseed() -> None:
    """Give a fork what a fresh interpreter has of its own: random states, and one thread."""
    random.seed()
    np.random.seed()  # noqa: NPY002 (the global state is the one that forks share)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        torch.set_num_threads(1)


def ending(code: int | None) -> str:
    """Say how a process ended, by its exit code: negative for a signal, None if it is unknown."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
