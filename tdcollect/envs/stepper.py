"""Slots with their bookkeeping, on arrays: the one place where a step of interaction happens.

The ``EnvBase`` wrapper and the collector both drive an env through a :class:`Stepper`. It adds to a
backend what TorchRL's StepCounter, RewardSum and InitTracker add, a time limit, the seeds that
wait for their reset, the checks, and what becomes of a slot whose env fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tdcollect.envs.backend import Backend, SlotBuffers
from tdcollect.envs.buffers import Bookkeeping, StepBuffers, allocate_buffers, entries_of
from tdcollect.envs.errors import SlotError
from tdcollect.envs.faults import Restarts, not_finite
from tdcollect.envs.spaces import Array
from tdcollect.envs.whereabouts import Whereabouts


class Stepper:
    """Steps and resets slots on arrays.

    Args:
        backend: the slots.
        bookkeeping: what to record beside.
        check_finite: take observations and rewards that are NaN or infinite for a failure.
        max_restarts: how many envs that fail are built anew, in all; None to raise instead.

    Attributes:
        entries: what the buffers hold beside reward and flags: observations, infos, bookkeeping.
        broken: what went wrong in the slots whose episodes the latest step broke off, their envs
            built anew, by slot.
        restarts: the envs that were built anew as they failed; None where failures raise.

    Raises:
        ValueError: for a time limit on slots that cannot be reset singly, for restarts of a backend
            that cannot rebuild, and for entries that share a name.
    """

    def __init__(
        self,
        backend: Backend,
        bookkeeping: Bookkeeping = Bookkeeping(),
        *,
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
        self.restarts = None if max_restarts is None else Restarts(max_restarts)
        self.broken: Mapping[int, Exception] = {}
        self.num_envs = backend.num_envs
        self.bookkeeping = bookkeeping
        self.entries = entries_of(backend, bookkeeping, self.restarts is not None)
        self._every_slot = range(self.num_envs)
        self._at = Whereabouts(self.num_envs)
        self._finite = check_finite
        # Whose envs were built anew with another's that failed, amid their own episodes.
        self._fallen: dict[int, Exception] = {}
        self._returns = np.zeros(self.num_envs, np.float32)
        self._must_reset = np.ones(self.num_envs, bool)
        self._unstarted = set(self._every_slot)
        self._seeds: dict[int, int] = {}

    def allocate(
        self, count: int, batched: bool = True, pinned: bool = False, exact: bool = False
    ) -> list[StepBuffers]:
        """Zeroed buffers for ``count`` steps, allocated together.

        Args:
            count: how many.
            batched: tensors of batch size ``[N]``; False for ``[]``, where N is 1.
            pinned: in page-locked memory, from which copies to a GPU need not be waited for.
            exact: the backend writes rewards in float64; those of the tensors are made from them.
        """
        return allocate_buffers(self.backend, self.entries, count, batched, pinned, exact)

    def set_seeds(self, seeds: Sequence[int]) -> None:
        """Keep one seed a slot for that slot's next reset.

        Raises:
            ValueError: where the backend can never honour them.
        """
        self.backend.check_seeds(seeds)
        self._seeds = dict(enumerate(seeds))
        if self.restarts is not None:
            self.restarts.seeded(range(self.num_envs))

    def reset(
        self,
        slots: Sequence[int] | None,
        out: StepBuffers,
        seeds: Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start an episode in each of ``slots`` (None for all); write the rows of those only.

        Args:
            slots: ascending.
            out: its reward and flags are left alone.
            seeds: one a slot in ``slots``; None for those of :meth:`set_seeds` that were not used
                yet, or the env's own generators.
            options: gymnasium's reset options.

        Raises:
            SlotError: where the envs of some slots failed; the others are reset.
            RestartsExhausted: where too many had failed before.
        """
        slots = self._every_slot if slots is None else slots
        if not slots:
            return
        failed = self._reset_backend(slots, seeds, options, out.raw)
        while failed is not None and self.restarts is not None:
            again = sorted(failed.causes)
            self._restart(failed, again)
            if seeds is not None:
                given = dict(zip(slots, seeds, strict=True))
                failed = self._reset_backend(again, [given[s] for s in again], options, out.raw)
            else:
                failed = self._reset_backend(again, None, options, out.raw)
        rows = list(slots) if failed is None else [s for s in slots if s not in failed.causes]
        used = self._seeds if seeds is None else dict(zip(slots, seeds, strict=True))
        self._at.started(rows, {slot: used[slot] for slot in rows if slot in used} if used else {})
        for slot in slots:
            self._seeds.pop(slot, None)
            self._fallen.pop(slot, None)
        if self.restarts is not None:
            self.restarts.seeded(slots)
        if self.bookkeeping.episode_reward:
            self._returns[rows] = 0
        self._must_reset[rows] = False
        self._unstarted.difference_update(rows)
        self._write_bookkeeping(rows, True, out)
        if failed is not None:
            raise failed

    def _reset_backend(
        self,
        slots: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
        out: SlotBuffers,
    ) -> SlotError | None:
        """Reset slots; returns what failed, told with its place."""
        failed: SlotError | None = None
        for group, group_seeds in self._by_seeding(slots, seeds):
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
        asked = self._seeds if seeds is None else dict(zip(slots, seeds, strict=True))
        return failed.at(self._at.told("reset", failed.causes, asked))

    def _by_seeding(
        self, slots: Sequence[int], seeds: Sequence[int] | None
    ) -> list[tuple[Sequence[int], Sequence[int] | None]]:
        """Slots apart by whether a seed waits for them."""
        if seeds is not None or not self._seeds:
            return [(slots, seeds)]
        seeded = [slot for slot in slots if slot in self._seeds]
        free = [slot for slot in slots if slot not in self._seeds]
        groups: list[tuple[Sequence[int], Sequence[int] | None]] = []
        if seeded:
            groups.append((seeded, [self._seeds[slot] for slot in seeded]))
        if free:
            groups.append((free, None))
        return groups

    def step(
        self,
        actions: Sequence[Array],
        slots: Sequence[int] | None,
        out: StepBuffers,
        shown: StepBuffers | None = None,
    ) -> None:
        """Step ``slots`` (None for all) and write their rows; others are left alone.

        Args:
            actions: ``[N, *shape]`` each, in the order of the action entries.
            slots: ascending.
            out: receives observations (at an episode's end the true final one), reward and flags.
            shown: what the slots show before the step, which restarts ask for.

        Raises:
            RuntimeError: before the first reset, or where an action would be lost.
            SlotError: where the envs of some slots failed; the others are stepped.
            RestartsExhausted: where too many had failed before; the others are stepped.
        """
        self._check_step(slots)
        buffers = out.raw
        failed = self._step_backend(actions, slots, out)
        if self.broken:
            self.broken = {}
        if failed is not None:
            if self.restarts is not None and shown is not None:
                self._break_off(failed, out, shown)
                self.broken, failed = failed.causes, None
            else:
                stepped = self._every_slot if slots is None else slots
                slots = [slot for slot in stepped if slot not in failed.causes]
                self._must_reset[list(failed.causes)] = True
        rows: Any = ... if slots is None else list(slots)
        self._at.stepped(slots)
        if self.bookkeeping.max_episode_steps is not None:
            limit = self.bookkeeping.max_episode_steps
            buffers.truncated[rows] |= self._at.lengths()[rows] >= limit
        if self.bookkeeping.episode_reward:
            self._returns[rows] += out.reward[rows]
        np.logical_or(buffers.terminated, buffers.truncated, out=out.done)
        self._must_reset[rows] = out.done[rows]
        if out.bookkeeping:
            self._write_bookkeeping(rows, False, out)
        if failed is not None:
            raise failed

    def _step_backend(
        self, actions: Sequence[Array], slots: Sequence[int] | None, out: StepBuffers
    ) -> SlotError | None:
        """Step slots; returns what failed, told with its place."""
        failed: SlotError | None = None
        if self._fallen:
            asked = self._every_slot if slots is None else slots
            slots = [slot for slot in asked if slot not in self._fallen]
            if len(slots) < len(asked):
                fallen = {slot: self._fallen[slot] for slot in asked if slot in self._fallen}
                failed = SlotError("step", fallen)
        try:
            self.backend.step(actions, slots, out.raw)
        except SlotError as error:
            failed = error if failed is None else failed.joined(error)
        if out.reward is not out.raw.reward:
            out.reward[...] = out.raw.reward
        if self._finite:
            asked = self._every_slot if slots is None else slots
            failed = not_finite("step", self.backend, asked, out.raw, failed, out.reward)
        if failed is None:
            return None
        return failed.at(self._at.told("step", failed.causes, {}))

    def _break_off(self, failed: SlotError, out: StepBuffers, shown: StepBuffers) -> None:
        """End the episodes of slots whose envs failed, where they are, and build these anew."""
        self._restart(failed, [slot for slot in failed.causes if slot not in self._fallen])
        rows = list(failed.causes)
        for array, present in zip(
            (*out.raw.observation, *out.raw.info),
            (*shown.raw.observation, *shown.raw.info),
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
        """Build envs that failed anew, as often as it takes and is allowed."""
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
            self.restarts.seed(built, self._seeds, self._at.seeds)
            return

    def rebuild(self, slots: Sequence[int]) -> list[int]:
        """Make the envs of ``slots`` anew; each must be reset before it is stepped.

        Envs that were lost together with these are made anew, too. Where one of them is amid an
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
        """Where the slots are in their episodes: counts, sums and waiting seeds."""
        return {
            "at": self._at.save_state(),
            "returns": self._returns.copy(),
            "must_reset": self._must_reset.copy(),
            "unstarted": sorted(self._unstarted),
            "seeds": dict(self._seeds),
            "restarts": None if self.restarts is None else self.restarts.save_state(),
        }

    def load_state(self, state: dict[str, Any], slots: Sequence[int]) -> None:
        """Take over what :meth:`save_state` gave for ``slots``, whose envs are there already."""
        rows = list(slots)
        self._at.load_state(state["at"], rows)
        self._returns[rows] = state["returns"][rows]
        self._must_reset[rows] = state["must_reset"][rows]
        self._unstarted.difference_update(rows)
        self._unstarted.update(set(rows).intersection(state["unstarted"]))
        waiting = {slot: seed for slot, seed in state["seeds"].items() if slot in rows}
        self._seeds = {s: seed for s, seed in self._seeds.items() if s not in rows} | waiting
        if self.restarts is not None and state["restarts"] is not None:
            self.restarts.load_state(state["restarts"], rows)

    def _write_bookkeeping(self, rows: Any, is_init: bool, out: StepBuffers) -> None:
        values = (
            (self.bookkeeping.step_count, self._at.lengths),
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

    def _check_step(self, slots: Sequence[int] | None) -> None:
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
        self.backend.close()
