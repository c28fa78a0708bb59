"""The end of what is half made, where the rest of it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ended_on_error(end: Callable[[], object]) -> Iterator[None]:
    """Call ``end`` if the body raises, whatever it raises."""
    try:
        yield
    except BaseException:
        end()
        raise
