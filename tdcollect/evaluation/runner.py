"""From whatever runs the episodes, this process or workers, to a result and its files."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.episodes.isolation import NotReproducibleError
from tdcollect.evaluation.finishing import finish
from tdcollect.evaluation.ledger.directory import Directory
from tdcollect.evaluation.ledger.manifest import MIXED, describe
from tdcollect.evaluation.ledger.reading import was_rechecked
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.ledger.shards import Shard
from tdcollect.evaluation.replay import Replay
from tdcollect.evaluation.request import Request
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.progress import line_above, progress_bar


class Runner(Protocol):
    """Runs the episodes of one evaluation.

    Attributes:
        manifest: the manifest of the evaluation.
        errors: the last error of each failed episode, by index, as text.
        about: the env and what runs it, for the notes on a run.
        num_workers: the number of workers; 0 in this process.
        note: is told in a line of each worker that is lost.
        let_in: is given the manifest of a worker that differs, before it runs an episode.
    """

    num_workers: int
    note: Callable[[str], None]
    let_in: Callable[[Mapping[str, Any]], None]

    @property
    def manifest(self) -> dict[str, Any]: ...

    @property
    def errors(self) -> dict[int, str]: ...

    @property
    def about(self) -> dict[str, Any]: ...

    def run(self, indices: Sequence[int], keep: bool) -> Generator[Finished, None, None]:
        """Run episodes; yields them, and their data if they are kept, as they end."""

    def close(self) -> None:
        """Let go of env and workers."""


class InThisProcess:
    """Runs the episodes in this process."""

    num_workers = 0

    def __init__(self, env: Any, policy: Any, settings: EvaluationSettings):
        self.errors: dict[int, str] = {}
        self.note: Callable[[str], None] = warn
        self.let_in: Callable[[Mapping[str, Any]], None] = lambda manifest: None
        self._collector = EvaluationCollector.from_settings(env, policy, settings)
        try:
            self.manifest = describe(self._collector)
        except BaseException:
            self.close()
            raise

    @property
    def about(self) -> dict[str, Any]:
        return {"env": repr(self._collector.base), "threads": torch.get_num_threads()}

    def run(self, indices: Sequence[int], keep: bool) -> Generator[Finished, None, None]:
        self._collector.episode_indices = indices
        yield from self._collector.run(keep)
        self.errors |= self._collector.errors

    def close(self) -> None:
        self._collector.close()


class Recording:
    """The episodes of one evaluation as they end, in its directory or in memory.

    Leave it by ``finish`` or ``give_up``, and ``close`` it.

    Args:
        manifest: of the evaluation.
        indices: of its episodes.
        keep_trajectories: as for :func:`tdcollect.evaluate`, and so all that follow.
        output_dir: likewise.
        shard: likewise.
        allow_mixed: likewise.
        retry_lost: likewise.
        recheck: likewise.

    Attributes:
        left: the indices of the episodes to run.
        directory: the directory, or None.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        indices: Sequence[int],
        *,
        keep_trajectories: bool = False,
        output_dir: str | os.PathLike[str] | None = None,
        shard: Shard | None = None,
        allow_mixed: bool = False,
        retry_lost: bool = False,
        recheck: bool = True,
    ):
        self._manifest, self._shard, self._recheck = manifest, shard, recheck
        self._again: Episode | None = None  # that runs once more
        self._was_finished = False
        self._ended: list[Episode] = []
        self._trajectories: dict[int, TensorDict] = {}
        self.directory: Directory | None = None
        if output_dir is not None:
            self.directory = Directory(output_dir, manifest, shard, allow_mixed, retry_lost)
            self._ended = list(self.directory.episodes)
        try:
            if self.directory is not None and keep_trajectories:
                self.directory.check_kept(self._ended)
            there = {episode.index for episode in self._ended}
            own = indices if shard is None else shard.select(indices)
            self.left = [index for index in own if index not in there]
            self._started = time.time()
            if self.directory is not None and not self.left:
                found = was_rechecked(self.directory.path)
                self._was_finished = found is not None
                self._recheck = recheck if found is None else found
            if self.directory is not None and self.left:
                self.directory.note_mixed(manifest)
        except BaseException:
            self.close()
            raise

    def let_in(self, manifest: Mapping[str, Any]) -> None:
        """Note that episodes run under another manifest, too."""
        if self.directory is not None:
            self.directory.note_mixed(manifest)

    def rounds(self) -> Iterator[Sequence[int]]:
        """Yield the indices to run: those left, then the shortest episode that ended, once more.

        Where workers may differ (``mixed`` in the manifest), so may an episode: none runs again.
        """
        yield self.left
        completed = [episode for episode in self._ended if episode.completed]
        mixed = MIXED in (self._manifest if self.directory is None else self.directory.manifest)
        if completed and self._recheck and not (self._was_finished or mixed):
            self._again = min(completed, key=lambda episode: (episode.length, episode.index))
            yield [self._again.index]

    def add(self, record: Episode, data: TensorDict | None) -> bool:
        """Take an episode that has ended; True if it ran once more, which leaves no trace.

        Raises:
            NotReproducibleError: if it is another one then.
        """
        before = self._again
        if before is not None:
            # One that fails now tells nothing; another episode comes late, from a lost worker.
            same = record.digest == before.digest
            if record.completed and record.index == before.index and not same:
                raise NotReproducibleError(
                    f"episode {record.index}, the shortest, is another one when it runs once more, "
                    "alone: env or policy keep something from one episode to the next, or draw "
                    "random numbers that no seed reaches. Keep what the policy remembers in "
                    "entries of the TensorDict; tdcollect doctor looks at the env"
                )
            return True
        self._ended.append(record)
        if self.directory is not None:
            self.directory.add(record, data)
        elif data is not None:
            self._trajectories[record.index] = data
        return False

    def finish(
        self,
        errors: Mapping[int, str],
        about: Mapping[str, Any],
        replay: Replay | None = None,
        request: Request | None = None,
    ) -> EvaluationResult:
        """Write the last files, and return the result.

        Args:
            errors: the last error of each failed episode, by index, as text.
            about: the env and what ran it, for the notes on the run.
            replay: for the result.
            request: env and policy by name, if they are kept.
        """
        directory = self.directory
        manifest = self._manifest if directory is None else directory.manifest
        output_dir = None if directory is None else directory.path
        completed = {episode.index for episode in self._ended if episode.completed}
        errors = {index: text for index, text in errors.items() if index not in completed}
        result = EvaluationResult(
            manifest, self._ended, output_dir, self._trajectories, replay, errors
        )
        if directory is not None:
            finish(directory, result, request, self._recheck)
            if self.left:
                part = {} if self._shard is None else {"shard": self._shard}
                directory.note_run(self._started, len(self.left), {**about, **part})
        return result

    def give_up(self, error: BaseException) -> None:
        """Leave the directory as it is after an error; see :meth:`Directory.give_up`."""
        if self.directory is not None:
            self.directory.give_up(error)

    def close(self) -> None:
        """Release the directory."""
        if self.directory is not None:
            self.directory.close()


def episodes_of(
    runner: Runner, recording: Recording, keep: bool
) -> Generator[Finished, None, None]:
    """Run the episodes that a recording asks for; yields them as they end."""
    for indices in recording.rounds():
        yield from runner.run(indices, keep)


def run_to_result(
    runner: Runner,
    indices: Sequence[int],
    replay: Replay | None,
    *,
    progress: bool,
    request: Request | None = None,
    **where: Any,
) -> EvaluationResult:
    """Run the episodes that the directory lacks, and write its files.

    Args:
        runner: runs the episodes.
        indices: of the episodes of the evaluation.
        replay: for the result.
        progress: as for :func:`tdcollect.evaluate`.
        request: likewise.
        where: the other arguments of :class:`Recording`.
    """
    with closing(Recording(runner.manifest, indices, **where)) as recording:
        left = recording.left
        runner.let_in = recording.let_in
        run = episodes_of(runner, recording, where.get("keep_trajectories", False))
        try:
            for record, data in _shown(run, runner, len(left)) if progress and left else run:
                recording.add(record, data)
        except BaseException as error:
            recording.give_up(error)
            raise
        return recording.finish(runner.errors, runner.about, replay, request)


def _shown(run: Generator[Finished, None, None], runner: Runner, total: int) -> Iterator[Finished]:
    """Yield the finished episodes, with a progress bar, and lines on lost workers above it."""
    with closing(run), progress_bar(total, "test episodes", leave=False) as bar:
        runner.note = lambda line: line_above(bar, line)
        if runner.num_workers:
            bar.set_postfix({"workers": str(runner.num_workers)})
        for number, finished in enumerate(run):
            if number < total:  # and not the one that runs once more
                bar.update(1)
            yield finished
            del finished  # else its data would stay in memory beside the next one's


@contextmanager
def resumable(directory: str | os.PathLike[str] | None) -> Iterator[None]:
    """Have an interrupt say in one line how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        if directory is not None:
            error.add_note(f"the same call goes on with the episodes that {directory} lacks")
        raise


def warn(line: str, /) -> None:
    """Say in a warning what no progress shows; it points to the user's call, and not to ours."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tdcollect."):
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)
