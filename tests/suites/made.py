"""Results of a suite by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tdcollect.evaluation.statistics import Interval
from tdcollect.suites.aggregates import aggregate
from tdcollect.suites.results import FAILED, FINISHED, MISSING, CellResult, SuiteResults
from tdcollect.suites.tables import Policy, Task


def results(
    tasks: Sequence[Task],
    policies: Sequence[Policy],
    *,
    missing: Collection[int] = (),
    failed: Mapping[int, str] | None = None,
    remarks: Sequence[str] = (),
) -> SuiteResults:
    """Results of returns between 0 and 100; later policies are better.

    Args:
        tasks: with scores from 0 to 100, or without.
        policies: the policies.
        missing: the places of cells that are missing.
        failed: the places of cells that failed, with their errors.
        remarks: on the results.
    """
    rng = np.random.default_rng(0)
    cells = []
    for task in tasks:
        for place, policy in enumerate(policies):
            for run in policy.runs:
                mean = float(rng.normal(30.0 * place, 5.0))
                cells.append(
                    CellResult(
                        task.name,
                        policy.name,
                        run,
                        f"evaluations/{task.name}/{policy.name}/{run}",
                        FINISHED,
                        episodes=10,
                        completed=10,
                        mean=mean,
                        interval=Interval(mean - 2, mean + 2),
                        score=None if task.score is None else mean / 100,
                    )
                )
    gone = dict.fromkeys(missing, (MISSING, ""))
    gone |= {at: (FAILED, reason) for at, reason in (failed or {}).items()}
    for at, (status, reason) in gone.items():
        names = (cells[at].task, cells[at].policy, cells[at].run, cells[at].path)
        cells[at] = CellResult(*names, status, reason)
    ranges = {task.name: None if task.score is None else (0.0, 100.0) for task in tasks}
    found = SuiteResults(
        "by hand", 1, 10, tuple(tasks), tuple(policies), tuple(cells), ranges, None, tuple(remarks)
    )
    scores = found.scores()
    if not scores:
        return found
    groups: dict[str, list[str]] = {}
    for task in tasks:
        if task.group is not None and task.score is not None:
            groups.setdefault(task.group, []).append(task.name)
    return replace(
        found,
        aggregates=aggregate(scores, tasks=found.scored_tasks, groups=groups or None, resamples=99),
    )
