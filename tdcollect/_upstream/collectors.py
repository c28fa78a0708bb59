"""Private names of TorchRL's collectors: in this process, with workers, on Ray."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Lock, RLock
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector, MultiCollector
from torchrl.data import ReplayBuffer

from tdcollect._upstream import Alias, View
from tdcollect._upstream.names import private

CollectorMeta: Any = type(Collector)
MultiCollectorMeta: Any = type(MultiCollector)

_META = "torchrl.collectors:Collector.__class__."
service_backend = private("torchrl._comm.backends:_get_service_backend")
backend_of_alias = private("torchrl._comm.backends:normalize_service_backend")
normalize_env_functions = private(_META + "_normalize_direct_env_fn")

one_env_each = private(_META + "_normalize_env_fns")
"""``(args, kwargs, num_collectors)`` of several collectors: a list of one env per collector."""

drop_generic_defaults = private(_META + "_drop_inapplicable_defaults")
"""Takes those of ``Collector``'s defaults out of kwargs that a class has others for."""

rollout_with_gradients = inspect.unwrap(Collector.rollout)
"""The rollout of TorchRL's collector without the ``no_grad`` that it is decorated with."""


class CollectorState(View):
    """The private state and methods of TorchRL's collector."""

    carrier = Alias[TensorDictBase]("_carrier")
    preallocates = Alias[bool]("_use_buffers")
    preallocated = Alias[TensorDictBase]("_final_rollout")
    left_out_of_next = Alias[Sequence[Any]]("_compact_next_keys")
    """The entries that ``compact_obs`` leaves out of batches."""
    ignores_replay_buffer = Alias[bool]("_ignore_rb")
    """True if batches are yielded although there is a replay buffer."""
    truncate_last_step = Alias[Callable[[TensorDictBase], TensorDictBase]]("_maybe_set_truncated")
    """Marks the last step of a batch as truncated, where ``set_truncated`` asks for it."""

    wrapped_policy = Alias[Any]("_wrapped_policy")
    """The policy as the collector calls it on TensorDicts, compiled if it is to be."""
    uncompiled_policy = Alias[Any]("_wrapped_policy_uncompiled")
    policy_call = Alias[Callable[[TensorDictBase], Any]]("_wrapped_policy_maybe_compiled")
    """The callable that the loop of ``rollout`` looks up and calls at each step."""
    policy_output_keys = Alias[Sequence[Any]]("_policy_output_keys")
    casts_to_policy_device = Alias[bool]("_cast_to_policy_device")
    stateful_policy = Alias[Any]("_policy_w_state_dict", None)
    """The policy whose weights the state dict holds; None where it has none."""
    registers_transforms = Alias[bool | None]("_auto_register_policy_transforms")

    frames = Alias[int]("_frames")
    iteration = Alias[int]("_iter")
    """The index of the latest batch; -1 before the first."""
    count_frames = Alias[Callable[[int], Any]]("_increment_frames")
    """Adds to :attr:`frames`, and closes the env where they reach ``total_frames``."""
    count_stepped = Alias[Callable[[int], Any]]("_record_stepped_frames", lambda rows: None)
    """Counts rows as they are stepped; since TorchRL 0.15."""
    load_progress = Alias[Callable[[Any], None]]("_load_progress_state_dict", lambda counts: None)
    """Goes on from saved counts of rows, or from none (None); since TorchRL 0.15."""
    acts_randomly = Alias[Callable[[], bool]]("_should_use_random_frames")
    trajectory_ids = Alias[Any]("_traj_pool")
    """The counter of trajectory ids: ``get_traj_and_increment(count)``, and a state dict."""
    start_new_trajectories = Alias[Callable[[], None]]("_start_new_trajectories")


class WorkersState(View):
    frames = Alias[int]("_frames")
    iteration = Alias[int]("_iter")
    acknowledged_version = Alias[Any]("_acknowledged_policy_version", None)
    """The policy version that all workers have; since TorchRL 0.15."""
    flush_trajectories = Alias[Callable[[], None]]("_flush_trajectory_assembly")

    def answer(self, worker: int) -> tuple[Any, str]:
        """The next message of a worker: an answer, and its name; waits for it."""
        return self._of._recv_and_check(self._of.pipes[worker], worker_idx=worker)

    def end_weight_sync(self) -> None:
        """End what sends weights: left to the interpreter's end, it would never come to one."""
        for scheme in (getattr(self._of, "_weight_sync_schemes", None) or {}).values():
            scheme.shutdown()

    def release_update(self, worker: int) -> None:
        """Stop waiting for a worker's acknowledgement of new weights."""
        for scheme in (self._of._weight_sync_schemes or {}).values():
            waited_for = getattr(scheme, "_ack_queues", {}).get(worker)
            if waited_for is not None:
                waited_for.put("updated")


class RayState(View):
    actors = Alias[list[Any] | None]("_remote_collectors", None)
    """Of the workers; None until the constructor begins to start them."""
    thread = Alias[threading.Thread | None]("_collection_thread")
    stop = Alias[threading.Event]("_stop_event")
    frames_per_worker = Alias[int]("_frames_per_batch_corrected")
    sync = Alias[bool]("_sync")
    learner_sends = Alias[bool]("_external_weight_sender", False)
    """True if a learner on Ray sends weights to the workers itself."""
    connected = Alias[bool]("_weight_sync_initialized")
    """Set, no update of weights connects the schemes first, and no iteration warns of it."""


def new_ids_of(trajectory_ids: Any) -> Callable[[int], np.ndarray[Any, Any]]:
    """As the counter's ``get_traj_and_increment``; in NumPy, a tenth of its time."""
    counter = getattr(trajectory_ids, "_traj_id", None)
    if not isinstance(counter, torch.Tensor):
        return lambda count: trajectory_ids.get_traj_and_increment(count).cpu().numpy()
    following = counter.numpy()

    def new_ids(count: int) -> np.ndarray[Any, Any]:
        with trajectory_ids.lock:
            first = int(following)
            following[...] = first + count
        return np.arange(first, first + count)

    return new_ids


def readers(queues: Iterable[Any]) -> list[Any]:
    """The ends of multiprocessing's queues that can be waited for."""
    return [queue._reader for queue in queues]


def locks_between(buffer: Any, queue: Any) -> list[Any]:
    """The locks that processes share in order to write to a replay buffer, and to a queue."""
    parts = [buffer, buffer.writer, buffer.storage] if isinstance(buffer, ReplayBuffer) else []
    values = [value for part in (*parts, queue) for value in vars(part).values()]
    locks = [v.get_lock() if isinstance(v, SynchronizedBase) else v for v in values]
    return [lock for lock in locks if isinstance(lock, (Lock, RLock))]


def kept_by_others(lock: Any, seconds: float) -> bool:
    """Return whether another process still holds a lock after ``seconds``."""
    if lock.acquire(timeout=seconds):
        lock.release()
        return False
    return not lock._semlock._count()
