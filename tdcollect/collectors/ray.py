"""TorchRL's ``RayCollector`` with tdcollect's collector in its actors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from ray import exceptions
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.collectors.distributed import RayCollector as TorchRLRayCollector

from tdcollect import ray_cluster
from tdcollect._upstream.collectors import RayState
from tdcollect._upstream.others import state_of
from tdcollect.cleanup import ended_on_error
from tdcollect.collect import Collector
from tdcollect.collect.arguments import check_known
from tdcollect.collect.collector import extends
from tdcollect.collectors import asking
from tdcollect.collectors.asking import class_of_collectors
from tdcollect.display import one_line

_LOSSES = (
    "ActorUnschedulable NodeDied ObjectLost OutOfMemory RayActor RuntimeEnvSetup WorkerCrashed"
)
_GONE = tuple(getattr(exceptions, f"{kind}Error") for kind in _LOSSES.split())


class RayCollector(asking.Asking, TorchRLRayCollector):
    """TorchRL's ``RayCollector`` with tdcollect's collector in its actors.

    Args:
        create_env_fn: a function that makes an env, one per worker; or one, with
            ``num_collectors``.
        policy: the policy; each worker has a copy.
        **kwargs: as the parent has them. ``collector_class="single"``, the default, is
            :class:`tdcollect.Collector`. Without ``ray_init_config`` and a Ray that runs, a quiet
            one without a dashboard starts, and stops with the last collector that uses it.

    Attributes:
        stats: :class:`tdcollect.collect.Statistics`, merged over the workers; a call gives
            TorchRL's dict of counters.

    Raises:
        WorkerLostError: where the collector waits for a worker that is lost; the others are ended.

    Examples:
        >>> make = partial(make_env, "CartPole-v1", num_envs=8)
        >>> collector = RayCollector(
        ...     [make, make], policy, frames_per_batch=1024, total_frames=102_400, sync=True
        ... )
        >>> collector.set_seed(0)
        >>> for batch in collector:
        ...     print(batch.shape)  # [2, 8, 64]
    """

    _torchrl = property(RayState)  # the private state of the parent

    @extends(TorchRLRayCollector.__init__)
    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any = None,
        **kwargs: Any,
    ):
        check_known(type(self), kwargs)
        senders = (kwargs.get(name) for name in ("weight_sync_schemes", "weight_updater"))
        self._sends = not any(senders) and getattr(policy, "service_backend", None) != "ray"
        self._version = 0
        self._failure: BaseException | None = None
        self._seedings = 0
        self._changing = threading.RLock()  # weights are sent, or seeds
        self._closed = False
        envs: Any = create_env_fn
        if isinstance(envs, Sequence):
            count = len(envs := list(envs))
        else:
            count = kwargs["num_collectors"] = kwargs.get("num_collectors") or 1
        kwargs["collector_class"] = kind = class_of_collectors(kwargs.get("collector_class"))
        # The parent writes into these, and would share one dict between workers.
        options = kwargs.get("collector_kwargs") or {}
        options = [options] * count if isinstance(options, Mapping) else options
        kwargs["collector_kwargs"] = [{**own} for own in options]
        self._one_env = isinstance(kind, type) and issubclass(kind, TorchRLCollector)
        self._connection = "" if kwargs.get("ray_init_config") else ray_cluster.connect(None)
        with ended_on_error(self.shutdown):
            super().__init__(envs, policy, **kwargs)
        if kwargs.get("total_frames", -1) < 0:
            self.total_frames = float("inf")  # the parent would collect nothing
        if self._sends:
            self._torchrl.connected = True
        if isinstance(kind, type) and issubclass(kind, Collector):
            self._learn_facts()

    def __repr__(self) -> str:
        if self._closed:
            return one_line(self, "shut down")
        sync = f"sync={self._torchrl.sync}"
        return one_line(self, f"{self.num_collectors} workers", sync)

    # --------------------------------------------------------------------------------- workers

    def add_collectors(
        self,
        create_env_fn: Sequence[Any],
        num_envs: int,
        policy: Any,
        collector_kwargs: Sequence[Mapping[str, Any]],
        remote_configs: Sequence[Any],
    ) -> None:
        """Start workers; see the parent's method."""
        if self._one_env:
            collector_kwargs = [
                {**options, "traj_pool": asking.TrajectoryIds(worker)}
                for worker, options in enumerate(collector_kwargs)
            ]
        super().add_collectors(create_env_fn, num_envs, policy, collector_kwargs, remote_configs)

    def _ask(self, function: Callable[..., Any], calls: asking.Calls) -> list[Any]:
        self._check_open()
        tasks = {
            worker: self.remote_collectors[worker].__ray_call__.remote(function, *arguments)
            for worker, arguments in calls.items()
        }
        return [self._result(worker, task) for worker, task in tasks.items()]

    def _result(self, worker: int, task: Any) -> Any:
        """The result of a task; if the worker is lost, all are ended and an error says so."""
        try:
            return ray.get(task)
        except _GONE as error:
            state = state_of(self.remote_collectors[worker])
            reason = " ".join((state.reason or str(error)).split())
            reason = reason.partition(" Some common causes")[0]  # which Ray lists at length
            process = f"{state.pid} on {state.host}"
            lost = self._lost_worker(worker, process, f"was lost: {reason}")
            if threading.current_thread() is self._torchrl.thread:
                self.stop_remote_collectors()
            else:
                self.shutdown()
            raise asking.WorkerLostError(lost) from error

    def _check_open(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._closed or not self.remote_collectors:
            raise RuntimeError("the collector is shut down; make a new one to collect")

    # ------------------------------------------------------------------------------ collection

    def _sync_iterator(self) -> Iterator[TensorDictBase | None]:
        torchrl = self._torchrl
        while self.collected_frames < self.total_frames and not torchrl.stop.is_set():
            if self.update_after_each_batch or self.max_weight_update_interval > -1:
                self.update_policy_weights_()
            pending = {actor.next.remote(): i for i, actor in enumerate(self.remote_collectors)}
            batches: dict[int, Any] = {}
            while pending:
                worker, batch = self._first_of(pending)
                batches[worker] = batch
            parts = [batches[worker] for worker in range(self.num_workers)]
            if parts[0] is None:  # the workers have written to the replay buffer themselves
                self.collected_frames += self.frames_per_batch
                yield None
                continue
            # An env without slots has batches of one dim, the time; they are put end to end.
            batch = torch.stack(parts) if parts[0].ndim else torch.cat(parts)
            self.collected_frames += batch.numel()
            yield batch
        if torchrl.thread is None:
            self.shutdown()

    def _async_iterator(self) -> Iterator[TensorDictBase | None]:
        torchrl = self._torchrl
        pending = {actor.next.remote(): i for i, actor in enumerate(self.remote_collectors)}
        seedings = [self._seedings] * self.num_collectors
        while self.collected_frames < self.total_frames and not torchrl.stop.is_set():
            worker, batch = self._first_of(pending)
            if seedings[worker] == self._seedings:
                self.collected_frames += torchrl.frames_per_worker
                yield batch
                if self.update_after_each_batch or self.max_weight_update_interval > -1:
                    self.update_policy_weights_(worker_ids=worker)
            # Else the batch was begun before the envs were seeded.
            seedings[worker] = self._seedings
            pending[self.remote_collectors[worker].next.remote()] = worker
        if pending:
            ray.wait(list(pending), num_returns=len(pending))
        if torchrl.thread is None:
            self.shutdown()

    def _first_of(self, pending: dict[Any, int]) -> tuple[int, Any]:
        """Wait for the first of some batches, and take it out."""
        (task,), _ = ray.wait(list(pending), num_returns=1)
        worker = pending.pop(task)
        return worker, self._result(worker, task)

    def _run_collection_loop(self) -> None:
        try:
            super()._run_collection_loop()
        except BaseException as error:
            self._failure = error  # the next call of another thread raises it

    # ------------------------------------------------------------------------ weights and seeds

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Send weights to the workers; see the parent's method.

        They go by Ray's object store, once per machine. Where the parent sends them over
        connections of its own, a worker that dies while it does costs a minute.
        """
        chosen_by = {"worker_ids": worker_ids, "model_id": model_id, "weights_dict": weights_dict}
        with self._changing:
            self._check_open()
            if (
                not self._sends
                or self._torchrl.learner_sends
                or model_id not in (None, "policy")
                or "policy_weights" in kwargs
            ):
                super().update_policy_weights_(policy_or_weights, **chosen_by, **kwargs)
                return
            if weights_dict is not None:
                (policy_or_weights,) = weights_dict.values()
            weights = _portable(self.policy if policy_or_weights is None else policy_or_weights)
            self._version += 1
            weights = ray.put(weights)
            chosen = [worker_ids] if isinstance(worker_ids, int) else worker_ids
            workers = range(self.num_collectors) if chosen is None else chosen
            self._ask(asking.take_weights, dict.fromkeys(workers, (weights, self._version)))

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed all workers and restart their envs.

        Slot i of worker w starts from ``slot_seed(seed, w N + i)`` with its next row; the workers'
        torch, NumPy and Python are seeded too. Batches that are begun are dropped.

        Args:
            seed: the seed of worker 0's slot 0.
            static_seed: as the parent has it.

        Returns:
            The seed for the next env, as TorchRL computes it.
        """
        with self._changing:
            self._check_open()
            self._seedings += 1
            return self._seed_workers(seed, static_seed)

    # ------------------------------------------------------------------------------------- end

    def shutdown(self, timeout: float | None = None, shutdown_ray: bool = False) -> None:
        """Stop the workers, and the Ray that was started for them. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._torchrl.actors is not None:
            super().shutdown(timeout, shutdown_ray)
        if self._connection:
            ray_cluster.disconnect(self._connection)


def _portable(weights: Any) -> Any:
    """Weights as tensors on the CPU, which every worker can load."""
    if isinstance(weights, nn.Module):
        weights = TensorDict.from_module(weights).data
    if isinstance(weights, TensorDictBase):
        return weights.to("cpu")
    if isinstance(weights, Mapping):
        return {name: value.detach().cpu() for name, value in weights.items()}
    return weights
