"""Looking at a suite before it runs: envs, checkpoints, settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrl.envs import EnvBase

from tdcollect.display import count_text, one_line, visible
from tdcollect.envs.make import make_env
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.evaluate import exits_refused
from tdcollect.progress import progress_bar
from tdcollect.suites.cells import Cell
from tdcollect.suites.tables import Task

if TYPE_CHECKING:
    from tdcollect.suites.suite import Suite

_MOST_STEPS = 200  # of an episode that the doctor plays
_SKIPPED = ("speed",)


@dataclass(frozen=True)
class Validation:
    """The problems of a suite; print it to see them.

    Attributes:
        suite: the name of the suite.
        cells: the number of evaluations that were looked at.
        problems: the problems, each with the task, the policy or the evaluation that has it.
        remarks: what need not be mended, one sentence each.
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
        found = f"failed, {count_text(len(self.problems), 'problem')}"
        end = f"{self.suite}: {count} looked at: {'passed' if self.passed else found}"
        return "\n".join(map(visible, [*self.problems, *self.remarks, end]))

    def __repr__(self) -> str:
        return one_line(self, self.suite, count_text(len(self.problems), "problem"))


def validate(suite: Suite, cells: Sequence[Cell], progress: bool) -> Validation:
    """Look at the env of each task, and at the policy of each cell; see :meth:`Suite.validate`."""
    problems: list[str] = []
    tasks = {cell.task.name: cell for cell in cells}
    unsound: set[str] = set()
    total = len(tasks) + len(cells)
    with progress_bar(total if progress else 0, "checks", leave=False) as bar:
        for name, cell in tasks.items():
            found = _problems_of_env(cell)
            problems += [f"task {name}: {problem}" for problem in found]
            if found:
                unsound.add(name)
            if progress:
                bar.update(1)
        for cell in cells:
            found = _problems_of_files(cell) or (
                [] if cell.task.name in unsound else _tried(lambda cell=cell: _step(cell))  # type: ignore[misc]
            )
            problems += [f"{cell.name}: {problem}" for problem in found]
            if progress:
                bar.update(1)
    scored = [task for task in suite.tasks if task.score is not None]
    remarks = [_without_score(task) for task in suite.tasks if scored and task.score is None]
    if not scored:
        remarks.append("No task has a score: there will be mean returns, and no aggregates.")
    return Validation(suite.name, len(cells), tuple(problems), tuple(remarks))


def _without_score(task: Task) -> str:
    return (
        f"task {task.name}: without a score, it is in no aggregate; give it one, "
        'score = { low = "random", high = ... }'
    )


def _problems_of_files(cell: Cell) -> list[str]:
    return [
        f"expected a file, as {name} has it, got {path}, which is none"
        for name, path in cell.files.items()
        if not path.is_file()
    ]


def _problems_of_env(cell: Cell) -> list[str]:
    """Return the problems of a task's env: it cannot be made, or the doctor finds it unsound."""
    found: list[str] = []

    def look() -> None:
        request = replace(cell.request(), policy="random", transforms=[], env_state=None)
        env = request.made_env()
        kwargs = dict(cell.task.env_kwargs)
        made = make_env(env, env_kwargs=kwargs) if isinstance(env, str) else env(**kwargs)
        (made if isinstance(made, EnvBase) else make_env(made)).close()
        if isinstance(env, str) or not isinstance(made, EnvBase):
            found.extend(_diagnosed(env, kwargs))

    return [*_tried(look), *found]


def _diagnosed(env: Any, kwargs: dict[str, Any]) -> list[str]:
    from tdcollect.testing import diagnose

    report = diagnose(env, env_kwargs=kwargs, max_episode_steps=_MOST_STEPS, skip=_SKIPPED)
    return [
        f"the doctor finds {finding.name}: {' '.join(finding.evidence.split())}"
        for finding in report.failures
    ]


def _step(cell: Cell) -> None:
    """Make the policy with its checkpoint, and run one step of one episode."""
    settings = cell.evaluation_settings()
    env, policy = cell.request().make()
    short = replace(settings, episodes=1, max_episode_steps=1, num_envs=None, on_env_error="raise")
    with closing(EvaluationCollector.from_settings(env, policy, short)) as collector:
        list(collector.run(False))


def _tried(look: Callable[[], None]) -> list[str]:
    """Call a function; return its exception as a problem."""
    try:
        with exits_refused():
            look()
    except Exception as error:
        text = " ".join(str(error).split())
        return [f"{type(error).__name__}: {text}" if text else type(error).__name__]
    return []
