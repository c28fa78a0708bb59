"""What goes wrong inside an env."""

from __future__ import annotations

from collections.abc import Mapping


class SlotError(RuntimeError):
    """Some slots' envs raised; the other slots were stepped or reset all the same.

    Attributes:
        causes: what each of these envs raised, by slot.
    """

    def __init__(self, verb: str, causes: Mapping[int, Exception]):
        self.verb = verb
        self.causes = dict(causes)
        told = "; ".join(f"slot {s}: {type(e).__name__}: {e}" for s, e in self.causes.items())
        super().__init__(f"the env raised in {verb}() of {told}")
        self.__cause__ = next(iter(self.causes.values()))

    def joined(self, other: SlotError) -> SlotError:
        """One error for both."""
        return SlotError(self.verb, {**self.causes, **other.causes})
