"""Messages between a worker and its parent, and the memory that both share.

Messages are short: commands and answers on a socket. Large or frequent values lie in shared memory.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import signal
import socket
import struct
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from gymnasium import spaces

from tdcollect.workers.values import Array, Tree, kinds_for


class Field(NamedTuple):
    """An array ``[N, *shape]`` in shared memory.

    ``kinds`` are NumPy's letters of the dtypes that may be written into it; others would not come
    out as the ``serial`` backend would write them.
    """

    shape: tuple[int, ...]
    dtype: str
    kinds: str = "biuf"


def fields_of(space: spaces.Space[Any], fields: list[Field]) -> Tree:
    """Append a field for each array in values of a space; returns how the values nest."""
    if isinstance(space, spaces.Dict):
        return {name: fields_of(part, fields) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(fields_of(part, fields) for part in space.spaces)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        shape = () if isinstance(space, spaces.Discrete) else tuple(space.nvec.shape)
        fields.append(Field(shape, "i8", "i"))
    else:
        assert space.shape is not None
        assert space.dtype is not None
        dtype = np.dtype(space.dtype)
        fields.append(Field(tuple(space.shape), dtype.str, kinds_for(dtype)))
    return len(fields) - 1


class Shared(NamedTuple):
    """The contents of shared memory, and how the values nest there."""

    num_envs: int
    observation_tree: Tree
    observation: Sequence[Field]
    action_tree: Tree
    action: Sequence[Field]

    @property
    def fields(self) -> list[Field]:
        """Every field, in order; reward, terminated and truncated come first."""
        return [Field((), "f8"), Field((), "?"), Field((), "?"), *self.observation, *self.action]


class SharedArrays:
    """The arrays ``[N, *shape]`` of shared memory.

    Args:
        shared: the contents.
        descriptor: the file that is shared.
    """

    def __init__(self, shared: Shared, descriptor: int):
        arrays = map_arrays(descriptor, shared.num_envs, shared.fields)
        split = 3 + len(shared.observation)
        self.outcome = arrays[:3]
        self.observation = arrays[3:split]
        self.action = arrays[split:]


def layout(num_envs: int, fields: Sequence[Field]) -> tuple[list[int], int]:
    """The offset of each field, which begins a cache line, and the bytes of all."""
    offsets, end = [], 0
    for field in fields:
        offsets.append(end)
        size = num_envs * int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
        end += -(-size // 64) * 64
    return offsets, end


def map_arrays(descriptor: int, num_envs: int, fields: Sequence[Field]) -> list[Array]:
    """The fields as arrays ``[N, *shape]`` that share the memory of a file."""
    offsets, size = layout(num_envs, fields)
    memory = mmap.mmap(descriptor, max(size, 1))
    return [
        np.ndarray((num_envs, *field.shape), field.dtype, memory, offset)
        for field, offset in zip(fields, offsets, strict=True)
    ]


def shared_file(size: int) -> int:
    """The descriptor of a file of zeros in memory. No name leads to it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tdcollect")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, max(size, 1))
    return descriptor


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


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text."""


def raised_there(failure: Failure, where: str) -> Exception:
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
