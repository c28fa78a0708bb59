"""The driver: runs the episodes of one job on workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.workers.dispatcher import Dispatcher
from tdcollect.evaluation.workers.job import Job
from tdcollect.evaluation.workers.protocol import Workers
from tdcollect.evaluation.workers.work import Work


class Driver:
    """Runs the episodes of a job on workers; make one for each evaluation, and close it.

    Args:
        workers: the workers, which are started if they are not running.
        job: the job.
        weights: pickled weights by model id, where the job's own are not meant.
        allow_mixed: take workers in whose versions, platform or device differ from the manifest's.

    Attributes:
        manifest: the manifest of the evaluation, of worker 0's machine; of the first worker's that
            is ready, while worker 0 waits for a place.
        num_workers: the number of workers.
        note: is told in a line of each worker that is lost; warns unless it is set.
        let_in: is given the manifest of a worker that differs, before it runs an episode.
        errors: the last error of each failed episode, by index, as text.
        lost: how each lost worker ended, in lines.

    Raises:
        Exception: that the env or the policy raises as it is made.
        RuntimeError: if workers are lost again and again as they make them.
        TypeError: for a job that cannot be pickled.
    """

    def __init__(
        self,
        workers: Workers,
        job: Job,
        weights: Mapping[str, bytes] | None = None,
        allow_mixed: bool = False,
    ):
        self._work = Work(lambda: job, weights=weights)
        self._work.pickled  # noqa: B018, refuses it before a worker starts
        self._dispatcher = Dispatcher(workers, allow_mixed)
        self.num_workers = workers.num_workers
        try:
            self._dispatcher.add(self._work)
            while not self._work.manifest:
                list(self._episodes())  # no episode, as none has been handed out
        except BaseException:
            self.close()
            raise

    @property
    def manifest(self) -> dict[str, Any]:
        return self._work.manifest

    @property
    def errors(self) -> dict[int, str]:
        return self._work.errors

    @property
    def lost(self) -> list[str]:
        return self._dispatcher.lost

    @property
    def note(self) -> Callable[[str], None]:
        return self._dispatcher.note

    @note.setter
    def note(self, note: Callable[[str], None]) -> None:
        self._dispatcher.note = note

    @property
    def let_in(self) -> Callable[[Mapping[str, Any]], None]:
        return self._work.let_in

    @let_in.setter
    def let_in(self, let_in: Callable[[Mapping[str, Any]], None]) -> None:
        self._work.let_in = let_in

    @property
    def about(self) -> dict[str, Any]:
        """The env and the workers, for the notes on a run."""
        return self._dispatcher.about(self._work)

    def run(self, indices: Iterable[int], keep: bool) -> Generator[Finished, None, None]:
        """Run episodes; yields them as they end.

        Args:
            indices: of the episodes.
            keep: yield their data too.

        Raises:
            NotReproducibleError: if an episode that ran twice has two digests.
            ValueError: for a worker that differs from the manifest.
            Exception: that a worker raises, as an evaluation without workers would.
        """
        self._work.keep = keep
        self._dispatcher.begin(self._work, indices)
        while self._dispatcher.left(self._work):
            yield from self._episodes()

    def _episodes(self) -> Iterator[Finished]:
        for _, what in self._dispatcher.events():
            if isinstance(what, Exception):
                raise what
            if what is not None:
                yield what

    def policy_state(self) -> dict[str, Any]:
        """Return the policy's ``state_dict``, on the CPU; empty if it has none."""
        return self._dispatcher.policy_state(self._work)

    def close(self) -> None:
        """Release the workers; those that have not ended their episodes are ended.

        So are those that have not made the env, if the evaluation was broken off: they may hang.
        """
        self._dispatcher.close()
