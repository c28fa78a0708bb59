"""Collecting by arrival: rows of slots in flight, from one batch to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from tensordict import TensorDictBase

from tdcollect import keys
from tdcollect.collect import path
from tdcollect.collect.monitor import CollectionLog
from tdcollect.collect.path import Plan
from tdcollect.collect.policies import Policy
from tdcollect.collect.ready.arguments import by_arrival_needs, check_arrival_buffer
from tdcollect.collect.ready.frames import Arrivals
from tdcollect.collect.step_dict import Key, StepDict
from tdcollect.collect.torchrl_loop import CollectorPart


class ByArrival(CollectorPart):
    """Collects rows in the order of their arrival, for a collector that was asked for it.

    Args:
        collector: is not kept alive.
    """

    def __init__(self, collector: Any):
        super().__init__(collector)
        self._held = Arrivals()
        self._random = False  # whether the slots in flight act randomly, instead of the policy

    @property
    def lost(self) -> bool:
        """True if slots that were in flight are not any more: somebody else has moved the env."""
        return self._held.slots is not None and self._held.slots.lost

    @property
    def surplus(self) -> tuple[dict[Key, torch.Tensor], list[int]]:
        """The rows that have arrived beyond the latest batch, and their slots."""
        return self._held.surplus, self._held.surplus_slots

    @surplus.setter
    def surplus(self, rows: tuple[dict[Key, torch.Tensor], list[int]]) -> None:
        self._held.surplus, self._held.surplus_slots = rows

    def leave_out(self, slots: Collection[int]) -> None:
        """Drop the rows of some slots, whose trajectories are cut short."""
        entries, of = self.surplus
        kept = [row for row, slot in enumerate(of) if slot not in slots]
        self.surplus = {k: v[kept] for k, v in entries.items()}, [of[row] for row in kept]

    def drop(self) -> None:
        """Forget slots in flight and rows: all slots have been reset."""
        self._held = Arrivals()

    def check(self) -> None:
        """Raise ValueError where rows cannot be collected by arrival, or not be stored."""
        collector = self._collector
        plan = path.plan_for(collector.env)
        if plan.env is None:
            raise by_arrival_needs("; ".join(plan.reasons))
        if not plan.env.own_pace:
            raise by_arrival_needs(plan.env.in_step_for)
        if collector.replay_buffer is not None:
            check_arrival_buffer(collector.replay_buffer, collector.n_env)

    def collect(
        self,
        plan: Plan,
        lower: Callable[[StepDict], Policy],
        count: int,
        log: CollectionLog,
        random: bool,
        gradients: bool = False,
    ) -> TensorDictBase:
        """Collect ``count`` rows: ``[count]``.

        Args:
            plan: of the env.
            lower: gives the policy on StepDicts.
            count: how many rows.
            log: of this collection.
            random: the policy draws random actions, and writes nothing else.
            gradients: keep the graph through the policy, within this batch.
        """
        collector, runner = self._collector, self._collector._runner
        if plan.env is None or not plan.env.own_pace:  # the env has changed since
            self.check()
        assert plan.env is not None
        plan.env.drops_unspecified = self._parent.preallocates
        if random != self._random:  # the entries of the rows in flight are others
            self.settle(log)
            self._random = random
        env, lower = log.timed_parts(plan.env, lower)
        loop = runner.frame_loop(env, lower, log, gradients)
        entries, slots = loop.arriving(count, self._held)
        if gradients:  # the graph ends with the batch
            self.settle(log)
            rows, of = self.surplus
            self.surplus = {key: value.detach() for key, value in rows.items()}, of
            self._parent.carrier = self._parent.carrier.detach()
        entries[keys.SLOT] = torch.tensor(slots)
        log.note_arrivals(entries, collector.env.reward_keys)
        batch: TensorDictBase = runner.assemble(entries, (count,))
        batch.names = None  # rows of one slot do not lie beside each other
        return batch

    def settle(self, log: CollectionLog | None = None) -> None:
        """Have slots in flight wait where they come to; their rows join the next batch.

        Args:
            log: of the present collection; None between two.
        """
        runner = self._collector._runner
        if self._held.slots is None or runner.is_lost:
            return
        plan = runner.plan()
        if plan.env is not None:
            log = log or self._collector._monitor.unnoted_log()
            runner.frame_loop(plan.env, runner.lower, log, False).settle(self._held)
