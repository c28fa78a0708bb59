"""Notes of a collector's collections, for its statistics and hooks.

Nothing here runs in the loop on arrays, unless times were asked for.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.nn.functional import pad
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect._upstream.collector import CollectorState
from tdcollect.collect.arguments import check_positive_int
from tdcollect.collect.episodes import Block, Piece
from tdcollect.collect.hooks import AnyHooks, as_hooks
from tdcollect.collect.policies import Policy
from tdcollect.collect.statistics import (
    Bools,
    Collection,
    Episodes,
    Floats,
    Ints,
    Statistics,
    Tally,
)
from tdcollect.collect.step_dict import Key, StepDict, entry_path, under_next
from tdcollect.collect.tensordict_env import SteppedEnv
from tdcollect.collect.watch import Watch, marked_slots
from tdcollect.envs.transforms import base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.progress import progress_bar

Env = TypeVar("Env", bound=SteppedEnv)
Function = TypeVar("Function", bound=Callable[..., Any])
Lower = Callable[[StepDict], Policy]


class Ends(NamedTuple):
    """The ends of the episodes of a collection.

    Attributes:
        done: ``[N, T]``; ``[1, F]`` if by episodes, or by arrival.
        failed: the steps that are marked as failed; None where the env marks none.
        by_episodes: whether whole episodes were collected.
        arrived: the slot of each row, by arrival; None otherwise.
    """

    done: Bools
    failed: Bools | None
    by_episodes: bool
    arrived: Ints | None

    def feed(self, tally: Tally, reward: Floats) -> Episodes:
        """The episodes that ended, with their rewards, of the shape of ``done``.

        Args:
            tally: of the slots. Whole episodes are added up by themselves.
            reward: the rewards.
        """
        if self.by_episodes:
            return Tally(1).feed(reward, self.done)
        if self.arrived is None:
            return tally.feed(reward, self.done, self.failed)
        return tally.feed_rows(self.arrived, reward, self.done, self.failed)


class CollectionLog:
    """Notes of one collection: rewards, done flags, and times on request.

    Args:
        batch_size: the env's.
        wanted: whether to note rewards and flags.
        timers: whether to time the env and the policy.
        watch: called with each step; None for no hooks.

    Attributes:
        batch: the batch collected; to be set.
        env_seconds: time in the env's steps and resets; None without timers.
        policy_seconds: time in calls of the policy; None without timers.
        arrived: the slot of each row, by arrival; None otherwise.
    """

    def __init__(
        self, batch_size: torch.Size, wanted: bool, timers: bool, watch: Watch | None = None
    ):
        self.env_seconds = 0.0 if timers else None
        self.policy_seconds = 0.0 if timers else None
        self.batch: TensorDictBase | None = None
        self.wanted = wanted
        self.watch = watch
        self._slots = batch_size.numel()
        self._time_dim = len(batch_size)
        self._timers = timers
        # Of a collection on StepDicts, the entries of its batch.
        self._reward_entries: dict[str, torch.Tensor] = {}
        self._done_entry: torch.Tensor | None = None
        self._failed_entry: torch.Tensor | None = None
        self.arrived: Ints | None = None
        self._ended: list[Piece] = []
        # Of TorchRL's loop, one list of entries per step.
        self._rewards: list[dict[str, torch.Tensor]] = []
        self._flags: list[list[torch.Tensor]] = []
        self._failures: list[list[torch.Tensor]] = []

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

    def timed_parts(self, env: Env, lower: Lower) -> tuple[Env, Lower]:
        """The env and the policy of a collection on StepDicts, timed if that is asked for."""
        if not self._timers:
            return env, lower
        for name in ("advance", "begin", *(("send_reset", "receive") if env.own_pace else ())):
            setattr(env, name, self.timed("env_seconds", getattr(env, name)))
        return env, lambda step: cast(Policy, _TimedPolicy(lower(step), self))

    # ------------------------------------------------------------------------------------ notes

    def note_blocks(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Hand on the blocks of a collection by episodes, and note which episodes ended."""
        for block in blocks:
            self._ended += [piece for piece in block.pieces if piece.ended]
            yield block

    def note_entries(self, entries: dict[Key, torch.Tensor], reward_keys: Sequence[Key]) -> None:
        """Note the rewards and flags of a collection on StepDicts.

        Args:
            entries: ``[*N, T, *feature]``; ``[F, *feature]`` if by episodes.
            reward_keys: those of the env.
        """
        if self.wanted:
            self._reward_entries = {
                entry_path(key): entries[under_next(key)] for key in reward_keys
            }
            self._done_entry = entries[keys.NEXT_DONE]
            if not self.by_episodes:  # a transform may truncate without ending the episode
                for key in (keys.TERMINATED, keys.TRUNCATED):
                    if under_next(key) in entries:
                        self._done_entry = self._done_entry | entries[under_next(key)]
            self._failed_entry = entries.get(under_next(keys.ENV_ERROR))

    def note_arrivals(self, entries: dict[Key, torch.Tensor], reward_keys: Sequence[Key]) -> None:
        """Note the rewards and flags of rows by arrival, ``[F, *feature]``, and their slots."""
        self.arrived = entries[keys.SLOT].numpy()
        self.note_entries(entries, reward_keys)

    def note(self, given: tuple[TensorDictBase, TensorDictBase], env: EnvBase) -> None:
        """Note a step of TorchRL's loop: the step taken, and the one to go on with."""
        stepped, upcoming = given
        following = stepped.get(keys.NEXT)
        rewards = {entry_path(key): following.get(key) for key in env.reward_keys}
        flags = [following.get(key, None) for key in env.done_keys]
        flags = [flag.reshape(self._slots, -1) for flag in flags if flag is not None]
        failed = following.get(keys.ENV_ERROR, None)
        if self.wanted:
            self._rewards.append(rewards)
            self._flags.append(flags)
            if failed is not None:
                self._failures.append([failed])
        if self.watch is not None:
            done = torch.cat(flags, -1).any(-1)
            ended: list[int] = done.nonzero().reshape(-1).tolist()
            broken = marked_slots(failed)
            unbroken = [slot for slot in ended if slot not in broken]
            self.watch.stepped(None, unbroken, lambda: stepped, rewards.values(), broken)
            if ended:
                self.watch.started(ended, lambda: upcoming)

    # ---------------------------------------------------------------------------- what was noted

    def arrays(self) -> tuple[dict[str, Floats], Bools]:
        """The reward entries by path, and done flags, ``[N, T]``; ``[1, F]`` if by episodes.

        By arrival, they are ``[1, F]``, too. The reward of an entry is the mean over its features
        (the agents of a group, say). A slot is done where any flag of it is, which is where
        TorchRL's collector starts a trajectory.
        """
        rewards: dict[str, Any]
        if self._done_entry is None:
            done = self._stacked(self._flags)
            names = self._rewards[0] if self._rewards else ()
            rewards = {name: self._stacked([[of[name]] for of in self._rewards]) for name in names}
        else:
            slots, steps = self._shape(self._done_entry)
            entries = self._reward_entries.items()
            rewards = {name: as_array(entry, slots, steps) for name, entry in entries}
            done = as_array(self._done_entry, slots, steps)
        return {name: averaged(reward) for name, reward in rewards.items()}, done.any(-1)

    def failed_steps(self) -> Bools | None:
        """The steps that are marked as failed, ``[N, T]``; None where the env marks none."""
        if self.by_episodes:
            return None  # episodes that failed are left out
        if self._failures:
            return self._stacked(self._failures).any(-1)
        if self._failed_entry is None:
            return None
        return as_array(self._failed_entry, *self._shape(self._failed_entry)).any(-1)

    def _shape(self, entry: torch.Tensor) -> tuple[int, int]:
        """The slots and steps of an entry; those of whole episodes, or by arrival, in one row."""
        if self.by_episodes or self.arrived is not None:
            return 1, entry.shape[0]
        return self._slots, entry.shape[self._time_dim]

    @property
    def by_episodes(self) -> bool:
        """True if whole episodes were collected."""
        return bool(self._ended)

    @property
    def slots(self) -> Ints:
        """``[E]`` int64, of whole episodes in the order in which they started."""
        order = sorted(self._ended, key=lambda piece: piece.start.index)
        return np.array([piece.slot for piece in order], np.int64)

    def _stacked(self, steps: Sequence[Sequence[torch.Tensor]]) -> Any:
        """A list of entries ``[*N, *feature]`` for each of T steps, as an array ``[N, T, F]``.

        Features that a step has less than others are zero: those of actions cut short by an end.
        """
        parts = []
        for values in zip(*steps, strict=True):
            rows = [value.reshape(self._slots, -1) for value in values]
            if len({row.shape for row in rows}) > 1:
                most = max(row.shape[1] for row in rows)
                rows = [pad(row, (0, most - row.shape[1])) for row in rows]
            parts.append(torch.stack(rows, 1))
        if not parts:
            return np.zeros((self._slots, 0, 0))
        return torch.cat(parts, -1).detach().cpu().numpy()


def slots_of(index: Any, batch_size: torch.Size) -> Bools:
    """The slots of an index ``[N]``, as TorchRL's ``reset()`` reads it."""
    marked = torch.zeros((*batch_size, 1), dtype=torch.bool)
    marked[index] = True
    return cast(Bools, marked.reshape(-1).numpy())


def as_array(entry: torch.Tensor, slots: int, steps: int) -> Any:
    """An entry as an array ``[N, T, F]``."""
    return entry.detach().cpu().numpy().reshape(slots, steps, -1)


def averaged(values: Any) -> Floats:
    """The mean over the features of ``[N, T, F]``."""
    if values.shape[-1] == 1:
        return values[..., 0].astype(np.float64)
    return values.mean(-1, dtype=np.float64)


class _TimedPolicy:
    """A policy on StepDicts, timed."""

    def __init__(self, policy: Policy, log: CollectionLog):
        self._policy = policy
        self._call = log.timed("policy_seconds", policy)

    def __call__(self, step: StepDict) -> None:
        self._call(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class Monitor:
    """Keeps a collector's statistics, and calls its hooks.

    Args:
        statistics: whether to keep any.
        window: K, how many episodes to smooth over.
        timers: whether to time the env and the policy.
        hooks: are called as the collector works.

    Attributes:
        stats: ``collector.stats``.
        collected: whether anything was collected since all slots were reset.

    Raises:
        TypeError: if an item is not a ``Hooks`` instance.
        ValueError: for a window that is not positive, and for timers without statistics.
    """

    def __init__(self, statistics: bool, window: int, timers: bool, hooks: AnyHooks = None):
        check_positive_int("stats_window", window)
        if timers and not statistics:
            raise ValueError(
                "expected statistics=True with timers=True, got statistics=False: they are part "
                "of collector.stats; leave one of the two out"
            )
        self.stats = Statistics(window, statistics, self._counters)
        self._timers = timers
        listed = as_hooks(hooks)
        self._watch = Watch(listed) if listed else None
        self._collector: Callable[[], Any] = lambda: None
        self._ended: float | None = None
        self._unshaped: Ends | None = None
        self._restarts = 0
        self.collected = False

    def attach(self, collector: TorchRLCollector) -> None:
        """Attach to the collector, once it is made. It is not kept alive."""
        self._collector = weakref.ref(collector)
        self._batch_size = collector.env.batch_size
        names = sorted(map(entry_path, collector.env.reward_keys))
        slots = self._batch_size.numel()
        rewards = collector.env.full_reward_spec[collector.env.reward_keys[0]].shape.numel()
        self._groups = [] if names == [keys.REWARD] and rewards == slots else names
        self._tallies = [Tally(slots) for _ in range(2 + len(self._groups))]
        self._tally, self._shaped, *_ = self._tallies
        base = base_of(collector.env)
        if isinstance(base, GymnasiumEnv) and base.restarts is not None:
            self._restarts = base.restarts
        if self._watch is not None:
            self._watch.attach(collector.env)

    def _counters(self) -> dict[str, Any]:
        collector = self._collector()
        if collector is None:
            raise RuntimeError("the collector is gone, and its counters with it")
        return TorchRLCollector.stats(collector)

    def drop(self, index: Any = None) -> None:
        """Drop the episodes in flight, cut short by a reset: of all slots, or of an index."""
        if index is None:
            self.collected = False
            for tally in self._tallies:
                tally.drop()
            if self._watch is not None:
                self._watch.drop()
            return
        slots = slots_of(index, self._batch_size)
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
        collected = self.collected
        self.drop()
        if collected:
            self.miss()
        self.collected = collected

    @property
    def _step_watch(self) -> Watch | None:
        return self._watch if self._watch is not None and self._watch.steps else None

    def unnoted_log(self) -> CollectionLog:
        """A log for steps whose rows are noted later; hooks see them at once."""
        return CollectionLog(self._batch_size, False, False, self._step_watch)

    @contextmanager
    def collection(self) -> Iterator[CollectionLog]:
        """Keep the log of one collection, and count it at its end."""
        log = CollectionLog(self._batch_size, self.stats.on, self._timers, self._step_watch)
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
            self._watch.collected(log.batch, self.stats)

    def _count(self, log: CollectionLog, start: float) -> None:
        rewards, done = log.arrays()
        failed = log.failed_steps()
        ends = Ends(done, failed, log.by_episodes, log.arrived)
        groups = {
            name: ends.feed(tally, rewards[name]).returns
            for name, tally in zip(self._groups, self._tallies[2:], strict=True)
        }
        mean = np.mean([*rewards.values()], 0)
        episodes = ends.feed(self._tally, mean)
        if log.by_episodes:
            episodes = episodes._replace(slots=log.slots)
        if self._unshaped is not None:
            self._shaped.miss()  # its batch was not shaped
        self._unshaped = ends
        between = None if self._ended is None else start - self._ended
        now = self._ended = time.perf_counter()
        times = (now - start, between, log.env_seconds, log.policy_seconds)
        restarts = self._newly_restarted(failed)
        self.stats.add(Collection(done.size, *times, *episodes, None, restarts, groups))

    def _newly_restarted(self, failed: Bools | None) -> int:
        """The number of envs built anew since the last call."""
        base = base_of(self._collector().env)
        if not isinstance(base, GymnasiumEnv):  # tdcollect's envs inside of others, say
            return 0 if failed is None else int(failed.sum())
        if base.restarts is None:
            return 0
        before, self._restarts = self._restarts, base.restarts
        return self._restarts - before

    def shaped(self, reward: torch.Tensor) -> None:
        """Count shaped rewards of the latest collection: ``[*N, T, *feature]``, or ``[F, ...]``."""
        if self._unshaped is None:
            return
        ends, self._unshaped = self._unshaped, None
        slots, steps = ends.done.shape
        in_one_row = ends.by_episodes or ends.arrived is not None
        length = reward.shape[0 if in_one_row else len(self._batch_size)]
        values = averaged(as_array(reward, slots, length))[:, :steps]  # it may have ended early
        self.stats.add_shaped(ends.feed(self._shaped, values).returns)


class StatsAttribute:
    """``collector.stats``: statistics that can be called, as the parent's method of that name."""

    def __get__(self, collector: Any, owner: type) -> Any:
        return TorchRLCollector.stats if collector is None else collector._monitor.stats


def with_progress(batches: Iterator[Any], collector: Any) -> Iterator[Any]:
    """The batches, while a bar shows the frames collected and the latest mean return.

    The bar closes with the iteration, however that ends.
    """
    parent, total = CollectorState(collector), collector.total_frames
    total = None if math.isinf(total) else total
    with (
        closing(batches),  # type: ignore[type-var]
        progress_bar(total, "frames", parent.frames) as bar,
    ):
        for batch in batches:
            latest = collector.stats.latest if collector.stats.on else None
            if latest is not None and latest.return_stats is not None:
                bar.set_postfix({"return": f"{latest.return_stats.mean:.4g}"}, refresh=False)
            bar.update(parent.frames - bar.n)
            yield batch
            del batch  # or it would take memory beside the next one
