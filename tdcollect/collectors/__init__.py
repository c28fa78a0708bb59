"""TorchRL's collectors on several processes and machines, with tdcollect's in each worker."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdcollect.collect import Collector, SyncDataCollector
    from tdcollect.collectors.batched import AsyncBatchedCollector
    from tdcollect.collectors.distributed import DistributedCollector, DistributedSyncCollector
    from tdcollect.collectors.link import LinkedCollector
    from tdcollect.collectors.local import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
    from tdcollect.collectors.lost import LostWorker, LostWorkers, WorkerLostError
    from tdcollect.collectors.multi import MultiCollector
    from tdcollect.collectors.ray import RayCollector
    from tdcollect.collectors.trajectory_ids import worker_of

__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "Collector",
    "DistributedCollector",
    "DistributedSyncCollector",
    "LinkedCollector",
    "LostWorker",
    "LostWorkers",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "RayCollector",
    "SyncDataCollector",
    "WorkerLostError",
    "worker_of",
]

# Imported when they are asked for: some need packages that are not installed everywhere.
_MODULES = {
    "AsyncBatchedCollector": "collectors.batched",
    "AsyncCollector": "collectors.local",
    "Collector": "collect",
    "DistributedCollector": "collectors.distributed",
    "DistributedSyncCollector": "collectors.distributed",
    "LinkedCollector": "collectors.link",
    "LostWorker": "collectors.lost",
    "LostWorkers": "collectors.lost",
    "MultiAsyncCollector": "collectors.local",
    "MultiCollector": "collectors.multi",
    "MultiSyncCollector": "collectors.local",
    "RayCollector": "collectors.ray",
    "SyncDataCollector": "collect",
    "WorkerLostError": "collectors.lost",
    "worker_of": "collectors.trajectory_ids",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tdcollect.collectors' has no attribute {name!r}")
    found = getattr(import_module(f"tdcollect.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
