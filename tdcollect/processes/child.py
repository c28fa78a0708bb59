"""Child processes, spawned or forked, which never outlive their parent; and messages to them.

Each child holds the read end of a pipe, its lifeline, whose other end the parent alone has; the
kernel ends the child when that closes, whatever happened to the parent.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import numpy as np

import tdcollect
from tdcollect.cleanup import ended_on_error
from tdcollect.packages import check_posix

GRACE = 5.0
"""Seconds that a child has for closing its envs."""

# The package comes from where it is here, wherever a relative sys.path leads by now.
_BOOT = """
import json, sys
path, root, *arguments = sys.argv[1:]
sys.path[:0] = [root]
import tdcollect
sys.path[:] = json.loads(path)
from tdcollect.processes.child import main
main(*arguments)
"""
_ROOT = str(Path(tdcollect.__file__).absolute().parent.parent)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


HASH_SEED = "PYTHONHASHSEED"


def hash_seed() -> str:
    """Return the seed with which children hash strings: that of this process if it has one."""
    seed = os.environ.get(HASH_SEED, "")
    return seed if seed.isdecimal() else "0"


@contextlib.contextmanager
def children_hash_by(seed: str) -> Iterator[None]:
    """Have the processes that start meanwhile hash strings with a seed."""
    before = os.environ.get(HASH_SEED)
    os.environ[HASH_SEED] = seed
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(HASH_SEED, None)
        else:
            os.environ[HASH_SEED] = before


_disowned: weakref.WeakSet[Any] = weakref.WeakSet()


def check_can_start() -> None:
    """Raise NotImplementedError where the system has no forks."""
    check_posix("worker processes need", "use backend='serial', and no workers")


def disown_in_forks(owner: Any) -> None:
    """Have ``owner.disown()`` called in every fork of this process, which owns no children."""
    _disowned.add(owner)


def _disown_all() -> None:
    for owner in list(_disowned):
        owner.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


class Child(ABC):
    """A child process and a socket to it.

    Args:
        descriptors: files that it inherits. Its function is called with its own end of the socket,
            and with these.

    Attributes:
        pid: its process id.
        socket: this process's end.
        pidfd: a descriptor that is readable once it has ended; None where the system has none.
        code: its exit code, once it has ended and if it is known.
    """

    pid: int

    def __init__(self, descriptors: Sequence[int] = ()):
        check_can_start()
        self.code: int | None = None
        self.pidfd: int | None = None
        self._how: str | None = None
        self.socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        disown_in_forks(self)
        try:
            with theirs, ended_on_error(self.disown):
                self._begin(lifeline, (theirs.fileno(), *descriptors))
                with contextlib.suppress(AttributeError, ProcessLookupError):
                    self.pidfd = os.pidfd_open(self.pid)
        finally:
            os.close(lifeline)

    @abstractmethod
    def _begin(self, lifeline: int, descriptors: Sequence[int]) -> None:
        """Start it, and set ``pid``."""

    @abstractmethod
    def _reap(self, waits: bool) -> bool:
        """Set ``code`` if it has ended, or once it has; False if it runs."""

    def end(self, seconds: float = 0.0) -> str:
        """Close the socket and reap the process, killed after some seconds; say how it ended."""
        if self._how is None:
            self.socket.close()
            ended = self._ends_within(seconds)
            self.kill()  # of no effect if it has ended
            self._reap(True)
            self._how = ending(self.code) if ended else "closed its connection, and was ended"
            self.disown()
        return self._how

    def kill(self) -> None:
        """Kill it, from any thread; :meth:`end` comes next."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self._how is None and self.code is None:
                os.kill(self.pid, signal.SIGKILL)

    def _ends_within(self, seconds: float) -> bool:
        if self.pidfd is not None:
            waiting = select.poll()
            waiting.register(self.pidfd, select.POLLIN)
            return bool(waiting.poll(1000 * seconds))
        deadline = time.monotonic() + seconds
        while not self._reap(False):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def disown(self) -> None:
        """Close all that leads to it; in a fork, it is nobody's to end."""
        self._how = self._how or "was started by another process"
        self.socket.close()
        for descriptor in (self._lifeline, self.pidfd):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._lifeline, self.pidfd = -1, None


class Spawned(Child):
    """A fresh interpreter that runs ``"module:name"``, and a pickled ``init_fn`` before it."""

    def __init__(
        self, function: str, descriptors: Sequence[int] = (), init_fn: bytes | None = None
    ):
        self._function, self._init_fn = function, init_fn or b""
        super().__init__(descriptors)

    def _begin(self, lifeline: int, descriptors: Sequence[int]) -> None:
        # One thread each, unless the environment says otherwise: children may use all cores.
        threads = {name: "1" for name in _THREADS if name not in os.environ}
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        executable = os.fsdecode(spawn.get_executable())
        file = shared_file(len(self._init_fn))
        try:
            os.pwrite(file, self._init_fn, 0)
            passed = (lifeline, file, *descriptors)
            self._process = subprocess.Popen(
                [executable, "-c", _BOOT, path, _ROOT, self._function, *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **threads, HASH_SEED: hash_seed()},
            )
        finally:
            os.close(file)
        self.pid = self._process.pid

    def _reap(self, waits: bool) -> bool:
        self.code = self._process.wait() if waits else self._process.poll()
        return self.code is not None


class Forked(Child):
    """A fork of this process that runs a function and ends."""

    def __init__(self, function: Callable[..., object], descriptors: Sequence[int] = ()):
        self._function = function
        super().__init__(descriptors)

    def _begin(self, lifeline: int, descriptors: Sequence[int]) -> None:
        sys.stdout.flush()  # else both would print the buffered text
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            run_fork(self._function, lifeline, *descriptors)

    def _reap(self, waits: bool) -> bool:
        if self.code is None:
            try:
                pid, status = os.waitpid(self.pid, 0 if waits else os.WNOHANG)
            except ChildProcessError:  # someone else reaped it
                self.code = 0
            else:
                self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None


def main(function: str, lifeline: str, init_fn: str, *descriptors: str) -> None:
    """Run a function in a fresh interpreter; see :class:`Spawned`."""
    begin(int(lifeline))
    with open(int(init_fn), "rb") as file:
        pickled = file.read().rstrip(b"\0")
    if pickled:
        pickle.loads(pickled)()
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(*map(int, descriptors))


def run_fork(function: Callable[..., object], lifeline: int, *descriptors: int) -> NoReturn:
    """Run a function in a fork, and never return into the code of the parent."""
    code = 1
    try:
        # A collection visits what is new: what the parent made is the parent's to remove, and to
        # visit it would copy every page.
        gc.freeze()
        _reseed()
        begin(lifeline)
        function(*descriptors)
        gc.collect()  # what has a semaphore, say, removes it: nothing else runs at this exit
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def leave(code: int = 0) -> NoReturn:
    """End this process at once, whose envs are closed; torch would take a second to go."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def begin(lifeline: int) -> None:
    """Set up signals in a child: interrupts are for the parent, and it ends with the parent.

    The kernel ends it when the parent's end of the pipe closes, also if it hangs in C code of an
    env. Where the kernel does not signal pipes, an idle child sees its socket close.
    """
    # The launch may have kept signals from us so far.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
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
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        torch.set_num_threads(1)


def shared_file(size: int) -> int:
    """Return the descriptor of a file of zeros in memory, which goes with its last user."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tdcollect")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, max(size, 1))
    return descriptor


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


# --- forked from a template -----------------------------------------------------------------------


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
        return _MESSAGE.unpack(answer)[1]


class FromTemplate(Child):
    """A fork of a template, which reaps it; raises ChildProcessError if the template has gone."""

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
    """Fork children that run a function, until the parent closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would keep exit codes from us
    gc.collect()
    gc.freeze()  # what is here is shared by all forks, unless a collector touches it
    requests = socket.socket(fileno=end)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE.size, 8)
        if not message:
            requests.close()
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


# --- messages and exceptions between processes, on sockets ----------------------------------------


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
