"""Running a suite, in this process or on workers; and looking at it before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tdcollect import display
from tdcollect.display import count_text, listed_text, number_text, one_line
from tdcollect.envs.make import make_env
from tdcollect.evaluation.directory import check_report_extras
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.evaluate import Recording, followed
from tdcollect.evaluation.imports import exits_refused
from tdcollect.evaluation.ledger import TRAJECTORIES, Shard, is_finished, read_directory
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
from tdcollect.progress import line_above, progress_bar

_MOST_STEPS = 200  # of an episode that the doctor plays


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


# Before it runs


@dataclass(frozen=True)
class Validation:
    """The problems of a suite; print it to see them.

    Attributes:
        suite: the name of the suite.
        cells: the number of evaluations that were looked at.
        problems: each with the task, the policy or the evaluation that has it.
        remarks: notes on what need not be mended.
    """

    suite: str
    cells: int
    problems: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if there is no problem."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the problems as plain lists, for JSON."""
        return {
            "suite": self.suite,
            "evaluations": self.cells,
            "problems": list(self.problems),
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        count = count_text(self.cells, "evaluation")
        failed = f"failed, {count_text(len(self.problems), 'problem')}"
        end = f"{self.suite}: {count} looked at: {'passed' if self.passed else failed}"
        return "\n".join(map(display.visible, [*self.problems, *self.remarks, end]))

    def __repr__(self) -> str:
        return one_line(self, self.suite, count_text(len(self.problems), "problem"))


def validate(suite: Definition, cells: Sequence[SuiteCell], progress: bool) -> Validation:
    """Look at the env of each task, and at the policy of each cell; see :meth:`Suite.validate`."""
    tasks = {f"task {cell.task.name}": cell for cell in cells}
    by_name: dict[str, list[str]] = {}
    total = len(tasks) + len(cells)
    with progress_bar(total, "checks", leave=False) if progress else nullcontext() as bar:
        for name, cell in [*tasks.items(), *((cell.name, cell) for cell in cells)]:
            if name in tasks:
                by_name[name] = _tried(_problems_of_env, cell)
            elif not by_name[f"task {cell.task.name}"]:
                by_name[name] = _tried(_problems_of_policy, cell)
            if bar is not None:
                bar.update(1)
    problems = tuple(f"{name}: {problem}" for name, ones in by_name.items() for problem in ones)
    remarks = tuple(
        f"task {task.name}: without a score, it is in no aggregate; give it one, "
        'score = { low = "random", high = ... }'
        for task in suite.tasks
        if task.score is None
    )
    if len(remarks) == len(suite.tasks):
        remarks = ("No task has a score: there will be mean returns, and no aggregates.",)
    return Validation(suite.name, len(cells), problems, remarks)


def _problems_of_env(cell: SuiteCell) -> Iterator[str]:
    """Make a task's env, and have the doctor look at it."""
    env = replace(cell.request(), policy="random", transforms=[], env_state=None).made_env()
    kwargs = dict(cell.task.env_kwargs)
    one = make_env(env, env_kwargs=kwargs) if isinstance(env, str) else env(**kwargs)
    (one if isinstance(one, EnvBase) else make_env(one)).close()
    if not isinstance(one, (EnvBase, VectorEnv)) or isinstance(env, str):
        yield from _diagnosed(env, kwargs)


def _diagnosed(env: Any, kwargs: dict[str, Any]) -> list[str]:
    from tdcollect.testing import diagnose

    report = diagnose(env, env_kwargs=kwargs, max_episode_steps=_MOST_STEPS)
    return [
        f"the doctor finds {finding.name}: {' '.join(finding.evidence.split())}"
        for finding in report.failures
    ]


def _problems_of_policy(cell: SuiteCell) -> list[str]:
    """Make the policy with its checkpoint, and run one step of one episode."""
    settings = cell.evaluation_settings()
    env, policy = cell.request().make()
    short = replace(settings, episodes=1, max_episode_steps=1, num_envs=None, on_env_error="raise")
    with closing(EvaluationCollector.from_settings(env, policy, short)) as collector:
        list(collector.run(False))
    return []


def _tried(look: Callable[[SuiteCell], Iterable[str]], cell: SuiteCell) -> list[str]:
    """Return the problems that a look at a cell finds; or its exception as the only one."""
    try:
        with exits_refused():
            return [*look(cell)]
    except Exception as error:
        text = " ".join(str(error).split())
        return [f"{type(error).__name__}: {text}" if text else type(error).__name__]
