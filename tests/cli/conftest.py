"""Commands, run in a directory with policies."""

from ..evaluation.conftest import here, typed

__all__ = ["here", "typed"]
