"""TorchRL's collectors on several processes and machines, with tdcollect's in each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.lazy import lazy

if TYPE_CHECKING:
    from tdcollect.collect import Collector, SyncDataCollector
    from tdcollect.collectors.asking import LostWorker, LostWorkers, WorkerLostError
    from tdcollect.collectors.dispatch import AsyncBatchedCollector
    from tdcollect.collectors.distributed import DistributedCollector, DistributedSyncCollector
    from tdcollect.collectors.multi import (
        AsyncCollector,
        MultiAsyncCollector,
        MultiCollector,
        MultiSyncCollector,
    )
    from tdcollect.collectors.ray import RayCollector
    from tdcollect.collectors.worker import worker_of as worker_of

__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "Collector",
    "DistributedCollector",
    "DistributedSyncCollector",
    "LostWorker",
    "LostWorkers",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "RayCollector",
    "SyncDataCollector",
    "WorkerLostError",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        ".collect": "Collector SyncDataCollector",
        "asking": "LostWorker LostWorkers WorkerLostError",
        "dispatch": "AsyncBatchedCollector",
        "distributed": "DistributedCollector DistributedSyncCollector",
        "multi": "AsyncCollector MultiAsyncCollector MultiCollector MultiSyncCollector",
        "ray": "RayCollector",
        "worker": "worker_of",
    },
    modules="distributed",
)
