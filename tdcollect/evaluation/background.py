"""The process that evaluates beside a training, and the thread that takes requests to it."""

from __future__ import annotations

import logging
import math
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from tdcollect import keys
from tdcollect.evaluation.curve import (
    FIGURE,
    PAGE,
    Best,
    Folder,
    Point,
    curve_page,
    point_of,
    read_folder,
    step_name,
    value_of,
    with_point,
)
from tdcollect.evaluation.evaluate import Recording, run
from tdcollect.evaluation.replay import Replay, Replayed, run_again
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.statistics import exact_mean
from tdcollect.evaluation.workers.dispatcher import Evaluation
from tdcollect.evaluation.workers.local import LocalWorkers, Workers
from tdcollect.evaluation.workers.worker import (
    POLICY,
    set_policy,
    set_weights,
    template,
    unpickled,
)
from tdcollect.files import write_atomically
from tdcollect.pages.build import REPORT
from tdcollect.processes.child import Described, Spawned, described, leave, packed, raised_there
from tdcollect.surroundings import Surroundings
from tdcollect.trajectories import split_trajectories

logger = logging.getLogger("tdcollect")


class Setup(NamedTuple):
    """The first message: arguments of the :class:`~tdcollect.Evaluator`, as bytes where pickled."""

    job: bytes
    workers: Workers
    metrics_fn: bytes
    output_dir: Path | None
    best_by: str
    log_prefix: str
    recheck: bool
    around: Surroundings


class Order(NamedTuple):
    """One evaluation, at a training step, with pickled weights by model id.

    ``policy`` is pickled if it is no module; None for the job's own. One that is ``apart`` leaves
    the curve and its directory alone; it may have a root seed of its own.
    """

    step: int
    weights: Mapping[str, bytes]
    policy: bytes | None = None
    apart: bool = False
    seed: int | None = None


class Answer(NamedTuple):
    """The outcome: manifest, records and errors pickled; ``lost`` says how workers ended."""

    records: bytes
    directory: Path | None
    metrics: dict[str, Any]
    point: Point
    best: Best | None
    lost: list[str]


class Failure(NamedTuple):
    """A request that raised."""

    error: Described
    applied: bool


def metrics_of(
    point: Point,
    returns: np.ndarray[Any, np.dtype[np.float64]],
    frames_per_second: float,
    custom: Mapping[str, Any],
    prefix: str,
) -> dict[str, Any]:
    # Means of returns that are not finite are what arithmetic makes of them.
    mean = point.mean if point.mean is not None or not len(returns) else exact_mean(returns)
    numbers = {
        "reward": mean,
        "reward_std": _std(returns),
        "reward_low": point.low,
        "reward_high": point.high,
        "num_episodes": len(returns),
        "failed": point.failed,
        "episode_length": point.length,
        "fps": frames_per_second,
        "step": point.step,
        **{f"metrics/{metric.name}": metric.mean for metric in point.metrics},
    }
    known = {name: math.nan if value is None else value for name, value in numbers.items()}
    return {f"{prefix}/{name}": value for name, value in {**known, **custom}.items()}


def _std(returns: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the standard deviation with ``count - 1``; 0 for one return, as TorchRL does."""
    if len(returns) < 2:
        return 0.0 if len(returns) else math.nan
    return float(torch.from_numpy(returns).std())


def custom_metrics(
    metrics_fn: Callable[[TensorDict], Any], episodes: Mapping[int, TensorDict]
) -> dict[str, Any]:
    """Return the user's metrics of the data ``[L]`` of completed episodes."""
    if not episodes:
        return {}
    metrics = metrics_fn(padded(episodes))
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(
            f"expected metrics_fn to return a dict from names to numbers, got {metrics!r:.200}"
        )
    return _on_cpu(metrics)


def padded(episodes: Mapping[int, TensorDict]) -> TensorDict:
    """Return the episodes as a padded batch ``[B, L]``, whose trajectory ids are their indices."""
    rows = []
    for index in sorted(episodes):
        data = episodes[index]
        rows.append(data.copy())
        rows[-1].set(keys.TRAJ_IDS, torch.full(data.batch_size, index))
    return split_trajectories(torch.cat(rows))


class Answering:
    """Runs requests on workers that stay, and keeps their curve."""

    def __init__(self, setup: Setup):
        setup.around.enter()
        self._setup = setup
        self._job = unpickled(setup.job)
        self._metrics_fn = pickle.loads(setup.metrics_fn)
        self._workers = setup.workers
        if isinstance(self._workers, LocalWorkers):
            self._workers.template = template
        self._folder: Folder | None = None
        self._policy: bytes | None = None  # the latest one that came with a request
        self._model: Any = None  # a policy whose weights can be set
        self._held: dict[str, bytes] = {}  # the weights of a simulator, which is made each time
        self._applied = False

    def answer(self, request: Order) -> bytes:
        """Run a request; return the pickled :class:`Answer` or :class:`Failure`."""
        self._applied = False
        try:
            # In here, as an odd metric of the user's is a failure, too.
            return packed(self._evaluate(request))
        except Exception as error:
            return packed(Failure(described(error), self._applied))

    def _evaluate(self, request: Order) -> Answer:
        if request.policy is not None and request.policy != self._policy:
            self._job = replace(self._job, policy=pickle.loads(request.policy))
            self._policy = request.policy
        if self._folder is None and self._setup.output_dir is not None:
            self._folder = Folder(self._setup.output_dir, self._setup.best_by)
        path: Path | None = None
        job, with_data = self._job, self._metrics_fn is not None and not request.apart
        if request.seed is not None:
            job = replace(job, settings=replace(job.settings, seed=request.seed))

        def record(manifest: Mapping[str, Any]) -> Recording:
            nonlocal path
            self._applied = True
            if self._folder is not None and not request.apart:
                self._folder.check_same_episodes(manifest)
                path = self._folder.step_path(request.step)
            return Recording(
                manifest,
                job.settings.episode_indices,
                output_dir=path,
                recheck=self._setup.recheck,
                every_data=with_data,
            )

        workers: Workers | None = self._workers
        if job.settings.episodes_per_slot is not None:  # a batch runs whole, in this process
            workers = None
            self._held.update(request.weights)
        weights = request.weights if workers is not None else self._held
        evaluation = Evaluation(lambda: job, record, with_data, weights)
        data: dict[int, TensorDict] = {}
        steps, start, now = 0, 0.0, 0.0
        # The training process says which workers were lost.
        events = run([evaluation], workers, note=lambda line: None)
        with closing(events):
            for _, what in events:
                if isinstance(what, Exception):
                    raise what
                if isinstance(what, EvaluationResult):
                    pace = steps / (now - start) if steps else 0.0
                    return self._answer(request, evaluation, what, pace, data)
                now = time.perf_counter()
                if what is None:
                    start = now
                else:
                    steps += what.record.length or 0
                    if what.data is not None:
                        data[what.record.index] = what.data
        raise AssertionError("expected a result")

    def _answer(
        self,
        request: Order,
        evaluation: Evaluation,
        result: EvaluationResult,
        pace: float,
        data: dict[int, TensorDict],
    ) -> Answer:
        point = point_of(request.step, result.summary(), result.digest)
        dispatcher = evaluation.dispatcher
        lost = [] if dispatcher is None else dispatcher.lost
        folder = None if request.apart else self._folder
        if folder is not None:
            folder.note(point, lambda: self._policy_state(request.weights))
            write_page(folder, evaluation.manifest["env"]["id"], self._setup.best_by)
        custom = {} if self._metrics_fn is None else custom_metrics(self._metrics_fn, data)
        metrics = metrics_of(point, result.returns, pace, custom, self._setup.log_prefix)
        records = pickle.dumps((result.manifest, result.episodes, result.errors))
        best = None if folder is None else folder.best
        return Answer(records, result.directory, metrics, point, best, lost)

    def _policy_state(self, weights: Mapping[str, bytes]) -> dict[str, Any]:
        """Return the ``state_dict`` of the policy with these weights, on the CPU; or no entries."""
        if self._model is None:
            job = unpickled(self._setup.job)  # workers are sent the other one, as it was
            self._model = replace(job, settings=replace(job.settings, device=None)).made_policy()
        if not isinstance(self._model, nn.Module):
            return {}
        if POLICY in weights:
            set_policy(self._model, pickle.loads(weights[POLICY]))
        return _on_cpu(self._model.state_dict())

    def close(self) -> None:
        self._workers.close()
        if self._folder is not None:
            self._folder.close()


def write_page(folder: Folder, name: str, by: str) -> None:
    """Write the page of a curve and its figure."""

    def page_of(step: int) -> str:
        return f"{step_name(step)}/{REPORT}"

    page = curve_page(folder.curve, folder.best, name, by, page_of)
    for figure in page.figures()[:1]:
        write_atomically(folder.path / FIGURE, figure.file())
    write_atomically(folder.path / PAGE, page.html())


def _on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, those that are tensors detached and on the CPU."""
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def main(end: int) -> None:
    """Answer requests until the training process closes the connection."""
    connection = Connection(end)
    with suppress(EOFError, OSError):
        answering = Answering(pickle.loads(connection.recv_bytes()))
        try:
            while True:
                connection.send_bytes(answering.answer(pickle.loads(connection.recv_bytes())))
        finally:
            answering.close()
    leave()


# --- on the side of the training --------------------------------------------------------------


Method = Literal["evaluate", "trigger", "submit", "episodes"]
"""The method of the evaluator that a request came by."""

MOST_RESTARTS = 3
"""Restarts of the process for one request."""

_SECONDS = 1.0  # for a process that closed its connection to end by itself
_GRACE = 5.0  # seconds for the thread to end, beside those for the process


class DriverProcess(Spawned):
    """A process that evaluates, in a fresh interpreter."""

    def __init__(self) -> None:
        super().__init__("tdcollect.evaluation.background:main")
        self.connection = Connection(self.socket.detach())

    def send(self, message: bytes) -> None:
        """Send a message, unless it has gone; may wait until the process reads."""
        with suppress(OSError):  # which reading tells
            self.connection.send_bytes(message)

    def end(self, seconds: float = 0.0) -> str:
        """Close the connection, and reap the process; say how it ended."""
        self.connection.close()
        return super().end(seconds)


@dataclass(eq=False)
class Errand:
    """A request on its way, with the future of its outcome."""

    request: Order
    kind: Method
    future: Future[Any] = field(default_factory=Future)


class Courier:
    """Takes requests to a process one at a time, in their order; has the curve of the answers.

    One daemon thread waits for both sides; the end of the interpreter would wait for an executor's.
    """

    def __init__(
        self, setup: Setup, on_result: Callable[[TensorDictBase], Any] | None, queue_size: int
    ):
        self._setup, self.on_result, self._size = setup, on_result, queue_size
        self._first = pickle.dumps(setup)
        self.curve: list[Point] = []
        self.best: Best | None = None
        if setup.output_dir is not None:
            self.curve, self.best, _ = read_folder(setup.output_dir, setup.best_by, logger.warning)
        self._owner = os.getpid()
        self.changed = threading.Condition()  # of all that follows: a request starts or ends
        self.unread: deque[Any] = deque()  # outcomes of triggered evaluations, also exceptions
        self.closed = False
        self.pending: deque[Errand] = deque()  # the first one may run
        self._seconds = 0.0
        self._latest: dict[str, bytes] = {}  # weights that hold where a request has none
        self._process: DriverProcess | None = DriverProcess()
        self._thread = threading.Thread(target=self._serve, name="tdcollect-evaluator", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """Return whether a request would be taken without waiting."""
        return len(self.pending) <= self._size

    def in_thread(self) -> bool:
        """Return whether the caller runs in the courier's thread, as ``on_result`` does."""
        return threading.current_thread() is self._thread

    def ask(self, request: Order, kind: Method) -> Future[Any]:
        """Add a request; waits while the queue is full."""
        errand = Errand(request, kind)
        with self.changed:
            if self.in_thread() and not self.has_room():
                raise RuntimeError(
                    "the queue of evaluations is full, and on_result runs in the thread that "
                    "empties it; trigger evaluations in the training loop"
                )
            self.changed.wait_for(lambda: self.closed or self.has_room())
            if self.closed:
                raise RuntimeError("this Evaluator is shut down; make a new one")
            self.pending.append(errand)
            self.changed.notify_all()
        return errand.future

    def close(self, seconds: float = 0.0) -> int:
        """End the process, and with it the request that runs; returns the number of lost ones."""
        if os.getpid() != self._owner:  # a fork has neither the thread nor the process
            return 0
        with self.changed:
            running = [errand for errand in self.pending if errand.future.running()]
            lost = [errand for errand in self.pending if errand not in running]
            self.pending, process = deque(running), self._process
            if not self.closed:
                self.closed, self._seconds = True, seconds
            self.changed.notify_all()
        for errand in lost:
            errand.future.cancel()
        if process is not None and running:
            process.kill()
        if not self.in_thread():
            self._thread.join(seconds + _GRACE)
            if self._thread.is_alive() and process is not None:  # which sends to one that hangs
                process.kill()
                self._thread.join(_GRACE)
        return len(lost) + len(running)

    # --- the thread ---

    def _serve(self) -> None:
        if self._process is not None:
            self._process.send(self._first)
        while (errand := self._next()) is not None:
            try:
                outcome = self._outcome(errand)
            except Exception as error:
                outcome = error
            self._complete(errand, outcome)
        with self.changed:
            process, self._process = self._process, None
        if process is not None:
            process.end(self._seconds)

    def _next(self) -> Errand | None:
        """Wait for the next request that was not cancelled; None once closed."""
        with self.changed:
            while True:
                self.changed.wait_for(lambda: self.closed or self.pending)
                if self.closed:
                    return None
                if self.pending[0].future.set_running_or_notify_cancel():
                    return self.pending[0]
                self.pending.popleft()
                self.changed.notify_all()

    def _outcome(self, errand: Errand) -> Any:
        """Return the metrics of a request, or its result if it came by ``submit``."""
        request = errand.request
        errand.request = request._replace(weights={**self._latest, **request.weights})
        answer = self._answer(errand.request)
        if errand.kind == "episodes":
            return pickle.loads(answer.records)[1]
        self.curve = with_point(self.curve, answer.point)
        self.best = answer.best or _best_of(self.curve, self._setup.best_by)
        if errand.kind == "evaluate":  # whose caller calls on_result itself
            return answer.metrics
        self.tell(answer.metrics)
        if errand.kind == "trigger":
            return answer.metrics
        return self._result(errand.request, answer)

    def _answer(self, request: Order) -> Answer:
        """Send a request; return its answer, or raise the error of its failure."""
        answer: Answer | Failure = pickle.loads(self._answered(request))
        if isinstance(answer, Answer) or answer.applied:
            self._latest.update(request.weights)
        if isinstance(answer, Failure):
            raise raised_there(answer.error, "the process that evaluates")
        for line in answer.lost:
            logger.warning("%s, at step %s", line, request.step)
        return answer

    def _result(self, request: Order, answer: Answer) -> EvaluationResult:
        manifest, episodes, errors = pickle.loads(answer.records)
        replay = _replay_of(self._setup, request)
        return EvaluationResult(manifest, episodes, answer.directory, replay=replay, errors=errors)

    def tell(self, metrics: Mapping[str, Any]) -> None:
        if self.on_result is None:
            return
        try:
            values = {name: torch.as_tensor(value) for name, value in metrics.items()}
            self.on_result(TensorDict(values))
        except Exception:
            logger.warning("on_result of the Evaluator failed", exc_info=True)

    def _answered(self, request: Order) -> bytes:
        """Send a request and wait for its answer; repeat it if the process ends meanwhile."""
        message = pickle.dumps(request)
        if self._process is not None and self._process.connection.poll():
            self._process.end(_SECONDS)  # it has ended while it was idle
            self._process = None
        ends = 0
        while True:
            with self.changed:  # so that close() knows each process
                if self.closed:
                    raise RuntimeError(
                        f"the Evaluator was shut down before the evaluation at step {request.step}"
                    )
                messages = [message] if self._process is not None else [self._first, message]
                process = self._process = self._process or DriverProcess()
            for one in messages:
                process.send(one)
            try:
                wait([process.connection])  # where other evaluations see that this thread waits
                return process.connection.recv_bytes()
            except (EOFError, OSError):
                how = process.end(_SECONDS)
                self._process = None
            ends += 1
            what = f"the process that evaluates beside training {how} at step {request.step}"
            if ends > MOST_RESTARTS:
                raise RuntimeError(
                    f"{ends} times in a row: {what}; see its standard error, or run "
                    "tdcollect.evaluate with this env and policy"
                )
            if not self.closed:
                logger.warning("%s; a new one goes on", what)

    def _complete(self, errand: Errand, outcome: Any) -> None:
        failed = isinstance(outcome, BaseException)
        is_read = errand.kind == "trigger" and not (failed and self.closed)
        if failed and is_read:  # nobody may ever ask for its result
            text = f"{type(outcome).__name__}: {outcome}"
            logger.warning("the evaluation at step %s failed: %s", errand.request.step, text)
        with self.changed:
            self.pending.popleft()
            if is_read:
                self.unread.append(outcome)
            self.changed.notify_all()
        if failed:
            errand.future.set_exception(outcome)
        else:
            errand.future.set_result(outcome)


def _best_of(points: list[Point], by: str) -> Best | None:
    """Return the best point, of equal ones the earliest; None without a finite return."""
    best = max(points, key=lambda point: value_of(point, by))  # the first of the greatest
    value = value_of(best, by)
    return None if value == float("-inf") else Best(best.step, value, None)


def _replay_of(setup: Setup, request: Order) -> Replay:
    """Return a function that runs an episode again, with a new env and policy."""

    def replay(indices: Sequence[int], video: str | os.PathLike[str] | None) -> list[Replayed]:
        parts = unpickled(setup.job)
        if request.policy is not None:
            parts = replace(parts, policy=pickle.loads(request.policy))
        return run_again(
            parts.env,
            parts.made_policy(),
            lambda several: replace(parts.settings, episodes=several),
            indices,
            video,
            set_up=partial(set_weights, weights=request.weights),
        )

    return replay
