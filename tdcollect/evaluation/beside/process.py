"""The process that evaluates, as the training process sees it."""

from __future__ import annotations

import os
from multiprocessing import Pipe

from tdcollect.workers import late
from tdcollect.workers.child import Lifeline, ending


class DriverProcess:
    """A process that evaluates, in a fresh interpreter; it does not outlive this one.

    Args:
        setup: its first message.

    Attributes:
        connection: to it.
    """

    def __init__(self, setup: bytes):
        self.connection, theirs = Pipe()
        self._lifeline = Lifeline()
        try:
            self._child = late.start(
                "tdcollect.evaluation.beside.driver", self._lifeline, (theirs.fileno(),)
            )
        except BaseException:
            self.connection.close()
            self._lifeline.close()
            raise
        finally:
            theirs.close()
            os.close(self._lifeline.descriptor)
        self._setup = setup

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def begin(self) -> None:
        """Send the first message; may wait until the process reads.

        Raises:
            OSError: if the process has gone.
        """
        self.connection.send_bytes(self._setup)

    def kill(self) -> None:
        """End the process at once."""
        self._child.kill()

    def end(self, seconds: float = 0.0) -> str:
        """Close the connection, and reap the process; returns how it ended.

        Args:
            seconds: the time it has to close its env before it is killed.
        """
        self.connection.close()
        code = self._child.wait(seconds)
        if code is None:
            self._child.kill()
        self._lifeline.close()
        return "closed its connection, and was ended" if code is None else ending(code)
