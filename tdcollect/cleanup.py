"""The end of what is half made, where the rest of it fails; and user code that ends the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def ended_on_error(end: Callable[[], object]) -> Iterator[None]:
    """Call ``end`` if the body raises, whatever it raises."""
    try:
        yield
    except BaseException:
        end()
        raise


@contextmanager
def exits_refused(what: str, advice: str) -> Iterator[None]:
    """Make an error of the end of the program, for which user code asks by ``sys.exit``."""
    try:
        yield
    except SystemExit as error:
        told = f"{what} ended the program by sys.exit({error.code!r}); {advice}"
        raise RuntimeError(told) from error


def env_exits_refused(env: Any) -> AbstractContextManager[None]:
    """Make an error of the end of the program by an env that is closed."""
    what = f"close() of {type(env).__name__}"
    return exits_refused(what, "take the call out, as programs go on after they close an env")


def close_env(env: Any) -> None:
    """Close an env of the user's, whose ``close`` must not end the program."""
    with env_exits_refused(env):
        env.close()
