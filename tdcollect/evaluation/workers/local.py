"""Workers of an evaluation as its driver sees them: messages to them, and local processes.

The driver hands out indices of episodes, and alone writes files. A worker makes env and policy of a
job once, keeps them, and answers with one record per episode that ends. Nothing here imports torch:
the actors of a Ray cluster only pass messages on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cloudpickle

from tdcollect import check
from tdcollect.display import count_text, one_line
from tdcollect.processes import child
from tdcollect.processes.child import Channel, Described, InterruptsHeld
from tdcollect.surroundings import Surroundings

if TYPE_CHECKING:
    from tdcollect.evaluation.episodes.data import Finished

_ADVICE = {
    "env": "pass a function that makes it, lambda: make_env()",
    "policy": "make it without such parts; an Evaluator takes a function that makes it, "
    "policy_factory=",
}

MOST_HELD = 4
"""Jobs that a worker holds at a time."""


class Open(NamedTuple):
    """Make env and policy of a job, unless they are there; set the policy's weights.

    ``job`` is None if this worker holds it, ``weights`` are None to leave them, and ``fresh_envs``
    if it is not known yet whether each episode must run on a new env: till then, all do.
    """

    around: Surroundings
    job: bytes | None
    weights: Mapping[str, bytes] | None
    fresh_envs: bool | None


class Run(NamedTuple):
    """Run these episodes of a job too, with their data and all steps if they are kept."""

    indices: Sequence[int]
    keep: bool
    keep_steps: bool = False
    again: bool = False


class Told(NamedTuple):
    """Whether episodes of a job run on new envs; None to find it out, by running one again."""

    fresh_envs: bool | None


class Ready(NamedTuple):
    """Env and policy of a job are there; with the manifest as this worker sees it, but for git."""

    manifest: dict[str, Any]
    slots: int
    about: Mapping[str, Any]  # the env and what runs it, for the notes on a run


class Found(NamedTuple):
    """Entries of the manifest that are known by now, as episodes have run."""

    entries: dict[str, Any]


class Ended(NamedTuple):
    """An episode ended; with its error as text if it failed."""

    finished: Finished
    error: str | None


class Raised(NamedTuple):
    """A job cannot go on: the exception that says why."""

    failure: Described


class Message(NamedTuple):
    """A message to a worker, or its answer: the number of the evaluation, the job, and what."""

    turn: int
    key: str
    what: Open | Run | Told | Ready | Found | Ended | Raised


class Member(ABC):
    """One worker, as the driver sees it; the rank of a lost one goes to its replacement."""

    def __init__(self, rank: int):
        self.rank = rank
        self.holds: list[str] = []  # keys of the jobs that it holds, oldest first

    @property
    @abstractmethod
    def where(self) -> str:
        """The process, as text."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message; nothing happens if the worker has gone, as ``wait`` tells."""

    @abstractmethod
    def beats(self) -> int:
        """The number of steps that it has finished, as far as is known; 0 until it is up."""

    @abstractmethod
    def leave(self) -> bool:
        """Ask it to close its envs and to end; False if it is not up."""

    @abstractmethod
    def end(self, seconds: float = 0.0) -> str:
        """End it, unless it does so by itself within some seconds; return how it ended."""

    @property
    def name(self) -> str:
        return f"worker {self.rank} ({self.where})"

    @property
    def machine(self) -> str:
        """The machine that it runs on, told from the others of these workers."""
        return ""


class Workers(contextlib.AbstractContextManager["Workers"], ABC):
    """Workers for test episodes, :class:`tdcollect.LocalWorkers` or :class:`tdcollect.RayWorkers`.

    They start when they are first needed, and stay for the evaluations that follow. They end with
    :meth:`close`, with a ``with`` block, and when nothing refers to them any more.

    Attributes:
        num_workers: the number of workers.
        timeout: the seconds that a worker may take for a step; None for any time.
        max_lost: the number of workers that an episode may cost before it counts as lost.
    """

    kind: ClassVar[str]

    def __init__(self, num_workers: int, timeout: float | None, max_lost: int):
        check.positive_int(num_workers=num_workers, max_lost=max_lost)
        if timeout is not None and not (check.is_number(timeout) and timeout > 0):
            raise ValueError(
                f"expected timeout to be positive seconds without a finished step, or None, got "
                f"{timeout!r}"
            )
        self.num_workers = int(num_workers)
        self.timeout = timeout
        self.max_lost = int(max_lost)
        self.crew: dict[int, Member] = {}  # those that run, by rank
        self.fresh_envs: dict[str, bool] = {}  # whether envs must be new ones, by their keys
        self.turn = 0  # the number of evaluations so far
        self.in_use = False
        # Ends them, also if nobody does: when they are garbage collected, or the program ends.
        self._end: Any = None

    @abstractmethod
    def start(self, rank: int) -> Member:
        """Start a worker, or another one in the place of one that was lost."""

    @abstractmethod
    def wait(self, seconds: float) -> Iterable[tuple[Member, Message | None]]:
        """Wait up to ``seconds`` for answers; None means that the worker died."""

    def close(self) -> None:
        """End all workers; they start again if they are needed again."""
        # They are asked to, and have a while; what they have to say is of no use now.
        for worker in [*self.crew.values()]:
            if not worker.leave():
                del self.crew[worker.rank]
        deadline = time.monotonic() + child.GRACE
        while self.crew and (left := deadline - time.monotonic()) > 0:
            for worker, answer in self.wait(left):
                if answer is None:
                    del self.crew[worker.rank]
                    worker.end(max(0.0, deadline - time.monotonic()))
        if self._end is not None:
            self._end()
        self._end = None
        self.crew.clear()

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        running = f"{len(self.crew)} running" if self.crew else "not started"
        return one_line(self, count_text(self.num_workers, "worker"), running)


def pickled_part(name: str, value: Any) -> bytes:
    """Pickle an argument, functions included; raises TypeError that names the argument."""
    try:
        dumped: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever a class's own __reduce__ raises
        advice = _ADVICE.get(name, "let it refer to nothing that is bound to this process")
        of = value[0] if name == "env" else value
        text = " ".join(f"{type(of).__name__} {of}".split())
        raise TypeError(
            f"expected {name} to be picklable, as episodes run in processes of their own, got "
            f"{text[:120]} ({type(error).__name__}: {error}); {advice}"
        ) from error
    return dumped


_WORKER = "tdcollect.evaluation.workers.worker"
_Start = Callable[[tuple[int]], child.Child]
EXIT_SECONDS = 2.0
"""Seconds between the end of a process's connection and its own."""
_STARTS = 4  # of templates, one after the other


class LocalWorkers(Workers):
    """Processes of this machine that run test episodes.

    Pass them to :func:`tdcollect.evaluate`; the episodes are the same to the bit as without. They
    start when they are first needed (about four seconds, whatever their number), and keep env and
    policy for the evaluations that follow. They end with :meth:`close`, with a ``with`` block, when
    nothing refers to them any more, and with this process, however it ends.

    Args:
        num_workers: the number of processes.
        timeout: end a worker that finishes no step for so many seconds; None to wait for ever. An
            env has a minute to start, whatever the timeout.
        max_lost: the number of workers that an episode may cost, before it counts as lost.
        init_fn: called first in each worker, before torch is imported there. Each worker is then a
            fresh interpreter, which takes three seconds of a core to start.

    Raises:
        TypeError, ValueError: if an argument cannot be honoured.

    Examples:
        >>> with LocalWorkers(4) as workers:
        ...     for checkpoint in checkpoints:
        ...         evaluate("CartPole-v1", load(checkpoint), workers=workers)
    """

    kind = "local"

    def __init__(
        self,
        num_workers: int,
        timeout: float | None = None,
        max_lost: int = 3,
        *,
        init_fn: Callable[[], Any] | None = None,
    ):
        child.check_can_start()
        super().__init__(num_workers, timeout, max_lost)
        check.callables(init_fn=init_fn)
        self.crew: dict[int, LocalWorker] = {}  # type: ignore[assignment]
        self.init_fn = None if init_fn is None else pickled_part("init_fn", init_fn)
        # What a fork of this process runs as the template; None for a fresh interpreter.
        self.template: Callable[[int], None] | None = None
        self._templates: list[child.Template] = []  # at most one
        child.disown_in_forks(self)

    def __reduce__(self) -> Any:
        """Copy the arguments only: the workers belong to this process."""
        arguments = self.num_workers, self.timeout, self.max_lost
        return LocalWorkers, arguments, {"init_fn": self.init_fn}

    def start(self, rank: int) -> Member:
        if self._end is None:
            self._end = weakref.finalize(self, _end_all, self.crew, self._templates)
        if self.init_fn is not None:
            with InterruptsHeld():
                return self._started(
                    rank, partial(child.Spawned, f"{_WORKER}:main", init_fn=self.init_fn)
                )
        for _ in range(_STARTS):  # one that has gone, or goes as it starts, is replaced
            if not self._templates:
                with InterruptsHeld():
                    fork, function = self.template, f"{_WORKER}:template"
                    process = child.Spawned(function) if fork is None else child.Forked(fork)
                    self._templates.append(child.Template(process))
            template = self._templates[0]
            if template.ready():
                with InterruptsHeld(), contextlib.suppress(ChildProcessError):
                    return self._started(rank, partial(child.FromTemplate, template))
            self._templates.pop().child.end()
        raise RuntimeError("expected a process to start and to import tdcollect, but it ended")

    def _started(self, rank: int, start: _Start) -> Member:
        worker = self.crew[rank] = LocalWorker(rank, start)
        return worker

    def wait(self, seconds: float) -> Iterator[tuple[Member, Message | None]]:
        awaited: dict[int, LocalWorker] = {}
        waiting = select.poll()
        for worker in self.crew.values():
            for descriptor, events in worker.signs:
                awaited[descriptor] = worker
                waiting.register(descriptor, events)
        ready = {descriptor for descriptor, _ in waiting.poll(1000 * seconds)}
        for worker in {awaited[descriptor]: None for descriptor in ready}:
            for answer in worker.answers(ready):
                yield worker, answer

    def disown(self) -> None:
        """In a fork of this process: these workers are not its own."""
        if self._end is None:
            return
        self._end.detach()
        self.crew.clear()
        self._templates.clear()
        self._end = None
        self.in_use = False


class LocalWorker(Member):
    """A process of this machine, which counts its steps in shared memory."""

    def __init__(self, rank: int, start: _Start):
        super().__init__(rank)
        self.read: Callable[[bytes], Any] = pickle.loads  # makes an answer of its bytes
        file = child.shared_file(8)
        try:
            self._steps = memoryview(mmap.mmap(file, 0)).cast("q")
            self.process = start((file,))
        finally:
            os.close(file)
        self._channel = Channel(self.process.socket)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def where(self) -> str:
        return f"process {self.pid}"

    @property
    def signs(self) -> list[tuple[int, int]]:
        """The descriptors that tell when it answers or ends, with the events to poll them for."""
        signs = [(self._channel.fileno(), self._channel.events)]
        if self.process.pidfd is not None:
            # A process that the env has forked may hold the socket open: its end is no sure sign.
            signs.append((self.process.pidfd, select.POLLIN))
        return signs

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._channel.post(pickle.dumps(message))

    def send_bytes(self, message: bytes) -> None:
        """Send a pickled message, however long it takes; from another thread than the driver's."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def answers(self, ready: set[int]) -> Iterator[Message | None]:
        """Yield the answers that are there; None once the process has ended and said all."""
        with contextlib.suppress(OSError):  # reading tells
            self._channel.flush()
        try:
            messages = self._channel.read()
        except EOFError:
            yield None
            return
        if messages is None and self.process.pidfd in ready:
            yield None
        yield from map(self.read, messages or ())

    def beats(self) -> int:
        return self._steps[0] + self._channel.progress

    def leave(self) -> bool:
        self._channel.send_no_more()
        return True

    def end(self, seconds: float = 0.0) -> str:
        return self.process.end(seconds)


def _end_all(crew: dict[int, LocalWorker], templates: list[child.Template]) -> None:
    for worker in crew.values():
        worker.end()
    crew.clear()
    while templates:
        templates.pop().child.end()


def as_workers(workers: Any) -> Workers | None:
    """Return the workers that are asked for; None for this process.

    Raises:
        TypeError, ValueError: for what asks for none.
    """
    if workers is None or isinstance(workers, Workers):
        return workers
    if not check.is_count(workers):
        raise TypeError(
            "expected workers to be the number of processes, a LocalWorkers or a RayWorkers, got "
            f"{workers!r}"
        )
    return LocalWorkers(workers) if workers else None
