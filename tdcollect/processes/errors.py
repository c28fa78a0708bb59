"""Exceptions that cross from one process to another."""

from __future__ import annotations

import pickle
import traceback

import cloudpickle

Described = tuple[bytes | None, str, str]
"""An exception: pickled if possible, in one line, and with its traceback."""


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text."""


def described(error: Exception) -> Described:
    """Return an exception in a form that travels, without the outermost frame of its traceback."""
    trace = error.__traceback__
    trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        # By cloudpickle, for classes of a main program.
        pickled: bytes | None = cloudpickle.dumps(error)
    except Exception:  # whatever a class's own __reduce__ raises
        pickled = None
    return pickled, f"{type(error).__name__}: {error}", text


def raised_there(failure: Described, where: str) -> Exception:
    """Return the exception of another process; its cause is the traceback there."""
    pickled, summary, trace = failure
    try:
        error = pickle.loads(pickled) if pickled is not None else None
    except Exception:  # an exception that does not survive its own pickling
        error = None
    if not isinstance(error, Exception):
        error = RuntimeError(summary)
    error.__cause__ = RemoteTraceback(f"in {where}:\n\n{trace}")
    return error
