"""The collector: TorchRL's, with the same constructor, methods and batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, GymWrapper, TransformedEnv
from torchrl.envs.utils import ExplorationType, RandomPolicy, set_exploration_type

from tdcollect import keys
from tdcollect._upstream import CollectorMeta, service_backend
from tdcollect.collect.episodes import EpisodeLoop, Start
from tdcollect.collect.explain import Explanation, Part
from tdcollect.collect.gather import gather
from tdcollect.collect.loop import ArrayEnv, array_env, collect_frames, forgotten_entries
from tdcollect.collect.placement import Placement
from tdcollect.collect.policy import Program, unknown_class
from tdcollect.collect.rows import Key, Rows, flat, shaped_like
from tdcollect.collect.transforms import transforms_of
from tdcollect.collect.whole import WholeEnv
from tdcollect.envs.wrapper import GymnasiumEnv, nested
from tdcollect.keys import IS_INIT, TIME
from tdcollect.seeding import slot_seeds
from tdcollect.trajectories.split import LAYOUTS, Layout, split_trajectories

_BLOCK_STEPS = 64

RUN_ON_ARRAYS = True
"""Whether collectors may run on arrays; their batches are the same either way."""


class _Dispatch(CollectorMeta):
    """Send ``backend=`` and ``num_collectors=`` where TorchRL's own constructor sends them.

    TorchRL dispatches for its own class only. Here the workers of every other backend run
    tdcollect's collector.
    """

    def __call__(
        cls,
        *args: Any,
        backend: str | None = None,
        backend_options: dict[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        _check_frames_per_batch(kwargs)
        chosen = backend or service_backend()
        if chosen is None:
            chosen = "direct" if num_collectors is None else "process"
        if chosen != "direct":
            if cls is not Collector:
                raise TypeError(
                    f"backend, num_collectors and sync are for Collector itself, not for its "
                    f"subclass {cls.__name__}; pass collector_class={cls.__name__} in the "
                    "backend_options of Collector(..., backend=...)"
                )
            options = {"collector_class": cls, **(backend_options or {})}
            return TorchRLCollector(
                *args,
                backend=backend,
                backend_options=options,
                num_collectors=num_collectors,
                sync=sync,
                **kwargs,
            )
        if num_collectors not in (None, 1) or sync is not None or backend_options:
            raise ValueError(
                "backend='direct' is one collector in this process: expected num_collectors=1 and "
                f"no sync and no backend_options, got num_collectors={num_collectors}, "
                f"sync={sync}, backend_options={backend_options}; choose backend='process'"
            )
        args, kwargs = cls._normalize_direct_env_fn(args, kwargs)
        return super().__call__(*args, **kwargs)


def _check_frames_per_batch(kwargs: dict[str, Any]) -> None:
    frames = kwargs.get("frames_per_batch", 1)
    for count in frames if isinstance(frames, (list, tuple)) else [frames]:
        if not count > 0:
            raise ValueError(f"expected frames_per_batch to be positive, got {frames}")


class Collector(TorchRLCollector, metaclass=_Dispatch):
    """TorchRL's ``Collector``, correct and fast on gymnasium envs.

    Takes the arguments of :class:`torchrl.collectors.Collector`, has its methods, and yields its
    batches: ``[N, T]`` TensorDicts, the last dimension named ``"time"``, with the next step's
    entries under ``"next"``.

    It differs from its parent in two things that the parent gets wrong: :meth:`set_seed` restarts,
    and a policy with a hidden state gets the transforms that carry it, unless
    ``auto_register_policy_transforms=False``.

    Examples:
        >>> env = make_env("CartPole-v1", num_envs=8)
        >>> collector = Collector(env, frames_per_batch=1024, total_frames=10_240)
        >>> collector.set_seed(0)
        >>> for batch in collector:
        ...     print(batch.shape)  # [8, 128]
    """

    _carrier: TensorDictBase
    _final_rollout: TensorDictBase
    _stale = False  # whether the slots must be reset before anything else is collected
    _auto_register_policy_transforms: bool | None

    def _maybe_setup_policy_env_transforms(self, env: EnvBase, policy: Any) -> EnvBase:
        # Left to itself, the parent warns and adds nothing, and a recurrent policy then forgets at
        # each step. Here what it needs is added, as the parent announces for its next version.
        if self._auto_register_policy_transforms is None:
            self._auto_register_policy_transforms = _needs_state(policy)
        return super()._maybe_setup_policy_env_transforms(env, policy)

    def _setup_policy_and_weights(self, policy: Any) -> None:
        super()._setup_policy_and_weights(policy)
        self._check_policy_writes_action()

    def _init_env(self, create_env_fn: Any, create_env_kwargs: Any) -> EnvBase:
        self._made_env = not isinstance(create_env_fn, EnvBase)
        return super()._init_env(create_env_fn, create_env_kwargs)

    def _check_policy_writes_action(self) -> None:
        if unknown_class(self.policy) is not None:
            return  # its out_keys may not be all that it writes
        out_keys = [unravel_key(key) for key in self.policy.out_keys]
        action_keys = self.env.action_keys
        # An entry that holds the action, nested, counts too.
        written = {key[:n] for key in map(_as_tuple, action_keys) for n in range(1, len(key) + 1)}
        if action_keys and not written & set(map(_as_tuple, out_keys)):
            if self._made_env:
                self.env.close()
            raise ValueError(
                f"expected the policy to write an action entry of the env, one of {action_keys}, "
                f"got a policy with out_keys={out_keys}; name its output accordingly"
            )

    @property
    def _array_env(self) -> ArrayEnv | str:
        """The env on arrays, or the reason why batches are collected as TorchRL does."""
        if not RUN_ON_ARRAYS:
            return "RUN_ON_ARRAYS is off"
        if self.interruptor is not None:
            return "an interruptor may end a batch early"
        if self.replay_buffer is not None and not self.extend_buffer:
            return "every step goes to the replay buffer by itself (extend_buffer=False)"
        return array_env(self.env)

    @property
    def _place(self) -> Placement | None:
        """Moves tensors between devices; None where all is on the CPU."""
        devices = (self.policy_device, self.env.device, self.storing_device)
        if all(device is None or device.type == "cpu" for device in devices):
            return None
        return Placement(*devices)

    def explain(self) -> Explanation:
        """Which parts of a collection run on arrays, which do not, and why.

        Returns:
            The parts; prints as a table. Nothing is run.
        """
        if self.closed:
            raise RuntimeError("the collector is shut down; explain() asks for a live one")
        env = self._array_env
        base = _base_env(self.env)
        with set_exploration_type(self.exploration_type):
            program = self._program(flat(self._carrier), checked=isinstance(env, str))
        policy = [Part("policy", what, how) for what, how in program.described]
        if isinstance(env, str):
            slow = "as TorchRL does"
            return Explanation(
                [
                    Part("env", _short(base), f"{slow}: {env}"),
                    *(Part("transform", _short(t), slow) for t in transforms_of(self.env)),
                    *policy,
                    Part("batch", "stacked from TensorDicts, then copied", slow),
                ]
            )
        parts = [Part("env", _short(base), "steps on arrays")]
        parts += [Part("transform", _short(t), "on rows") for t in transforms_of(self.env)]
        parts += policy
        if self._place is not None:
            parts.append(Part("devices", repr(self._place), "each tensor crosses once"))
        if self.return_same_td:
            parts.append(Part("batch", "copied into one TensorDict", "return_same_td=True"))
        else:
            parts.append(Part("batch", "stacked once", "no copy"))
        return Explanation(parts)

    def _program(
        self, rows: Rows, checked: bool = False, policy: Callable[..., Any] | None = None
    ) -> Program:
        """The policy, or another in its place, on rows."""
        compiled = self.compiled_policy or self.cudagraphed_policy
        cast = self._cast_to_policy_device and self.policy_device is not None
        return Program(
            policy or self._wrapped_policy,
            rows,
            self.env.batch_size,
            self.policy_device if cast else self._carrier.device,
            self._policy_output_keys if compiled and policy is None else None,
            checked,
        )

    @contextmanager
    def _policy_on_rows(self) -> Iterator[None]:
        """Let the parent's loop call the policy without the bookkeeping between its modules."""
        policy = self._wrapped_policy
        plain = type(self._carrier) is TensorDict and isinstance(policy, TensorDictModuleBase)
        if not plain or self.compiled_policy or self.cudagraphed_policy:
            yield
            return
        program: Program | None = None

        def run(tensordict: TensorDictBase) -> TensorDictBase:
            nonlocal program
            rows = flat(tensordict)
            given = dict(rows)
            if program is None:
                self._wrapped_policy_maybe_compiled = policy
                program = self._program(rows, checked=True)
                self._wrapped_policy_maybe_compiled = run if program.straight else policy
            if not program.straight:
                return policy(tensordict)
            program(rows)
            for key, value in rows.items():
                if given.get(key) is not value:
                    tensordict.set(key, value)
            return tensordict

        self._wrapped_policy_maybe_compiled = run
        try:
            yield
        finally:
            self._wrapped_policy_maybe_compiled = policy

    def _shrink_buffer(self) -> None:
        """Let go of the memory of the parent's preallocated batch, which arrays do without."""
        if self._use_buffers and self._final_rollout.is_contiguous():
            shape = self._final_rollout.shape
            one = self._final_rollout[..., :1].clone()
            self._final_rollout = one.expand(shape).refine_names(..., TIME)

    def _restore_buffer(self) -> None:
        """Give the parent's preallocated batch memory of its own again."""
        if self._use_buffers and not self._final_rollout.is_contiguous():
            self._final_rollout = self._final_rollout.clone()

    @torch.no_grad()
    def rollout(self) -> TensorDictBase | None:
        """Collect one batch ``[N, T]``; see the parent's method."""
        if self._stale:
            self.reset()
        env = self._array_env
        self._fresh = not isinstance(env, str) and not self._should_use_random_frames()
        if isinstance(env, str) or not self._fresh:
            self._restore_buffer()
            with self._policy_on_rows():
                return super().rollout()
        if self.return_same_td:
            self._restore_buffer()
        else:
            self._shrink_buffer()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self.reset_at_each_iter:
            self._carrier.update(self.env.reset())
            self._start_new_trajectories()
        with set_exploration_type(self.exploration_type):
            columns = collect_frames(
                env,
                self._program,
                self._carrier,
                self.frames_per_batch,
                self._traj_pool.get_traj_and_increment if self.track_traj_ids else None,
                frozenset(self._compact_next_keys),
                self._place,
                partial(setattr, self, "_carrier"),
            )
        shape = (*self.env.batch_size, self.frames_per_batch)
        batch = self._maybe_set_truncated(self._assemble(columns, shape))
        if self.return_same_td and self._use_buffers:
            return self._final_rollout.update_(batch)
        return batch

    def _assemble(self, columns: dict[Key, torch.Tensor], shape: tuple[int, ...]) -> TensorDictBase:
        """The entries of a batch as the TensorDict that the parent makes of them."""
        template = self._final_rollout if self._use_buffers else self._carrier
        batch = nested(columns.items(), shape, self.storing_device or template.device)
        shaped_like(template, batch, cast=self._use_buffers)
        if self._use_buffers or self.replay_buffer is None or self._ignore_rb:
            batch.refine_names(..., TIME)
        return batch

    def iterator(self) -> Iterator[TensorDictBase]:
        """Iterate over batches; see the parent's method."""
        if self.return_same_td or self.replay_buffer is not None:
            yield from super().iterator()
            return
        while self._frames < self.total_frames:
            self._iter += 1
            batch = self.rollout()
            assert batch is not None
            self._increment_frames(batch.numel())
            batch = self._postproc(batch)
            if not self._fresh:  # the parent stacks into memory that the next batch reuses
                batch = batch.clone()
            if self.post_collect_hook is not None:
                self.post_collect_hook(batch)
            yield batch
            del batch  # or it would take memory beside the next one

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the envs; see the parent's method."""
        if index is None:
            self._stale = False
        super().reset(index, **kwargs)

    def collect(
        self,
        frames: int | None = None,
        episodes: int | None = None,
        *,
        reset: bool = False,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        random: bool = False,
        exploration_type: ExplorationType | None = None,
        gradients: bool = False,
        max_steps: int | None = None,
        layout: Layout = "flat",
    ) -> Any:
        """Collect a number of frames, or of whole episodes.

        By frames, collection goes on where the last batch ended, in the middle of episodes, as
        iterating does. By episodes, every slot starts afresh, and so does whatever is collected
        next: episodes in flight are dropped, before and after. Those collected are the first
        ``episodes`` to start; a slot whose episode ends takes the next one, and waits once all
        have started. With fewer episodes than slots, only so many slots are used.

        What comes out is not counted towards ``total_frames``, and not put into a replay buffer.
        Trajectory ids go on.

        Args:
            frames: how many frames over all slots; rounded up to a multiple of the slots, with a
                warning.
            episodes: how many whole episodes over all slots.
            reset: start afresh in every slot before collecting frames.
            seed: of the first reset: slot i is seeded with ``seed + i``. Implies ``reset``.
            options: gymnasium's options, for the first reset; by episodes, for each. Implies
                ``reset``.
            random: take actions from the action spec; the policy is not called, and its other
                entries are absent.
            exploration_type: instead of the collector's own.
            gradients: keep the graph through the policy, within this batch.
            max_steps: by episodes, truncate each at this length.
            layout: by episodes, ``"flat"`` or another of :func:`tdcollect.split_trajectories`.

        Returns:
            By frames, a batch ``[N, T]``. By episodes, a TensorDict ``[sum of lengths]``, each
            episode contiguous, in the order of starting; or another layout. ``postproc`` is applied
            as in iteration.

        Raises:
            ValueError: for both counts or none, and for those that are not positive.
            RuntimeError: where the collector is shut down.
        """
        count = _check_count(frames, episodes, max_steps, layout)
        if self.closed:
            raise RuntimeError("the collector is shut down; make a new one to collect")
        policy = RandomPolicy(self.env.full_action_spec) if random else None
        lower = partial(self._program, policy=policy)
        given = {"seed": seed, "options": options}
        given = {name: value for name, value in given.items() if value is not None}
        exploration = exploration_type or self.exploration_type
        with torch.set_grad_enabled(gradients), set_exploration_type(exploration):
            if episodes is not None:
                batch = self._collect_episodes(count, lower, given, max_steps, gradients)
            else:
                if reset or given or self._stale:
                    self.reset(**given)
                batch = self._collect_frames(count, lower, gradients)
        batch = self._postproc(batch)
        return batch if layout == "flat" else split_trajectories(batch, layout=layout)

    def _collect_frames(
        self, frames: int, lower: Callable[[Rows], Program], gradients: bool
    ) -> TensorDictBase:
        steps = -(-frames // self.n_env)
        if frames % self.n_env:
            warnings.warn(
                f"{frames} frames are no multiple of the {self.n_env} slots: collecting "
                f"{steps * self.n_env}, {steps} a slot",
                stacklevel=3,
            )
        columns = collect_frames(
            self._rows_env(),
            lower,
            self._carrier,
            steps,
            self._traj_pool.get_traj_and_increment if self.track_traj_ids else None,
            frozenset(self._compact_next_keys),
            self._place,
            self._keep_detached,
            whole=gradients,
        )
        return self._maybe_set_truncated(self._assemble(columns, (*self.env.batch_size, steps)))

    def _collect_episodes(
        self,
        episodes: int,
        lower: Callable[[Rows], Program],
        given: dict[str, Any],
        max_steps: int | None,
        gradients: bool,
    ) -> TensorDictBase:
        env, place = self._rows_env(), self._place
        program: Program | None = None

        def act(rows: Rows, slots: list[int]) -> None:
            nonlocal program
            program = program or lower(rows)
            if place is None:
                program(rows)
            else:
                place.run(program, rows)

        def remembered(rows: Rows) -> list[Key]:
            assert program is not None
            return forgotten_entries(rows, env, program)

        take_id = self._traj_pool.get_traj_and_increment
        left_out = frozenset(self._compact_next_keys)
        seed = given.get("seed")
        loop = EpisodeLoop(
            env,
            act,
            remembered,
            (Start(number, None, int(take_id(1))) for number in range(episodes)),
            steps=_BLOCK_STEPS,
            max_steps=max_steps,
            left_out=left_out if self.track_traj_ids else left_out | {keys.TRAJ_IDS},
            place=place,
            first_seeds=None if seed is None else slot_seeds(seed, range(self.n_env)),
            options=given.get("options"),
            whole=gradients,
        )
        self._stale = True  # the carried row no longer says where the envs are
        columns = gather(loop, len(self.env.batch_size))
        if program is not None:
            program.check()
        return self._assemble(columns, (len(columns[keys.NEXT_DONE]),))

    def _rows_env(self) -> ArrayEnv | WholeEnv:
        env = array_env(self.env) if RUN_ON_ARRAYS else ""
        return WholeEnv(self.env) if isinstance(env, str) else env

    def _keep_detached(self, carrier: TensorDictBase) -> None:
        self._carrier = carrier.detach()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the envs and restart them.

        The next row collected of slot i is a reset with seed ``seed + i``, for the envs that
        :func:`tdcollect.make_env` makes and for TorchRL's gym wrappers. (TorchRL's own collector
        goes on from the unseeded reset of its construction.) Other envs are seeded as their own
        ``set_seed`` does and then reset. Trajectories in flight are dropped; ids go on.

        Args:
            seed: the seed of slot 0.
            static_seed: return the seed as it is.

        Returns:
            The seed for the next env, as TorchRL computes it.
        """
        next_seed = super().set_seed(seed, static_seed=static_seed)
        # A gym wrapper has drawn its seeded episode inside set_seed already: seed it once more.
        self.reset(**({"seed": seed} if isinstance(_base_env(self.env), GymWrapper) else {}))
        return next_seed


def _check_count(
    frames: int | None, episodes: int | None, max_steps: int | None, layout: str
) -> int:
    """The count that was asked for."""
    if (frames is None) == (episodes is None):
        raise ValueError(
            f"expected either frames or episodes, got frames={frames} and episodes={episodes}"
        )
    for name, value in (("frames", frames), ("episodes", episodes), ("max_steps", max_steps)):
        is_int = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (is_int and value > 0):
            raise ValueError(f"expected {name} to be a positive int, got {value!r}")
    if frames is not None and (max_steps is not None or layout != "flat"):
        raise ValueError(
            "max_steps and layout are for collecting by episodes; by frames use make_env's "
            "time_limit, and split_trajectories on the batch"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"expected layout to be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return int(frames or episodes or 0)


def _as_tuple(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _needs_state(policy: Any) -> bool:
    """Whether a policy carries a hidden state, or asks where episodes begin."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(
        hasattr(type(module), "make_tensordict_primer") or hasattr(module, "is_init_key")
        for module in modules
    ) or any(_as_tuple(key)[-1] == IS_INIT for key in getattr(policy, "in_keys", ()))


def _short(thing: Any) -> str:
    if isinstance(thing, GymnasiumEnv):
        return f"{type(thing).__name__}({thing.name}, {thing.stepper.backend.name})"
    return getattr(thing, "__name__", type(thing).__name__)


def _base_env(env: EnvBase) -> EnvBase:
    return env.base_env if isinstance(env, TransformedEnv) else env


SyncDataCollector = Collector
"""The collector under the name that TorchRL gave it up to version 0.10."""
