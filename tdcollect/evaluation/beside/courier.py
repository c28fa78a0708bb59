"""The thread between a training and the process that evaluates: it waits for messages."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from multiprocessing.connection import wait
from typing import Any

from tdcollect.evaluation.beside.messages import Answer, Failure, Request
from tdcollect.evaluation.beside.process import DriverProcess

MOST_RESTARTS = 3
"""Restarts of the process for one request."""

_SECONDS = 1.0  # for a process that closed its connection to end by itself
_GRACE = 5.0  # seconds for the thread to end, beside those for the process

logger = logging.getLogger("tdcollect")


class Kind(Enum):
    """The method that a request came by."""

    EVALUATE = "evaluate"
    TRIGGER = "trigger_eval"
    SUBMIT = "submit"


class Asked:
    """A request on its way.

    Attributes:
        request: the request; from when it is sent, with the weights of all models.
        kind: the method that it came by.
        future: gets the outcome.
        restarts: the number of processes that ended while they ran it.
    """

    def __init__(self, request: Request, kind: Kind):
        self.request = request
        self.kind = kind
        self.future: Future[Any] = Future()
        self.restarts = 0


class Courier:
    """Takes requests to a process one at a time, in their order, and brings the answers.

    One daemon thread waits for messages of both sides. It runs no env and no policy, and draws no
    random numbers.

    Args:
        start: starts a process.
        finish: called in the thread with a request and its answer; returns the outcome.
        queue_size: the number of requests that may wait while one runs.

    Attributes:
        changed: the lock of all that follows; notified when a request starts or ends.
        unread: outcomes of triggered evaluations that nobody has read, exceptions among them.
        closed: True once it is closed.
    """

    def __init__(
        self,
        start: Callable[[], DriverProcess],
        finish: Callable[[Asked, Answer], Any],
        queue_size: int,
    ):
        self._start, self._finish, self._size = start, finish, queue_size
        self._owner = os.getpid()
        self.changed = threading.Condition()
        self.unread: deque[Any] = deque()
        self.closed = False
        self._waiting: deque[Asked] = deque()
        self._running: Asked | None = None
        self._sent = False
        self._seconds = 0.0
        self._latest: dict[str, bytes] = {}  # weights that hold where a request has none
        self._process: DriverProcess | None = start()
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._rope, False)
        self._thread = threading.Thread(target=self._serve, name="tdcollect-evaluator", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none at present."""
        process = self._process
        return None if process is None else process.pid

    @property
    def pending(self) -> list[Asked]:
        """The requests that run or wait."""
        with self.changed:
            running = [] if self._running is None else [self._running]
            return [*running, *self._waiting]

    def has_room(self) -> bool:
        """Tell whether a request would be taken without waiting."""
        # With nothing running, the first one in the queue is about to run.
        with self.changed:
            return len(self._waiting) < self._size + (self._running is None)

    def in_thread(self) -> bool:
        """Tell whether the caller runs in the courier's thread, as ``on_result`` does."""
        return threading.current_thread() is self._thread

    def ask(self, request: Request, kind: Kind) -> Future[Any]:
        """Add a request; waits while the queue is full.

        Raises:
            RuntimeError: if it is closed; and in the courier's thread, which must not wait.
        """
        asked = Asked(request, kind)
        with self.changed:
            if self.in_thread() and not self.has_room():
                raise RuntimeError(
                    "the queue of evaluations is full, and on_result runs in the thread that "
                    "empties it; trigger evaluations in the training loop"
                )
            self.changed.wait_for(lambda: self.closed or self.has_room())
            if self.closed:
                raise RuntimeError("this Evaluator is shut down; make a new one")
            self._waiting.append(asked)
            self._ring()
        return asked.future

    def close(self, seconds: float = 0.0) -> int:
        """End the process, and with it the request that runs; returns the number of lost requests.

        Args:
            seconds: the time that an idle process has to close its env.
        """
        if os.getpid() != self._owner:  # a fork has neither the thread nor the process
            return 0
        with self.changed:
            lost = list(self._waiting)
            self._waiting.clear()
            running = self._running is not None
            process = self._process
            if not self.closed:
                self.closed, self._seconds = True, seconds
                self._ring()
            self.changed.notify_all()
        for asked in lost:
            asked.future.cancel()
        if process is not None and running:
            process.kill()
        if not self.in_thread():
            self._thread.join(seconds + _GRACE)
            if self._thread.is_alive() and process is not None:  # which sends to one that hangs
                process.kill()
                self._thread.join(_GRACE)
        return len(lost) + running

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it rings already
            os.write(self._rope, b"\0")

    # --- the thread ---

    def _serve(self) -> None:
        self._begin()
        while not self.closed:
            self._send_next()
            process = self._process
            ready = wait([self._bell, *([] if process is None else [process.connection])])
            if self._bell in ready:
                os.read(self._bell, 4096)
            if process is not None and process.connection in ready:
                self._receive(process)
        self._stop()

    def _begin(self) -> None:
        assert self._process is not None
        with suppress(OSError):  # it has gone, which its connection tells next
            self._process.begin()

    def _send_next(self) -> None:
        """Send the request that runs, or else the next one, unless it has been sent."""
        with self.changed:
            while self._running is None and self._waiting:
                asked = self._waiting.popleft()
                if asked.future.set_running_or_notify_cancel():
                    self._running, self._sent = asked, False
                self.changed.notify_all()
            asked_now = self._running
        if asked_now is None or self._sent:
            return
        weights = {**self._latest, **asked_now.request.weights}
        asked_now.request = asked_now.request._replace(weights=weights)
        if self._process is None:
            try:
                self._process = self._start()
            except OSError as error:
                self._complete(asked_now, error)
                return
            self._begin()
        self._sent = True
        with suppress(OSError):
            self._process.connection.send_bytes(pickle.dumps(asked_now.request))

    def _receive(self, process: DriverProcess) -> None:
        try:
            message = process.connection.recv_bytes()
        except (EOFError, OSError):
            self._lost(process.end(_SECONDS))
            return
        asked = self._running
        assert asked is not None
        try:
            answer: Answer | Failure = pickle.loads(message)
            if isinstance(answer, Answer) or answer.applied:
                self._latest.update(asked.request.weights)
            if isinstance(answer, Failure):
                raise answer.error
            self._complete(asked, self._finish(asked, answer))
        except Exception as error:
            self._complete(asked, error)

    def _lost(self, how: str) -> None:
        """Give up or repeat the request that ran when the process ended."""
        self._process, self._sent = None, False
        asked = self._running
        if asked is None or self.closed:
            return
        asked.restarts += 1
        what = f"the process that evaluates beside training {how} at step {asked.request.step}"
        if asked.restarts > MOST_RESTARTS:
            times = f"{asked.restarts} times in a row: {what}"
            advice = "see its standard error, or run tdcollect.evaluate with this env and policy"
            self._complete(asked, RuntimeError(f"{times}; {advice}"))
        else:
            logger.warning("%s; a new one goes on", what)

    def _complete(self, asked: Asked, outcome: Any) -> None:
        failed = isinstance(outcome, BaseException)
        if failed and asked.kind is Kind.TRIGGER:  # nobody may ever ask for its result
            text = f"{type(outcome).__name__}: {outcome}"
            logger.warning("the evaluation at step %s failed: %s", asked.request.step, text)
        with self.changed:
            self._running = None
            if asked.kind is Kind.TRIGGER:
                self.unread.append(outcome)
            self.changed.notify_all()
        if failed:
            asked.future.set_exception(outcome)
        else:
            asked.future.set_result(outcome)

    def _stop(self) -> None:
        with self.changed:
            asked, self._running = self._running, None
            process, self._process = self._process, None
            os.close(self._bell)
            os.close(self._rope)
            self.changed.notify_all()
        if process is not None:
            process.end(0.0 if asked else self._seconds)
        if asked is not None:
            step = asked.request.step
            asked.future.set_exception(
                RuntimeError(f"the Evaluator was shut down before the evaluation at step {step}")
            )
