"""Messages between a local worker and its driver, on a socket."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque

from tdcollect.workers.protocol import InterruptsHeld

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 2**20


class Channel:
    """One end of a socket pair, for messages of any size.

    The driver never waits here: a worker may stop amid a message, or not read its own. A signal
    tears no message apart.

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
        """Send a message as far as it goes without waiting; ``flush`` sends the rest.

        Raises:
            OSError: if the other end has gone.
        """
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
        """Read of what has arrived; return the messages that are complete by now.

        None if nothing had arrived.

        Raises:
            EOFError: if the other end has gone.
        """
        with InterruptsHeld():
            try:
                arrived = self._socket.recv(_AT_ONCE)
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
        """Send a message, however long it takes.

        Raises:
            OSError: if the other end has gone.
        """
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
