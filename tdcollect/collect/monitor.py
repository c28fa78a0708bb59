"""Monitor: a collector's statistics, from notes of its collections; TorchRL's rollout, watched.

Nothing here runs in the loop on arrays, unless times were asked for.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch.nn.functional import pad
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase

from tdcollect import check, keys
from tdcollect._upstream.collectors import CollectorState, rollout_with_gradients
from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.episodes import Block, Piece
from tdcollect.collect.hooks import Watch
from tdcollect.collect.policy import LoweredPolicy
from tdcollect.collect.statistics import (
    Bools,
    Collection,
    Ints,
    RowEnds,
    Statistics,
    Tally,
    row_ends,
)
from tdcollect.collect.step_dict import StepDict
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.keys import Key, entry_path, under_next

Env = TypeVar("Env", bound=SteppedEnv)
Function = TypeVar("Function", bound=Callable[..., Any])


class CollectionLog:
    """Notes of one collection: rewards and done flags if wanted, and times on request.

    Attributes:
        batch: the batch collected; to be set.
        env_seconds: time in the env's steps and resets; None without timers.
        policy_seconds: time in calls of the policy; None without timers.
    """

    def __init__(
        self, batch_size: torch.Size, wanted: bool, timers: bool, watch: Watch | None = None
    ):
        self.env_seconds = 0.0 if timers else None
        self.policy_seconds = 0.0 if timers else None
        self.batch: TensorDictBase | None = None
        self.wanted = wanted
        self.watch = watch
        self._dims = len(batch_size)
        self._slots = batch_size.numel()
        self._row_slots: Ints | None = None  # of rows by arrival
        self._timers = timers
        self._ended: list[Piece] = []
        # Rewards by path, flags, marks of failures, ``[N, T, features]``: of a batch, or each step.
        self._noted: list[tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]] = []

    # ------------------------------------------------------------------------------------ times

    def timed(self, name: str, function: Function) -> Function:
        """The same function, its time added to an attribute of this log if times are asked for."""
        if not self._timers:
            return function

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - start)

        return cast(Function, timed)

    def timed_parts(
        self, env: Env, lower: Callable[[StepDict], LoweredPolicy]
    ) -> tuple[Env, Callable[[StepDict], LoweredPolicy]]:
        """The env and the policy of a collection on StepDicts, timed if that is asked for."""
        if not self._timers:
            return env, lower
        in_two_parts = ("send_reset", "receive") if env.can.asynchronous else ()
        env = copy(env)  # the next collection may go on with it
        for name in ("advance", "begin", *in_two_parts):
            setattr(env, name, self.timed("env_seconds", getattr(env, name)))

        def lower_timed(step: StepDict) -> LoweredPolicy:
            policy = copy(lower(step))
            policy.calls = [self.timed("policy_seconds", call) for call in policy.calls]
            return policy

        return env, lower_timed

    # ------------------------------------------------------------------------------------ notes

    def note_blocks(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Hand on the blocks of a collection by episodes, and note which episodes ended."""
        for block in blocks:
            self._ended += [piece for piece in block.pieces if piece.ended]
            yield block

    def note_entries(
        self,
        entries: dict[Key, torch.Tensor],
        reward_keys: Sequence[Key],
        slots: Sequence[int] | None = None,
    ) -> None:
        """Note the rewards and flags of a batch ``[*N, T]``, or of whole episodes ``[F]``.

        By arrival, they are ``[F]`` too, and ``slots`` has the slot of each row.
        """
        if not self.wanted:
            return
        whole = bool(self._ended)
        if whole or slots is not None:
            self._dims = 0
            self._row_slots = None if slots is None else np.array(slots, np.int64)
        done, failed = entries[keys.NEXT_DONE], entries.get(under_next(keys.ENV_ERROR))
        if not whole:  # a transform may truncate without ending the episode
            for key in (keys.TERMINATED, keys.TRUNCATED):
                if under_next(key) in entries:
                    done = done | entries[under_next(key)]
        rewards = {
            entry_path(key): grid_of(entries[under_next(key)], self._dims) for key in reward_keys
        }
        # Whole episodes that failed are left out.
        marks = None if failed is None or whole else grid_of(failed, self._dims)
        self._noted.append((rewards, grid_of(done, self._dims), marks))

    def note(self, steps: tuple[TensorDictBase, TensorDictBase], env: EnvBase) -> None:
        """Note a step of TorchRL's loop: the step taken, and the one to go on with."""
        stepped, upcoming = steps
        following, slots = stepped.get(keys.NEXT), self._slots
        present = (following.get(key, None) for key in env.done_keys)
        flags = torch.cat([flag.reshape(slots, -1) for flag in present if flag is not None], -1)
        failed = following.get(keys.ENV_ERROR, None)
        rewards = {
            entry_path(key): following.get(key).reshape(slots, 1, -1) for key in env.reward_keys
        }
        if self.wanted:
            marks = None if failed is None else failed.reshape(slots, 1, -1)
            self._noted.append((rewards, flags.unsqueeze(1), marks))
        if self.watch is not None:
            ended: list[int] = flags.any(-1).nonzero().reshape(-1).tolist()
            self.watch.stepped(None, ended, lambda: stepped, rewards.values(), failed)
            if ended:
                self.watch.started(ended, lambda: upcoming)

    # ---------------------------------------------------------------------------- what was noted

    def rewards_and_ends(self) -> tuple[dict[str, NDArray[Any]], RowEnds]:
        """The reward entries ``[N, T]`` by path, or ``[1, F]`` of rows, and the ends of episodes.

        The reward of an entry is the mean over its features (the agents of a group, say). An
        episode ends where any flag says so, which is where TorchRL's collector starts a trajectory.
        """
        rewards, flags, marks = zip(*self._noted, strict=True)
        means = {name: _reduced([step[name] for step in rewards], _mean) for name in rewards[0]}
        done = _reduced(flags, np.any)
        failed = None if marks[0] is None else _reduced(marks, np.any).reshape(-1)
        whole = bool(self._ended)
        return means, row_ends(done, self._row_slots, failed=failed, whole=whole, dims=self._dims)

    @property
    def slots_of_episodes(self) -> Ints:
        """Of whole episodes in the order in which they started, ``[E]``."""
        order = sorted(self._ended, key=lambda piece: piece.start.index)
        return np.array([piece.slot for piece in order], np.int64)


def grid_of(entry: torch.Tensor, dims: int) -> torch.Tensor:
    """``[N, T, features]`` of an entry ``[*N, T, *feature]`` with so many dims of slots."""
    return entry.reshape(entry.shape[:dims].numel(), entry.shape[dims], -1)


def _reduced(parts: Sequence[torch.Tensor], over: Callable[..., Any]) -> NDArray[Any]:
    """Entries ``[N, T, features]`` of several parts of the steps as an array ``[N, T]``.

    Features that a part has less than others are zero: those of actions cut short by an end.
    """
    entry = parts[0]
    if len(parts) > 1:
        most = max(part.shape[-1] for part in parts)
        entry = torch.cat([pad(part, (0, most - part.shape[-1])) for part in parts], 1)
    values = entry.detach().cpu().numpy()
    return cast(NDArray[Any], values[..., 0] if values.shape[-1] == 1 else over(values, -1))


_mean = partial(np.mean, dtype=np.float64)


def slots_of(index: Any, batch_size: torch.Size) -> Bools:
    """The slots of an index ``[N]``, as TorchRL's ``reset()`` reads it."""
    marked = torch.zeros((*batch_size, 1), dtype=torch.bool)
    marked[index] = True
    return cast(Bools, marked.reshape(-1).numpy())


class Monitor:
    """Keeps a collector's statistics, and calls its hooks.

    Attributes:
        stats: ``collector.stats``.
        timers: whether the env and the policy are timed.
        collected: whether anything was collected since all slots were reset.
    """

    def __init__(self, statistics: bool, window: int, timers: bool, watch: Watch | None = None):
        check.positive_int(stats_window=window)
        if timers and not statistics:
            raise ValueError(
                "expected statistics=True with timers=True, got statistics=False: they are part "
                "of collector.stats; leave one of the two out"
            )
        self.stats = Statistics(window, statistics, self._counters)
        self.timers = timers
        self._watch = watch
        self._step_watch = watch if watch is not None and watch.steps else None
        self._collector: Callable[[], Any] = lambda: None
        self._ended: float | None = None
        self._unshaped: RowEnds | None = None
        self._restarts = 0
        self.collected = False

    def attach(self, collector: TorchRLCollector) -> None:
        """Attach to the collector, once it is made. It is not kept alive."""
        self._collector = weakref.ref(collector)
        self._batch_size = collector.env.batch_size
        names = sorted(map(entry_path, collector.env.reward_keys))
        slots, rewards = self._batch_size.numel(), collector.env.full_reward_spec
        is_one = names == [keys.REWARD] and rewards[keys.REWARD].shape.numel() == slots
        self._groups = [] if is_one else names
        self._tallies = [Tally(slots) for _ in range(2 + len(self._groups))]
        self._tally, self._shaped, *_ = self._tallies
        self._newly_restarted(None)
        if self._watch is not None:
            self._watch.attach(collector.env)

    def _counters(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        collector = self._collector()
        if collector is None:
            raise RuntimeError("the collector is gone, and its counters with it")
        return TorchRLCollector.stats(collector, *args, **kwargs)

    def drop(self, index: Any = None) -> None:
        """Drop the episodes in flight, cut short by a reset: of all slots, or of an index."""
        slots = None if index is None else slots_of(index, self._batch_size)
        if slots is None:
            self.collected = False
        for tally in self._tallies:
            tally.drop(slots)
        if self._watch is not None:
            self._watch.drop(slots)

    def save_state(self) -> dict[str, Any]:
        """Statistics, and the sums of episodes in flight, as nested arrays and numbers."""
        return {
            "stats": self.stats.save_state(),
            "tallies": [vars(tally).copy() for tally in self._tallies],
            "watch": None if self._watch is None else self._watch.save_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`save_state`."""
        self.stats.load_state(state["stats"])
        for tally, values in zip(self._tallies, state["tallies"], strict=True):
            tally.drop(None)
            vars(tally).update(values)
        if self._watch is not None and state["watch"] is not None:
            self._watch.load_state(state["watch"])
        self._ended = self._unshaped = None

    def miss(self) -> None:
        """Leave out the episodes in flight, some of whose steps were not seen."""
        for tally in self._tallies:
            tally.miss()

    def lose(self) -> None:
        """Discard the running sums: they belong to other episodes than those in flight."""
        self.drop(slice(None))
        if self.collected:
            self.miss()

    def unnoted_log(self) -> CollectionLog:
        """A log for steps whose rows are noted later; hooks see them at once."""
        return CollectionLog(self._batch_size, False, False, self._step_watch)

    @contextmanager
    def collection(self) -> Iterator[CollectionLog]:
        """Keep the log of one collection, and count it at its end."""
        log = CollectionLog(self._batch_size, self.stats.on, self.timers, self._step_watch)
        start = time.perf_counter()
        try:
            yield log
        except BaseException:
            self.miss()
            raise
        finally:
            self.collected = True
        if self.stats.on:
            self._count(log, start)
        if self._watch is not None:
            self._watch.call("collection_ended", log.batch, self.stats)

    def _count(self, log: CollectionLog, start: float) -> None:
        rewards, ends = log.rewards_and_ends()
        groups = {
            name: tally.feed(ends, rewards[name]).returns
            for name, tally in zip(self._groups, self._tallies[2:], strict=True)
        }
        means = [*rewards.values()] or [np.zeros((1, ends.steps))]
        mean: Any = means[0] if len(means) == 1 else np.mean(means, 0, dtype=np.float64)
        episodes = self._tally.feed(ends, mean)
        if not rewards:
            episodes = episodes._replace(returns=np.empty(0))
        if ends.whole:
            episodes = episodes._replace(slots=log.slots_of_episodes)
        if self._unshaped is not None:
            self._shaped.miss()  # its batch was not shaped
        self._unshaped = ends
        between = None if self._ended is None else start - self._ended
        now = self._ended = time.perf_counter()
        times = (now - start, between, log.env_seconds, log.policy_seconds)
        restarts = self._newly_restarted(ends.failed)
        self.stats.add(Collection(ends.steps, *times, *episodes, None, restarts, groups))

    def _newly_restarted(self, failed: Bools | None) -> int:
        base = base_of(self._collector().env)
        if not isinstance(base, GymnasiumEnv):  # tdcollect's envs inside of others, say
            return 0 if failed is None else int(failed.sum())
        before, self._restarts = self._restarts, base.restarts or 0
        return self._restarts - before

    def shaped(self, reward: torch.Tensor) -> None:
        """Count shaped rewards of the latest collection: ``[*N, T, *feature]``, or ``[F, ...]``."""
        if self._unshaped is None:
            return
        ends, self._unshaped = self._unshaped, None
        values = _reduced([grid_of(reward, ends.dims)], _mean)
        self.stats.add_shaped(self._shaped.feed(ends, values).returns)


class StatsAttribute:
    """``collector.stats``: statistics that can be called, as the parent's method of that name."""

    def __get__(self, collector: Any, owner: type) -> Any:
        return TorchRLCollector.stats if collector is None else collector._monitor.stats


# ---------------------------------------------------------------------------- TorchRL's own rollout


def torchrl_rollout(
    collector: Any, log: CollectionLog, has_acted: bool, **settings: Any
) -> TensorDictBase | None:
    """Run the rollout of a collector's parent; None where each step goes to the replay buffer.

    Args:
        collector: whose parent it is.
        log: notes the steps.
        has_acted: the carried step has the policy's outputs already.
        **settings: attributes of the collector, set for this batch.
    """
    parent = CollectorState(collector)
    policy = call = parent.wrapped_policy
    if has_acted:
        calls = chain([lambda tensordict: tensordict], repeat(policy))
        call = lambda tensordict: next(calls)(tensordict)  # noqa: E731
    call = log.timed("policy_seconds", call)
    wrapped = {} if call is policy else {"policy_call": call}
    with changed(collector, **settings), changed(parent, **wrapped), _watched_env(collector, log):
        if torch.is_grad_enabled():
            return rollout_with_gradients(collector)
        return TorchRLCollector.rollout(collector)


@contextmanager
def _watched_env(collector: Any, log: CollectionLog) -> Iterator[None]:
    """Note the steps that TorchRL's loop takes: it may end early, and may keep no batch."""
    if not log.wanted and log.watch is None:
        yield
        return
    env = collector.env
    step = log.timed("env_seconds", env.step_and_maybe_reset)
    own = env.__dict__.get("step_and_maybe_reset")  # a user may have replaced it

    def noting(tensordict: TensorDictBase) -> Any:
        if log.watch is not None:
            log.watch.begin(tensordict)
        stepped = step(tensordict)
        try:
            log.note(stepped, env)
        except BaseException:
            collector._runner.stale = True  # the loop has yet to go on to the env's step
            raise
        return stepped

    env.__dict__["step_and_maybe_reset"] = noting
    try:
        yield
    finally:
        del env.__dict__["step_and_maybe_reset"]
        if own is not None:
            env.__dict__["step_and_maybe_reset"] = own


def warn_of_lost(parent: CollectorState, entries: Iterable[Key]) -> None:
    """Warn of entries that the parent's buffers, made before they came, do not take."""
    held = parent.preallocated.keys(True) if parent.preallocates else entries
    lost = [key for key in entries if key not in held]
    if lost:
        warnings.warn(
            f"the policy's entries {lost} are no dense tensors, and are not in the batches: "
            "TorchRL's buffers do not hold them; pass use_buffers=False to keep them",
            stacklevel=2,
        )


@contextmanager
def changed(thing: Any, **settings: Any) -> Iterator[None]:
    """Change attributes of something for a while."""
    before = {name: getattr(thing, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)
