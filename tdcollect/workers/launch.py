"""Worker processes as their parent sees them: how they start, answer and end.

Memory is shared through files without a name, which are gone with the last process that maps them.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tdcollect.workers import worker
from tdcollect.workers.child import Forked, Lifeline, Spawned, ending
from tdcollect.workers.protocol import CALL, Connection, packed

START_METHODS = ("spawn", "fork")
GRACE = 5.0
"""Seconds that a worker has for closing its envs."""


class WorkerLost(RuntimeError):
    """A worker process ended, or was killed as it hung; the envs of its slots are gone."""


class WorkerProcess:
    """One worker process.

    Args:
        index: its place among the workers.
        slots: the slots whose envs it holds.
        method: ``"spawn"`` (a fresh interpreter) or ``"fork"``.
        factories: one callable per slot.
        control: memory in which it notes the slot at work and its calls; two int64 per worker.

    Attributes:
        lost: the reason that it was lost for; None while it can be asked.
    """

    def __init__(
        self,
        index: int,
        slots: range,
        method: str,
        factories: Sequence[Callable[[], Any]],
        control: memoryview,
    ):
        self.index = index
        self.slots = slots
        self.lost: str | None = None
        self._control = control
        self._sequence = 0
        ours, theirs = socket.socketpair()
        self._lifeline = Lifeline()
        self.connection = Connection(ours)
        self._child: Spawned | Forked | None = None
        _alive.add(self)
        try:
            descriptors = (theirs.fileno(), self._lifeline.descriptor)
            if method == "spawn":
                self._child = Spawned("tdcollect.workers.worker", descriptors)
            else:
                self._child = Forked(partial(worker.main, *descriptors, factories))
        except BaseException:
            self.end()
            raise
        finally:
            theirs.close()
            os.close(self._lifeline.descriptor)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._child is not None
        return self._child.pid

    @property
    def at_work(self) -> tuple[int, int]:
        """The slot of its latest call of an env, and the number of calls begun."""
        return self._control[2 * self.index], self._control[2 * self.index + 1]

    def ask(self, kind: int, payload: bytes = b"", descriptor: int = -1) -> bool:
        """Send a command; False if the worker has gone."""
        self._sequence = (self._sequence + 1) % 256
        try:
            self.connection.send(kind, self._sequence, payload, descriptor)
        except OSError:
            return False
        return True

    def call(self, name: str, *arguments: Any, descriptor: int = -1) -> bool:
        """Ask for a method of the worker by name."""
        return self.ask(CALL, packed((name, descriptor >= 0, arguments)), descriptor)

    def answer(self) -> bytes | None:
        """The answer to the latest command; None if one to an earlier command came.

        The earlier command was interrupted; nothing waits for its answer.

        Raises:
            EOFError: if the worker has gone.
        """
        try:
            _, sequence, payload = self.connection.receive()
        except OSError as error:
            raise EOFError from error
        return payload if sequence == self._sequence else None

    def lose(self, reason: str | None = None) -> str:
        """End the process, if it has not ended; returns the reason that it was lost for.

        Args:
            reason: the reason to end it; None if it ended by itself.
        """
        if self.lost is None:
            slot, calls = self.at_work
            code = self.end(kill=reason is not None)
            where = f" while slot {slot} was at work" if calls else ""
            self.lost = f"the worker of {named(self.slots)} {reason or ending(code)}{where}"
        return self.lost

    def end(self, kill: bool = True) -> int | None:
        """End the process and reap it; return its exit code.

        Args:
            kill: end it at once; else its socket closes, and it has a moment to close its envs.
        """
        self.connection.close()
        code = None
        try:
            if self._child is not None:
                code = None if kill else self._child.wait(GRACE)
                code = self._child.kill() if code is None else code
        finally:
            self.abandon()
        return code

    def abandon(self) -> None:
        """Close the socket and the pipe to the process, and leave it alone."""
        _alive.discard(self)
        self.connection.close()
        self._lifeline.close()


def named(slots: Sequence[int]) -> str:
    """Consecutive slots in words."""
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]}"


_alive: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a fork of the parent: its copies of our ends would keep workers from seeing us go."""
    for process in list(_alive):
        process.lost = "belongs to the process that this one was forked from"
        process.abandon()
        process._child = None  # not ours to end


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
