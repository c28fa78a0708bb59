"""From whatever runs the episodes, this process or workers, to a result and its files."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.finishing import finish
from tdcollect.evaluation.ledger.directory import Directory
from tdcollect.evaluation.ledger.manifest import describe
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

    manifest: dict[str, Any]
    num_workers: int
    note: Callable[[str], None]
    let_in: Callable[[Mapping[str, Any]], None]

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
        self.note: Callable[[str], None] = warn
        self.let_in: Callable[[Mapping[str, Any]], None] = lambda manifest: None
        self._collector = EvaluationCollector.from_settings(env, policy, settings)
        try:
            self.manifest = describe(self._collector)
        except BaseException:
            self.close()
            raise

    @property
    def errors(self) -> dict[int, str]:
        return self._collector.errors

    @property
    def about(self) -> dict[str, Any]:
        return {"env": repr(self._collector.base), "threads": torch.get_num_threads()}

    def run(self, indices: Sequence[int], keep: bool) -> Generator[Finished, None, None]:
        self._collector.episode_indices = indices
        return self._collector.run(keep)

    def close(self) -> None:
        self._collector.close()


def run_to_result(
    runner: Runner,
    indices: Sequence[int],
    replay: Replay | None,
    *,
    keep_trajectories: bool,
    output_dir: str | os.PathLike[str] | None,
    progress: bool,
    request: Request | None = None,
    shard: Shard | None = None,
    allow_mixed: bool = False,
) -> EvaluationResult:
    """Run the episodes that the directory lacks, and write its files.

    Args:
        runner: runs the episodes.
        indices: of the episodes of the evaluation.
        replay: for the result.
        keep_trajectories: as for :func:`tdcollect.evaluate`, and so all that follow.
        output_dir: likewise.
        progress: likewise.
        request: likewise.
        shard: likewise.
        allow_mixed: likewise.
    """
    with ExitStack() as stack:
        ended: list[Episode] = []
        directory = None
        if output_dir is not None:
            directory = Directory(output_dir, runner.manifest, shard, allow_mixed)
            stack.callback(directory.close)
            ended = list(directory.episodes)
            if keep_trajectories:
                directory.check_kept(ended)
        trajectories: dict[int, TensorDict] = {}
        there = {episode.index for episode in ended}
        own = indices if shard is None else shard.select(indices)
        left = [index for index in own if index not in there]
        started = time.time()
        if directory is not None and left:
            directory.note_mixed(runner.manifest)
            runner.let_in = directory.note_mixed
        run = runner.run(left, keep_trajectories)
        try:
            for record, data in _shown(run, runner, len(left)) if progress and left else run:
                ended.append(record)
                if directory is not None:
                    directory.add(record, data)
                elif data is not None:
                    trajectories[record.index] = data
        except BaseException as error:
            if directory is not None:
                directory.give_up(error)
            raise
        manifest = runner.manifest if directory is None else directory.manifest
        result = EvaluationResult(manifest, ended, output_dir, trajectories, replay, runner.errors)
        if directory is not None:
            finish(directory, result, request)
            if left:
                part = {} if shard is None else {"shard": shard}
                directory.note_run(started, len(left), {**runner.about, **part})
        return result


def _shown(run: Generator[Finished, None, None], runner: Runner, total: int) -> Iterator[Finished]:
    """Yield the finished episodes, with a progress bar, and lines on lost workers above it."""
    with closing(run), progress_bar(total, "test episodes", leave=False) as bar:
        runner.note = lambda line: line_above(bar, line)
        if runner.num_workers:
            bar.set_postfix({"workers": str(runner.num_workers)})
        for finished in run:
            bar.update(1)
            yield finished
            del finished  # else its data would stay in memory beside the next one's


def warn(line: str, /) -> None:
    """Say in a warning what no progress shows."""
    warnings.warn(line, stacklevel=2)
