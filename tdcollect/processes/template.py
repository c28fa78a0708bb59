"""A process that has imported what others need, and forks them: in milliseconds, not in seconds.

It has one thread and has never used a GPU, so that its forks are as good as fresh interpreters.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence

from tdcollect.processes.child import Child, run_fork

_MESSAGE = struct.Struct("<cq")
_READY, _FORK, _KILL = b"?", b"f", b"k"
_SECONDS = 10.0  # to answer
_START_SECONDS = 120.0  # the first time, as it has to import


class Template:
    """The process, as its parent sees it: a child whose function calls :func:`fork_on_request`."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._is_up = False

    def ready(self) -> bool:
        """Wait until it has imported all; False if it has gone."""
        return self.ask(_READY) is not None

    def ask(self, kind: bytes, pid: int = 0, descriptors: Sequence[int] = ()) -> int | None:
        """Return its answer; None if it has gone."""
        try:
            self.child.socket.settimeout(_SECONDS if self._is_up else _START_SECONDS)
            socket.send_fds(self.child.socket, [_MESSAGE.pack(kind, pid)], descriptors)
            answer = self.child.socket.recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError as error:
            if isinstance(error, TimeoutError):  # it is stopped: its late answer would mislead
                self.child.end()
            return None
        except BaseException:  # an answer to this would be taken for that to another question
            self.child.end()
            raise
        if not answer:
            return None
        self._is_up = True
        value: int = _MESSAGE.unpack(answer)[1]
        return value


class FromTemplate(Child):
    """A fork of a template, which reaps it.

    Raises:
        ChildProcessError: if the template has gone.
    """

    def __init__(self, template: Template, descriptors: Sequence[int] = ()):
        self._template = template
        super().__init__(descriptors)

    def _begin(self, lifeline: int, descriptors: Sequence[int]) -> None:
        pid = self._template.ask(_FORK, 0, [lifeline, *descriptors])
        if pid is None:
            raise ChildProcessError("the process that starts workers has ended")
        self.pid = pid

    def _reap(self, waits: bool) -> bool:
        if waits:
            self.code = self._template.ask(_KILL, self.pid)
        return True  # where no pidfd tells whether it runs


def fork_on_request(end: int, function: Callable[..., object]) -> None:
    """Fork children for the parent that run a function, until it has gone.

    Args:
        end: the descriptor of a socket to the parent.
        function: called in each child with the descriptors that were sent for it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would keep exit codes from us
    gc.collect()
    gc.freeze()  # what is here is shared by all forks, unless a collector touches it
    requests = socket.socket(fileno=end)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE.size, 8)
        if not message:
            return
        kind, pid = _MESSAGE.unpack(message)
        if kind == _FORK:
            answer = os.fork()
            if not answer:
                requests.close()
                run_fork(function, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        elif kind == _READY:
            answer = 0
        else:
            os.kill(pid, signal.SIGKILL)  # of no effect if it has ended by itself
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        requests.sendall(_MESSAGE.pack(kind, answer))
