"""The start of a child process that calls a function of the user's before torch is imported."""

from __future__ import annotations

import os
import pickle
import sys
from importlib import import_module
from multiprocessing.connection import Connection

from tdcollect.workers.child import begin


def main(lifeline: int, end: int, *descriptors: int) -> None:
    """Call the function that the first message holds, then ``main`` of the module that it names.

    Args:
        lifeline: the read end of a pipe that the parent holds open.
        end: this process's end of the connection; the first argument of that ``main``.
        descriptors: its other arguments.
    """
    begin(lifeline)
    connection = Connection(end)
    try:
        init_fn, module = connection.recv()
    except EOFError:
        return
    if init_fn is not None:
        pickle.loads(init_fn)()
    import_module(module).main(connection, *descriptors)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # envs are closed; torch would take a second to go
