"""Running a suite, in this process or on workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tdcollect import display
from tdcollect.display import count_text, listed_text, number_text
from tdcollect.evaluation.directory import check_report_extras
from tdcollect.evaluation.evaluate import Recording, followed
from tdcollect.evaluation.ledger import TRAJECTORIES, Shard, is_finished, read_directory
from tdcollect.evaluation.request import exits_refused
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.statistics import exact_mean
from tdcollect.evaluation.workers.dispatcher import Evaluation
from tdcollect.evaluation.workers.local import Workers, as_workers
from tdcollect.evaluation.workers.worker import Job
from tdcollect.files import check_no_links, remove, write_json
from tdcollect.lab import results
from tdcollect.lab.definition import Definition, SuiteCell
from tdcollect.lab.pages.suite import report_on
from tdcollect.progress import line_above


def run_suite(
    suite: Definition,
    directory: Path,
    cells: Sequence[SuiteCell],
    *,
    workers: Workers | int | None,
    shard: tuple[int, int] | None,
    progress: bool,
    **how: bool,
) -> results.SuiteResults:
    """Run the cells that are not finished, and write the report; see :meth:`Suite.run`."""
    check_report_extras("Suite.run(...)")
    part = None if shard is None else Shard.of(shard)
    chosen = cells if part is None else [cells[n] for n in part.select(range(len(cells)))]
    settings = {cell.name: cell.evaluation_settings() for cell in chosen}  # refused if unsound
    for each in settings.values():
        each.check_whole(workers in (None, 0))
    results.check_files(chosen)
    described = results.described_cells(suite, chosen)
    results.check_folder(directory, described)
    if how["keep_trajectories"]:
        _check_kept(directory, [cell for cell in chosen if is_finished(directory / cell.path)])
    left = [
        cell
        for cell in chosen
        if not is_finished(directory / cell.path)
        or any(episode.lost for episode in read_directory(directory / cell.path).episodes)
    ]
    check_no_links(directory, *(cell.path for cell in left))
    crew = as_workers(workers)
    results.claim_folder(directory, described)
    runs = {
        _evaluation(cell, settings[cell.name], directory, crew, len(left), how): cell
        for cell in left
    }
    shown, ended = suite.episodes * progress, 0
    staff = crew if left else None
    with followed(runs, workers, staff, directory, shown, refuse_exits=True) as (events, bar):
        for one, what in events:
            if isinstance(what, (EvaluationResult, Exception)):
                cell, told = runs[one], _told(what)
                ended += 1
                if isinstance(what, Exception):
                    write_json(results.error_beside(directory / cell.path), {"reason": told})
                    told = f"could not run: {told}"
                if bar is not None:
                    line_above(bar, f"{cell.name}: {told} ({ended} of {len(left)})")
            del what
    return report_on(suite, directory)


def _evaluation(
    cell: SuiteCell,
    settings: EvaluationSettings,
    directory: Path,
    crew: Workers | None,
    cells: int,
    how: Mapping[str, Any],
) -> Evaluation:
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
        remove(results.error_beside(directory / cell.path))
        return recording

    return Evaluation(make, record, how["keep_trajectories"])


def _check_kept(directory: Path, ended: Sequence[SuiteCell]) -> None:
    """Refuse to keep data if evaluations have ended without, naming them."""
    without = [cell.name for cell in ended if not (directory / cell.path / TRAJECTORIES).is_dir()]
    if without:
        raise ValueError(
            f"expected evaluations with the data of their episodes, got {listed_text(without)} "
            "without: data are kept as an episode runs. Choose another directory, or remove these "
            "evaluations to run them again"
        )


def _told(ended: EvaluationResult | Exception) -> str:
    if isinstance(ended, Exception):
        text = display.without_process_ids(" ".join(str(ended).split())) or type(ended).__name__
        return f"{type(ended).__name__}: {text}"
    lost = sum(episode.lost for episode in ended.episodes)
    failed = len(ended.episodes) - len(ended.returns) - lost
    mean = number_text(exact_mean(ended.returns)) if len(ended.returns) else "none"
    counts = [(failed, "failed"), (lost, "were lost")]
    told = [f"{count_text(count, 'episode')} {how}" for count, how in counts if count]
    return ", ".join([f"mean return {mean}", *told])
