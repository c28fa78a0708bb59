"""TorchRL's collector on torch's RPC, with tdcollect's inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.distributed import rpc
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.collectors.distributed import RPCCollector as TorchRLRPCCollector

from tdcollect.collect import Collector
from tdcollect.collect.construction import extends
from tdcollect.collectors.distributed_workers import DistributedWorkers


class RPCCollector(DistributedWorkers, TorchRLRPCCollector):
    """TorchRL's ``RPCCollector`` with tdcollect's collector in its workers.

    A worker that dies ends the collection with a :class:`WorkerLostError` that names it.

    Args:
        create_env_fn: functions that make envs, one per worker.
        policy: the policy; each worker has a copy.
        **kwargs: as the parent has them. ``collector_class="single"``, the default, is
            :class:`tdcollect.Collector`.
    """

    @extends(TorchRLRPCCollector.__init__)
    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any):
        envs = self._prepare(create_env_fn, kwargs, Collector)
        try:
            super().__init__(envs, policy, **kwargs)
        except BaseException as error:
            self._end_construction(error)
            raise
        if issubclass(self.collector_class, TorchRLCollector):
            self._know()
        if self.total_frames < 0:
            self.total_frames = math.inf  # the parent would collect nothing

    def iterator(self) -> Iterator[TensorDictBase]:
        """Iterate over batches; see the parent's method."""
        try:
            yield from super().iterator()
        except RuntimeError as error:
            self._raise_if_lost(error)
            raise

    def _next_sync_rpc(self) -> TensorDictBase:
        # The parent puts batches in the order in which they come, and adds to the ids of rows.
        if self.update_after_each_batch:
            self.update_policy_weights_()
        tasks = [collector.rpc_async().next() for collector in self.collector_rrefs]
        data: TensorDictBase = torch.cat([task.wait() for task in tasks])
        self._torchrl.count_frames(data.numel())
        return data

    def _ask(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        given = zip(*arguments, strict=True) if arguments else [()] * self.num_workers
        try:
            tasks = [
                rpc.rpc_async(info, _with_local, args=(function, collector, *values))
                for info, collector, values in zip(
                    self.collector_infos, self.collector_rrefs, given, strict=True
                )
            ]
            return [task.wait() for task in tasks]
        except RuntimeError as error:
            self._raise_if_lost(error)
            raise

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed all workers and restart their envs; see :meth:`DistributedCollector.set_seed`."""
        begun = [worker for task, worker in self.futures if task.wait() is not None]
        self.futures.clear()
        following = self._seed(seed, static_seed)
        for worker in begun:
            self.futures.append((self.collector_rrefs[worker].rpc_async().next(), worker))
        return following

    def _end(self) -> None:
        with suppress(RuntimeError):
            rpc.shutdown(graceful=False)
        super()._end()


def _with_local(function: Callable[..., Any], collector: Any, *arguments: Any) -> Any:
    """Call a function with the collector that a reference of RPC stands for, where it is."""
    return function(collector.local_value(), *arguments)
