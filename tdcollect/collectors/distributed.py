"""TorchRL's collectors on torch.distributed, with tdcollect's inside."""

from __future__ import annotations

import math
import os
import secrets
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.collectors import distributed as upstream
from torchrl.collectors.utils import split_trajectories

from tdcollect._upstream.collectors import DistributedState
from tdcollect.collect import Collector
from tdcollect.collect.collector import extends
from tdcollect.collectors import asking
from tdcollect.display import one_line
from tdcollect.keys import TRAJ_IDS
from tdcollect.processes.child import ending

_PATIENCE = 60.0
"""Seconds for a worker with workers of its own, which start and end interpreters, to answer."""

_CONNECT_WITHIN = 600.0
"""Seconds for all workers to connect, once TorchRL has made them."""


_GREETING = 5
"""Seconds in which whoever connects must say the key."""

_READ_WITHIN = socket.SOL_SOCKET, socket.SO_RCVTIMEO


class Address(NamedTuple):
    """The address and the key that a worker connects with."""

    host: str
    port: int
    key: bytes
    worker: int


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
        if link is None:
            self._begun.set()
        else:
            threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def next(self) -> Any:
        """The next batch; see the parent's method."""
        self._begun.set()  # the parent's method iterates
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

    def set_seed(self, *args: Any, **kwargs: Any) -> int:
        """Seed the env, and count it: batches tell how often; see the parent's method."""
        self.seedings += 1
        return super().set_seed(*args, **kwargs)

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

    ``host`` is the address of this machine, as workers reach it. They iterate once they are told
    to: with :meth:`LinkedCollector.begin`.
    """

    def __init__(self, host: str, workers: int):
        self._server = socket.create_server((host, 0), backlog=workers + 64)
        port, self._key = self._server.getsockname()[1], secrets.token_bytes(16)
        self.addresses = [Address(host, port, self._key, worker) for worker in range(workers)]
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._batches: list[list[int]] = [[] for _ in range(workers)]

    def accept(self, lost: Callable[[], Any]) -> None:
        """Wait for all workers to connect, ten minutes at most; ``lost`` raises if one has died."""
        self._server.settimeout(0.2)
        end = time.monotonic() + _CONNECT_WITHIN
        while len(self._connections) < len(self.addresses):
            lost()
            if time.monotonic() > end:
                raise TimeoutError(
                    f"expected {len(self.addresses)} workers to connect to {self.addresses[0][:2]} "
                    f"within {_CONNECT_WITHIN:g} s, got {len(self._connections)}; see whether "
                    "their machines can reach this address"
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

    def call(self, function: Callable[..., Any], given: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call ``function(collector, *arguments)`` in workers; return its results.

        Raises:
            EOFError: if a worker is lost.
            RuntimeError: if the function raises.
        """
        for worker, arguments in given.items():
            try:
                self._connections[worker].send((function, arguments))
            except OSError as error:
                raise EOFError from error
        answers: dict[int, tuple[str, Any]] = {}
        for worker in given:
            while worker not in answers:
                if (answer := self._receive(worker)) is not None:
                    answers[worker] = answer
        for worker, (kind, value) in answers.items():
            if kind == "error":
                raise RuntimeError(f"a call of worker {worker} failed:\n{value}")
        return [value for _, value in answers.values()]

    def first_batch(self) -> None:
        """Wait until a worker has a batch; EOFError if one is lost."""
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


class DistributedWorkers(asking.Asking):
    """The common part of these collectors: their options, seeds, and lost workers."""

    collector_kwargs: list[dict[str, Any]]
    postproc: Any
    split_trajs: bool
    total_frames: float
    _links: Links | None = None
    _seedings = 0
    _torchrl = property(DistributedState)  # the private state of the parent

    def _start(self, envs: Any, policy: Any, options: dict[str, Any]) -> None:
        """Have TorchRL start workers, each with trajectory ids and a connection of its own."""
        self._ended = False
        envs = list(envs) if isinstance(envs, Sequence) else [envs]
        if options.get("collector_class", "single") in ("single", TorchRLCollector, Collector):
            options["collector_class"] = LinkedCollector
        kind = options["collector_class"]
        given = options.get("collector_kwargs") or {}
        given = [given] * len(envs) if isinstance(given, Mapping) else given
        own = asking.options_of_workers(options.pop("reset_options", None), kind, len(envs))
        for worker, each in enumerate(own if issubclass(kind, TorchRLCollector) else ()):
            each["traj_pool"] = asking.TrajectoryIds(worker)
        if issubclass(kind, LinkedCollector):
            host = "localhost" if options.get("launcher") == "mp" else own_address()
            self._links = Links(host, len(envs))
            for each, address in zip(own, self._links.addresses, strict=True):
                each["link"] = address
        options["collector_kwargs"] = [{**a, **b} for a, b in zip(own, given, strict=True)]
        try:
            super().__init__(envs, policy, **options)
            if self._links is not None:
                self._links.accept(self._raise_if_lost)
                self._learn_facts()
        except asking.WorkerLostError:
            raise
        except BaseException as error:
            if hasattr(self, "jobs"):
                self._raise_if_lost(error, patience=5.0)
            self._end()
            raise

    def __repr__(self) -> str:
        if self._torchrl.shut_down:
            return one_line(self, "shut down")
        return one_line(self, f"{self.num_workers} workers", f"frames={self.frames_per_batch}")

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed all workers and restart their envs, as :meth:`RayCollector.set_seed` does."""
        if self._torchrl.shut_down:
            raise RuntimeError("the collector is shut down; make a new one to collect")
        following = self._seed_workers(seed, static_seed)
        self._seedings += 1
        return following

    def _reports(self) -> list[asking.WorkerReport]:
        if self._torchrl.shut_down:
            raise RuntimeError("the collector is shut down; ask a live one")
        return super()._reports()

    # ------------------------------------------------------------------------------ lost workers

    def _raise_if_lost(self, error: BaseException | None = None, patience: float = 1.0) -> None:
        """End the collection if a worker is lost, with an error that names it.

        A worker may take ``patience`` seconds to end after the error that followed from its loss.
        """
        lost = self._find_lost(0.0 if error is None else patience)
        if lost is None:
            return
        self._end()
        advice = "make a new collector; RayCollector can put another worker in its place"
        raise asking.WorkerLostError(lost, advice) from error

    @property
    def _local_jobs(self) -> list[Any]:
        """The processes of the workers, if they are on this machine."""
        return self.jobs if hasattr(self, "jobs") and self.launcher == "mp" else []

    def _find_lost(self, patience: float) -> asking.LostWorker | None:
        jobs = self._local_jobs
        for worker in [] if self._links is None else self._links.lost():
            if not jobs:
                return self._on_record(worker, "unknown", "has ended its connection")
            jobs[worker].join(1.0)
        for worker, job in enumerate(jobs):
            job.join(patience)
            if not job.is_alive():
                return self._on_record(worker, job.pid, ending(job.exitcode))
        return None

    def _any_failed(self) -> bool:
        """Tell whether a worker will not answer, and has not ended as it should."""
        jobs = self._local_jobs
        return any(job.exitcode for job in jobs) if jobs else self._find_lost(0.0) is not None

    def _iterator_dist(self) -> Iterator[TensorDictBase]:
        try:
            yield from super()._iterator_dist()
        except (RuntimeError, EOFError) as error:
            self._raise_if_lost(error)
            raise

    def _with_own_ids(self, data: TensorDictBase) -> Any:
        """Undo the parent's change of ids, which makes them collide, and differ in each batch."""
        if TRAJ_IDS in data.keys(True):
            data[TRAJ_IDS] = self._torchrl.received[TRAJ_IDS].clone()
        return data

    def _on_record(self, worker: int, pid: Any, how: str) -> asking.LostWorker:
        return self._lost_worker(worker, pid, how, self._torchrl.frames_per_worker)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the workers. A second call does nothing."""
        if not self._ended and hasattr(self, "jobs"):
            self._ended = True
            if not self._torchrl.shut_down and self._any_failed():
                self._end()
            super().shutdown(timeout)
        self._close_links()

    def _end(self) -> None:
        """End all that is left, without a word to the workers: one of them would not answer."""
        self._ended = self._torchrl.shut_down = True
        for job in self._local_jobs:
            job.kill()
        for scheme in (self._torchrl.schemes or {}).values():
            with suppress(Exception):
                scheme.shutdown()
        if torch.distributed.is_initialized():
            with suppress(Exception):
                torch.distributed.destroy_process_group()
        for job in self._local_jobs:
            job.join(5.0)
        self._close_links()

    # ------------------------------------------------------------ connections beside TorchRL's

    def _ask(self, function: Callable[..., Any], given: Mapping[int, Sequence[Any]]) -> list[Any]:
        if self._links is None:
            raise ValueError(
                f"expected a collector_class that is a LinkedCollector, got "
                f"{self.collector_class.__name__}, which answers no calls; derive it from "
                "tdcollect.collectors.distributed.LinkedCollector"
            )
        try:
            return self._links.call(function, given)
        except EOFError as error:
            self._raise_if_lost(error)
            raise

    def _close_links(self) -> None:
        if self._links is not None:
            self._links.close()


class DistributedCollector(DistributedWorkers, upstream.DistributedCollector):
    """TorchRL's ``DistributedCollector`` with tdcollect's collector in its workers.

    A worker that dies ends the collection with a :class:`WorkerLostError` that names it.

    Args:
        create_env_fn: functions that make envs, one per worker.
        policy: the policy; each worker has a copy.
        **kwargs: as the parent has them, and ``reset_options`` as :class:`tdcollect.Collector` has
            it; slot i of worker w is ``w N + i``. ``collector_class="single"``, the default, is
            :class:`tdcollect.Collector` with a connection to this process, over which
            :meth:`set_seed` goes; a class of yours derives from :class:`LinkedCollector`.
    """

    @extends(upstream.DistributedCollector.__init__)
    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any):
        self._start(create_env_fn, policy, kwargs)
        if self._links is None:
            self._torchrl.wait_at_most(_PATIENCE)
        if self.total_frames < 0:
            self.total_frames = math.inf  # the parent would collect nothing

    def _make_container(self) -> None:
        # The parent makes a collector of TorchRL's with the options of worker 0.
        options = self.collector_kwargs
        self.collector_kwargs = [{**options[0]}]
        for name in ("link", "reset_options"):
            self.collector_kwargs[0].pop(name, None)
        super()._make_container()
        self.collector_kwargs = options

    def _next_sync(self, total_frames: int) -> tuple[TensorDictBase, int]:
        data, total_frames = super()._next_sync(total_frames)
        if self._links is not None:
            for worker in range(self.num_workers):
                self._links.seedings_of_batch(worker)
        return self._with_own_ids(data), total_frames

    def _next_async(
        self, total_frames: int, trackers: list[Any]
    ) -> tuple[TensorDictBase, int, int]:
        while True:
            if self._links is not None:
                self._links.first_batch()  # the parent turns without a pause
            data, total, worker = super()._next_async(total_frames, trackers)
            if self._links is None or self._links.seedings_of_batch(worker) == self._seedings:
                return data, total, worker
            self._torchrl.ask_for_batch(worker, trackers)  # it was begun before the seed


class DistributedSyncCollector(DistributedWorkers, upstream.DistributedSyncCollector):
    """TorchRL's ``DistributedSyncCollector`` with tdcollect's collector in its workers.

    A worker that dies ends the collection with a :class:`WorkerLostError` that names it.

    Args:
        create_env_fn, policy: as :class:`DistributedCollector` has them.
        **kwargs: as it and the parent have them.
    """

    @extends(upstream.DistributedSyncCollector.__init__)
    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any):
        if kwargs.get("total_frames", -1) < 0:
            raise ValueError(
                "expected total_frames, which each worker takes its share of, got none; pass it"
            )
        self._begun = False
        self._start(create_env_fn, policy, kwargs)
        # The parent changes the ids of batches before it hands them on to these.
        self._afterwards = self.split_trajs, self.postproc
        self.split_trajs, self.postproc = False, self._finish

    def _make_container(self) -> None:
        super()._make_container()
        self._torchrl.separate()

    def _finish(self, data: TensorDictBase) -> Any:
        splits, postproc = self._afterwards
        data = self._with_own_ids(data)
        data = split_trajectories(data) if splits else data
        return data if postproc is None else postproc(data)

    def _iterator_dist(self) -> Iterator[TensorDictBase]:
        if self._links is not None and not self._begun:
            self._ask_all(LinkedCollector.begin)
        self._begun = True
        yield from super()._iterator_dist()

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed all workers before the first batch; see :meth:`DistributedCollector.set_seed`.

        Raises:
            RuntimeError: after the first batch: workers are ahead of what this process has seen.
        """
        if self._begun:
            raise RuntimeError(
                "expected set_seed() before the first batch, got it after; workers collect ahead, "
                "so seed a new collector"
            )
        return super().set_seed(seed, static_seed)

    def _any_failed(self) -> bool:
        return True  # workers have no message for the end: they would send all their batches
