"""Slots with their bookkeeping, on arrays: the one place where a step of interaction happens.

The ``EnvBase`` wrapper and the collector both drive an env through a :class:`Stepper`. To a backend
it adds the entries of TorchRL's StepCounter, RewardSum and InitTracker, a time limit, waiting
seeds, checks, and restarts of envs that fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tdcollect.envs.backend import Backend, SlotBuffers
from tdcollect.envs.buffers import Bookkeeping, StepBuffers, allocate_buffers, entries_of
from tdcollect.envs.errors import RestartBudget, SlotError, not_finite
from tdcollect.envs.slot_counters import EpisodeCounters, WaitingSeeds
from tdcollect.workers.values import Array


class Stepper:
    """Steps and resets slots on arrays.

    Args:
        backend: the slots.
        bookkeeping: the further entries to write.
        name: the env's name in messages.
        check_finite: take NaN or infinite observations and rewards for failures of the env.
        max_restarts: number of envs that may be built anew after failures; None to raise instead.

    Attributes:
        entries: the entries beside reward and flags: observations, infos, bookkeeping.
        latest: the buffers of the latest step or reset, which hold the present state of all slots;
            None before the first reset.
        broken: the failures of the latest step, by slot, after which the envs were built anew and
            the episodes broken off.
        restarts: the envs that were built anew after failures; None where failures raise.
        is_closed: whether :meth:`close` was called.

    Raises:
        ValueError: for a time limit on slots that cannot be reset singly, for restarts of a backend
            that cannot rebuild, and for entries that share a name.
    """

    def __init__(
        self,
        backend: Backend,
        bookkeeping: Bookkeeping = Bookkeeping(),
        *,
        name: str = "the env",
        check_finite: bool = False,
        max_restarts: int | None = None,
    ):
        if bookkeeping.max_episode_steps is not None and not backend.resets_subset:
            raise ValueError(
                "expected no max_episode_steps: this vector env cannot reset single slots, which a "
                "limit asks for; make the env itself with one, or use backend='serial'"
            )
        if max_restarts is not None and not backend.rebuilds:
            raise ValueError(
                f"expected on_env_error='raise': the backend {backend.name!r} cannot build single "
                "slots anew; use backend='serial' or 'process'"
            )
        self.backend = backend
        self.name = name
        self.is_closed = False
        self.latest: StepBuffers | None = None
        self.restarts = None if max_restarts is None else RestartBudget(max_restarts)
        self.broken: Mapping[int, Exception] = {}
        self.num_envs = backend.num_envs
        self.bookkeeping = bookkeeping
        self.entries = entries_of(backend, bookkeeping, self.restarts is not None)
        self._every_slot = range(self.num_envs)
        self._counters = EpisodeCounters(self.num_envs)
        self._finite = check_finite
        # Slots whose envs were built anew together with one that failed, amid their own episodes.
        self._fallen: dict[int, Exception] = {}
        self._returns = np.zeros(self.num_envs, np.float32)
        self._must_reset = np.ones(self.num_envs, bool)
        self._unstarted = set(self._every_slot)
        self._seeds = WaitingSeeds()

    def allocate(
        self, count: int, batched: bool = True, pinned: bool = False, exact: bool = False
    ) -> list[StepBuffers]:
        """Zeroed buffers for ``count`` steps, allocated together.

        Args:
            count: how many.
            batched: tensors of batch size ``[N]``; False for ``[]``, where N is 1.
            pinned: in page-locked memory, from which copies to a GPU need not be waited for.
            exact: the backend writes rewards in float64; the tensors hold their rounding.
        """
        return allocate_buffers(self.backend, self.entries, count, batched, pinned, exact)

    def set_seeds(self, seeds: Sequence[int]) -> None:
        """Keep one seed per slot for that slot's next reset.

        Raises:
            ValueError: if no reset of the backend could honour them.
        """
        self.backend.check_seeds(seeds)
        self._seeds.ask(seeds)

    def derive_seeds(self) -> None:
        """Seed the next reset of each slot that was seeded before from that seed.

        For envs whose generators stand where timing has left them: seeded runs repeat so.
        """
        self._seeds.derive(self._every_slot, self._counters.seeds)

    def follow(self) -> None:
        """Go on from slots that somebody else has reset or stepped."""
        self._unstarted.clear()
        self._must_reset[:] = False
        self.latest = None

    def read_info(self, examples: Mapping[str, Any]) -> None:
        """Have steps write further infos, with examples by name; all slots must be reset."""
        if examples:
            present = {i.key: np.zeros(i.shape, i.dtype) for i in self.backend.info}
            self.backend.read_info({**present, **examples})
            self.entries = entries_of(self.backend, self.bookkeeping, self.restarts is not None)
            self.latest = None
            self._unstarted = set(self._every_slot)

    def reset(
        self,
        slots: Sequence[int] | None,
        out: StepBuffers,
        seeds: Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start an episode in each of ``slots`` (None for all).

        Args:
            slots: ascending.
            out: receives the rows of these slots, flags set to False; the rows of the others show
                their present state. Its reward is left alone.
            seeds: one per slot in ``slots``; None for those of :meth:`set_seeds` that were not used
                yet, or the env's own generators.
            options: gymnasium's reset options.

        Raises:
            RuntimeError: if the stepper is closed.
            SlotError: if the envs of some slots failed; the others are reset.
            RestartsExhausted: if a failure exceeds ``max_restarts``.
        """
        self.check_open("reset")
        if slots is not None:
            self._hold_present(out)
        for flag in (out.raw.terminated, out.raw.truncated, out.done):
            flag[... if slots is None else slots] = False
        slots = self._every_slot if slots is None else slots
        self.recall(slots)
        failed = self._restarted_reset(slots, seeds, options, out.raw) if slots else None
        rows = list(slots) if failed is None else [s for s in slots if s not in failed.causes]
        used = self._seeds.of(slots, seeds)
        self._seeds.drop(slots)
        for slot in slots if self._fallen else ():
            self._fallen.pop(slot, None)
        self._begun(rows, used, out)
        self.latest = out
        if failed is not None:
            raise failed

    def _begun(self, rows: list[int], seeds: Mapping[int, int], out: StepBuffers) -> None:
        """Note the episodes that have begun, with the seeds that were used, by slot."""
        self._counters.started(rows, {slot: seeds[slot] for slot in rows if slot in seeds})
        if self.bookkeeping.episode_reward:
            self._returns[rows] = 0
        self._must_reset[rows] = False
        self._unstarted.difference_update(rows)
        self._write_bookkeeping(rows, True, out)

    def _restarted_reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
        out: SlotBuffers,
    ) -> SlotError | None:
        """Reset slots, and again those whose envs failed and were built anew.

        Returns:
            The failures to raise; None if there are none left.
        """
        failed = self._reset_backend(slots, seeds, options, out)
        while failed is not None and self.restarts is not None:
            again = sorted(failed.causes)
            self._restart(failed, again)
            if seeds is None:
                failed = self._reset_backend(again, None, options, out)
            else:
                given = dict(zip(slots, seeds, strict=True))
                failed = self._reset_backend(again, [given[s] for s in again], options, out)
        return failed

    def _reset_backend(
        self,
        slots: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
        out: SlotBuffers,
    ) -> SlotError | None:
        """Reset slots; returns the failures, with episode and seed."""
        failed: SlotError | None = None
        for group, group_seeds in self._seeds.groups(slots, seeds):
            if group_seeds is not None:
                self.backend.check_seeds(group_seeds)
            try:
                self.backend.reset(group, group_seeds, options, out)
            except SlotError as error:
                failed = error if failed is None else failed.joined(error)
        if self._finite:
            failed = not_finite("reset", self.backend, slots, out, failed)
        if failed is None:
            return None
        asked = self._seeds.of(slots, seeds)
        return failed.at(self._counters.places("reset", failed.causes, asked))

    def step(
        self,
        actions: Sequence[Array],
        slots: Sequence[int] | None,
        out: StepBuffers,
        *,
        restart: bool = True,
    ) -> None:
        """Step ``slots`` (None for all).

        Args:
            actions: ``[N, *shape]`` each, in the order of the action entries.
            slots: ascending.
            out: receives the rows of these slots: observations (at an episode's end the true final
                one), reward and flags. The rows of the others show their present state.
            restart: False raises SlotError also where ``max_restarts`` would have envs built anew.

        Raises:
            RuntimeError: if the stepper is closed, before the first reset, or if an action would
                be lost.
            SlotError: if the envs of some slots failed; the others are stepped.
            RestartsExhausted: if a failure exceeds ``max_restarts``; the others are stepped.
        """
        self.recall()
        self._check_step(slots)
        if slots is not None:
            self._hold_present(out)
        failed, stepped = None, slots
        if self._fallen:
            stepped, failed = self._without_fallen(slots)
        try:
            self.backend.step(actions, stepped, out.raw)
        except SlotError as error:
            failed = error if failed is None else failed.joined(error)
        failed = self._stepped(slots, stepped, failed, out, restart)
        self.latest = out
        if failed is not None:
            raise failed

    def _stepped(
        self,
        slots: Sequence[int] | None,
        stepped: Sequence[int] | None,
        failed: SlotError | None,
        out: StepBuffers,
        restart: bool,
    ) -> SlotError | None:
        """Complete the rows of a step.

        Args:
            slots: that were to be stepped.
            stepped: those of them that the backend was asked for.
            failed: the failures so far.
            out: has the backend's rows.
            restart: as of :meth:`step`.

        Returns:
            The failures to raise; None if there are none left.
        """
        buffers = out.raw
        if out.reward is not buffers.reward:
            out.reward[...] = buffers.reward
        if self._finite:
            checked = self._every_slot if stepped is None else stepped
            failed = not_finite("step", self.backend, checked, buffers, failed, out.reward)
        if self.broken:
            self.broken = {}
        if failed is not None:
            slots, failed = self._failed_step(failed, slots, out, restart)
        rows: Any = ... if slots is None else list(slots)
        self._counters.stepped(slots)
        if self.bookkeeping.max_episode_steps is not None:
            limit = self.bookkeeping.max_episode_steps
            buffers.truncated[rows] |= self._counters.lengths()[rows] >= limit
        if self.bookkeeping.episode_reward:
            self._returns[rows] += out.reward[rows]
        np.logical_or(buffers.terminated, buffers.truncated, out=out.done)
        self._must_reset[rows] = out.done[rows]
        if out.bookkeeping:
            self._write_bookkeeping(rows, False, out)
        return failed

    def recall(self, resetting: Sequence[int] = ()) -> None:
        """Wait for slots in flight, where some may be, and forget where they came to.

        Args:
            resetting: the slots that are about to be reset.
        """

    def _without_fallen(self, slots: Sequence[int] | None) -> tuple[list[int], SlotError | None]:
        """Of ``slots``, those that can be stepped, and the failures of the fallen."""
        asked = self._every_slot if slots is None else slots
        fallen = {slot: self._fallen[slot] for slot in asked if slot in self._fallen}
        rest = [slot for slot in asked if slot not in fallen]
        return rest, SlotError("step", fallen) if fallen else None

    def _failed_step(
        self, failed: SlotError, slots: Sequence[int] | None, out: StepBuffers, restart: bool
    ) -> tuple[Sequence[int] | None, SlotError | None]:
        """Deal with the failures of a step.

        Returns:
            The slots that have taken the step, and the error to raise at its end. If envs were
            built anew, all slots have, and there is no error.
        """
        failed = failed.at(self._counters.places("step", failed.causes, {}))
        if restart and self.restarts is not None:
            self._break_off(failed, out)
            self.broken = failed.causes
            return slots, None
        self._must_reset[list(failed.causes)] = True
        asked = self._every_slot if slots is None else slots
        return [slot for slot in asked if slot not in failed.causes], failed

    def _hold_present(self, out: StepBuffers) -> None:
        """Write the present state of all slots, for those that a call leaves alone."""
        if self.latest is not None:
            out.copy_state(self.latest.state)

    def _break_off(self, failed: SlotError, out: StepBuffers) -> None:
        """Truncate the episodes of slots whose envs failed, and build these anew."""
        assert self.latest is not None  # a step follows a reset
        latest = self.latest.raw
        self._restart(failed, [slot for slot in failed.causes if slot not in self._fallen])
        rows = list(failed.causes)
        for array, present in zip(
            (*out.raw.observation, *out.raw.info),
            (*latest.observation, *latest.info),
            strict=True,
        ):
            array[rows] = present[rows]
        out.reward[rows] = out.raw.reward[rows] = 0
        out.raw.terminated[rows] = False
        out.raw.truncated[rows] = True
        for slot in rows:
            self._fallen.pop(slot, None)
        self._unstarted.update(rows)

    def _restart(self, failed: SlotError, slots: list[int]) -> None:
        """Build envs that failed anew, until that succeeds or the budget is spent."""
        assert self.restarts is not None
        while slots:
            self.restarts.allow(len(slots), failed)
            try:
                built = self.rebuild(slots)
            except Exception as error:
                self.restarts.count += len(slots)
                failed = SlotError("rebuild", dict.fromkeys(slots, error))
                continue
            self.restarts.count += len(built)
            self._seeds.derive(built, self._counters.seeds)
            return

    def rebuild(self, slots: Sequence[int]) -> list[int]:
        """Make the envs of ``slots`` anew; each must be reset before it is stepped.

        Envs that were lost together with these are made anew, too. If one of them is amid an
        episode, its next step fails.

        Returns:
            The slots built anew, ascending.
        """
        built = self.backend.rebuild(slots)
        for slot in built:
            if slot not in slots and not self._must_reset[slot]:
                self._fallen[slot] = RuntimeError(
                    f"its env was built anew together with that of slot {slots[0]}"
                )
            else:
                self._must_reset[slot] = True
                self._unstarted.add(slot)
        return built

    def save_state(self) -> dict[str, Any]:
        """The present state of all slots, with counts, sums and waiting seeds."""
        return {
            "counters": self._counters.save_state(),
            "returns": self._returns.copy(),
            "must_reset": self._must_reset.copy(),
            "unstarted": sorted(self._unstarted),
            "seeds": self._seeds.save_state(),
            "restarts": None if self.restarts is None else self.restarts.count,
            "latest": None if self.latest is None else [a.copy() for a in self.latest.state],
        }

    def load_state(self, state: dict[str, Any], slots: Sequence[int]) -> None:
        """Restore the part of a :meth:`save_state` that concerns ``slots``, once their envs are."""
        if not slots or state["latest"] is None:
            return
        rows = list(slots)
        self._counters.load_state(state["counters"], rows)
        self._returns[rows] = state["returns"][rows]
        self._must_reset[rows] = state["must_reset"][rows]
        self._unstarted.difference_update(rows)
        self._unstarted.update(set(rows).intersection(state["unstarted"]))
        self._seeds.load_state(state["seeds"], rows)
        if self.restarts is not None and state["restarts"] is not None:
            self.restarts.count = state["restarts"]
        (out,) = self.allocate(1)
        self._hold_present(out)
        out.copy_state(state["latest"], rows)
        self.latest = out

    def _write_bookkeeping(self, rows: Any, is_init: bool, out: StepBuffers) -> None:
        values = (
            (self.bookkeeping.step_count, self._counters.lengths),
            (self.bookkeeping.episode_reward, lambda: self._returns),
        )
        arrays = iter(out.bookkeeping)
        for wanted, value in values:
            if wanted:
                next(arrays)[rows, 0] = value()[rows]
        if self.bookkeeping.is_init:
            next(arrays)[rows] = is_init
        if self.restarts is not None:
            marks = next(arrays)
            marks[rows] = False
            if self.broken and not is_init:
                marks[list(self.broken)] = True

    def check_open(self, verb: str) -> None:
        """Raise RuntimeError if the stepper is closed."""
        if self.is_closed:
            raise RuntimeError(f"cannot {verb} {self.name}: the env is closed; make a new one")

    def _check_step(self, slots: Sequence[int] | None) -> None:
        self.check_open("step")
        if self._unstarted and (slots is None or self._unstarted.intersection(slots)):
            raise RuntimeError("expected reset() before the first step(); call env.reset()")
        if slots is not None and not self.backend.steps_subset:
            raise RuntimeError(
                f"expected a step of all {self.num_envs} slots, got one of slots {list(slots)}: "
                "this vector env steps its slots together; use backend='serial' to step some"
            )
        if not self.backend.steps_ended_slots:
            ended = self._must_reset if slots is None else self._must_reset[list(slots)]
            if ended.any():
                raise RuntimeError(
                    f"the episodes of slots {np.flatnonzero(self._must_reset).tolist()} have "
                    "ended and the env would ignore their actions; reset these slots first (a "
                    "'_reset' mask, env.maybe_reset or env.step_and_maybe_reset do)"
                )

    def close(self) -> None:
        """Close the backend."""
        self.is_closed = True
        self.backend.close()
