"""The process that evaluates beside training: requests in, answers out."""

from __future__ import annotations

import pickle
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from tensordict import TensorDict

from tdcollect.evaluation.beside.curve import point_of
from tdcollect.evaluation.beside.folder import Folder
from tdcollect.evaluation.beside.messages import Answer, Request, Setup, failure
from tdcollect.evaluation.beside.metrics import custom_metrics, metrics_of
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.episodes.isolation import NotReproducibleError
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.runner import run_to_result
from tdcollect.evaluation.workers.driver import Driver
from tdcollect.evaluation.workers.job import unpickled
from tdcollect.evaluation.workers.local import LocalWorkers
from tdcollect.evaluation.workers.protocol import Workers
from tdcollect.workers.protocol import packed


class Answering:
    """Runs requests on workers that stay, and keeps their curve.

    Args:
        setup: the subject of all requests.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        self._job = unpickled(setup.job)
        self._metrics_fn = pickle.loads(setup.metrics_fn)
        self._workers: Workers = pickle.loads(setup.workers)
        if isinstance(self._workers, LocalWorkers):
            self._workers.template_is_fork = True
        self._folder: Folder | None = None
        self._policy: bytes | None = None  # the latest one that came with a request
        self._applied = False

    def answer(self, request: Request) -> bytes:
        """Run a request; return the pickled :class:`Answer`, or the :class:`Failure`."""
        self._applied = False
        try:
            # In here, as an odd metric of the user's is a failure, too.
            return packed(self._evaluate(request))
        except Exception as error:
            return packed(failure(error, self._applied))

    def _evaluate(self, request: Request) -> Answer:
        if request.policy is not None and request.policy != self._policy:
            self._job = replace(self._job, policy=pickle.loads(request.policy))
            self._policy = request.policy
        if self._folder is None and self._setup.output_dir is not None:
            self._folder = Folder(Path(self._setup.output_dir), self._setup.best_by)
        runner = _Watched(self._workers, self._job, request.weights)
        try:
            self._applied = True
            runner.note = lambda line: None  # the training process says it
            runner.keeps, runner.data = self._metrics_fn is not None, {}
            return self._run(request, runner)
        finally:
            runner.close()

    def _run(self, request: Request, runner: _Watched) -> Answer:
        path = None
        if self._folder is not None:
            self._folder.check_same_episodes(runner.manifest)
            path = self._folder.step_path(request.step)
        indices = self._job.settings.episode_indices
        result = run_to_result(
            runner,
            indices,
            None,
            keep_trajectories=False,
            output_dir=path,
            progress=False,
            retry_lost=True,
            recheck=self._setup.recheck,
        )
        pace = runner.steps / runner.seconds if runner.steps else 0.0
        point = point_of(request.step, result.summary(), result.digest)
        if self._folder is not None:
            name = str(runner.manifest["env"]["id"])
            self._folder.note(point, name, runner.policy_state)
        custom = {}
        if self._metrics_fn is not None:
            runner.run_again(result)
            custom = custom_metrics(self._metrics_fn, runner.data)
        return Answer(
            pickle.dumps((result.manifest, result.episodes, result.errors)),
            None if path is None else str(path),
            metrics_of(point, result.returns, pace, custom, self._setup.log_prefix),
            point,
            None if self._folder is None else self._folder.best,
            runner.lost,
        )

    def close(self) -> None:
        """End the workers, and release the directory."""
        self._workers.close()
        if self._folder is not None:
            self._folder.close()


class _Watched(Driver):
    """Runs episodes on workers; notes their pace, and keeps their data for ``metrics_fn``."""

    keeps = False
    steps, seconds = 0, 0.0
    data: dict[int, TensorDict]

    def run(self, indices: Iterable[int], keep: bool) -> Generator[Finished, None, None]:
        start = time.perf_counter()
        for record, data in super().run(indices, keep or self.keeps):
            self.steps += record.length or 0
            if data is not None:
                self.data[record.index] = data
            yield Finished(record, data if keep else None)
        self.seconds += time.perf_counter() - start

    def run_again(self, result: EvaluationResult) -> None:
        """Run episodes that a ledger had already for their data, which no file keeps."""
        there = {e.index: e for e in result.episodes if e.completed and e.index not in self.data}
        for record, data in super().run(there, True):
            if record.digest != there[record.index].digest or data is None:
                raise NotReproducibleError(
                    f"episode {record.index} is not what the ledger says, now that it runs again "
                    "for metrics_fn: env or policy do not give the same episode for the same seeds"
                )
            self.data[record.index] = data


def main(end: int) -> None:
    """Answer requests until the training process closes the connection.

    Args:
        end: this process's end of it.
    """
    connection = Connection(end)
    with suppress(EOFError, OSError):
        answering = Answering(pickle.loads(connection.recv_bytes()))
        try:
            while True:
                connection.send_bytes(answering.answer(pickle.loads(connection.recv_bytes())))
        finally:
            answering.close()
