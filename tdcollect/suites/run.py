"""Running the evaluations of a suite: in this process, or all together on workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdcollect.display import count_text, listed_text, number_text, without_process_ids
from tdcollect.evaluation.finishing import check_report_extras
from tdcollect.evaluation.ledger.reading import TRAJECTORIES, is_finished, read_directory
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.ledger.shards import Shard
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.runner import InThisProcess, Recording, episodes_of, resumable, warn
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.workers.dispatcher import Dispatcher, Event
from tdcollect.evaluation.workers.job import Job
from tdcollect.evaluation.workers.local import as_workers
from tdcollect.evaluation.workers.protocol import Workers
from tdcollect.evaluation.workers.work import Work
from tdcollect.files import check_no_links, remove
from tdcollect.progress import line_above, progress_bar
from tdcollect.suites.cells import Cell, exits_refused
from tdcollect.suites.folder import (
    check_files,
    check_folder,
    claim_folder,
    described_cells,
    error_file,
    write_error,
)
from tdcollect.suites.report import report_on
from tdcollect.suites.results import SuiteResults

if TYPE_CHECKING:
    from tdcollect.suites.suite import Suite


def run_suite(
    suite: Suite,
    directory: Path,
    cells: Sequence[Cell],
    *,
    workers: Workers | int | None,
    shard: tuple[int, int] | None,
    keep_trajectories: bool,
    allow_mixed: bool,
    retry_lost: bool,
    recheck: bool,
    progress: bool,
) -> SuiteResults:
    """Run the cells that are not finished, and write the report; see :meth:`Suite.run`."""
    check_report_extras("Suite.run(...)")
    part = None if shard is None else Shard.of(shard)
    chosen = cells if part is None else [cells[n] for n in part.select(range(len(cells)))]
    settings = {cell.name: cell.evaluation_settings() for cell in chosen}  # refused if unsound
    check_files(chosen)
    described = described_cells(suite, chosen)
    check_folder(directory, described)
    if keep_trajectories:
        _check_kept(directory, [cell for cell in chosen if is_finished(directory / cell.path)])
    left = [
        cell
        for cell in chosen
        if not is_finished(directory / cell.path)
        or (retry_lost and any(e.lost for e in read_directory(directory / cell.path)[1]))
    ]
    check_no_links(directory, *(cell.path for cell in left))
    crew = as_workers(workers)
    claim_folder(directory, described)
    how = {
        "keep_trajectories": keep_trajectories,
        "allow_mixed": allow_mixed,
        "retry_lost": retry_lost,
        "recheck": recheck,
    }
    running = _Running(directory, left, suite.episodes, how, progress)
    with resumable(directory), ExitStack() as stack:
        stack.enter_context(running)
        if crew is None:
            running.in_this_process(settings)
        elif left:
            if crew is not workers:
                stack.callback(crew.close)
            running.on(crew, settings)
    return report_on(suite, directory)


def _check_kept(directory: Path, ended: Sequence[Cell]) -> None:
    """Refuse to keep data if evaluations have ended without.

    Raises:
        ValueError: naming them.
    """
    without = [cell.name for cell in ended if not (directory / cell.path / TRAJECTORIES).is_dir()]
    if without:
        raise ValueError(
            f"expected evaluations with the data of their episodes, got {listed_text(without)} "
            "without: data are kept as an episode runs. Choose another directory, or remove these "
            "evaluations to run them again"
        )


class _Running:
    """The evaluations that run, each with its recording; a context manager.

    Args:
        directory: of the suite.
        cells: to run.
        episodes: of each.
        how: further arguments of :class:`Recording`.
        progress: as for :func:`tdcollect.evaluate`.
    """

    def __init__(
        self,
        directory: Path,
        cells: Sequence[Cell],
        episodes: int,
        how: Mapping[str, Any],
        progress: bool,
    ):
        self._directory, self._cells = directory, cells
        self._how, self._keep = how, how["keep_trajectories"]
        self._rounds: dict[Work, Iterator[Sequence[int]]] = {}
        self._episodes = episodes
        self._recordings: dict[str, Recording] = {}
        self._ended = 0
        self._opened = ExitStack()
        self._progress = progress and bool(cells)

    def __enter__(self) -> _Running:
        total = len(self._cells) * self._episodes
        self._bar = None
        if self._progress:
            bar = progress_bar(total, "test episodes", leave=False)
            self._bar = self._opened.enter_context(bar)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._opened:
            for recording in self._recordings.values():
                if error is not None:
                    recording.give_up(error)
                recording.close()

    def in_this_process(self, settings: Mapping[str, EvaluationSettings]) -> None:
        """Run one evaluation after the other."""
        for cell in self._cells:
            try:
                with exits_refused():
                    self._run(cell, settings[cell.name])
            except Exception as error:
                self.fail(cell, error)

    def _run(self, cell: Cell, settings: EvaluationSettings) -> None:
        env, policy = cell.request().make()
        runner = InThisProcess(env, policy, settings)
        runner.note = self.note
        try:
            recording = self.begin(cell, runner.manifest)
            for record, data in episodes_of(runner, recording, self._keep):
                self.add(cell, record, data)
            self.finish(cell, runner.errors, runner.about)
        finally:
            runner.close()

    def on(self, crew: Workers, settings: Mapping[str, EvaluationSettings]) -> None:
        """Run all evaluations on workers that they share."""
        dispatcher = Dispatcher(crew, self._how["allow_mixed"])
        dispatcher.note = self.note
        sharing = max(1, crew.num_workers // len(self._cells))
        works: dict[Work, Cell] = {}
        ended: deque[tuple[Cell, Work]] = deque()  # their reports are to be written
        try:
            for cell in self._cells:
                work = Work(_job_of(cell, settings[cell.name], sharing), self._keep)
                works[work] = cell
                dispatcher.add(work)
            while works or ended:
                self._take_in(dispatcher.hand_out(), dispatcher, works, ended)
                if ended:  # one at a time, and while workers have enough to do
                    cell, work = ended.popleft()
                    self._finished(cell, work, dispatcher)
                self._take_in(dispatcher.answers(not ended), dispatcher, works, ended)
        finally:
            dispatcher.close()

    def _take_in(
        self,
        events: Iterator[Event],
        dispatcher: Dispatcher,
        works: dict[Work, Cell],
        ended: deque[tuple[Cell, Work]],
    ) -> None:
        """Record what the workers did; evaluations that have ended move on."""
        for work, what in events:
            if work not in works:
                continue  # it could not go on
            cell = works[work]
            try:
                if isinstance(what, Exception):
                    raise what
                if what is None:
                    recording = self.begin(cell, work.manifest)
                    work.let_in = recording.let_in
                    self._rounds[work] = recording.rounds()
                    dispatcher.begin(work, next(self._rounds[work]))
                else:
                    self.add(cell, *what)
                if not dispatcher.left(work) and (more := next(self._rounds[work], None)):
                    dispatcher.begin(work, more)
            except Exception as error:
                self.fail(cell, error)
                if not isinstance(what, Exception):
                    dispatcher.remove(work)
                del works[work]
                continue
            if not dispatcher.left(work):
                dispatcher.remove(work)
                ended.append((works.pop(work), work))

    def _finished(self, cell: Cell, work: Work, dispatcher: Dispatcher) -> None:
        try:
            self.finish(cell, work.errors, dispatcher.about(work))
        except Exception as error:
            self.fail(cell, error)

    def begin(self, cell: Cell, manifest: Mapping[str, Any]) -> Recording:
        """Open the directory of an evaluation."""
        recording = Recording(
            manifest,
            range(self._episodes),
            output_dir=self._directory / cell.path,
            **self._how,
        )
        remove(error_file(self._directory, cell))
        self._recordings[cell.name] = recording
        self._step(self._episodes - len(recording.left))
        return recording

    def add(self, cell: Cell, record: Episode, data: Any) -> None:
        """Take an episode that has ended."""
        if not self._recordings[cell.name].add(record, data):
            self._step(1)

    def finish(self, cell: Cell, errors: Mapping[int, str], about: Mapping[str, Any]) -> None:
        """Write the last files of an evaluation."""
        recording = self._recordings[cell.name]
        result = recording.finish(errors, about, request=cell.request())
        del self._recordings[cell.name]
        recording.close()
        self._tell(cell, _told(result))

    def fail(self, cell: Cell, error: Exception) -> None:
        """Leave an evaluation that cannot go on; the others run."""
        recording = self._recordings.pop(cell.name, None)
        if recording is not None:
            recording.give_up(error)
            recording.close()
        text = without_process_ids(" ".join(str(error).split())) or type(error).__name__
        reason = f"{type(error).__name__}: {text}"
        write_error(self._directory, cell, reason)
        self._tell(cell, f"could not run: {reason}")

    def note(self, line: str) -> None:
        """Tell of a worker that was lost."""
        if self._bar is None:
            warn(line)
        else:
            line_above(self._bar, line)

    def _tell(self, cell: Cell, text: str) -> None:
        self._ended += 1
        if self._bar is not None:
            line = f"{cell.name}: {text} ({self._ended} of {len(self._cells)})"
            line_above(self._bar, line)

    def _step(self, more: int) -> None:
        if self._bar is not None and more:
            self._bar.update(more)


def _job_of(cell: Cell, settings: EvaluationSettings, sharing: int) -> Callable[[], Job]:
    def make() -> Job:
        with exits_refused():
            env, policy = cell.request().make()
        return Job(env, policy, settings, sharing)

    return make


def _told(result: EvaluationResult) -> str:
    lost = sum(episode.lost for episode in result.episodes)
    failed = len(result.episodes) - len(result.returns) - lost
    mean = number_text(float(result.returns.mean())) if len(result.returns) else "none"
    counts = [(failed, "failed"), (lost, "were lost")]
    told = [f"{count_text(count, 'episode')} {how}" for count, how in counts if count]
    return ", ".join([f"mean return {mean}", *told])
