"""The end of what is half made, where the rest of it fails; and user code that ends the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CLOSING = "take the call out, as programs go on after they close an env"


@contextmanager
def ended_on_error(end: Callable[[], object]) -> Iterator[None]:
    """Call ``end`` if the body raises, whatever it raises."""
    try:
        yield
    except BaseException:
        end()
        raise


@contextmanager
def close_may_fail(exits: bool = False) -> Iterator[None]:
    """Warn of what an env's ``close()`` raises, where nothing more is expected of the env.

    With ``exits``, also of the end of the program.
    """
    try:
        yield
    except Exception as error:
        from tdcollect.progress import warn  # rarely needed

        if isinstance(error, ProgramEndedError) and not exits:
            raise
        warn(
            f"closing the env raised {type(error).__name__}: {error}; nothing is lost, but correct "
            "its close(), which frees its resources"
        )


class ProgramEndedError(RuntimeError):
    """The code of a user asked for the end of the program, by ``sys.exit``."""


@contextmanager
def exits_refused(what: str, advice: str = CLOSING) -> Iterator[None]:
    """Make an error of the end of the program, for which user code asks by ``sys.exit``."""
    try:
        yield
    except SystemExit as error:
        told = f"{what} ended the program by sys.exit({error.code!r}); {advice}"
        raise ProgramEndedError(told) from error


def close_env(env: Any) -> None:
    """Close an env of the user's, whose ``close`` must not end the program."""
    with exits_refused(f"close() of {type(env).__name__}"):
        env.close()
