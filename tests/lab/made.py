"""Results of a suite by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from tdcollect.evaluation.statistics import Interval
from tdcollect.lab.aggregates import aggregate
from tdcollect.lab.definition import Policy, Task
from tdcollect.lab.results import FAILED, FINISHED, MISSING, CellResult, SuiteResults


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
    gone = dict.fromkeys(missing, (MISSING, ""))
    gone |= {at: (FAILED, reason) for at, reason in (failed or {}).items()}
    cells = []
    for task, (place, policy) in product(tasks, enumerate(policies)):
        for run in policy.runs:
            names = (task.name, policy.name, run)
            about = (*names, f"evaluations/{'/'.join(names)}")
            mean = float(rng.normal(30.0 * place, 5.0))
            interval = Interval(mean - 2, mean + 2)
            score = None if task.score is None else mean / 100
            whole = CellResult(*about, FINISHED, "", 10, 10, mean, interval, None, score)
            at = len(cells)
            cells.append(CellResult(*about, *gone[at]) if at in gone else whole)
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
