"""Locks between threads that collect and threads that evaluate; the threads of torch.

Both use state that a process has once: the global random states, the exploration type, and the
modules of a policy. An evaluation restores all of it, which works only if no other thread uses it
meanwhile.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Run torch on ``count`` threads of the CPU: sums round by how they are split."""
    before = torch.get_num_threads()
    try:
        if before != count:
            torch.set_num_threads(count)
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class _Collection:
    """A collection that has begun and not ended."""

    thread: threading.Thread  # that began it
    pauses: bool  # it may be between two batches


# Held while an evaluation makes envs or runs a block, and for a moment when a collection begins.
_turn = threading.RLock()
_collections: set[_Collection] = set()
# The files and functions in which a thread waits for another one, or for input.
_FILES = {threading.__file__, selectors.__file__, __file__}
_WAITING = {"wait", "join", "_wait_for_tstate_lock", "select", "collecting", "evaluating"}
_LOOKS, _SECONDS = 10, 0.002


def _forget() -> None:
    """Start over in a forked process, which has none of its parent's other threads."""
    global _turn
    _turn = threading.RLock()
    _collections.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def collecting(pauses: bool = False) -> Iterator[None]:
    """Announce that this thread collects; wait while another thread runs a block of an evaluation.

    If it ``pauses``, it yields batches, and may be between two of them.
    """
    collection = _Collection(threading.current_thread(), pauses)
    with _turn:
        _collections.add(collection)
    try:
        with _no_end():
            yield
    finally:
        if _collections is not None:  # as the interpreter ends, it may be gone
            _collections.discard(collection)


def turn() -> AbstractContextManager[Any]:
    """While a thread holds it, no other one evaluates or begins to collect."""
    return _turn


@contextmanager
def evaluating() -> Iterator[None]:
    """Hold the turn, so that no other thread evaluates or begins to collect.

    RuntimeError if another thread collects.
    """
    looks = _LOOKS  # the thread that started this evaluation may be about to wait for it
    while looks and any(collection.pauses for collection in _elsewhere()):
        looks -= 1
        time.sleep(_SECONDS)
    with _turn:
        for collection in _elsewhere():
            raise RuntimeError(
                "expected no other thread to collect during an evaluation, but a Collector is at "
                f"work in the thread {collection.thread.name!r}: both would use the global random "
                "states, the exploration type and the policy's modes. Evaluate between two batches "
                "in the thread that collects, with workers=1, or beside training with "
                "tdcollect.Evaluator"
            )
        with _no_end():
            yield


@contextmanager
def _no_end() -> Iterator[None]:
    """Name the place of a StopIteration of the user's code, which would end generators of ours."""
    try:
        yield
    except (StopIteration, RuntimeError) as error:
        stop = error if isinstance(error, StopIteration) else error.__cause__
        if stop is None or (stop is not error and str(error) != "generator raised StopIteration"):
            raise
        at = traceback.extract_tb(stop.__traceback__)[-1]
        raise RuntimeError(  # noqa: B904 - with a cause, a context manager would raise that one
            f"expected the functions that are called here to return, got a StopIteration from "
            f"{at.name}, {at.filename}, line {at.lineno}: an iterator has come to its end there; "
            "catch it, or give next() a default"
        )


def _elsewhere() -> list[_Collection]:
    """The collections in other threads, without those that wait between two batches."""
    here = threading.current_thread()
    others = [c for c in tuple(_collections) if c.thread is not here and c.thread.is_alive()]
    frames = sys._current_frames()
    return [c for c in others if not (c.pauses and _waits(frames.get(c.thread.ident or 0)))]


def other_threads(busy: bool = False) -> set[str]:
    """Names of all other threads; if ``busy``, of those that are not waiting."""
    here = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}")
        for ident, frame in sys._current_frames().items()
        if ident != here and not (busy and _waits(frame))
    }


def _waits(frame: FrameType | None) -> bool:
    """Return whether a thread waits for another one or for input, as in ``join`` or ``Event.wait``.

    A thread that starts another one waits too, but for a moment only.
    """
    if frame is None:  # it has not begun to run
        return True
    if frame.f_code.co_filename not in _FILES or frame.f_code.co_name not in _WAITING:
        return False
    while frame is not None and frame.f_code.co_filename in _FILES:
        if frame.f_code.co_name == "start":
            return False
        frame = frame.f_back
    return True
