"""A process that has imported what workers need, and forks them: in milliseconds, not in seconds.

It has one thread and has never used a GPU, so that its forks are as good as fresh interpreters.
Code of the user is not imported here.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
from collections.abc import Sequence
from functools import partial

from tdcollect.workers.child import Forked, Lifeline, Spawned, begin, run_fork

_MESSAGE = struct.Struct("<cq")
_READY, _FORK, _KILL = b"?", b"f", b"k"
_SECONDS = 10.0  # to answer
_START_SECONDS = 120.0  # the first time, as it has to import


class Template:
    """The process, as its parent sees it.

    Args:
        as_fork: fork this process, which has imported all and has one thread.
    """

    def __init__(self, as_fork: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        self._lifeline = Lifeline()
        self._is_up = False
        self._child: Spawned | Forked
        try:
            descriptors = (theirs.fileno(), self._lifeline.descriptor)
            if as_fork:
                self._child = Forked(partial(main, *descriptors))
            else:
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

    def fork(self, lifeline: Lifeline, descriptors: Sequence[int]) -> ForkOfTemplate:
        """Fork a worker that runs ``main`` of ``local.py``.

        Args:
            lifeline: ends the worker with this process.
            descriptors: the arguments of that ``main``.

        Raises:
            ChildProcessError: if the template has gone.
        """
        pid = self._ask(_FORK, 0, [lifeline.descriptor, *descriptors])
        if pid is None:
            raise ChildProcessError("the process that starts workers has ended")
        return ForkOfTemplate(self, pid)

    def kill(self, pid: int) -> int | None:
        """End a worker, unless it has ended; return its exit code, None if that is unknown."""
        return self._ask(_KILL, pid)

    def _ask(self, kind: bytes, pid: int, descriptors: Sequence[int] = ()) -> int | None:
        try:
            self._socket.settimeout(_SECONDS if self._is_up else _START_SECONDS)
            socket.send_fds(self._socket, [_MESSAGE.pack(kind, pid)], descriptors)
            answer = self._socket.recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError as error:
            if isinstance(error, TimeoutError):  # it is stopped: its late answer would mislead
                self.close()
            return None
        except BaseException:  # an answer to this would be taken for that to another question
            self.close()
            raise
        if not answer:
            return None
        self._is_up = True
        value: int = _MESSAGE.unpack(answer)[1]
        return value

    def close(self) -> None:
        """End the process; workers that run are left to their own lifelines."""
        self.abandon()
        self._child.kill()

    def abandon(self) -> None:
        """Let go of the process, in a fork of its parent."""
        self._socket.close()
        self._lifeline.close()


class ForkOfTemplate:
    """A worker; the template is its parent, and reaps it."""

    def __init__(self, template: Template, pid: int):
        self._template = template
        self.pid = pid

    def kill(self) -> int | None:
        """End it at once, unless it has ended; return its exit code, if that can be known."""
        return self._template.kill(self.pid)


def _work(lifeline: int, end: int, beats_file: int) -> None:
    from tdcollect.evaluation.workers import local

    begin(lifeline)
    local.main(end, beats_file)


def main(end: int, lifeline: int) -> None:
    """Import, then fork for whoever asks.

    Args:
        end: the descriptor of a socket.
        lifeline: the read end of a pipe that the parent holds open.
    """
    begin(lifeline)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would keep exit codes from us
    from tensordict import TensorDict

    from tdcollect.evaluation.workers import local, serving  # noqa: F401, for its forks

    TensorDict.from_any({})  # which imports pandas, where it is installed
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
                run_fork(partial(_work, *descriptors))
            for descriptor in descriptors:
                os.close(descriptor)
        elif kind == _READY:
            answer = 0
        else:
            os.kill(pid, signal.SIGKILL)  # of no effect if it has ended by itself
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        requests.sendall(_MESSAGE.pack(kind, answer))
