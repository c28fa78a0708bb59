"""Slots that go on when they are ready: a step in two parts, sent and received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tdcollect.envs.backend import Arrivals
from tdcollect.envs.buffers import StepBuffers
from tdcollect.envs.errors import SlotError, not_finite
from tdcollect.envs.stepper import Stepper
from tdcollect.workers.values import Array


class Received(NamedTuple):
    """The slots that have done what they were sent to do.

    ``stepped`` and ``begun`` are ascending; the rows of others mean nothing new. ``failed`` and
    ``failed_resets`` are the failures of steps and of resets, None where there are none.
    """

    stepped: list[int]
    begun: list[int]
    failed: SlotError | None
    failed_resets: SlotError | None


class ReadyStepper(Stepper):
    """A :class:`Stepper` whose slots may also be sent one by one, and received when they are ready.

    Steps and resets of all slots, or of some, wait for those in flight, and forget these.

    Args:
        *args: as of :class:`Stepper`; the backend has a ``wait_num``.
        **kwargs: likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._starting: dict[int, tuple[int | None, Any]] = {}  # seeds, options of resets in flight
        self._unsent: dict[int, Exception] = {}  # failures of slots that could not be sent

    def send(self, actions: Sequence[Array], slots: Sequence[int]) -> None:
        """Have ``slots``, idle ones, take a step, and go on; see :meth:`receive`.

        Args:
            actions: as of :meth:`step`.
            slots: ascending.
        """
        self._check_step(slots)
        if self._fallen:
            slots, failed = self._without_fallen(slots)
            if failed is not None:
                self._unsent.update(failed.causes)
        self.backend.send(actions, slots)

    def send_reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start an episode in ``slots``, idle ones, and go on; see :meth:`receive`.

        Args:
            slots: ascending.
            seeds: one per slot in ``slots``; None for one that is waiting, or the env's own
                generator.
            options: gymnasium's reset options.
        """
        self.check_open("reset")
        used: dict[int, int | None] = {**dict.fromkeys(slots), **self._seeds.of(slots, None)}
        if seeds is not None:
            given = zip(slots, seeds, strict=True)
            used.update({slot: seed for slot, seed in given if seed is not None})
        self.backend.check_seeds([seed for seed in used.values() if seed is not None])
        self._seeds.drop(slots)
        self._starting.update({slot: (seed, options) for slot, seed in used.items()})
        for slot in slots:
            self._fallen.pop(slot, None)
        self.backend.send_reset(slots, list(used.values()), options)

    def receive(self, out: StepBuffers, *, restart: bool = True) -> Received:
        """Wait for slots that were sent, and write their rows.

        Args:
            out: receives them: of steps as :meth:`step` writes them, of resets as :meth:`reset`
                does. The rows of other slots show their present state.
            restart: as of :meth:`step`.

        Raises:
            RestartsExhausted: if a failure exceeds ``max_restarts``.
        """
        self._hold_present(out)
        unsent = self._take_unsent()
        arrived = Arrivals([], [], unsent, {}) if unsent else self.backend.receive(out.raw)
        failed_reset = self._receive_begun(arrived, out)
        arrived.failed_steps.update(self._take_unsent())
        slots = sorted([*arrived.stepped, *arrived.failed_steps])
        failed = SlotError("step", arrived.failed_steps) if arrived.failed_steps else None
        if slots:
            failed = self._stepped(slots, arrived.stepped, failed, out, restart)
            gone = () if failed is None else failed.causes
            slots = [slot for slot in slots if slot not in gone]
        self.latest = out
        begun = [slot for slot in arrived.begun if slot not in arrived.failed_resets]
        return Received(slots, sorted(begun), failed, failed_reset)

    def _take_unsent(self) -> dict[int, Exception]:
        """The failures of slots that could not be sent, once their workers can be asked again."""
        taken = {s: error for s, error in self._unsent.items() if self.backend.is_idle(s)}
        self._unsent = {s: error for s, error in self._unsent.items() if s not in taken}
        return taken

    def _receive_begun(self, arrived: Arrivals, out: StepBuffers) -> SlotError | None:
        """Complete the rows of resets that have arrived; returns the failures to raise.

        Where envs are built anew, those that failed are reset once more.
        """
        begun, failed = arrived.begun, None
        if not begun and not arrived.failed_resets:
            return None
        asked = {slot: self._starting.pop(slot) for slot in (*begun, *arrived.failed_resets)}
        seeds = {slot: seed for slot, (seed, _) in asked.items() if seed is not None}
        if arrived.failed_resets:
            failed = SlotError("reset", dict(sorted(arrived.failed_resets.items())))
        for flag in (out.raw.terminated, out.raw.truncated, out.done):
            flag[begun] = False
        if self._finite:
            failed = not_finite("reset", self.backend, begun, out.raw, failed)
        if failed is not None:
            arrived.failed_resets.update(failed.causes)
            begun = [slot for slot in begun if slot not in failed.causes]
            failed = failed.at(self._counters.places("reset", failed.causes, seeds))
        self._begun(begun, seeds, out)
        if failed is not None and self.restarts is not None:
            again = sorted(failed.causes)
            self._restart(failed, again)
            self.send_reset(again, [asked[slot][0] for slot in again], asked[again[0]][1])
            return None
        return failed

    @property
    def away(self) -> set[int]:
        """The slots that were sent and have not been received."""
        return {*self.backend.in_flight, *self._unsent}

    def recall(self, resetting: Sequence[int] = ()) -> None:
        """Wait for slots in flight, and forget where they came to.

        They start anew before they are stepped, but for those being reset.
        """
        away = self.away
        if away:
            self.backend.recall()
            self._unsent, self._starting = {}, {}
            self._unstarted.update(away.difference(resetting))
