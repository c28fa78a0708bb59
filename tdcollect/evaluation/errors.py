"""Why an evaluation is refused."""

from __future__ import annotations


class NotReproducibleError(RuntimeError):
    """The policy or the env does not give the same episode for the same seeds."""
