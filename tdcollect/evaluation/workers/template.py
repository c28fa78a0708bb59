"""A process that has imported what workers need, and forks them: in milliseconds, not in seconds.

It has one thread and has never used a GPU, so that its forks are as good as fresh interpreters.
Code of the user is not imported here.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence

from tdcollect.workers.child import Lifeline, Spawned, begin, end_with_parent, reseed

_MESSAGE = struct.Struct("<cq")
_FORK, _REAP, _KILL, _READY = b"f", b"r", b"k", b"?"


class Template:
    """The process, as its parent sees it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lifeline = Lifeline()
        try:
            descriptors = (theirs.fileno(), self._lifeline.descriptor)
            self._child = Spawned(__name__, descriptors)
        except BaseException:
            self._socket.close()
            self._lifeline.close()
            raise
        finally:
            theirs.close()
            os.close(self._lifeline.descriptor)

    def ready(self) -> bool:
        """Wait until it has imported all; False if it has gone."""
        return self._ask(_READY, 0) is not None

    def fork(self, descriptors: Sequence[int]) -> int | None:
        """Fork a worker that runs ``main`` of ``local.py``; return its process id.

        None if the template has gone.

        Args:
            descriptors: the arguments of that ``main``, its lifeline first.
        """
        return self._ask(_FORK, 0, descriptors)

    def reap(self, pid: int, kill: bool) -> int | None:
        """Wait for the end of a worker, and return its exit code; None if the template has gone.

        Args:
            pid: its process id.
            kill: end it first.
        """
        return self._ask(_KILL if kill else _REAP, pid)

    def _ask(self, kind: bytes, pid: int, descriptors: Sequence[int] = ()) -> int | None:
        try:
            socket.send_fds(self._socket, [_MESSAGE.pack(kind, pid)], descriptors)
            answer = self._socket.recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError:
            return None
        except BaseException:  # an answer to this would be taken for that to another question
            self.close()
            raise
        if not answer:
            return None
        value: int = _MESSAGE.unpack(answer)[1]
        return value

    def close(self) -> None:
        """End the process; workers that run are left to their own lifelines."""
        self._socket.close()
        self._lifeline.close()
        self._child.kill()


def main(end: int, lifeline: int) -> None:
    """Import, then fork for whoever asks.

    Args:
        end: the descriptor of a socket.
        lifeline: the read end of a pipe that the parent holds open.
    """
    begin(lifeline)
    from tdcollect.evaluation.workers import local, serving  # noqa: F401 (which imports the rest)

    gc.collect()
    gc.freeze()  # what is here is shared by all forks, unless a collector touches it
    requests = socket.socket(fileno=end)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE.size, 3)
        if not message:
            return
        kind, pid = _MESSAGE.unpack(message)
        if kind == _FORK:
            answer = os.fork()
            if not answer:
                requests.close()
                os.close(lifeline)
                _run(local.main, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        elif kind == _READY:
            answer = 0
        else:
            if kind == _KILL:
                os.kill(pid, signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        requests.sendall(_MESSAGE.pack(kind, answer))


def _run(worker: Callable[..., None], descriptors: Sequence[int]) -> None:
    """Run a worker, and never return."""
    code = 1
    try:
        end_with_parent(descriptors[0])
        reseed()
        worker(*descriptors)
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
