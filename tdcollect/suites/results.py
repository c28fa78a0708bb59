"""The results of a suite, and of each of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tdcollect.display import (
    count_text,
    html_table,
    number_text,
    one_line,
    text_table,
    visible,
)
from tdcollect.evaluation.ledger.reading import read_directory
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.reports.intervals import Interval, exact_mean
from tdcollect.suites.definition import Policy, Task
from tdcollect.suites.estimates import Aggregates

FINISHED, UNFINISHED, MISSING, FAILED = "finished", "unfinished", "missing", "failed"


@dataclass(frozen=True)
class CellResult:
    """The evaluation of one policy, of one training run, on one task.

    Attributes:
        task: the task's name.
        policy: the policy's name.
        run: the training run.
        path: the directory of the evaluation, relative to that of the suite.
        status: ``"finished"``, ``"unfinished"``, ``"missing"``; ``"failed"`` if it could not run.
        reason: the error of one that failed.
        episodes: the number of episodes that have ended.
        completed: the number of them that ran to their end.
        mean: the mean return of the completed ones; None if there is none.
        interval: of the mean, over episodes; None for fewer than two.
        success: the share of successes, where the env reports them, failed and lost episodes among
            the others; None elsewhere.
        score: the normalised mean return; None if it is not finished, or the task has no score.
        lost: the number of episodes that were given up because their workers ended.
    """

    task: str
    policy: str
    run: str
    path: str
    status: str
    reason: str = ""
    episodes: int = 0
    completed: int = 0
    mean: float | None = None
    interval: Interval | None = None
    success: float | None = None
    score: float | None = None
    lost: int = 0

    @property
    def failed(self) -> int:
        """The number of episodes that failed."""
        return self.episodes - self.completed - self.lost

    @property
    def name(self) -> str:
        """Task, policy and run, as ``task/policy/run``."""
        return f"{self.task}/{self.policy}/{self.run}"

    def __repr__(self) -> str:
        return one_line(self, self.name, self.status, f"mean return {number_text(self.mean)}")


@dataclass(frozen=True)
class SuiteResults:
    """The results of a suite; print them to see the leaderboard.

    Attributes:
        name: of the suite.
        version: of the suite.
        episodes: the number of test episodes of each evaluation.
        tasks: the tasks.
        policies: the policies.
        cells: the results of all evaluations, task by task.
        ranges: the returns that score 0 and 1, by task; None where they are not known.
        aggregates: of the scores of policies with all their evaluations finished; None if there is
            no score or no such policy.
        remarks: on the results, one sentence each.
        directory: the directory of the suite.
    """

    name: str
    version: int
    episodes: int
    tasks: tuple[Task, ...]
    policies: tuple[Policy, ...]
    cells: tuple[CellResult, ...]
    ranges: Mapping[str, tuple[float, float] | None]
    aggregates: Aggregates | None
    remarks: tuple[str, ...]
    directory: Path = field(compare=False, default=Path())

    @cached_property
    def _by_name(self) -> dict[str, CellResult]:
        return {cell.name: cell for cell in self.cells}

    def cell(self, task: str, policy: str, run: int | str = 0) -> CellResult:
        """Return the result of one evaluation.

        Raises:
            KeyError: if the suite has no such evaluation.
        """
        name = f"{task}/{policy}/{run}"
        if name not in self._by_name:
            raise KeyError(f"expected an evaluation of the suite, task/policy/run, got {name}")
        return self._by_name[name]

    def of(self, task: str, policy: str) -> list[CellResult]:
        """Return the results of all runs of a policy on a task."""
        return [cell for cell in self.cells if (cell.task, cell.policy) == (task, policy)]

    @property
    def failures(self) -> dict[str, str]:
        """The errors of the evaluations that could not run, by ``task/policy/run``."""
        return {cell.name: cell.reason for cell in self.cells if cell.status == FAILED}

    @property
    def finished(self) -> bool:
        """True if all evaluations are finished."""
        return all(cell.status == FINISHED for cell in self.cells)

    @property
    def failed_episodes(self) -> int:
        """The number of episodes that failed."""
        return sum(cell.failed for cell in self.cells)

    @property
    def lost_episodes(self) -> int:
        """The number of episodes that were given up because their workers ended."""
        return sum(cell.lost for cell in self.cells)

    def scores(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the scores of each policy that has all of them, float64 ``[runs, tasks]``."""
        tasks = self.scored_tasks
        found = {}
        for policy in self.policies:
            rows = [
                [self.cell(task, policy.name, run).score for task in tasks] for run in policy.runs
            ]
            if tasks and all(score is not None for row in rows for score in row):
                found[policy.name] = np.array(rows, np.float64)
        return found

    @property
    def scored_tasks(self) -> list[str]:
        """The names of the tasks that have a score, in the order of the columns of scores."""
        return [task.name for task in self.tasks if task.score is not None]

    def records(self) -> dict[tuple[str, str, int | str], list[Episode]]:
        """Read the records of all finished evaluations, by task, policy and run."""
        return {
            (cell.task, cell.policy, cell.run): read_directory(self.directory / cell.path)[1]
            for cell in self.cells
            if cell.status == FINISHED
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain dicts, lists, numbers and None, for JSON."""
        return {
            "name": self.name,
            "version": self.version,
            "episodes": self.episodes,
            "tasks": {
                task.name: {
                    "env": task.env,
                    "group": task.group,
                    "range": self.ranges[task.name],
                    "source": task.score.source if task.score else None,
                    "presets": dict(task.presets),
                }
                for task in self.tasks
            },
            "cells": [
                {
                    "task": cell.task,
                    "policy": cell.policy,
                    "run": cell.run,
                    "path": cell.path,
                    "status": cell.status,
                    "episodes": cell.episodes,
                    "completed": cell.completed,
                    "mean_return": cell.mean,
                    "interval": None
                    if cell.interval is None
                    else [cell.interval.low, cell.interval.high],
                    "success": cell.success,
                    "score": cell.score,
                    **({"lost": cell.lost} if cell.lost else {}),
                }
                for cell in self.cells
            ],
            "aggregates": None if self.aggregates is None else self.aggregates.to_dict(),
            "remarks": list(self.remarks),
        }

    def rows(self) -> list[list[str]]:
        """Return the table of tasks and policies: scores, or mean returns without them."""
        return [
            [task.name, *(self._text(task, policy.name) for policy in self.policies)]
            for task in self.tasks
        ]

    def _text(self, task: Task, policy: str) -> str:
        cells = self.of(task.name, policy)
        if any(cell.status != FINISHED for cell in cells):
            ended = sum(cell.status == FINISHED for cell in cells)
            return f"{ended} of {count_text(len(cells), 'run')}"
        values = [cell.mean if task.score is None else cell.score for cell in cells]
        known = [value for value in values if value is not None]
        if not known:
            return "-"
        unit = " (return)" if task.score is None else ""
        return f"{number_text(exact_mean(np.array(known)))}{unit}"

    def _head(self) -> str:
        done = sum(cell.status == FINISHED for cell in self.cells)
        return (
            f"{self.name} {self.version}: {done} of {count_text(len(self.cells), 'evaluation')} "
            f"finished, {count_text(self.episodes, 'episode')} each"
        )

    def _header(self) -> list[str]:
        return ["", *(policy.name for policy in self.policies)]

    def __str__(self) -> str:
        parts = [self._head()]
        if self.aggregates is not None:
            parts.append(str(self.aggregates))
        parts.append(text_table(self.rows(), self._header()))
        parts += ["\n".join(map(visible, self.remarks))] if self.remarks else []
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return one_line(self, self._head())

    def _repr_html_(self) -> str:
        above = "" if self.aggregates is None else self.aggregates._repr_html_()
        own = html_table(self._header(), self.rows(), before=[self._head()], after=self.remarks)
        return "\n".join([above, own] if above else [own])
