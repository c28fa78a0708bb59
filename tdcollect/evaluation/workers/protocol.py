"""Messages between the driver of an evaluation and its workers, and its view of a worker.

The driver hands out indices of episodes, and alone writes files. A worker makes env and policy of a
job once, keeps them, and answers with one record per episode that ends. Local processes and Ray
actors run the same loop (``worker.py``) and differ in how messages travel.

Nothing here imports torch: the actors of a Ray cluster only pass messages on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cloudpickle

from tdcollect import check
from tdcollect.display import count_text, one_line
from tdcollect.evaluation.ledger import Episode
from tdcollect.processes.errors import Described

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tdcollect.evaluation.episodes.opening import Verdict
    from tdcollect.evaluation.workers.worker import Surroundings

_ADVICE = {
    "env": "pass a function that makes it, lambda: make_env()",
    "policy": "make it without such parts; an Evaluator takes a function that makes it, "
    "policy_factory=",
}

MOST_HELD = 4
"""Jobs that a worker holds at a time."""


class Open(NamedTuple):
    """Make env and policy of a job, unless they are there; set the policy's weights.

    Attributes:
        turn: tells this evaluation from those before.
        around: of the evaluation.
        key: of the job.
        job: the pickled job; None if this worker holds it.
        weights: pickled weights, by model id; None to leave them.
        verdict: the probe's verdict on the env; None to probe it.
        skipped: the number of groups of seeds that the probe leaves out, as they end workers.
    """

    turn: int
    around: Surroundings
    key: str
    job: bytes | None
    weights: Mapping[str, bytes] | None
    verdict: Verdict | None
    skipped: int


class Run(NamedTuple):
    """Run these episodes of a job too, with their data if ``keep``."""

    turn: int
    key: str
    indices: Sequence[int]
    keep: bool


class Fetch(NamedTuple):
    """Answer with the policy's ``state_dict``."""

    turn: int
    key: str


class Opened(NamedTuple):
    """Env and policy of a job are there.

    Attributes:
        turn: of the message.
        key: of the job; so for all answers.
        manifest: the manifest of the evaluation, as this worker sees it, but for the commit.
        verdict: the probe's.
        slots: the number of slots.
        env: the env as text.
        threads: the number of torch's threads.
    """

    turn: int
    key: str
    manifest: dict[str, Any]
    verdict: Verdict
    slots: int
    env: str
    threads: int


class Probing(NamedTuple):
    """Env and policy of a job are made, and the env is probed, without ``skipped`` groups."""

    turn: int
    key: str
    skipped: int


class Lacks(NamedTuple):
    """The job to open is not held here: it must be sent."""

    turn: int
    key: str


class Ended(NamedTuple):
    """An episode ended: its record, its error as text if it failed, its data if they are kept."""

    turn: int
    key: str
    record: Episode
    error: str | None
    data: TensorDict | None


class State(NamedTuple):
    """The policy's ``state_dict``, on the CPU; empty if it has none."""

    turn: int
    key: str
    state: dict[str, Any]


class Raised(NamedTuple):
    """A job cannot go on: the exception that says why."""

    turn: int
    key: str
    failure: Described


Message = Open | Run | Fetch
Answer = Probing | Opened | Lacks | Ended | State | Raised


class Worker(ABC):
    """One worker, as the driver sees it.

    Attributes:
        rank: its place among the workers; that of a lost one goes to its replacement.
        holds: the keys of the jobs that were sent to it, the latest last. It may lack one that it
            failed to open.
        outside: once it has ended: the cause is known to lie outside of env and policy.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.holds: list[str] = []
        self.outside = False

    @property
    @abstractmethod
    def where(self) -> str:
        """The process, as text for messages."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message; nothing happens if the worker has gone, which ``wait`` tells."""

    @abstractmethod
    def beats(self) -> int:
        """The number of steps that it has finished, as far as is known; 0 until it is up."""

    @abstractmethod
    def end(self, waits: bool = False) -> str:
        """End it, unless it has ended; return how it ended, as text.

        Args:
            waits: it has gone, or is about to: give it a moment to end by itself.
        """

    @property
    def name(self) -> str:
        """Its rank and its process."""
        return f"worker {self.rank} ({self.where})"

    def __repr__(self) -> str:
        return one_line(self, self.name)


class Workers(ABC):
    """Workers for test episodes, :class:`tdcollect.LocalWorkers` or :class:`tdcollect.RayWorkers`.

    They start when they are first needed, and stay for the evaluations that follow. They end with
    :meth:`close`, with a ``with`` block, and when nothing refers to them any more.

    Attributes:
        num_workers: how many.
        timeout: the seconds that a worker may take for a step; None for any time.
        max_lost: the number of workers that an episode may cost before it counts as lost.
        crew: the workers that run, by rank.
        verdicts: of probes, by the key of the env.
        turn: the number of evaluations so far.
        in_use: True while an evaluation uses them.
    """

    kind: ClassVar[str]

    def __init__(self, num_workers: int, timeout: float | None, max_lost: int):
        check.positive_int(num_workers=num_workers, max_lost=max_lost)
        if timeout is not None:
            number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
            if not number or not timeout > 0:
                raise ValueError(
                    f"expected timeout to be positive seconds without a finished step, or None, "
                    f"got {timeout!r}"
                )
        self.num_workers = int(num_workers)
        self.timeout = timeout
        self.max_lost = int(max_lost)
        self.crew: dict[int, Worker] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.turn = 0
        self.in_use = False

    @abstractmethod
    def start(self, rank: int) -> Worker:
        """Start a worker, or another one in the place of one that was lost."""

    @abstractmethod
    def wait(self, seconds: float) -> Iterable[tuple[Worker, Answer | None]]:
        """Wait for answers, so long at most; None comes from a worker that was lost."""

    @abstractmethod
    def close(self) -> None:
        """End all workers; they start anew if they are needed again."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        running = f"{len(self.crew)} running" if self.crew else "not started"
        return one_line(self, count_text(self.num_workers, "worker"), running)


def pickled_part(name: str, value: Any) -> bytes:
    """Pickle an argument, functions of any kind included.

    Raises:
        TypeError: if it cannot be, naming the argument.
    """
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
