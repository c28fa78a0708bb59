"""Per-slot counters of episode and step, for error messages, and the seeds of coming resets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tdcollect.seeding import restart_seed
from tdcollect.workers.values import Array


class EpisodeCounters:
    """Counts the episodes and steps of N slots.

    One clock goes up at each step; the length of a slot's episode is its difference to the clock
    at the reset.

    Args:
        num_envs: N.

    Attributes:
        seeds: the seed that each slot was last given, by slot.
    """

    def __init__(self, num_envs: int):
        self.seeds: dict[int, int] = {}
        self._seeded_at: dict[int, int] = {}
        self._clock = 0
        self._begun = np.zeros(num_envs, np.int64)
        self._episodes = np.zeros(num_envs, np.int64)  # resets so far

    def stepped(self, slots: Sequence[int] | None) -> None:
        """Count a step of ``slots`` (None for all)."""
        self._clock += 1
        if slots is not None:
            waiting = np.ones(len(self._begun), bool)
            waiting[list(slots)] = False
            self._begun[waiting] += 1

    def started(self, slots: Any, seeds: Mapping[int, int]) -> None:
        """Count an episode in each of ``slots``, begun with the seed given for it, if any."""
        self._begun[slots] = self._clock
        self._episodes[slots] += 1
        if seeds:
            self.seeds.update(seeds)
            self._seeded_at.update({slot: int(self._episodes[slot]) - 1 for slot in seeds})

    def lengths(self) -> Array:
        """The steps that each slot has taken in its episode, ``[N]`` int64."""
        return self._clock - self._begun

    def save_state(self) -> dict[str, Any]:
        """Lengths, episodes and seeds of all slots."""
        return {
            "lengths": self.lengths(),
            "episodes": self._episodes.copy(),
            "seeds": {slot: (seed, self._seeded_at[slot]) for slot, seed in self.seeds.items()},
        }

    def load_state(self, state: Mapping[str, Any], slots: Sequence[int]) -> None:
        """Restore the part of a :meth:`save_state` that concerns ``slots``."""
        rows = list(slots)
        self._begun[rows] = self._clock - state["lengths"][rows]
        self._episodes[rows] = state["episodes"][rows]
        for slot in rows:
            self.seeds.pop(slot, None)
            self._seeded_at.pop(slot, None)
            if slot in state["seeds"]:
                self.seeds[slot], self._seeded_at[slot] = state["seeds"][slot]

    def places(self, verb: str, slots: Iterable[int], seeds: Mapping[int, int]) -> dict[int, str]:
        """Episode, step and seed of each of ``slots``, in words.

        Args:
            verb: ``"reset"``, which would begin an episode, or another.
            slots: the slots to name.
            seeds: the seeds that a reset was asked for, by slot.
        """
        words = {}
        for slot in slots:
            episode = int(self._episodes[slot]) - (verb != "reset")
            step = "" if verb == "reset" else f", step {int(self._clock - self._begun[slot])}"
            place = f", episode {episode}{step}" if episode >= 0 else ", before its first reset"
            words[slot] = f"{place}{self._seed(slot, episode, seeds)}"
        return words

    def _seed(self, slot: int, episode: int, asked: Mapping[int, int]) -> str:
        if slot in asked:
            return f", seed {asked[slot]}"
        if slot not in self.seeds:
            return ""
        at = self._seeded_at[slot]
        return f", seed {self.seeds[slot]}" + ("" if at == episode else f" at episode {at}")


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
