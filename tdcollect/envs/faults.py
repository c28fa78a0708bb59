"""Envs that fail: numbers that are none, and how often envs may be built anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from tdcollect.envs.backend import Backend, SlotBuffers
from tdcollect.envs.errors import SlotError
from tdcollect.seeding import restart_seed
from tdcollect.workers.values import Array


class RestartsExhausted(RuntimeError):
    """An env failed after as many had been built anew as ``max_restarts`` allows."""


class Restarts:
    """Counts the envs that were built anew as they failed, and seeds them.

    Args:
        most: how many are allowed.

    Attributes:
        count: how many there were.
    """

    def __init__(self, most: int):
        self.most = most
        self.count = 0
        self._derived: set[int] = set()  # slots for which a seed of ours waits

    def allow(self, more: int, failed: SlotError) -> None:
        """Raise unless so many more may be built anew.

        Raises:
            RestartsExhausted: from what failed last.
        """
        if self.count + more > self.most:
            raise RestartsExhausted(
                f"{failed}; {self.count} envs were built anew already and max_restarts="
                f"{self.most}: correct the env, or pass a larger max_restarts to make_env"
            ) from failed

    def seed(
        self, slots: Iterable[int], waiting: MutableMapping[int, int], given: Mapping[int, int]
    ) -> None:
        """Choose the next seeds of slots that were built anew.

        A seed that the user has asked for stays. Else each seed follows from the one before, so
        that seeded runs repeat; slots that were never seeded go on without.

        Args:
            slots: those built anew.
            waiting: seeds for the next reset, by slot; written.
            given: the seed that each slot was last given.
        """
        for slot in slots:
            if slot in waiting and slot not in self._derived:
                continue
            before = waiting.get(slot, given.get(slot))
            if before is not None:
                waiting[slot] = restart_seed(before)
                self._derived.add(slot)

    def seeded(self, slots: Iterable[int]) -> None:
        """No seed of ours waits for ``slots`` any more."""
        if self._derived:
            self._derived.difference_update(slots)

    def save_state(self) -> dict[str, Any]:
        """How many there were, and where seeds of ours wait."""
        return {"count": self.count, "derived": sorted(self._derived)}

    def load_state(self, state: Mapping[str, Any], slots: Iterable[int]) -> None:
        """Take over the count that :meth:`save_state` gave, and what it says of ``slots``."""
        self.count = state["count"]
        self._derived.difference_update(slots)
        self._derived.update(set(slots).intersection(state["derived"]))


def not_finite(
    verb: str,
    backend: Backend,
    slots: Sequence[int],
    out: SlotBuffers,
    failed: SlotError | None,
    reward: Array | None = None,
) -> SlotError | None:
    """Join what failed with the slots whose observations or rewards are NaN or infinite.

    Rewards count as they are stored: one beyond the range of float32 is infinite.
    """
    found: dict[int, Exception] = {}
    named = [
        ("/".join(path), array)
        for path, array in zip(backend.observation.paths, out.observation, strict=True)
    ]
    if reward is not None:
        named.append(("reward", reward))
    for name, array in named:
        if array.dtype.kind == "f":
            for slot in _odd_rows(array, slots):
                if slot not in found and (failed is None or slot not in failed.causes):
                    found[slot] = _told(name, array[slot])
    if not found:
        return failed
    error = SlotError(verb, dict(sorted(found.items())))
    return error if failed is None else failed.joined(error)


def _odd_rows(array: Array, slots: Sequence[int]) -> list[int]:
    finite: Any = np.isfinite(array)
    if finite.all():
        return []
    odd = ~finite.reshape(len(array), -1).all(1)
    return [slot for slot in slots if odd[slot]]


def _told(name: str, row: Array) -> ValueError:
    row = np.atleast_1d(row)
    where = tuple(np.argwhere(~np.isfinite(row))[0].tolist())
    return ValueError(
        f"expected finite numbers, as check_finite=True asks for, got {row[where]} at "
        f"{list(where)} of {name!r}"
    )
