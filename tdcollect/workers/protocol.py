"""Messages between a worker and its parent: commands and answers on a socket.

Messages are short. Large or frequent values lie in shared memory.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
import traceback
from typing import Any

import cloudpickle

STEP, RESET, CALL = range(3)
"""Kinds of commands."""

_HEADER = struct.Struct("<BBHQ")  # kind, sequence number, a mark, bytes that follow
_MARK = 0x7DC0
_AT_ONCE = 2**15
"""Bytes that the kernel takes in one go: no interrupt tears them apart."""
_INTERRUPTS = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_let_others_run = getattr(os, "sched_yield", lambda: None)


class InterruptsHeld:
    """Hold signals back whose handlers may raise, amid a launch or a message.

    A worker is launched with them held, until it has said which it ignores.
    """

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def poll_awake(waiting: select.poll, seconds: float) -> list[tuple[int, int]]:
    """Poll without sleep for a moment: to wake a core that has gone idle costs many steps' time.

    Other processes that want the core have it meanwhile.
    """
    end = time.monotonic() + seconds
    while not (events := waiting.poll(0)) and time.monotonic() < end:
        _let_others_run()
    return events


class Connection:
    """Messages on a socket.

    Args:
        end: one end of a socket pair; owned from now on.
    """

    def __init__(self, end: socket.socket):
        self._socket = end

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._socket.fileno()

    def send(self, kind: int, sequence: int, payload: bytes = b"", descriptor: int = -1) -> None:
        """Send a message; with it, a file descriptor."""
        message = _HEADER.pack(kind, sequence, _MARK, len(payload)) + payload
        if len(payload) <= _AT_ONCE and descriptor < 0:
            self._socket.sendall(message)
            return
        with InterruptsHeld():
            self._socket.sendall(message)
            if descriptor >= 0:
                socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive(self) -> tuple[int, int, bytes]:
        """Wait for a message: its kind, its sequence number and its payload.

        Raises:
            EOFError: if the other side has gone, or if an interrupt cut short the reading of an
                earlier message, whose rest comes first.
        """
        kind, sequence, mark, length = _HEADER.unpack(self._exactly(_HEADER.size))
        if mark != _MARK:
            raise EOFError
        if not length:
            return kind, sequence, b""
        with InterruptsHeld():
            return kind, sequence, self._exactly(length)

    def receive_descriptor(self) -> int:
        """Wait for the descriptor that follows a message."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise EOFError
        return descriptors[0]

    def _exactly(self, count: int) -> bytes:
        received = self._socket.recv(count)
        if len(received) == count:
            return received
        parts = [received]
        while received:
            count -= len(received)
            if not count:
                return b"".join(parts)
            received = self._socket.recv(min(count, 2**20))
            parts.append(received)
        raise EOFError

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def packed(value: Any) -> bytes:
    """A value to be sent, classes of the main program included."""
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


Failure = tuple[bytes | None, str, str]
"""An env's exception: pickled if possible, in one line, and with its traceback."""


def describe(error: Exception) -> Failure:
    """An exception in a form that crosses processes, without the traceback's outermost frame."""
    trace = error.__traceback__
    trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        pickled: bytes | None = cloudpickle.dumps(error)
    except Exception:  # whatever a class's own __reduce__ raises
        pickled = None
    return pickled, f"{type(error).__name__}: {error}", text
