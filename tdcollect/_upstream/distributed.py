"""TorchRL's collectors on Ray and on torch.distributed: private names."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

__all__ = ["DistributedState", "RayState"]


class RayState:
    """The private state of TorchRL's ``RayCollector``, under plain names; a view.

    Args:
        collector: TorchRL's, or a subclass of it.
    """

    __slots__ = ("_of",)

    def __init__(self, collector: Any):
        self._of = collector

    @property
    def started(self) -> bool:
        """True once the constructor has begun to start workers."""
        return hasattr(self._of, "_remote_collectors")

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that collects after ``start()``."""
        return self._of._collection_thread

    @property
    def stopped(self) -> bool:
        """True once collection is to end."""
        return bool(self._of._stop_event.is_set())

    @property
    def frames_per_worker(self) -> int:
        """The number of frames in the batch of one worker."""
        return int(self._of._frames_per_batch_corrected)

    @property
    def in_step(self) -> bool:
        """The argument ``sync``."""
        return bool(self._of._sync)

    @property
    def learner_sends(self) -> bool:
        """True if a learner on Ray sends weights to the workers itself."""
        return bool(getattr(self._of, "_external_weight_sender", False))

    def need_no_connection(self) -> None:
        """Have no update of weights connect the schemes first, and no iteration warn of it."""
        self._of._weight_sync_initialized = True


class DistributedState:
    """The private state of TorchRL's collectors on torch.distributed; a view.

    Args:
        collector: TorchRL's, or a subclass of it.
    """

    __slots__ = ("_of",)

    def __init__(self, collector: Any):
        self._of = collector

    @property
    def started(self) -> bool:
        """True once the constructor has begun to start workers."""
        return hasattr(self._of, "jobs")

    @property
    def in_step(self) -> bool:
        """The argument ``sync``."""
        return bool(getattr(self._of, "_sync", True))

    @property
    def frames_per_worker(self) -> int:
        """The number of frames in the batch of one worker."""
        return int(self._of._frames_per_batch_corrected)

    @property
    def schemes(self) -> dict[str, Any] | None:
        """The weight sync schemes, by the name of the model."""
        return getattr(self._of, "_weight_sync_schemes", None)

    @property
    def shut_down(self) -> bool:
        """True if ``shutdown()`` has nothing to do any more."""
        return bool(getattr(self._of, "_shutdown", False))

    @shut_down.setter
    def shut_down(self, done: bool) -> None:
        self._of._shutdown = done

    @property
    def received(self) -> Any:
        """The memory that batches are received into: ``[W, ...]``, or W of them."""
        return self._of._tensordict_out

    def wait_at_most(self, seconds: float) -> None:
        """Wait so long for an answer of a worker of ``DistributedCollector``, in place of 10 s."""
        self._of._store.set_timeout(timedelta(seconds=seconds))

    def separate(self) -> None:
        """Give each worker memory of its own.

        That of ``DistributedSyncCollector`` is one batch, expanded: all workers write to it.
        """
        memory = self._of._tensordict_out.clone()
        self._of._single_tds = memory.unbind(0)
        self._of._tensordict_out = memory.lock_()

    def ask_for_batch(self, worker: int, trackers: list[Any]) -> None:
        """Let a worker go on, as the loop of ``DistributedCollector(sync=False)`` does."""
        self._of._store.set(f"NODE_{worker + 1}_in", b"continue")
        memory = self._of._tensordict_out[worker]
        trackers[worker] = memory.irecv(src=worker + 1, return_premature=True)
