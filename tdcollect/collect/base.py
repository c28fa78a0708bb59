"""TorchRL's collector with the means to run its loop on rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs.utils import exploration_type

from tdcollect import keys
from tdcollect._upstream.collector import CollectorState, rollout_with_gradients
from tdcollect.collect.arguments import missing_entries
from tdcollect.collect.fast.devices import Placement
from tdcollect.collect.fast.loop import ArrayEnv, array_env, collect_frames
from tdcollect.collect.fast.policy import Program
from tdcollect.collect.record import Record
from tdcollect.collect.step_dict import (
    Key,
    NotTensors,
    StepDict,
    flat,
    is_plain,
    shaped_like,
    stacked_lazily,
)
from tdcollect.envs.wrapper import nested

RUN_ON_ARRAYS = True
"""Whether collectors may run on arrays; their batches are the same either way."""


class RowsCollector(TorchRLCollector):
    """What the collector is made of below its options: its parts on rows, and batches of them."""

    _not_tensors: Sequence[Key] = ()  # what the policy has written that is no dense tensor
    _acted = False  # whether the row has the policy's outputs already
    _stale = False  # whether the slots must be reset before anything else is collected

    @property
    def _parent(self) -> CollectorState:
        """The private state of TorchRL's collector, which this one shares."""
        return CollectorState(self)

    @property
    def _array_env(self) -> ArrayEnv | str:
        """The env on arrays, or the reason why iteration collects as TorchRL does."""
        if self.interruptor is not None:
            return "an interruptor may end a batch early"
        if self.replay_buffer is not None and not self.extend_buffer:
            return "every step goes to the replay buffer by itself (extend_buffer=False)"
        return self._env_on_arrays

    @property
    def _env_on_arrays(self) -> ArrayEnv | str:
        if self._not_tensors:
            return f"the policy writes entries that are no dense tensors, {self._not_tensors}"
        return array_env(self.env) if RUN_ON_ARRAYS else "RUN_ON_ARRAYS is off"

    @property
    def _place(self) -> Placement | None:
        """Moves tensors between devices; None where all is on the CPU."""
        devices = (self.policy_device, self.env.device, self.storing_device)
        if all(device is None or device.type == "cpu" for device in devices):
            return None
        return Placement(*devices)

    def _go_on(self, steps: int, record: Record, random: bool, gradients: bool) -> TensorDictBase:
        """Go on for ``steps`` steps of every slot, on arrays or as TorchRL does: ``[N, steps]``."""
        env = self._env_on_arrays
        lower = self._lower(random, gradients)
        batch = None
        if isinstance(env, ArrayEnv):
            batch = self._on_arrays(env, lower, steps, record, gradients)
        if batch is None:
            with (
                self._settings(
                    frames_per_batch=steps,
                    exploration_type=exploration_type(),
                    init_random_frames=math.inf if random else 0,
                    reset_at_each_iter=False,
                    pre_collect_hook=None,
                    interruptor=None,
                ),
                self._parent.without_preallocation(),
                self._policy_on_rows(),
                record.watching(self),
            ):
                batch = rollout_with_gradients(self)
            if self._parent.preallocates:
                shaped_like(self._parent.preallocated, batch, cast=True)
        if gradients:
            self._parent.carrier = self._parent.carrier.detach()
        return batch

    def _on_arrays(
        self,
        env: ArrayEnv,
        lower: Callable[[StepDict], Program],
        steps: int,
        record: Record,
        gradients: bool = False,
    ) -> TensorDictBase | None:
        """Go on for ``steps`` steps of every slot: a batch ``[N, steps]``.

        None where the policy turns out to write something else than tensors: it has been called for
        the first step, and its outputs are in the row that TorchRL's loop is to begin with.
        """
        env, lower = record.timed(env, lower)
        if record.watch is not None:
            record.watch.begin(self._parent.carrier)
        try:
            columns = collect_frames(
                env,
                lower,
                self._parent.carrier,
                steps,
                self._parent.trajectory_ids.get_traj_and_increment if self.track_traj_ids else None,
                self._left_out,
                self._place,
                self._keep,
                whole=gradients,
                watch=None if record.watch is None else record.watch.stepped_rows,
            )
        except NotTensors as found:
            self._not_tensors, self._acted = found.entries, True
            return None
        record.take(columns, self.env.reward_keys)
        return self._parent.truncate_last_step(
            self._assemble(columns, (*self.env.batch_size, steps))
        )

    def _warn_of_lost(self, entries: Iterable[Key]) -> None:
        """Warn of entries that the parent's buffers, made before they came, do not take."""
        held = self._parent.preallocated.keys(True) if self._parent.preallocates else entries
        lost = [key for key in entries if key not in held]
        if lost:
            warnings.warn(
                f"the policy's entries {lost} are no dense tensors, and are not in the batches: "
                "TorchRL's buffers do not hold them; pass use_buffers=False to keep them",
                stacklevel=2,
            )

    def _keep(self, carrier: TensorDictBase, stale: bool) -> None:
        self._parent.carrier, self._stale = carrier, stale

    @property
    def _left_out(self) -> frozenset[Key]:
        left_out = frozenset(self._parent.left_out_of_next)
        return left_out if self.track_traj_ids else left_out | {keys.TRAJ_IDS}

    @property
    def _template(self) -> TensorDictBase:
        """Shows the devices and empty entries of the parent's batch, and dtypes of its buffers."""
        return self._parent.preallocated if self._parent.preallocates else self._parent.carrier

    def _assemble(self, columns: dict[Key, torch.Tensor], shape: tuple[int, ...]) -> TensorDictBase:
        """The entries of a batch as the TensorDict that the parent makes of them."""
        batch = nested(columns.items(), shape, self.storing_device or self._template.device)
        shaped_like(self._template, batch, cast=self._parent.preallocates)
        if (
            self._parent.preallocates
            or self.replay_buffer is None
            or self._parent.ignores_replay_buffer
        ):
            batch.refine_names(..., keys.TIME)
        return batch

    def _program(
        self,
        rows: StepDict,
        checked: bool = False,
        policy: Callable[..., Any] | None = None,
        whole: str | None = None,
    ) -> Program:
        """The policy, or another in its place, on rows."""
        compiled = self.compiled_policy or self.cudagraphed_policy
        cast = self._parent.casts_to_policy_device and self.policy_device is not None
        return Program(
            policy or self._parent.wrapped_policy,
            rows,
            self.env.batch_size,
            self.policy_device if cast else self._parent.carrier.device,
            self._parent.policy_output_keys if compiled and policy is None else None,
            checked,
            whole=whole,
        )

    @property
    def _stacked_lazily(self) -> bool:
        """True if entries of TorchRL's row may not be one tensor each."""
        return type(self._parent.carrier) is not TensorDict or stacked_lazily(self._parent.carrier)

    @contextmanager
    def _policy_on_rows(self) -> Iterator[None]:
        """Let the parent's loop call the policy without the bookkeeping between its modules."""
        policy = self._parent.wrapped_policy
        if self._acted:
            self._acted = False

            def has_acted(tensordict: TensorDictBase) -> TensorDictBase:
                self._parent.policy_call = policy
                return tensordict

            self._parent.policy_call = has_acted
            try:
                yield
            finally:
                self._parent.policy_call = policy
            return
        known = isinstance(policy, TensorDictModuleBase) and not self._stacked_lazily
        if not known or self.compiled_policy or self.cudagraphed_policy:
            yield
            return
        program: Program | None = None

        def run(tensordict: TensorDictBase) -> TensorDictBase:
            nonlocal program
            rows = flat(tensordict)
            given = dict(rows)
            if program is None:
                self._parent.policy_call = policy
                program = self._program(rows, checked=True)
                self._parent.policy_call = run if program.straight else policy
            if not program.straight:
                try:
                    return policy(tensordict)
                except KeyError as error:
                    missing = missing_entries(policy, rows)
                    raise error if missing is None else KeyError(missing) from error
            program(rows)
            for key, value in rows.items():
                if given.get(key) is not value:
                    tensordict.set(key, value)
                    if not is_plain(value):  # the next rows could not have it
                        self._parent.policy_call = policy
                        self._warn_of_lost([key])
            return tensordict

        self._parent.policy_call = run
        try:
            yield
        finally:
            self._parent.policy_call = policy

    def _shrink_buffer(self) -> None:
        """Let go of the memory of the parent's preallocated batch, which arrays do without."""
        if self._parent.preallocates and self._parent.preallocated.is_contiguous():
            shape = self._parent.preallocated.shape
            one = self._parent.preallocated[..., :1].clone()
            self._parent.preallocated = one.expand(shape).refine_names(..., keys.TIME)

    def _restore_buffer(self) -> None:
        """Give the parent's preallocated batch memory of its own again."""
        if self._parent.preallocates and not self._parent.preallocated.is_contiguous():
            self._parent.preallocated = self._parent.preallocated.clone()

    def _lower(self, random: bool, gradients: bool) -> Callable[[StepDict], Program]:
        # Gradients are those of the distributions' own classes.
        policy = self.env.rand_action if random else None
        return partial(self._program, checked=gradients, policy=policy)

    @contextmanager
    def _settings(self, **settings: Any) -> Iterator[None]:
        """Other settings for the parent's loop, for a while."""
        before = {name: getattr(self, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)
