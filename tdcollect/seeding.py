"""From one root seed to the seeds of slots and episodes; seeds that wait for a reset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

EVALUATION_PROTOCOL = 2
"""Version of the rule that gives each test episode its seeds."""
BATCHED_PROTOCOL = "batched-1"
"""The name of the rule for batched simulators, whose slots share the seed of their batch."""


def slot_seeds(seed: int | Sequence[int], slots: Sequence[int]) -> list[int]:
    """One seed for each of ``slots``.

    Args:
        seed: an int, the root, which gives each its :func:`slot_seed`; or one int per slot.
        slots: the slots to seed, by index.

    Raises:
        TypeError: if a seed is not an int.
        ValueError: if a seed is negative, or there are more or fewer seeds than slots.
    """
    is_root = isinstance(seed, Integral) and not isinstance(seed, bool)
    if is_root:
        seeds = [int(seed)]  # type: ignore[arg-type]
    elif isinstance(seed, (Sequence, np.ndarray)) and not isinstance(seed, (str, bytes)):
        if len(seed) != len(slots):
            raise ValueError(
                f"expected one seed for each of the {len(slots)} slots that are reset, got "
                f"{len(seed)} seeds; pass {len(slots)} of them, or one int"
            )
        if not all(isinstance(s, Integral) and not isinstance(s, bool) for s in seed):
            raise TypeError(f"expected seeds that are ints, got {list(seed)}")
        seeds = [int(s) for s in seed]
    else:
        raise TypeError(f"expected a seed that is an int or one int per slot, got {seed!r}")
    if any(s < 0 for s in seeds):
        raise ValueError(f"expected seeds that are not negative, got {seed}")
    return [slot_seed(seeds[0], slot) for slot in slots] if is_root else seeds


def slot_seed(root: int, slot: int) -> int:
    """Seed of the first episode of slot ``slot`` of an env or a collector with the seed ``root``.

    Slot 0 has the root itself, as a single env has. Slot i > 0 has the first 31 bits of
    ``SeedSequence(root, spawn_key=(i, 6))``: no other root gives it, and no test episode has it.
    """
    return _bits(root, slot, 6) if slot else int(root)


def restart_seed(seed: int) -> int:
    """Seed of an env that is rebuilt after it failed, from the seed that it was last given.

    The first 31 bits of ``SeedSequence(seed, spawn_key=(2,))``, so that every env library takes it.
    """
    return _bits(seed, 2)


def env_seed(root: int, episode: int) -> int:
    """Seed of the env of test episode ``episode`` under ``root``.

    The first 31 bits of ``SeedSequence(root, spawn_key=(episode, 0))``, so that every env library
    takes it.
    """
    return _bits(root, episode, 0)


def batch_seed(root: int, batch: int) -> int:
    """Seed of batch ``batch`` of a simulator that seeds all of its slots together.

    The first 31 bits of ``SeedSequence(root, spawn_key=(batch, 5))``.
    """
    return _bits(root, batch, 5)


def policy_seed(root: int, episode: int) -> int:
    """Seed of the policy's random numbers in test episode ``episode`` under ``root``.

    The first 64 bits of ``SeedSequence(root, spawn_key=(episode, 1))``.
    """
    sequence = np.random.SeedSequence(root, spawn_key=(episode, 1))
    return int(sequence.generate_state(1, np.uint64)[0])


def global_seeds(seed: int) -> tuple[int, int, int]:
    """Seeds of the global generators of torch, NumPy and Python in an episode of this env seed.

    The first three words of 32 bits of ``SeedSequence(seed, spawn_key=(3,))``. An env that draws
    from the global generators finds them started from these.
    """
    words = np.random.SeedSequence(seed, spawn_key=(3,)).generate_state(3, np.uint32)
    of_torch, of_numpy, of_python = map(int, words)
    return of_torch, of_numpy, of_python


def _bits(root: int, *key: int) -> int:
    """The first 31 bits of ``SeedSequence(root, spawn_key=key)``."""
    return int(np.random.SeedSequence(root, spawn_key=key).generate_state(1, np.uint32)[0] >> 1)


class WaitingSeeds:
    """Seeds for the next resets of slots: the user's, or derived for envs made again."""

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}
        self._derived: set[int] = set()

    def ask(self, seeds: Sequence[int]) -> None:
        """Have one seed per slot wait, of all slots."""
        self._seeds = dict(enumerate(seeds))
        self._derived.clear()

    def derive(self, slots: Iterable[int], latest: Mapping[int, tuple[int, int]]) -> None:
        """Choose seeds that follow from the ones before, unless the user's wait."""
        for slot in slots:
            if slot in self._seeds and slot not in self._derived:
                continue
            before = self._seeds.get(slot, latest.get(slot, (None,))[0])
            if before is not None:
                self._seeds[slot] = restart_seed(before)
                self._derived.add(slot)

    def of(self, slots: Iterable[int]) -> dict[int, int | None]:
        """The seeds that wait for a reset of ``slots``."""
        if not self._seeds:
            return dict.fromkeys(slots)
        return {slot: self._seeds.get(slot) for slot in slots}

    def drop(self, slots: Iterable[int]) -> None:
        """Forget the seeds of ``slots``, which have been reset."""
        for slot in slots if self._seeds else ():
            self._seeds.pop(slot, None)
            self._derived.discard(slot)

    def save_state(self) -> dict[str, Any]:
        return {"seeds": dict(self._seeds), "derived": sorted(self._derived)}

    def load_state(self, state: Mapping[str, Any], slots: Sequence[int]) -> None:
        self.drop(slots)
        self._seeds.update({s: seed for s, seed in state["seeds"].items() if s in slots})
        self._derived.update(set(slots).intersection(state["derived"]))
