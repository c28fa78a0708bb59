"""A connection of its own to each worker, beside TorchRL's: calls, and signs of life.

TorchRL's messages to distributed workers have no calls, and its store does not tell if a worker has
died. The end of a connection does, on other machines too.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
    wait,
)
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from tdcollect.collect import Collector
from tdcollect.collect.construction import extends

_PATIENCE = 600.0
"""Seconds for all workers to connect, once TorchRL has made them."""


_GREETING = 5
"""Seconds in which whoever connects must say the key."""

_READ_WITHIN = socket.SOL_SOCKET, socket.SO_RCVTIMEO


def own_address() -> str:
    """The address of this machine, as others reach it."""
    with suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127."):  # as /etc/hosts has it on Debian
            return found
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        way_out.connect(("192.0.2.1", 9))  # sends nothing
        return str(way_out.getsockname()[0])
    return "localhost"


class Address(NamedTuple):
    """The address and the key that a worker connects with."""

    host: str
    port: int
    key: bytes
    worker: int
    begins_when_told: bool


class LinkedCollector(Collector):
    """The collector of a distributed worker; a thread of it answers calls between batches.

    Args:
        *args: as :class:`tdcollect.Collector` has them.
        link: the connection to make, as :class:`DistributedCollector` gives it; None for none.
        **kwargs: as :class:`tdcollect.Collector` has them.
    """

    @extends(Collector.__init__)
    def __init__(self, *args: Any, link: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._between_batches = threading.Lock()
        self._begun = threading.Event()
        self.seedings = 0
        self._connection: Connection[Any, Any] | None = None
        if link is None or not link.begins_when_told:
            self._begun.set()
        if link is not None:
            threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def next(self) -> Any:
        """The next batch; see the parent's method."""
        with self._between_batches:
            batch = super().next()
            if self._connection is not None:
                self._connection.send(("batch", self.seedings))
        return batch

    def iterator(self) -> Iterator[TensorDictBase]:
        """Iterate over batches, once told to begin; see the parent's method."""
        self._begun.wait()
        yield from super().iterator()

    def begin(self) -> None:
        """Let iteration begin."""
        self._begun.set()

    def _answer(self, link: Address) -> None:
        # In this thread: the other side accepts when TorchRL's own connections are made.
        connection = Client((link.host, link.port), authkey=link.key)
        self._connection = connection
        connection.send(link.worker)
        with suppress(EOFError, OSError):  # the end of the other side
            while True:
                function, arguments = connection.recv()
                with self._between_batches:
                    connection.send(self._result_of(function, arguments))

    def _result_of(self, function: Any, arguments: Any) -> tuple[str, Any]:
        try:
            return "result", function(self, *arguments)
        except Exception:
            return "error", traceback.format_exc()


class Links:
    """The connections to all workers, on the side of their user.

    Args:
        host: the address of this machine, as workers reach it.
        workers: the number of workers.
        begins_when_told: workers begin when :meth:`begin` is called.
    """

    def __init__(self, host: str, workers: int, begins_when_told: bool = False):
        self._server = socket.create_server((host, 0), backlog=workers + 64)
        port, self._key = self._server.getsockname()[1], secrets.token_bytes(16)
        self.addresses = [
            Address(host, port, self._key, worker, begins_when_told) for worker in range(workers)
        ]
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._batches: list[list[int]] = [[] for _ in range(workers)]

    def accept(self, lost: Callable[[], Any]) -> None:
        """Wait for all workers to connect.

        Args:
            lost: is called now and then; raises if a worker has died.

        Raises:
            TimeoutError: if not all of them do within ten minutes.
        """
        self._server.settimeout(0.2)
        end = time.monotonic() + _PATIENCE
        while len(self._connections) < len(self.addresses):
            lost()
            if time.monotonic() > end:
                raise TimeoutError(
                    f"expected {len(self.addresses)} workers to connect to {self.addresses[0][:2]} "
                    f"within {_PATIENCE:g} s, got {len(self._connections)}; see whether their "
                    "machines can reach this address"
                )
            with suppress(TimeoutError):
                self._greet(self._server.accept()[0])
        self._server.close()

    def _greet(self, client: socket.socket) -> None:
        """Take the connection of a worker; drop that of anybody else."""
        with client:
            client.setblocking(True)
            client.setsockopt(*_READ_WITHIN, struct.pack("ll", _GREETING, 0))
            connection: Connection[Any, Any] = Connection(os.dup(client.fileno()))
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                self._connections[connection.recv()] = connection
                client.setsockopt(*_READ_WITHIN, struct.pack("ll", 0, 0))
            except Exception:  # whatever a port scan sends, or its silence
                connection.close()

    def call(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call ``function(collector, argument, ...)`` in all workers; return its results.

        Args:
            function: one of a module that workers can import.
            *arguments: one value per worker, each.

        Raises:
            EOFError: if a worker is lost.
            RuntimeError: if the function raises.
        """
        workers = range(len(self.addresses))
        given = list(zip(*arguments, strict=True)) if arguments else [()] * len(workers)
        for worker in workers:
            try:
                self._connections[worker].send((function, given[worker]))
            except OSError as error:
                raise EOFError from error
        answers = [self._result(worker) for worker in workers]
        for worker, (kind, value) in enumerate(answers):
            if kind == "error":
                raise RuntimeError(f"a call of worker {worker} failed:\n{value}")
        return [value for _, value in answers]

    def begin(self) -> None:
        """Let workers begin that wait for it."""
        self.call(LinkedCollector.begin)

    def first_batch(self) -> None:
        """Wait until a worker has a batch.

        Raises:
            EOFError: if a worker is lost.
        """
        while not any(self._batches):
            ready: list[Any] = wait(list(self._connections.values()))
            for worker, connection in self._connections.items():
                if connection in ready:
                    self._receive(worker)

    def seedings_of_batch(self, worker: int) -> int:
        """The number of times that a worker was seeded before the batch that it sent first."""
        while not self._batches[worker]:
            self._receive(worker)
        return self._batches[worker].pop(0)

    def lost(self) -> list[int]:
        """Return the workers whose connections have ended."""
        found = []
        for worker, connection in self._connections.items():
            try:
                while connection.poll():
                    self._receive(worker)
            except EOFError:
                found.append(worker)
        return found

    def close(self) -> None:
        """End all connections."""
        self._server.close()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _receive(self, worker: int) -> Any:
        try:
            kind, value = self._connections[worker].recv()
        except OSError as error:
            raise EOFError from error
        if kind == "batch":
            self._batches[worker].append(value)
            return None
        return kind, value

    def _result(self, worker: int) -> tuple[str, Any]:
        while True:
            answer: tuple[str, Any] | None = self._receive(worker)
            if answer is not None:
                return answer
