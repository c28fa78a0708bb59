"""TorchRL's collectors on torch.distributed, with tdcollect's inside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors.distributed import DistributedCollector as TorchRLDistributedCollector
from torchrl.collectors.distributed import (
    DistributedSyncCollector as TorchRLDistributedSyncCollector,
)
from torchrl.collectors.utils import split_trajectories

from tdcollect.collect.construction import extends
from tdcollect.collectors import on_worker
from tdcollect.collectors.distributed_workers import DistributedWorkers
from tdcollect.keys import TRAJ_IDS

_PATIENCE = 60.0
"""Seconds for a worker with workers of its own, which start and end interpreters, to answer."""


class DistributedCollector(DistributedWorkers, TorchRLDistributedCollector):
    """TorchRL's ``DistributedCollector`` with tdcollect's collector in its workers.

    A worker that dies ends the collection with a :class:`WorkerLostError` that names it.

    Args:
        create_env_fn: functions that make envs, one per worker.
        policy: the policy; each worker has a copy.
        **kwargs: as the parent has them. ``collector_class="single"``, the default, is
            :class:`tdcollect.Collector` with a connection to this process, over which
            :meth:`set_seed` goes; a class of yours derives from :class:`LinkedCollector`.
    """

    @extends(TorchRLDistributedCollector.__init__)
    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any):
        envs = self._link(create_env_fn, kwargs, begins_when_told=False)
        self._seedings = 0
        try:
            super().__init__(envs, policy, **kwargs)
            if self._links is None:
                self._torchrl.wait_at_most(_PATIENCE)
            self._accept()
        except BaseException as error:
            self._end_construction(error)
            raise
        if self.total_frames < 0:
            self.total_frames = math.inf  # the parent would collect nothing

    def _make_container(self) -> None:
        # The parent makes a collector of TorchRL's with the options of worker 0.
        options = self.collector_kwargs
        self.collector_kwargs = [{**options[0]}]
        self.collector_kwargs[0].pop("link", None)
        super()._make_container()
        self.collector_kwargs = options

    def _iterator_dist(self) -> Iterator[TensorDictBase]:
        try:
            yield from super()._iterator_dist()
        except (RuntimeError, EOFError) as error:
            self._raise_if_lost(error)
            raise

    def _next_sync(self, total_frames: int) -> tuple[TensorDictBase, int]:
        data, total_frames = super()._next_sync(total_frames)
        if TRAJ_IDS in data.keys(True):
            # The parent adds to the ids what makes them collide, and change from batch to batch.
            data[TRAJ_IDS] = self._torchrl.received[TRAJ_IDS].clone()
        if self._links is not None:
            for worker in range(self.num_workers):
                self._links.seedings_of_batch(worker)
        return data, total_frames

    def _next_async(
        self, total_frames: int, trackers: list[Any]
    ) -> tuple[TensorDictBase, int, int]:
        while True:
            if self._links is not None:
                self._links.first_batch()  # the parent turns without a pause
            data, total, worker = super()._next_async(total_frames, trackers)
            if self._links is None or self._links.seedings_of_batch(worker) == self._seedings:
                return data, total, worker
            self._torchrl.ask_for_batch(worker, trackers)  # it was begun before the seed

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed all workers and restart their envs.

        Slot i of worker w starts from seed ``seed + wN + i`` with its next row; torch's, NumPy's
        and Python's generators in the workers are seeded too. Batches that are begun are dropped.

        Returns:
            The seed for the next env, as TorchRL computes it.

        Raises:
            ValueError: for envs of other makers than :func:`tdcollect.make_env`.
        """
        following = self._seed(seed, static_seed)
        self._ask(on_worker.counted)
        self._seedings += 1
        return following


class DistributedSyncCollector(DistributedWorkers, TorchRLDistributedSyncCollector):
    """TorchRL's ``DistributedSyncCollector`` with tdcollect's collector in its workers.

    A worker that dies ends the collection with a :class:`WorkerLostError` that names it.

    Args:
        create_env_fn: functions that make envs, one per worker.
        policy: the policy; each worker has a copy.
        **kwargs: as :class:`DistributedCollector` has them, and the parent.
    """

    @extends(TorchRLDistributedSyncCollector.__init__)
    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any):
        if kwargs.get("total_frames", -1) < 0:
            raise ValueError(
                "expected total_frames, which each worker takes its share of, got none; pass it"
            )
        envs = self._link(create_env_fn, kwargs, begins_when_told=True)
        self._begun = False
        try:
            super().__init__(envs, policy, **kwargs)
            self._accept()
        except BaseException as error:
            self._end_construction(error)
            raise
        # The parent changes the ids of batches before it hands them on to these.
        self._afterwards = self.split_trajs, self.postproc
        self.split_trajs, self.postproc = False, self._with_own_ids

    def _make_container(self) -> None:
        super()._make_container()
        self._torchrl.separate()

    def _with_own_ids(self, data: TensorDictBase) -> Any:
        if TRAJ_IDS in data.keys(True):
            data[TRAJ_IDS] = self._torchrl.received[TRAJ_IDS].clone()
        splits, postproc = self._afterwards
        data = split_trajectories(data) if splits else data
        return data if postproc is None else postproc(data)

    def _iterator_dist(self) -> Iterator[TensorDictBase]:
        try:
            self._begin()
            yield from super()._iterator_dist()
        except (RuntimeError, EOFError) as error:
            self._raise_if_lost(error)
            raise

    def _begin(self) -> None:
        """Let workers begin."""
        if self._links is not None and not self._begun:
            self._links.begin()
        self._begun = True

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed all workers before the first batch; see :meth:`DistributedCollector.set_seed`.

        Raises:
            RuntimeError: after the first batch: workers are ahead of what this process has seen.
        """
        if self._begun:
            raise RuntimeError(
                "expected set_seed() before the first batch, got it after; workers collect ahead, "
                "so seed a new collector"
            )
        return self._seed(seed, static_seed)

    def _any_failed(self) -> bool:
        return True  # workers have no message for the end: they would send all their batches
