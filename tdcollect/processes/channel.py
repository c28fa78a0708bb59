"""Messages and exceptions between processes, on sockets."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections import deque
from typing import Any

import cloudpickle

_HEADER = struct.Struct("<BBHQ")  # kind, sequence number, a mark, bytes that follow
_MARK = 0x7DC0
_AT_ONCE = 2**15  # bytes that the kernel takes in one go: no interrupt tears them apart
_INTERRUPTS = {  # Windows lacks most of them
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
}
_let_others_run = getattr(os, "sched_yield", lambda: None)


class InterruptsHeld:
    """Hold signals back whose handlers may raise, amid a launch or a message."""

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def poll_awake(waiting: select.poll, seconds: float) -> list[tuple[int, int]]:
    """Poll without sleep for a moment: to wake a core that has gone idle costs many steps' time."""
    end = time.monotonic() + seconds
    while not (events := waiting.poll(0)) and time.monotonic() < end:
        _let_others_run()
    return events


class Connection:
    """Numbered messages on a socket that is waited for: 12 bytes at least.

    Args:
        end: one end of a socket pair; owned from now on.
    """

    def __init__(self, end: socket.socket):
        self._socket = end

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._socket.fileno()

    def send(self, kind: int, sequence: int, payload: bytes) -> None:
        """Send a message."""
        message = _HEADER.pack(kind, sequence, _MARK, len(payload)) + payload
        if len(payload) <= _AT_ONCE:
            self._socket.sendall(message)
            return
        with InterruptsHeld():
            self._socket.sendall(message)

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

    def _exactly(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            more = self._socket.recv(count - len(received), socket.MSG_WAITALL)
            if not more:
                raise EOFError
            received += more
        return received

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def packed(value: Any) -> bytes:
    """A value to be sent, classes of the main program included."""
    return cloudpickle.dumps(value)


_LENGTH = struct.Struct("<Q")
_MOST_READ = 2**20


class Channel:
    """Messages of any size, on a socket that is never waited for unless that is asked for.

    The other process may stop amid a message, or not read its own. A signal tears none apart.

    Args:
        end: one end; owned from now on.

    Attributes:
        progress: the number of times that something has arrived.
    """

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._socket = end
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        self._turn = threading.Lock()
        self.progress = 0

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The events to poll it for."""
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    def post(self, message: bytes) -> None:
        """Send a message as far as it goes without waiting; OSError if the other end has gone."""
        self._outgoing += [memoryview(_LENGTH.pack(len(message))), memoryview(message)]
        self.flush()

    def flush(self) -> None:
        """Send more of what has been posted, as far as it goes without waiting."""
        with InterruptsHeld(), self._turn:
            while self._outgoing:
                try:
                    sent = self._socket.send(self._outgoing[0])
                except BlockingIOError:
                    return
                rest = self._outgoing.popleft()[sent:]
                if rest:
                    self._outgoing.appendleft(rest)

    def read(self) -> list[bytes] | None:
        """Return the messages that are complete by now; None if nothing has arrived.

        Raises:
            EOFError: if the other end has gone.
        """
        with InterruptsHeld():
            try:
                arrived = self._socket.recv(_MOST_READ)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if not arrived:
                raise EOFError
            self._incoming += arrived
            self.progress += 1
            messages, at = [], 0
            while (start := at + _LENGTH.size) <= len(self._incoming):
                end = start + _LENGTH.unpack_from(self._incoming, at)[0]
                if end > len(self._incoming):
                    break
                messages.append(bytes(memoryview(self._incoming)[start:end]))
                at = end
            del self._incoming[:at]
            return messages

    def wait(self) -> None:
        """Wait until something has arrived, or more can be sent."""
        waiting = select.poll()
        waiting.register(self._socket, self.events)
        waiting.poll()

    def send(self, message: bytes) -> None:
        """Send a message, however long it takes; raises OSError if the other end has gone."""
        self.post(message)
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        while self._outgoing:
            waiting.poll()
            self.flush()

    def send_no_more(self) -> None:
        """Have the other end find that this one has gone, once it has read all messages."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


# --- exceptions -----------------------------------------------------------------------------------


Described = tuple[bytes | None, str, str]
"""An exception: pickled if possible, in one line, and with its traceback."""


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text."""


def described(error: Exception, frames: int = 1) -> Described:
    """Return an exception in a form that travels, without the outermost frames of its traceback."""
    trace = error.__traceback__
    for _ in range(frames):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        # By cloudpickle, for classes of a main program.
        pickled: bytes | None = cloudpickle.dumps(error)
    except Exception:  # whatever a class's own __reduce__ raises
        pickled = None
    return pickled, f"{type(error).__name__}: {error}", text


def raised_there(failure: Described, where: str) -> Exception:
    """Return the exception of another process; its cause is the traceback there."""
    pickled, summary, trace = failure
    try:
        error = pickle.loads(pickled) if pickled is not None else None
    except Exception:  # an exception that does not survive its own pickling
        error = None
    if not isinstance(error, Exception):
        error = RuntimeError(summary)
    error.__cause__ = RemoteTraceback(f"in {where}:\n\n{trace}")
    return error
