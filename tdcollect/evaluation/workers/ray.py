"""Workers of a Ray cluster: actors that start a process beside them, and pass messages on."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tdcollect import check, ray_cluster
from tdcollect._upstream.others import bounded, started_here
from tdcollect.display import count_text
from tdcollect.evaluation.workers import local
from tdcollect.packages import extra_module
from tdcollect.processes.child import HASH_SEED, hash_seed
from tdcollect.progress import warn

_UNREAD = 16  # answers of a worker that wait for the driver; with data if trajectories are kept
_LARGE = 100_000  # bytes of a message that is stored once for all workers
_PATIENCE = 15.0  # seconds without a place for an actor before that is said
_ALONE = 20.0  # seconds without a machine for an actor before those that were there have gone
_ANY_TIME = 3600.0  # nothing is to be done until a worker answers
_PUT, _LOOK = ({"concurrency_group": name} for name in ("put", "look"))


class RayWorkers(local.Workers):
    """Workers of a Ray cluster that run test episodes.

    Pass them to :func:`tdcollect.evaluate`; the episodes are the same to the bit as without. Each
    is an actor that starts a process beside it, for env and policy. They start when they are first
    needed, all at once, and stay for the evaluations that follow. They end with :meth:`close`, with
    a ``with`` block, when nothing refers to them any more, and with this process.

    Ray is used as it is if this process is connected to it (``ray.init``). Otherwise it connects to
    ``address``, or to the cluster that ``RAY_ADDRESS`` or ``ray start`` name; or starts Ray on this
    machine, which ends with the workers.

    Args:
        num_workers: the number of workers.
        num_cpus: CPUs that Ray reserves for each, which decides how many share a machine.
        num_gpus: GPUs likewise; may be a fraction. Run the policy there by ``device="cuda"``.
        timeout, max_lost: as for :class:`tdcollect.LocalWorkers`.
        address: the cluster, as ``"host:port"``.
        init_fn: called first in each worker, before torch is imported there.

    Raises:
        ModuleNotFoundError: if Ray is not installed.
        ValueError: if an argument cannot be honoured; at the start, for more workers than a Ray
            that this process has started can have.

    Examples:
        >>> with RayWorkers(8) as workers:
        ...     for checkpoint in checkpoints:
        ...         evaluate("CartPole-v1", load(checkpoint), workers=workers)
    """

    kind = "ray"

    def __init__(
        self,
        num_workers: int,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        timeout: float | None = None,
        max_lost: int = 3,
        address: str | None = None,
        init_fn: Callable[[], Any] | None = None,
    ):
        super().__init__(num_workers, timeout, max_lost)
        for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
            if not (check.is_number(value) and value >= 0):
                raise ValueError(f"expected {name} to be a number from 0, got {value!r}")
        if address is not None and not isinstance(address, str):
            raise TypeError(f"expected address to be 'host:port' or None, got {address!r}")
        extra_module("ray", "RayWorkers")
        self.crew: dict[int, _Remote] = {}  # type: ignore[assignment]
        self.num_cpus, self.num_gpus = num_cpus, num_gpus
        self.address = address
        self._local = local.LocalWorkers(1, init_fn=init_fn)  # of each actor, not started here
        self._actors: _Actors  # once they start

    def __reduce__(self) -> Any:
        """Copy the arguments only; a copy in another process connects to the same cluster."""
        names = ("num_workers", "num_cpus", "num_gpus", "timeout", "max_lost")
        arguments = {name: getattr(self, name) for name in names}
        copied = partial(RayWorkers, address=ray_cluster.address() or self.address, **arguments)
        return copied, (), {"_local": self._local}

    def start(self, rank: int) -> local.Member:
        if self._end is None or not self._actors.connected:
            if self._end is not None:
                self._end()
            connection = ray_cluster.connect(self.address)
            self._actors = _Actors(connection, self._local, self.num_cpus, self.num_gpus)
            self._end = weakref.finalize(self, self._actors.close)
            self._check_room()
        worker = self.crew[rank] = _Remote(rank, self._actors)
        return worker

    def _check_room(self) -> None:
        """Refuse workers that will never have a place, and say so of those that may wait."""
        there = ray_cluster.room(self._actors.needs)
        if there >= self.num_workers:
            return
        each = ray_cluster.in_words(self._actors.needs)
        if started_here():
            raise ValueError(
                f"expected at most {count_text(int(there), 'worker')} of {each} each, as the Ray "
                f"of this process has no room for more, got {self.num_workers}; take fewer, pass a "
                "smaller num_cpus or num_gpus, or the address of a cluster"
            )
        waiting = count_text(self.num_workers - int(there), "worker")
        warn(
            f"the Ray cluster has room for {int(there)} of {self.num_workers} workers of {each} "
            f"each; {waiting} will wait until it grows"
        )

    def wait(self, seconds: float) -> Iterator[tuple[local.Member, local.Message | None]]:
        deadline = time.monotonic() + seconds
        answered = False
        while not answered and self.crew:
            left = max(0.0, deadline - time.monotonic())
            for worker, thing in self._ready(left):
                if thing is not worker.stream:
                    worker.hear()
                    continue
                for answer in worker.read():
                    answered = True
                    yield worker, answer
            answered |= not left
            self._actors.check_places()

    def _ready(self, seconds: float) -> list[tuple[_Remote, Any]]:
        """Wait for streams, and for steps that were asked for; return those that are there."""
        import ray

        awaited: dict[Any, _Remote] = {}
        for worker in self.crew.values():
            if self.timeout:
                worker.ask(min(1.0, self.timeout / 10))
            for thing in (worker.stream, worker.asked):
                if thing is not None:
                    awaited[thing] = worker
        lost: list[tuple[_Remote, Any]] = [(one, None) for one in self.crew.values() if one.how]
        if lost or not awaited:
            return lost
        with _handlers_raise():
            ready, _ = ray.wait(list(awaited), num_returns=1, timeout=seconds)
        if ready and len(awaited) > 1:
            ready, _ = ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        return [(awaited[thing], thing) for thing in ready]


class _Actors:
    """The actors of some workers, by rank, and the connection to Ray by its name."""

    def __init__(
        self, connection: str, workers: local.LocalWorkers, num_cpus: float, num_gpus: float
    ):
        import ray

        self._connection = connection
        self._local = workers
        needs = {"CPU": float(num_cpus), "GPU": float(num_gpus)}
        self.needs = {kind: amount for kind, amount in needs.items() if amount}
        self._make = ray.remote(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,
            concurrency_groups={"put": 1, "look": 1},
        )(Host)
        self._by_rank: dict[int, Any] = {}
        self._placed: dict[int, Any] = {}  # answers of those that have been asked for a sign
        self._had_room = False
        self._look_at, self._say_at, self._alone_since = 0.0, math.inf, 0.0
        self._stored: tuple[bytes, Any] = b"", None

    @property
    def connected(self) -> bool:
        """True while the connection stands; without it, Ray must not be called."""
        return ray_cluster.current() == self._connection

    def begin(self, rank: int) -> Any:
        """Return a new actor for a worker."""
        actor = self._by_rank[rank] = self._make.remote(self._local, hash_seed())
        self._placed[rank] = actor.beats.options(**_LOOK).remote()
        self._alone_since = time.monotonic()
        self._say_at = self._alone_since + _PATIENCE
        return actor

    def drop(self, rank: int) -> None:
        """End an actor, which may have ended."""
        import ray

        actor = self._by_rank.pop(rank, None)
        self._placed.pop(rank, None)
        if actor is not None and self.connected:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)

    def stored(self, pickled: bytes) -> Any:
        """Return a message, or a reference to a large one, the same for all workers."""
        import ray

        if len(pickled) < _LARGE:
            return pickled
        if pickled != self._stored[0]:
            self._stored = pickled, ray.put(pickled)
        return self._stored[1]

    def check_places(self) -> None:
        """Warn once of actors without a place; raise RuntimeError if all machines have gone."""
        import ray

        now = time.monotonic()
        if not self._placed or now < self._look_at or not self.connected:
            return
        self._look_at = now + 1.0
        _, waiting = ray.wait([*self._placed.values()], num_returns=len(self._placed), timeout=0)
        each = ray_cluster.in_words(self.needs)
        if ray_cluster.room(self.needs) >= 1:  # else those that have a place are lost, told or not
            self._had_room, self._alone_since = True, now
        elif self._had_room and now > self._alone_since + _ALONE:
            self._alone_since = now
            raise RuntimeError(
                f"expected a machine of the Ray cluster that can take a worker of {each}, got none "
                f"for {_ALONE:g} s: those that ran workers have gone. Once there are others, the "
                "same call goes on with the episodes that have not ended"
            )
        if waiting and now > self._say_at:
            self._say_at = math.inf
            free = ray.available_resources()
            warn(
                f"no place in the Ray cluster yet for {len(waiting)} of {len(self._by_rank)} "
                f"workers: each takes {each}; free are "
                + ray_cluster.in_words({kind: free.get(kind, 0.0) for kind in self.needs})
            )

    def close(self) -> None:
        for rank in [*self._by_rank]:
            self.drop(rank)
        self._stored = b"", None
        ray_cluster.disconnect(self._connection)


class _Remote(local.Member):
    """A worker beside an actor."""

    def __init__(self, rank: int, actors: _Actors):
        super().__init__(rank)
        self._actors = actors
        self._actor = actors.begin(rank)
        # Its answers, and that to the latest question for its steps, if there is one.
        self.stream: Any = self._actor.answers.options(**bounded(_UNREAD)).remote()
        self.asked: Any = None
        self._asked_at = 0.0
        self._beats = 0
        self._where: str | None = None
        self._how: str | None = None

    @property
    def where(self) -> str:
        return self._where or "an actor that has not started"

    @property
    def machine(self) -> str:
        return (self._where or "").rpartition(" on ")[2]

    @property
    def how(self) -> str | None:
        """The reason why it was lost; None while it runs."""
        if self._how is None and not self._actors.connected:
            self._lose("lost its Ray, which was shut down")
        return self._how

    def send(self, message: local.Message | None) -> None:
        if self.how is None:
            pickled = self._actors.stored(pickle.dumps(message))
            self._actor.put.options(**_PUT).remote(pickled)

    def read(self) -> Iterator[local.Message | None]:
        """Yield the answer that is there; None if the worker was lost instead."""
        import ray

        if self.how is None:
            try:
                item = ray.get(next(self.stream))
            except (ray.exceptions.RayError, StopIteration) as error:
                self._lose(_reason(error))
            else:
                if isinstance(item, bytes):
                    yield pickle.loads(item)
                elif self._where is None:
                    self._where = item
                else:
                    self._lose(item)
        if self._how is not None:
            yield None

    def ask(self, seconds: float) -> None:
        """Ask for its steps, unless that was done no longer than some seconds ago."""
        now = time.monotonic()
        if self.asked is None and now > self._asked_at + seconds and self.how is None:
            self.asked, self._asked_at = self._actor.beats.options(**_LOOK).remote(), now

    def hear(self) -> None:
        """Take the answer in, unless the worker was lost meanwhile."""
        import ray

        if self.asked is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # the stream tells of it
                self._beats = ray.get(self.asked)
            self.asked = None

    def beats(self) -> int:
        return max(self._beats, self._where is not None)

    def leave(self) -> bool:
        if self._where is not None:
            self.send(None)
        return self._where is not None and self._how is None

    def end(self, seconds: float = 0.0) -> str:
        how = self.how or "was ended"
        self._lose(how)
        return how

    def _lose(self, how: str) -> None:
        if self._how is None:
            self._actors.drop(self.rank)
        self._how = how
        self.stream = self.asked = None


@contextlib.contextmanager
def _handlers_raise() -> Iterator[None]:
    """Raise what a signal's handler raised in the place of Ray's own error."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def _reason(error: BaseException) -> str:
    """Say in plain words how an actor ended."""
    from ray import exceptions

    last = (str(error).strip().splitlines() or [""])[-1].strip()
    if isinstance(error, exceptions.OutOfMemoryError):
        return "was ended by Ray, as its machine ran short of memory"
    if isinstance(error, exceptions.RayTaskError) or "creation task" in str(error):
        return f"ended with {last}"
    if isinstance(error, exceptions.RuntimeEnvSetupError):
        return f"did not start, as Ray could not set its runtime_env up: {last}"
    if "ray.kill" in last:
        return "was ended by ray.kill"
    if isinstance(error, exceptions.ActorUnavailableError):
        return "was out of reach"
    if isinstance(error, exceptions.NodeDiedError) or "node" in last.partition(".")[0].lower():
        return "was lost with its machine"
    return "was lost with its Ray actor, whose process ended"


class Host:
    """Starts a local worker beside the actor, and passes messages on.

    In the actor itself, env and policy would run outside of the main thread and beside Ray's
    threads, which do not survive a fork; and how a crash came about would not be known. Nothing
    here imports torch.
    """

    def __init__(self, workers: local.LocalWorkers, seed_of_hashes: str):
        os.environ[HASH_SEED] = seed_of_hashes  # of the process that it starts
        self._workers = workers
        self._worker: Any = None
        self._is_up = threading.Event()

    def answers(self) -> Iterator[bytes | str]:
        """Start the worker; yield its place, its pickled answers, and how it ended."""
        worker: Any = self._workers.start(0)
        worker.read = bytes
        self._worker = worker
        self._is_up.set()
        yield f"{worker.where} on {socket.gethostname()}"
        while True:
            for _, answer in self._workers.wait(_ANY_TIME):
                if answer is None:
                    yield worker.end(local.EXIT_SECONDS)
                    return
                yield answer  # type: ignore[misc]  # bytes

    def put(self, message: bytes) -> None:
        """Pass a pickled message on, once the worker is up."""
        self._is_up.wait()
        self._worker.send_bytes(message)

    def beats(self) -> int:
        """Return the number of steps that the worker has finished."""
        return 0 if self._worker is None else self._worker.beats()
