"""The start of the process that evaluates beside training, before torch is imported there."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
from importlib import import_module
from multiprocessing.connection import Connection

_DRIVER = "tdcollect.evaluation.beside.driver"  # imports torch


def main(descriptor: int, lifeline: int) -> None:
    """Serve a training process until it closes the connection, or ends.

    Args:
        descriptor: this process's end of the connection. The first message is a pickled function
            to call before torch is imported, or nothing.
        lifeline: the read end of a pipe that the training process holds open.
    """
    from tdcollect.workers.worker import _end_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _end_with_parent(lifeline)
    connection = Connection(descriptor)
    try:
        first = connection.recv_bytes()
    except EOFError:
        return
    if first:
        pickle.loads(first)()
    import_module(_DRIVER).main(connection)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # envs are closed; torch's modules would take a second to go
