"""The collector: TorchRL's, with the same constructor, methods and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, GymWrapper
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tdcollect import keys
from tdcollect.collect.arguments import (
    cannot_wrap,
    check_made,
    check_options,
    check_weights,
    failed_call,
)
from tdcollect.collect.by_count import check_count, round_up, whole_episodes
from tdcollect.collect.construction import Dispatch, check_writes_action, needs_state
from tdcollect.collect.explain import Explanation, explanation, short
from tdcollect.collect.fast.loop import ArrayEnv
from tdcollect.collect.fast.transforms import base_of
from tdcollect.collect.hooks import AnyHooks
from tdcollect.collect.monitor import Monitor, StatsAttribute
from tdcollect.collect.options import extends
from tdcollect.collect.progress import with_progress
from tdcollect.collect.record import Record
from tdcollect.collect.replay_buffer import check_replay_buffer
from tdcollect.collect.resume import ResumableCollector
from tdcollect.collect.shaping import RewardShaping, Shaper
from tdcollect.collect.step_dict import StepDict, flat
from tdcollect.collect.tensordict_env import TensorDictEnv
from tdcollect.display import one_line
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.progress import check_tqdm
from tdcollect.seeding import slot_seeds
from tdcollect.threads import collecting
from tdcollect.trajectories.split import Layout, split_trajectories

_SHUT_DOWN = (
    "the collector is shut down, as an exception while iterating also does; make a new one to "
    "collect"
)


class Collector(ResumableCollector, metaclass=Dispatch):
    """TorchRL's ``Collector``, correct and fast on gymnasium envs.

    Takes the arguments of :class:`torchrl.collectors.Collector`, has its methods, and yields its
    batches: ``[N, T]`` TensorDicts, the last dimension named ``"time"``, with the next step's
    entries under ``"next"``.

    It differs from its parent in two things that the parent gets wrong: :meth:`set_seed` restarts,
    and a policy with a hidden state gets the transforms that carry it, unless
    ``auto_register_policy_transforms=False``.

    Args:
        *args: as the parent has them.
        reward_shaping: a function ``(observation, action, reward, done) -> reward``, called on
            whole batches, whose result learners see in place of the env's reward; that one stays
            under ``("next", "raw_reward")``. See :class:`tdcollect.collect.RewardShaping`.
        statistics: keep statistics of episodes, steps and times in :attr:`stats`, a
            :class:`tdcollect.collect.Statistics`.
        stats_window: K, how many of the latest episodes ``stats.window`` holds.
        timers: also time the env's steps and the policy's calls, which costs a little at each step.
        hooks: one :class:`tdcollect.Hooks`, or several, told of steps, episodes and collections.
        progress: show a progress bar while iterating (needs tqdm); where there is neither a
            terminal nor a notebook, a line every 30 seconds.
        **kwargs: as the parent has them.

    Attributes:
        stats: statistics; a call, ``collector.stats()``, gives the parent's dict of counters.

    Examples:
        >>> env = make_env("CartPole-v1", num_envs=8)
        >>> collector = Collector(env, frames_per_batch=1024, total_frames=10_240)
        >>> collector.set_seed(0)
        >>> for batch in collector:
        ...     print(batch.shape)  # [8, 128]
    """

    @extends(TorchRLCollector.__init__)
    def __init__(
        self,
        *args: Any,
        reward_shaping: RewardShaping | None = None,
        statistics: bool = True,
        stats_window: int = 100,
        timers: bool = False,
        hooks: AnyHooks = None,
        progress: bool = False,
        **kwargs: Any,
    ):
        self._reward_shaping = reward_shaping
        self._shaper: Shaper | None = None
        self._splits = bool(kwargs.get("split_trajs"))
        self._monitor = Monitor(statistics, stats_window, timers, hooks)
        self._progress = progress
        if progress:
            check_tqdm()
        super().__init__(*args, **kwargs)
        try:
            self._monitor.attach(self)
        except BaseException:
            self.shutdown(close_env=self._made_env)
            raise

    stats = StatsAttribute()

    def _maybe_setup_policy_env_transforms(self, env: EnvBase, policy: Any) -> EnvBase:
        # Left to itself, the parent warns and adds nothing, and a recurrent policy then forgets at
        # each step. Here what it needs is added, as the parent announces for its next version.
        if self._parent.registers_transforms is None:
            self._parent.registers_transforms = needs_state(policy)
        return super()._maybe_setup_policy_env_transforms(env, policy)

    def _init_policy(self, policy: Any, policy_factory: Any, *args: Any, **kwargs: Any) -> Any:
        with self._closing_what_it_made():
            try:
                return super()._init_policy(policy, policy_factory, *args, **kwargs)
            except TypeError as error:
                if isinstance(policy_factory, nn.Module):
                    raise TypeError(
                        "expected policy_factory to be a function without arguments that makes a "
                        f"policy, got a {type(policy_factory).__name__}; pass it as the policy"
                    ) from error
                raise

    def _setup_policy_and_weights(self, policy: Any) -> None:
        with self._closing_what_it_made():
            try:
                super()._setup_policy_and_weights(policy)
            except TypeError as error:
                if error.__cause__ is None or not str(error).startswith("Failed to wrap"):
                    raise
                told = cannot_wrap(policy, self.env)
                if told is None:
                    raise error.__cause__ from None
                raise TypeError(told) from error.__cause__
            check_writes_action(self.policy, self.env)

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        # Here TorchRL calls the policy for the first time, with some exceptions.
        with self._closing_what_it_made():
            try:
                super()._maybe_make_final_rollout(make_rollout)
            except Exception as error:
                wrapped = self._parent.uncompiled_policy
                known = failed_call(self.policy, wrapped, self._parent.carrier, self.env)
                if known is not None:
                    raise known from error
                raise

    def _setup_frames_per_batch(self, frames_per_batch: int) -> None:
        # The last of the parent's preparations before the env is reset.
        super()._setup_frames_per_batch(frames_per_batch)
        with self._closing_what_it_made():
            if self._reward_shaping is not None:
                self._shaper = Shaper(
                    self._reward_shaping, self.env, self.compact_obs, self.extend_buffer
                )
            # What a postproc makes of a batch is not known yet.
            if self.replay_buffer is not None and self.postproc is None and not self._splits:
                check_replay_buffer(
                    self.replay_buffer,
                    self.env.batch_size,
                    self.frames_per_batch,
                    whole_batches=self.extend_buffer,
                    trajectories=self.trajs_per_batch is not None,
                )

    def __repr__(self) -> str:
        if getattr(self, "closed", True):
            return one_line(self, "shut down")
        counts = (
            f"frames_per_batch={self.requested_frames_per_batch}",
            f"total_frames={self.total_frames}",
            f"exploration={self.exploration_type}",
        )
        policy = type(self.policy).__name__
        return one_line(self, short(base_of(self.env)), policy, *counts)

    @contextmanager
    def _closing_what_it_made(self) -> Iterator[None]:
        """Close the env where the collector made it and then refuses something."""
        try:
            yield
        except Exception:
            if self._made_env:
                self.env.close()
            raise

    def _init_env(self, create_env_fn: Any, create_env_kwargs: Any) -> EnvBase:
        self._made_env = not isinstance(create_env_fn, EnvBase)
        try:
            env = super()._init_env(create_env_fn, create_env_kwargs)
        except TypeError as error:
            if self._made_env and isinstance(create_env_fn, nn.Module):
                raise TypeError(
                    "expected an env of TorchRL, or a function that makes one, got a "
                    f"{type(create_env_fn).__name__}; pass the env first, then the policy"
                ) from error
            raise
        check_made(env)
        return env

    def _postproc(self, tensordict_out: TensorDictBase) -> TensorDictBase:
        """What is done to each batch before its user, or the replay buffer, gets it."""
        if self._shaper is not None:
            tensordict_out = self._shaper(tensordict_out)
            self._monitor.shaped(tensordict_out[keys.NEXT, keys.REWARD])
        try:
            return super()._postproc(tensordict_out)
        except AttributeError as error:
            if error.obj is None and error.name == "keys":
                raise TypeError(
                    "expected postproc to return a TensorDict, got None; return the batch"
                ) from error
            raise

    def explain(self) -> Explanation:
        """Which parts of a collection run on arrays, which do not, and why.

        Returns:
            The parts; prints as a table. Nothing is run.
        """
        if self.closed:
            raise RuntimeError("the collector is shut down; explain() asks for a live one")
        env = self._array_env
        with set_exploration_type(self.exploration_type):
            if self._stacked_lazily:
                program = self._program(StepDict(), whole="the env's entries are stacked lazily")
            else:
                program = self._program(flat(self._parent.carrier), checked=isinstance(env, str))
        reason = env if isinstance(env, str) else None
        return explanation(self.env, reason, program, self._place, self.return_same_td)

    @torch.no_grad()
    def rollout(self) -> TensorDictBase | None:
        """Collect one batch ``[N, T]``; see the parent's method.

        What an env or the policy raises leaves the collector usable; raised while iterating, it
        also shuts the collector down, as the parent's does.

        Raises:
            RuntimeError: where the collector is shut down.
        """
        if self.closed:
            raise RuntimeError(_SHUT_DOWN)
        with collecting(), self._monitor.collection() as record:
            record.batch = self._rollout(record)
        return record.batch

    def _rollout(self, record: Record) -> TensorDictBase | None:
        if self._stale:
            self.reset()
        env = self._array_env
        self._fresh = not isinstance(env, str) and not self._parent.acts_randomly()
        if self.reset_at_each_iter:
            self._monitor.drop()
        if isinstance(env, str) or not self._fresh:
            self._restore_buffer()
            with self._policy_on_rows(), record.watching(self):
                return super().rollout()
        if self.return_same_td:
            self._restore_buffer()
        else:
            self._shrink_buffer()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self.reset_at_each_iter:
            self._parent.carrier.update(self.env.reset())
            self._parent.start_new_trajectories()
        with set_exploration_type(self.exploration_type):
            batch = self._on_arrays(env, self._program, self.frames_per_batch, record)
        if batch is None:
            self._fresh = False
            self._warn_of_lost(self._not_tensors)
            self._restore_buffer()
            settings = self._settings(pre_collect_hook=None, reset_at_each_iter=False)
            with settings, self._policy_on_rows(), record.watching(self):
                return super().rollout()
        if self.return_same_td and self._parent.preallocates:
            return self._parent.preallocated.update_(batch)
        return batch

    def iterator(self) -> Iterator[TensorDictBase]:
        """Iterate over batches; see the parent's method."""
        batches = self._batches()
        return with_progress(batches, self) if self._progress else batches

    def _batches(self) -> Iterator[TensorDictBase]:
        with collecting(pauses=True):
            yield from self._each_batch()

    def _each_batch(self) -> Iterator[TensorDictBase]:
        if self.return_same_td or self.replay_buffer is not None:
            yield from super().iterator()
            return
        while self._parent.frames < self.total_frames:
            self._parent.iteration += 1
            batch = self.rollout()
            assert batch is not None
            self._parent.count_frames(batch.numel())
            batch = self._postproc(batch)
            if not self._fresh:  # the parent stacks into memory that the next batch reuses
                batch = batch.clone()
            if self.post_collect_hook is not None:
                self.post_collect_hook(batch)
            yield batch
            del batch  # or it would take memory beside the next one

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: Any = None, **kwargs: Any
    ) -> None:
        """Copy weights into the policy; see the parent's method."""
        try:
            super().update_policy_weights_(policy_or_weights, worker_ids=worker_ids, **kwargs)
        except (AttributeError, TypeError) as error:
            check_weights(kwargs.get("policy_weights", policy_or_weights), error)
            raise

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the envs; see the parent's method.

        Episodes in flight are dropped: statistics do not count them.
        """
        if index is None:
            self._stale = False
        super().reset(index, **kwargs)
        self._monitor.drop(index)

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
        max_episode_steps: int | None = None,
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
            max_episode_steps: by episodes, truncate each at this length.
            layout: by episodes, ``"flat"`` or another of :func:`tdcollect.split_trajectories`.

        Returns:
            By frames, a batch ``[N, T]``. By episodes, a TensorDict ``[sum of lengths]``, each
            episode contiguous, in the order of starting; or another layout. ``postproc`` is applied
            as in iteration.

        Raises:
            ValueError: for both counts or none, and for those that are not positive.
            RuntimeError: where the collector is shut down.
        """
        count = check_count(frames, episodes, max_episode_steps, layout)
        check_options(options)
        self._check_open()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        chosen = exploration_type or self.exploration_type
        with (
            collecting(),
            self._settings(replay_buffer=None),
            torch.set_grad_enabled(gradients),
            set_exploration_type(chosen),
            self._monitor.collection() as record,
        ):
            if episodes is None:
                if reset or seed is not None or options is not None or self.reset_at_each_iter:
                    self._restart(seed, options)
                elif self._stale:
                    self.reset()
                batch = self._go_on(round_up(count, self.n_env), record, random, gradients)
            else:
                batch = self._episodes(
                    count, record, seed, options, random, gradients, max_episode_steps
                )
            record.batch = batch
        batch = self._postproc(batch)
        if layout != "flat":
            batch = split_trajectories(batch, layout=layout)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(_SHUT_DOWN)
        if self._parent.frames >= self.total_frames:
            raise RuntimeError(
                f"the collector has yielded its total_frames={self.total_frames} and closed its "
                "env; make a new one, without total_frames, to collect"
            )

    def _episodes(
        self,
        episodes: int,
        record: Record,
        seed: int | None,
        options: dict[str, Any] | None,
        random: bool,
        gradients: bool,
        max_episode_steps: int | None,
    ) -> TensorDictBase:
        """Whole episodes from a fresh start: ``[sum of lengths]``."""
        env = self._env_on_arrays
        rows_env, lower = record.timed(
            env if isinstance(env, ArrayEnv) else TensorDictEnv(self.env),
            self._lower(random, gradients),
        )
        first_seeds = None
        if seed is not None:
            super().set_seed(seed)
            if self._seeds_too_early:
                first_seeds = slot_seeds(seed, range(self.n_env))
        self._monitor.drop()
        self._stale = True  # from here on the carried row does not say where the envs are
        columns = whole_episodes(
            rows_env,
            lower,
            episodes,
            self._parent.trajectory_ids.get_traj_and_increment,
            max_episode_steps=max_episode_steps,
            left_out=self._left_out,
            place=self._place,
            first_seeds=first_seeds,
            options=options,
            gradients=gradients,
            noted=record.noting,
            watch=record.watch,
        )
        record.take(columns, self.env.reward_keys)
        return self._assemble(columns, (len(columns[keys.NEXT_DONE]),))

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
        return self._restart(seed, static_seed=static_seed)

    def rebuild_env(self, **env_kwargs: Any) -> None:
        """Make the envs anew, with other settings if given, and restart.

        Policy, transforms, statistics and counters stay; trajectories in flight are dropped, and
        ids go on. See :meth:`tdcollect.GymnasiumEnv.rebuild`.

        Args:
            **env_kwargs: put over the ``env_kwargs`` of :func:`tdcollect.make_env`.

        Raises:
            TypeError: for envs that :func:`tdcollect.make_env` cannot make anew.
            ValueError: where the new envs have other spaces; the old ones go on.
            RuntimeError: where the collector is shut down.
        """
        self._check_open()
        base = base_of(self.env)
        if not isinstance(base, GymnasiumEnv):
            raise TypeError(
                f"expected an env of tdcollect.make_env, got a {type(base).__name__}; make a new "
                "collector over a new env"
            )
        base.rebuild(**env_kwargs)
        self.reset()

    @property
    def _seeds_too_early(self) -> bool:
        """Whether the env's ``set_seed`` has drawn the seeded episode when a reset comes."""
        return isinstance(base_of(self.env), GymWrapper)

    def _restart(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        static_seed: bool = False,
    ) -> Any:
        """Reset every slot; the seed for the next env."""
        given: dict[str, Any] = {} if options is None else {"options": options}
        if seed is not None:
            seed, first = super().set_seed(seed, static_seed=static_seed), seed
            if self._seeds_too_early:
                given["seed"] = first
        self.reset(**given)
        return seed


SyncDataCollector = Collector
"""The collector under the name that TorchRL gave it up to version 0.10."""
