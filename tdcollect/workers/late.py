"""A child process that calls a function of the user's before torch is imported."""

from __future__ import annotations

import os
import pickle
import sys
from importlib import import_module

from tdcollect.workers.child import Lifeline, Spawned, begin
from tdcollect.workers.protocol import shared_file


def start(
    module: str, lifeline: Lifeline, descriptors: tuple[int, ...], init_fn: bytes | None = None
) -> Spawned:
    """Start a fresh interpreter that runs ``main`` of a module.

    Args:
        module: its full name.
        lifeline: ends the process with this one.
        descriptors: files that it inherits, and the arguments of that ``main``.
        init_fn: a pickled function to call first.
    """
    message = pickle.dumps((init_fn, module))
    file = shared_file(len(message))
    try:
        os.pwrite(file, message, 0)
        return Spawned(__name__, (lifeline.descriptor, file, *descriptors))
    finally:
        os.close(file)


def main(lifeline: int, file: int, *descriptors: int) -> None:
    """Call the function, then ``main`` of the module.

    Args:
        lifeline: the read end of a pipe that the parent holds open.
        file: holds the function and the module's name.
        descriptors: the arguments of that ``main``.
    """
    begin(lifeline)
    with open(file, "rb") as opened:
        init_fn, module = pickle.loads(opened.read())
    if init_fn is not None:
        pickle.loads(init_fn)()
    import_module(module).main(*descriptors)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # envs are closed; torch would take a second to go
