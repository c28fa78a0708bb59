"""The process that evaluates beside training: requests in, answers out."""

from __future__ import annotations

import pickle
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle

from tdcollect.evaluation.beside.curve import point_of
from tdcollect.evaluation.beside.folder import Folder
from tdcollect.evaluation.beside.job import unpacked
from tdcollect.evaluation.beside.messages import Answer, Failure, Request, Setup, failure
from tdcollect.evaluation.beside.metrics import custom_metrics, metrics_of
from tdcollect.evaluation.beside.warm import Warm


class Driver:
    """Runs requests, and keeps their curve.

    Args:
        setup: the subject of all requests.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        self._folder: Folder | None = None
        self._warm: Warm | None = None

    def answer(self, request: Request) -> Answer | Failure:
        """Run a request; an exception is an answer too."""
        try:
            answer = self._evaluate(request)
            cloudpickle.dumps(
                answer
            )  # else an object among the user's metrics would end the process
            return answer
        except Exception as error:
            return failure(error, self._warm is not None and self._warm.applied)

    def _evaluate(self, request: Request) -> Answer:
        if self._warm is None:
            self._job = unpacked(self._setup.job)
            self._warm = Warm(self._job)
        if self._folder is None and self._setup.output_dir is not None:
            self._folder = Folder(Path(self._setup.output_dir), self._setup.best_by)
        manifest = self._warm.manifest(request)
        path = None
        if self._folder is not None:
            self._folder.check_same_episodes(manifest)
            path = self._folder.step_path(request.step)
        ran = self._warm.run(manifest, path)
        result = ran.result
        point = point_of(request.step, result.summary(), result.digest)
        if self._folder is not None:
            self._folder.note(point, str(manifest["env"]["id"]), ran.policy)
        custom = {}
        if self._job.metrics_fn is not None:
            custom = custom_metrics(self._job.metrics_fn, ran.episodes)
        prefix = self._setup.log_prefix
        metrics = metrics_of(point, result.returns, ran.frames_per_second, custom, prefix)
        return Answer(
            pickle.dumps((manifest, result.episodes, result.errors)),
            None if path is None else str(path),
            metrics,
            point,
            None if self._folder is None else self._folder.best,
        )

    def close(self) -> None:
        """Close the env, and release the directory."""
        if self._warm is not None:
            self._warm.close()
        if self._folder is not None:
            self._folder.close()


def main(connection: Connection) -> None:
    """Answer requests until the training process closes the connection."""
    with suppress(EOFError, OSError):
        driver = Driver(pickle.loads(connection.recv_bytes()))
        try:
            while True:
                answer = driver.answer(pickle.loads(connection.recv_bytes()))
                connection.send_bytes(cloudpickle.dumps(answer))
        finally:
            driver.close()
