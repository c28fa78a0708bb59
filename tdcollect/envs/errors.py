"""Env failures: their errors, non-finite values, and the restart budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tdcollect.envs.backend import Backend, SlotBuffers
from tdcollect.workers.slots import old_api
from tdcollect.workers.values import Array


class SlotError(RuntimeError):
    """The envs of some slots failed; the other slots were stepped or reset all the same.

    Args:
        verb: what was asked of the env: ``"step"``, ``"reset"`` or ``"rebuild"``.
        causes: what went wrong in each of these envs, by slot.
        where: of some of these slots, the words that name episode, step and seed.

    Attributes:
        causes: as given. What an env raised has the env's own traceback.
    """

    def __init__(
        self,
        verb: str,
        causes: Mapping[int, Exception],
        where: Mapping[int, str] = MappingProxyType({}),
    ):
        self.verb = verb
        self.causes = dict(causes)
        self.where = dict(where)
        slots = "; ".join(
            f"slot {s}{self.where.get(s, '')}: {type(e).__name__}: {e}"
            for s, e in self.causes.items()
        )
        advice = old_api(slots)
        super().__init__(f"the env failed in {verb}() of {slots}" + f"; {advice}" * bool(advice))
        self.__cause__ = next(iter(self.causes.values()))

    def __reduce__(self) -> Any:
        return type(self), (self.verb, self.causes, self.where)

    def joined(self, other: SlotError) -> SlotError:
        """One error for both."""
        return SlotError(self.verb, {**self.causes, **other.causes}, {**self.where, **other.where})

    def at(self, where: Mapping[int, str]) -> SlotError:
        """The same error, with words that name episode, step and seed."""
        return SlotError(self.verb, self.causes, where)


class RestartsExhausted(RuntimeError):
    """An env failed after as many had been built anew as ``max_restarts`` allows."""


class RestartBudget:
    """A count of the envs that were built anew after failures, and its limit.

    Args:
        most: how many are allowed.

    Attributes:
        count: how many there were.
    """

    def __init__(self, most: int):
        self.most = most
        self.count = 0

    def allow(self, more: int, failed: SlotError) -> None:
        """Check that ``more`` envs may be built anew.

        Raises:
            RestartsExhausted: from the latest failure, if they may not.
        """
        if self.count + more > self.most:
            raise RestartsExhausted(
                f"{failed}; {self.count} envs were built anew already and max_restarts="
                f"{self.most}: correct the env, or pass a larger max_restarts to make_env"
            ) from failed


def not_finite(
    verb: str,
    backend: Backend,
    slots: Sequence[int],
    out: SlotBuffers,
    failed: SlotError | None,
    reward: Array | None = None,
) -> SlotError | None:
    """Join failures with those of slots whose observations or rewards are NaN or infinite.

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
            for slot in _slots_not_finite(array, slots):
                if slot not in found and (failed is None or slot not in failed.causes):
                    found[slot] = _not_finite_error(name, array[slot])
    if not found:
        return failed
    error = SlotError(verb, dict(sorted(found.items())))
    return error if failed is None else failed.joined(error)


def _slots_not_finite(array: Array, slots: Sequence[int]) -> list[int]:
    finite: Any = np.isfinite(array)
    if finite.all():
        return []
    odd = ~finite.reshape(len(array), -1).all(1)
    return [slot for slot in slots if odd[slot]]


def _not_finite_error(name: str, values: Array) -> ValueError:
    values = np.atleast_1d(values)
    where = tuple(np.argwhere(~np.isfinite(values))[0].tolist())
    return ValueError(
        f"expected finite numbers, as check_finite=True asks for, got {values[where]} at "
        f"{list(where)} of {name!r}"
    )
