"""Seeds that wait for the next resets of slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tdcollect.seeding import restart_seed


class WaitingSeeds:
    """Seeds for the next resets of slots.

    Either the user has asked for them, or they are derived for envs that were built anew.
    """

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}
        self._derived: set[int] = set()

    def ask(self, seeds: Sequence[int]) -> None:
        """Have one seed per slot wait, of all slots."""
        self._seeds = dict(enumerate(seeds))
        self._derived.clear()

    def derive(self, slots: Iterable[int], latest: Mapping[int, int]) -> None:
        """Choose the next seeds of slots whose envs were built anew.

        A seed that the user has asked for stays. Else each seed follows from the one before, so
        that seeded runs repeat; slots that were never seeded go on without.

        Args:
            slots: those built anew.
            latest: the seed that each slot was last given.
        """
        for slot in slots:
            if slot in self._seeds and slot not in self._derived:
                continue
            before = self._seeds.get(slot, latest.get(slot))
            if before is not None:
                self._seeds[slot] = restart_seed(before)
                self._derived.add(slot)

    def of(self, slots: Iterable[int], given: Sequence[int] | None) -> dict[int, int]:
        """The seeds of a reset, by slot: ``given`` to it, or waiting."""
        if given is not None:
            return dict(zip(slots, given, strict=True))
        return {s: self._seeds[s] for s in slots if s in self._seeds} if self._seeds else {}

    def groups(
        self, slots: Sequence[int], given: Sequence[int] | None
    ) -> list[tuple[Sequence[int], Sequence[int] | None]]:
        """The slots of a reset as groups that are seeded, or not, together."""
        if given is not None or not self._seeds:
            return [(slots, given)]
        seeded = [slot for slot in slots if slot in self._seeds]
        free = [slot for slot in slots if slot not in self._seeds]
        groups: list[tuple[Sequence[int], Sequence[int] | None]] = []
        if seeded:
            groups.append((seeded, [self._seeds[slot] for slot in seeded]))
        if free:
            groups.append((free, None))
        return groups

    def drop(self, slots: Iterable[int]) -> None:
        """Forget the seeds of ``slots``, which have been reset."""
        if self._seeds:
            for slot in slots:
                self._seeds.pop(slot, None)
                self._derived.discard(slot)

    def save_state(self) -> dict[str, Any]:
        """The seeds by slot, and the slots whose seeds are derived."""
        return {"seeds": dict(self._seeds), "derived": sorted(self._derived)}

    def load_state(self, state: Mapping[str, Any], slots: Sequence[int]) -> None:
        """Restore the part of a :meth:`save_state` that concerns ``slots``."""
        self.drop(slots)
        self._seeds.update({s: seed for s, seed in state["seeds"].items() if s in slots})
        self._derived.update(set(slots).intersection(state["derived"]))
