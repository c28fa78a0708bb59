"""Processes from a fork server that has imported everything: spawning each takes seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_IMPORTED = [
    "pytest",
    "matplotlib",
    "scipy.stats",
    "tdcollect.collect",
    "tdcollect.evaluation.run",
    "tdcollect.evaluation.request",
]


def forkserver() -> ForkServerContext:
    """The context; this process has one server, which starts with its first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context
