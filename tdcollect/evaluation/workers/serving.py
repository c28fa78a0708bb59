"""The loop of a worker, the same in a local process and in a Ray actor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn

from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.ledger.manifest import subject
from tdcollect.evaluation.workers.job import set_weights, unpickled
from tdcollect.evaluation.workers.protocol import (
    MOST_HELD,
    Answer,
    Ended,
    Fetch,
    Lacks,
    Message,
    Open,
    Opened,
    Probing,
    Raised,
    Run,
    State,
)
from tdcollect.workers.protocol import describe

Receive = Callable[[bool], Message | None]
"""Returns the next message; given False, it does not wait. None if the driver has gone, or if there
is none yet."""


def serve(receive: Receive, beat: Callable[[], None]) -> Generator[Answer, None, None]:
    """Do what the driver says until it goes; yields the answers.

    Running out of memory ends the loop, as it would end the process elsewhere: what fits beside
    fewer episodes may still run.

    Args:
        receive: returns the next message; given False, it does not wait.
        beat: called at each step.
    """
    jobs: dict[str, EvaluationCollector] = {}
    beat()
    message = receive(True)
    try:
        while message is not None:
            turn, key = message.turn, message.key
            following: list[Message | None] = []
            try:
                if isinstance(message, Open):
                    message.around.enter()
                    yield from _open(jobs, message, beat)
                elif isinstance(message, Fetch):
                    yield State(turn, key, _state(jobs[key].policy))
                else:
                    feed = _Feed(message, receive, beat, following)
                    yield from _ended(jobs[key], message, feed)
            except Exception as error:
                if _lacks_memory(error):
                    raise
                yield Raised(turn, key, describe(error))
            message = following[0] if following else receive(True)
    finally:
        for collector in jobs.values():
            collector.close()


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _open(
    jobs: dict[str, EvaluationCollector], message: Open, beat: Callable[[], None]
) -> Iterator[Answer]:
    collector = jobs.pop(message.key, None)
    if collector is None:
        if message.job is None:
            yield Lacks(message.turn, message.key)
            return
        while len(jobs) >= MOST_HELD:
            jobs.pop(next(iter(jobs))).close()
        collector = unpickled(message.job).open()
    jobs[message.key] = collector  # the latest last
    if message.weights is not None:
        set_weights(collector, message.weights)
    if message.verdict is None:
        yield Probing(message.turn, message.key, message.skipped)
    verdict = collector.prepare(message.verdict, beat, message.skipped)
    assert verdict is not None
    yield Opened(
        message.turn,
        message.key,
        subject(collector),
        verdict,
        collector.slots,
        repr(collector.base),
        torch.get_num_threads(),
    )


def _state(policy: Any) -> dict[str, Any]:
    state = policy.state_dict() if isinstance(policy, nn.Module) else {}
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def _ended(collector: EvaluationCollector, message: Run, feed: _Feed) -> Iterator[Ended]:
    for finished in collector.run(message.keep, feed):
        record = finished.record
        error = None if record.completed else collector.errors[record.index]
        yield Ended(message.turn, message.key, record, error, finished.data)
        feed.stepped()  # to send them may take as long as a step
        del finished  # else its data would stay in memory beside the next one's


class _Feed:
    """Indices that arrive while episodes run.

    Args:
        message: the first ones.
        receive: returns the next message.
        beat: called at each step.
        following: gets the message that ends the run, or None for the end of all.
    """

    seconds = 0.25  # as the driver waits for records before it hands out more

    def __init__(
        self, message: Run, receive: Receive, beat: Callable[[], None], following: list[Any]
    ):
        self._turn, self._keep = message.turn, message.keep
        self._indices = deque(message.indices)
        self._receive = receive
        self.stepped = beat
        self._following = following

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.arrived():
            raise StopIteration
        return self._indices.popleft()

    def arrived(self) -> bool:
        if not self._indices and not self._following:
            message = self._receive(False)
            if message is not None:
                self._take(message)
        return bool(self._indices)

    def goes_on(self) -> bool:
        if not self._following:
            self._take(self._receive(True))
        return not self._following

    def _take(self, message: Message | None) -> None:
        more = isinstance(message, Run) and (message.turn, message.keep) == (self._turn, self._keep)
        if more:
            self._indices += message.indices  # type: ignore[union-attr]
        else:
            self._following.append(message)
