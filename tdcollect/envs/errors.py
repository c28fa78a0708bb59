"""What goes wrong inside an env."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class SlotError(RuntimeError):
    """Some slots' envs failed; the other slots were stepped or reset all the same.

    Args:
        verb: what was asked of the env: ``"step"``, ``"reset"`` or ``"rebuild"``.
        causes: what went wrong in each of these envs, by slot.
        where: of some of these slots, the words that say which episode, step and seed it was.

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
        told = "; ".join(
            f"slot {s}{self.where.get(s, '')}: {type(e).__name__}: {e}"
            for s, e in self.causes.items()
        )
        super().__init__(f"the env failed in {verb}() of {told}")
        self.__cause__ = next(iter(self.causes.values()))

    def __reduce__(self) -> Any:
        return type(self), (self.verb, self.causes, self.where)

    def joined(self, other: SlotError) -> SlotError:
        """One error for both."""
        return SlotError(self.verb, {**self.causes, **other.causes}, {**self.where, **other.where})

    def at(self, where: Mapping[int, str]) -> SlotError:
        """The same, told with episode, step and seed."""
        return SlotError(self.verb, self.causes, where)
