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


@contextmanager
def close_may_fail() -> Iterator[None]:
    """Warn of what an env's ``close()`` raises, where nothing more is expected of the env."""
    try:
        yield
    except Exception as error:
        from tdcollect.progress import warn  # rarely needed

        warn(
            f"closing the env raised {type(error).__name__}: {error}; nothing is lost, but correct "
            "its close(), which frees its resources"
        )
