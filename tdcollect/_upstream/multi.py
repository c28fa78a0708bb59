"""Private names of TorchRL's collectors with workers, and of multiprocessing's queues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrl.collectors import Collector, MultiCollector

MultiCollectorMeta: Any = type(MultiCollector)


def one_env_each(
    args: tuple[Any, ...], kwargs: dict[str, Any], num_collectors: int | None
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """The arguments of several collectors, the env as a list of one per collector.

    Returns:
        The arguments, and the number of collectors.

    Raises:
        ValueError: where the number is not that of the envs.
    """
    meta: Any = type(Collector)
    args, kwargs, count = meta._normalize_env_fns(args, dict(kwargs), num_collectors)
    return args, kwargs, count


def drop_generic_defaults(target: type, kwargs: dict[str, Any]) -> None:
    """Take arguments out that are ``Collector``'s defaults and that ``target`` has others for."""
    meta: Any = type(Collector)
    meta._drop_inapplicable_defaults(target, kwargs)


class WorkersState:
    """The private state and methods of TorchRL's collector with workers, under plain names.

    A view: it holds the collector and nothing else, and is made where it is needed.
    """

    __slots__ = ("_of",)

    def __init__(self, collector: MultiCollector):
        self._of = collector

    @property
    def frames(self) -> int:
        """The number of frames yielded so far."""
        return self._of._frames

    @frames.setter
    def frames(self, frames: int) -> None:
        self._of._frames = frames

    @property
    def iteration(self) -> int:
        """The index of the latest batch; -1 before the first."""
        return self._of._iter

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._of._iter = iteration

    @property
    def worker_trajectories(self) -> int | None:
        """The ``trajs_per_batch`` of the workers."""
        count: int | None = self._of._worker_trajs_per_batch
        return count

    def flush_trajectories(self) -> None:
        """Drop the trajectories that are put together in this process."""
        self._of._flush_trajectory_assembly()

    def answer(self, worker: int) -> tuple[Any, str]:
        """The next message of a worker: an answer, and its name; waits for it."""
        return self._of._recv_and_check(self._of.pipes[worker], worker_idx=worker)

    def end_weight_sync(self) -> None:
        """End what sends weights: left to the interpreter's end, it would never come to one."""
        for scheme in (getattr(self._of, "_weight_sync_schemes", None) or {}).values():
            scheme.shutdown()

    def release_update(self, worker: int) -> None:
        """Have nobody wait for a worker's word that it has taken new weights."""
        for scheme in (self._of._weight_sync_schemes or {}).values():
            waited_for = getattr(scheme, "_ack_queues", {}).get(worker)
            if waited_for is not None:
                waited_for.put("updated")


def readers(queues: Iterable[Any]) -> list[Any]:
    """The ends of multiprocessing's queues that can be waited for."""
    return [queue._reader for queue in queues]


@contextmanager
def same_threads() -> Iterator[None]:
    """Undo the change of torch's number of threads that TorchRL's collectors make."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = [
    "MultiCollectorMeta",
    "WorkersState",
    "drop_generic_defaults",
    "one_env_each",
    "readers",
    "same_threads",
]
