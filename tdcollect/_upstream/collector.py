"""Private names of TorchRL's collector."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDictBase
from torchrl._comm.backends import _get_service_backend as service_backend
from torchrl._comm.backends import normalize_service_backend as backend_of_alias
from torchrl.collectors import Collector
from torchrl.collectors._single import _CollectorMeta as CollectorMeta

rollout_with_gradients = inspect.unwrap(Collector.rollout)
"""The rollout of TorchRL's collector without the ``no_grad`` that it is decorated with."""


def normalize_env_functions(
    cls: CollectorMeta, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a collector in this process: one function that makes an env, not a list."""
    return cls._normalize_direct_env_fn(args, kwargs)


class CollectorState:
    """The private state and methods of TorchRL's collector, under plain names.

    A view: it holds the collector and nothing else, and is made where it is needed. (Kept on the
    collector, it would keep the collector alive.)

    Args:
        collector: TorchRL's, or a subclass of it.
    """

    __slots__ = ("_of",)

    def __init__(self, collector: Collector):
        self._of = collector

    # ------------------------------------------------------------------------------ rows, batches

    @property
    def carrier(self) -> TensorDictBase:
        """The step to begin with: one row per slot."""
        return self._of._carrier

    @carrier.setter
    def carrier(self, row: TensorDictBase) -> None:
        self._of._carrier = row

    @property
    def preallocates(self) -> bool:
        """True if batches are stacked into :attr:`preallocated`."""
        return self._of._use_buffers

    @preallocates.setter
    def preallocates(self, wanted: bool) -> None:
        self._of._use_buffers = wanted

    @property
    def preallocated(self) -> TensorDictBase:
        """The TensorDict that batches are stacked into; only where :attr:`preallocates`."""
        return self._of._final_rollout

    @preallocated.setter
    def preallocated(self, batch: TensorDictBase) -> None:
        self._of._final_rollout = batch

    @contextmanager
    def without_preallocation(self) -> Iterator[None]:
        """Have each batch stacked into memory of its own, for a while."""
        before = self._of._use_buffers
        self._of._use_buffers = False
        try:
            yield
        finally:
            self._of._use_buffers = before

    @property
    def left_out_of_next(self) -> Sequence[Any]:
        """The entries that ``compact_obs`` leaves out of batches."""
        return self._of._compact_next_keys

    @property
    def ignores_replay_buffer(self) -> bool:
        """True if batches are yielded although there is a replay buffer."""
        return self._of._ignore_rb

    def truncate_last_step(self, batch: TensorDictBase) -> TensorDictBase:
        """Mark the last step of a batch as truncated, where ``set_truncated`` asks for it."""
        return self._of._maybe_set_truncated(batch)

    # ------------------------------------------------------------------------------------- policy

    @property
    def wrapped_policy(self) -> Any:
        """The policy as the collector calls it on TensorDicts, compiled if it is to be."""
        return self._of._wrapped_policy

    @property
    def uncompiled_policy(self) -> Any:
        """The policy as the collector calls it on TensorDicts, before it is compiled."""
        return self._of._wrapped_policy_uncompiled

    @property
    def policy_call(self) -> Any:
        """The callable that the loop of ``rollout`` looks up and calls at each step."""
        return self._of._wrapped_policy_maybe_compiled

    @policy_call.setter
    def policy_call(self, call: Callable[[TensorDictBase], Any]) -> None:
        self._of._wrapped_policy_maybe_compiled = call

    @property
    def policy_output_keys(self) -> Sequence[Any]:
        """The entries that the loop takes over from the output of a compiled policy."""
        return self._of._policy_output_keys

    @property
    def casts_to_policy_device(self) -> bool:
        """True if steps are moved to the policy's device."""
        return self._of._cast_to_policy_device

    @property
    def stateful_policy(self) -> Any:
        """The policy whose weights the state dict holds; None where it has none."""
        return getattr(self._of, "_policy_w_state_dict", None)

    @property
    def registers_transforms(self) -> bool | None:
        """The argument ``auto_register_policy_transforms``."""
        return self._of._auto_register_policy_transforms

    @registers_transforms.setter
    def registers_transforms(self, registers: bool) -> None:
        self._of._auto_register_policy_transforms = registers

    # --------------------------------------------------------------------------- frames, episodes

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

    def count_frames(self, frames: int) -> None:
        """Add to :attr:`frames`, and close the env where they reach ``total_frames``."""
        self._of._increment_frames(frames)

    def acts_randomly(self) -> bool:
        """Tell whether ``init_random_frames`` has the next batch act at random."""
        return self._of._should_use_random_frames()

    @property
    def trajectory_ids(self) -> Any:
        """The counter of trajectory ids: ``get_traj_and_increment(count)``, and a state dict."""
        return self._of._traj_pool

    def start_new_trajectories(self) -> None:
        """Give every slot of :attr:`carrier` a new trajectory id."""
        self._of._start_new_trajectories()


__all__ = [
    "CollectorMeta",
    "CollectorState",
    "backend_of_alias",
    "normalize_env_functions",
    "rollout_with_gradients",
    "service_backend",
]
