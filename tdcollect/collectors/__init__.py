"""TorchRL's collectors on several processes and machines, with tdcollect's in each worker.

``AsyncBatchedCollector``, ``DistributedCollector`` and ``DistributedSyncCollector`` are TorchRL's
own classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from torchrl.collectors import AsyncBatchedCollector as AsyncBatchedCollector
    from torchrl.collectors.distributed import DistributedCollector as DistributedCollector
    from torchrl.collectors.distributed import DistributedSyncCollector as DistributedSyncCollector

    from tdcollect.collect import Collector as Collector
    from tdcollect.collect import SyncDataCollector as SyncDataCollector
    from tdcollect.collectors.asking import LostWorker as LostWorker
    from tdcollect.collectors.asking import WorkerLostError as WorkerLostError
    from tdcollect.collectors.asking import worker_of as worker_of
    from tdcollect.collectors.multi import AsyncCollector as AsyncCollector
    from tdcollect.collectors.multi import MultiAsyncCollector as MultiAsyncCollector
    from tdcollect.collectors.multi import MultiCollector as MultiCollector
    from tdcollect.collectors.multi import MultiSyncCollector as MultiSyncCollector
    from tdcollect.collectors.ray import RayCollector as RayCollector

__getattr__, __dir__, __all__ = lazy(__name__, inner="worker_of")
