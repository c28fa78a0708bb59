"""Running the evaluations of a suite: in this process, or all together on workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdcollect.display import count_text, listed_text, number_text, without_process_ids
from tdcollect.evaluation.evaluate import (
    Recording,
    check_report_extras,
    exits_refused,
    resumable,
    run,
)
from tdcollect.evaluation.ledger import TRAJECTORIES, Shard, is_finished, read_directory
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.workers.dispatcher import Evaluation
from tdcollect.evaluation.workers.local import Workers, as_workers
from tdcollect.evaluation.workers.worker import Job
from tdcollect.files import check_no_links, remove
from tdcollect.progress import line_above, progress_bar, warn
from tdcollect.suites.cells import Cell
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
    runs = {
        _evaluation(cell, settings[cell.name], directory, crew, len(left), how): cell
        for cell in left
    }
    ended, bar = 0, None

    def say(line: str) -> None:
        if bar is not None:
            line_above(bar, line)

    with resumable(directory), ExitStack() as stack:
        if crew is not None and crew is not workers:
            stack.callback(crew.close)
        if progress and left:
            total = len(left) * suite.episodes
            bar = stack.enter_context(progress_bar(total, "test episodes", leave=False))
        events = run(
            runs,
            crew if left else None,
            allow_mixed=allow_mixed,
            note=warn if bar is None else say,
            refuse_exits=True,
        )
        for one, what in stack.enter_context(closing(events)):
            cell, more = runs[one], 0
            if isinstance(what, (EvaluationResult, Exception)):
                ended += 1
                told = _told(what)
                if isinstance(what, Exception):
                    write_error(directory, cell, told)
                    told = f"could not run: {told}"
                say(f"{cell.name}: {told} ({ended} of {len(left)})")
            elif what is None:
                more = suite.episodes - len(one.recording.left)
            elif not one.recording.again:
                more = 1
            del what
            if bar is not None and more:
                bar.update(more)
    return report_on(suite, directory)


def _evaluation(
    cell: Cell,
    settings: EvaluationSettings,
    directory: Path,
    crew: Workers | None,
    cells: int,
    how: Mapping[str, Any],
) -> Evaluation:
    """Return the evaluation of a cell, which is recorded in its directory."""
    sharing = 1 if crew is None else max(1, crew.num_workers // cells)

    def make() -> Job:
        with exits_refused():
            env, policy = cell.request().make()
        return Job(env, policy, settings, sharing)

    def record(manifest: Mapping[str, Any]) -> Recording:
        recording = Recording(
            manifest,
            settings.episode_indices,
            output_dir=directory / cell.path,
            request=cell.request(),
            **how,
        )
        remove(error_file(directory, cell))
        return recording

    return Evaluation(make, record, how["keep_trajectories"])


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


def _told(ended: EvaluationResult | Exception) -> str:
    if isinstance(ended, Exception):
        text = without_process_ids(" ".join(str(ended).split())) or type(ended).__name__
        return f"{type(ended).__name__}: {text}"
    lost = sum(episode.lost for episode in ended.episodes)
    failed = len(ended.episodes) - len(ended.returns) - lost
    mean = number_text(float(ended.returns.mean())) if len(ended.returns) else "none"
    counts = [(failed, "failed"), (lost, "were lost")]
    told = [f"{count_text(count, 'episode')} {how}" for count, how in counts if count]
    return ", ".join([f"mean return {mean}", *told])
