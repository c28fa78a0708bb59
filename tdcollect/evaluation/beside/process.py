"""The process that evaluates, as the training process sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from multiprocessing import Pipe, spawn
from multiprocessing.connection import Connection
from pathlib import Path

import tdcollect

# The package comes from where it is here, wherever a relative sys.path leads by now.
_BOOT = """
import json, sys
path, root, end, lifeline = sys.argv[1:]
sys.path[:0] = [root]
import tdcollect
sys.path[:] = json.loads(path)
from tdcollect.workers.beside import main
main(int(end), int(lifeline))
"""
_ROOT = str(Path(tdcollect.__file__).absolute().parent.parent)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class DriverProcess:
    """A process that evaluates, in a fresh interpreter; it does not outlive this one.

    Args:
        init_fn: a pickled function that it calls first, or nothing.
        setup: its first message.

    Attributes:
        connection: to it.
    """

    def __init__(self, init_fn: bytes, setup: bytes):
        self.connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        _alive.add(self)
        try:
            self._process = _spawned(theirs, lifeline)
        except BaseException:
            self.abandon()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._first = (init_fn, setup)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def begin(self) -> None:
        """Send the first messages; may wait until the process reads.

        Raises:
            OSError: if the process has gone.
        """
        for message in self._first:
            self.connection.send_bytes(message)

    def kill(self) -> None:
        """End the process at once."""
        if self._lifeline >= 0:
            self._process.kill()

    def end(self, seconds: float = 0.0) -> str:
        """Close the connection, and reap the process; returns how it ended.

        Args:
            seconds: the time it has to close its env before it is killed.
        """
        self.connection.close()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.abandon()
        return _ending(code)

    def abandon(self) -> None:
        """Close this process's ends of the connection and the lifeline."""
        _alive.discard(self)
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def _spawned(end: Connection, lifeline: int) -> subprocess.Popen[bytes]:
    threads = {name: "1" for name in _THREADS if name not in os.environ}
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    executable = spawn.get_executable()
    if isinstance(executable, bytes):
        executable = os.fsdecode(executable)
    descriptors = (end.fileno(), lifeline)
    return subprocess.Popen(
        [executable, "-c", _BOOT, path, _ROOT, *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **threads},
    )


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


_alive: weakref.WeakSet[DriverProcess] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a fork of this process: its copies of our ends would keep drivers from seeing us go."""
    for process in list(_alive):
        process.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
