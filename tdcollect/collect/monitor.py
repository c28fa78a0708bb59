"""What a collector notes of its collections, for its statistics.

Nothing here runs in the loop on arrays, unless times were asked for.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torchrl.collectors import Collector as TorchRLCollector

from tdcollect.collect.arguments import check_positive_int
from tdcollect.collect.fast.transforms import base_of
from tdcollect.collect.hooks import AnyHooks, Watch, as_hooks
from tdcollect.collect.record import Record, as_array, summed
from tdcollect.collect.statistics import Bools, Collection, Statistics, Tally
from tdcollect.envs.wrapper import GymnasiumEnv


class Monitor:
    """Keeps a collector's statistics, and tells its hooks.

    Args:
        statistics: whether to keep any.
        window: K, how many episodes to smooth over.
        timers: whether to time the env and the policy.
        hooks: are told of what the collector does.

    Attributes:
        stats: what the user sees.
        collected: whether anything was collected since all slots were reset.

    Raises:
        TypeError: for hooks that are none.
        ValueError: for a window that is not positive, and for timers without statistics.
    """

    def __init__(self, statistics: bool, window: int, timers: bool, hooks: AnyHooks = None):
        check_positive_int("stats_window", window)
        if timers and not statistics:
            raise ValueError(
                "expected statistics=True with timers=True, got statistics=False: times are told "
                "in collector.stats; leave one of the two out"
            )
        self.stats = Statistics(window, statistics, self._counters)
        self._timers = timers
        listed = as_hooks(hooks)
        self._watch = Watch(listed) if listed else None
        self._collector: Callable[[], Any] = lambda: None
        self._ended: float | None = None
        # Done flags, failed steps, and whether by episodes.
        self._unshaped: tuple[Bools, Bools | None, bool] | None = None
        self._restarts = 0
        self.collected = False

    def attach(self, collector: TorchRLCollector) -> None:
        """The collector, once it is made. It is not kept alive."""
        self._collector = weakref.ref(collector)
        self._batch_size = collector.env.batch_size
        self._tally = Tally(self._batch_size.numel())
        self._shaped = Tally(self._batch_size.numel())
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
        """Episodes in flight are cut short by a reset: of all slots, or of those of an index."""
        if index is None:
            self.collected = False
            self._tally.drop()
            self._shaped.drop()
            if self._watch is not None:
                self._watch.drop()
            return
        marked = torch.zeros((*self._batch_size, 1), dtype=torch.bool)
        marked[index] = True  # as TorchRL's reset() reads an index
        slots = marked.reshape(-1).numpy()
        self._tally.drop(slots)
        self._shaped.drop(slots)
        if self._watch is not None:
            self._watch.drop(slots)

    def save_state(self) -> dict[str, Any]:
        """Statistics, and the sums of episodes in flight, as nested arrays and numbers."""
        return {
            "stats": self.stats.save_state(),
            "tallies": [vars(tally).copy() for tally in (self._tally, self._shaped)],
            "watch": None if self._watch is None else self._watch.save_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`save_state` gave."""
        self.stats.load_state(state["stats"])
        for tally, values in zip((self._tally, self._shaped), state["tallies"], strict=True):
            vars(tally).update(values)
        if self._watch is not None and state["watch"] is not None:
            self._watch.load_state(state["watch"])
        self._ended = self._unshaped = None

    def miss(self) -> None:
        """The episodes in flight have steps that were not seen: they are not counted."""
        self._tally.miss()
        self._shaped.miss()

    def lose(self) -> None:
        """The episodes in flight are not those of the sums: they are not counted."""
        collected = self.collected
        self.drop()
        if collected:
            self.miss()
        self.collected = collected

    @contextmanager
    def collection(self) -> Iterator[Record]:
        """Around one collection, which tells the record what it collects."""
        watch = self._watch if self._watch is not None and self._watch.steps else None
        record = Record(self._batch_size, self.stats.on, self._timers, watch)
        start = time.perf_counter()
        try:
            yield record
        except BaseException:
            self.miss()
            raise
        finally:
            self.collected = True
        if self.stats.on:
            self._count(record, start)
        if self._watch is not None:
            self._watch.collected(record.batch, self.stats)

    def _count(self, record: Record, start: float) -> None:
        reward, done = record.arrays()
        failed = record.failed()
        if record.by_episodes:
            episodes = Tally(1).feed(reward, done)._replace(slots=record.slots)
        else:
            episodes = self._tally.feed(reward, done, failed)
        if self._unshaped is not None:
            self._shaped.miss()  # its batch was not shaped
        self._unshaped = done, failed, record.by_episodes
        between = None if self._ended is None else start - self._ended
        now = self._ended = time.perf_counter()
        times = (now - start, between, record.env_seconds, record.policy_seconds)
        restarts = self._newly_restarted(failed)
        self.stats.add(Collection(done.size, *times, *episodes, restarts=restarts))

    def _newly_restarted(self, failed: Bools | None) -> int:
        """Envs built anew since last asked."""
        base = base_of(self._collector().env)
        if not isinstance(base, GymnasiumEnv):  # tdcollect's envs inside of others, say
            return 0 if failed is None else int(failed.sum())
        if base.restarts is None:
            return 0
        before, self._restarts = self._restarts, base.restarts
        return self._restarts - before

    def shaped(self, reward: torch.Tensor) -> None:
        """The rewards of the latest collection, shaped: ``[*N, T, *feature]``, or ``[F, ...]``."""
        if self._unshaped is None:
            return
        (done, failed, by_episodes), self._unshaped = self._unshaped, None
        slots, steps = done.shape
        length = reward.shape[0 if by_episodes else len(self._batch_size)]
        values = summed(as_array(reward, slots, length))[:, :steps]  # it may have ended early
        tally = Tally(1) if by_episodes else self._shaped
        self.stats.add_shaped(tally.feed(values, done, failed).returns)


class StatsAttribute:
    """``collector.stats``: statistics that can be called, as the parent's method of that name."""

    def __get__(self, collector: Any, owner: type) -> Any:
        return TorchRLCollector.stats if collector is None else collector._monitor.stats
