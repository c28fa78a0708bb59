"""TorchRL's collectors on Ray, on torch.distributed and on torch's RPC: private names."""

from __future__ import annotations

import threading
from typing import Any

from torchrl.weight_update import RayWeightSyncScheme

__all__ = ["RayState", "new_generation"]


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
    def schemes(self) -> dict[str, Any] | None:
        """The weight sync schemes, by the name of the model."""
        return self._of._weight_sync_schemes

    @schemes.setter
    def schemes(self, schemes: dict[str, Any]) -> None:
        self._of._weight_sync_schemes = schemes

    def connect_again(self) -> None:
        """Have the next update of weights connect the schemes first."""
        self._of._weight_sync_initialized = False


def new_generation(scheme: Any) -> Any:
    """Return a scheme with the settings of this one and no connection.

    Raises:
        TypeError: if it is not TorchRL's scheme for Ray.
    """
    if not isinstance(scheme, RayWeightSyncScheme):
        raise TypeError(
            f"expected a RayWeightSyncScheme, got a {type(scheme).__name__}, which cannot be made "
            "anew for a worker that takes the place of a lost one; pass on_worker_lost='raise'"
        )
    return scheme._copy_uninitialized()
