"""Reading the results of a suite from the directories of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tdcollect.display import (
    count_text,
    listed_text,
    percent_text,
)
from tdcollect.evaluation.ledger.manifest import leaf_differences, manifest_entry, mixed_values
from tdcollect.evaluation.ledger.reading import (
    is_finished,
    number_of_episodes,
    read_manifest,
    read_records,
    refusal_of,
)
from tdcollect.evaluation.reports.intervals import (
    check_settings,
    exact_mean,
    generator,
    mean_interval,
)
from tdcollect.suites.aggregates import aggregate
from tdcollect.suites.cells import Cell
from tdcollect.suites.definition import RANDOM, Task
from tdcollect.suites.estimates import Aggregates
from tdcollect.suites.folder import read_error, read_folder
from tdcollect.suites.results import (
    FAILED,
    FINISHED,
    MISSING,
    UNFINISHED,
    CellResult,
    SuiteResults,
)

if TYPE_CHECKING:
    from tdcollect.suites.suite import Suite


def read_results(suite: Suite, directory: Path) -> SuiteResults:
    """Read the results of a suite; what others wrote is read as data.

    Args:
        suite: the suite.
        directory: its directory.

    Raises:
        ValueError: for evaluations that were altered, or are of other episodes than the suite's.
    """
    read_folder(directory)
    manifests: dict[str, dict[str, Any]] = {}
    cells = [_read_cell(cell, directory, suite, manifests) for cell in suite.cells()]
    by_task = {
        task.name: _range(task, suite, [cell for cell in cells if cell.task == task.name])
        for task in suite.tasks
    }
    scored = tuple(_scored(cell, by_task[cell.task]) for cell in cells)
    results = SuiteResults(
        suite.name,
        suite.version,
        suite.episodes,
        suite.tasks,
        suite.policies,
        scored,
        by_task,
        None,
        (),
        directory,
    )
    aggregates = _aggregates(suite, results)
    remarks = [*_remarks(suite, results, aggregates), *_differing(manifests)]
    return replace(results, aggregates=aggregates, remarks=tuple(remarks))


def state_of(cell: Cell, directory: Path) -> tuple[str, int]:
    """Return the status of an evaluation, and the number of its episodes so far."""
    root = directory / cell.path
    try:
        manifest = read_manifest(root)
    except FileNotFoundError:
        return MISSING, 0
    if refusal_of(root) is not None:
        return FAILED, 0
    episodes = read_records(root, manifest)
    return (FINISHED if is_finished(root) else UNFINISHED), len(episodes)


def _read_cell(
    cell: Cell,
    directory: Path,
    suite: Suite,
    manifests: dict[str, dict[str, Any]],
) -> CellResult:
    names = (cell.task.name, cell.policy.name, cell.run, cell.path.as_posix())
    root, reason = directory / cell.path, read_error(directory, cell)
    try:
        manifest = read_manifest(root)
    except FileNotFoundError:
        return CellResult(*names, FAILED if reason else MISSING, reason)
    if (refused := refusal_of(root)) is not None:
        return CellResult(*names, FAILED, refused)
    try:
        episodes = read_records(root, manifest)
    except ValueError:
        if not reason:
            raise
        return CellResult(*names, FAILED, reason)  # which is most likely the same
    count, root_seed = number_of_episodes(manifest), manifest_entry(manifest, "seeds.root")
    if (count, root_seed) != (suite.episodes, suite.seed):
        raise ValueError(
            f"expected {count_text(suite.episodes, 'episode')} of root seed {suite.seed} in "
            f"{root}, got {count} of root seed {root_seed}: it is not of this suite as it is now "
            "(see --episodes and --limit)"
        )
    done = is_finished(root)
    if done:
        manifests[cell.name] = manifest
    completed = [episode for episode in episodes if episode.completed]
    returns = np.array([episode.episode_return for episode in completed], np.float64)
    finite = len(returns) > 0 and bool(np.isfinite(returns).all())
    said = [episode.success for episode in completed if episode.success is not None]
    confidence, failed = suite.confidence, len(episodes) - len(completed)
    resamples = check_settings(confidence, None, 0, len(episodes))
    status = FINISHED if done else FAILED if reason else UNFINISHED
    return CellResult(
        *names,
        status,
        "" if done else reason,
        len(episodes),
        len(completed),
        exact_mean(returns) if finite else None,
        # The numbers of the evaluation's own report, by the same generator.
        mean_interval(returns, confidence, resamples, generator(0, 0)) if finite and done else None,
        sum(said) / (len(said) + failed) if said else None,
        lost=sum(episode.lost for episode in episodes),
    )


def _range(task: Task, suite: Suite, cells: Sequence[CellResult]) -> tuple[float, float] | None:
    """Return the returns of a task that score 0 and 1; None if they are not known."""
    if task.score is None:
        return None
    if not isinstance(task.score.low, str):
        return task.score.low, task.score.high
    by_chance = {policy.name for policy in suite.policies if policy.factory == RANDOM}
    own = [cell for cell in cells if cell.policy in by_chance]
    means = [cell.mean for cell in own if cell.status == FINISHED and cell.mean is not None]
    if not means or means[0] == task.score.high:
        return None
    return means[0], task.score.high


def _scored(cell: CellResult, ends: tuple[float, float] | None) -> CellResult:
    if ends is None or cell.mean is None or cell.status != FINISHED:
        return cell
    low, high = ends
    return replace(cell, score=(cell.mean - low) / (high - low))


def _aggregates(suite: Suite, results: SuiteResults) -> Aggregates | None:
    scores = results.scores()
    if not scores:
        return None
    groups: dict[str, list[str]] = {}
    for task in suite.tasks:
        if task.group is not None and task.score is not None and suite.groups:
            groups.setdefault(task.group, []).append(task.name)
    return aggregate(
        scores,
        tasks=results.scored_tasks,
        metrics=suite.metrics,
        groups=groups if len(groups) > 1 else None,
        confidence=suite.confidence,
        drawn_runs=suite.drawn_runs,
    )


def _remarks(suite: Suite, results: SuiteResults, aggregates: Aggregates | None) -> list[str]:
    remarks = []
    if suite.whole is not None:
        remarks.append(
            f"Limited to {suite.episodes} of the {suite.whole} episodes of each evaluation: a "
            "trial, not a result."
        )
    left = [cell.name for cell in results.cells if cell.status in (MISSING, UNFINISHED)]
    if left:
        remarks.append(f"Not finished: {listed_text(left)}.")
    failed = [cell.name for cell in results.cells if cell.status == FAILED]
    if failed:
        remarks.append(f"Could not run: {listed_text(failed)}.")
    ranked = () if aggregates is None else aggregates.policies
    lacking = [policy.name for policy in suite.policies if policy.name not in ranked]
    if lacking and results.scored_tasks:
        remarks.append(f"No aggregates of {listed_text(lacking)}: a score of theirs is missing.")
    unscored = [task.name for task in suite.tasks if task.score is None]
    if unscored:
        remarks.append(
            f"No score, as no range of returns is given: {listed_text(unscored)}. They are in no "
            "aggregate."
        )
    for cell in results.cells:
        for count, how in ((cell.failed, "failed"), (cell.lost, "were lost with their workers")):
            if count:
                remarks.append(
                    f"{cell.name}: {count} of {count_text(cell.episodes, 'episode')} {how} "
                    f"({percent_text(round(count / cell.episodes, 3))}), and are in no mean."
                )
    if results.lost_episodes:
        remarks.append("The same command with --retry-lost runs lost episodes again.")
    return remarks


def _differing(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a remark for each entry that may change episodes and is not the same everywhere."""
    values: dict[str, dict[str, str]] = {}
    first: Mapping[str, Any] = next(iter(manifests.values()), {})
    for name, manifest in manifests.items():
        for key in ("versions", "platform", "device"):
            for path, a, b in leaf_differences(key, first.get(key), manifest.get(key)):
                values.setdefault(path, {next(iter(manifests)): repr(a)})[name] = repr(b)
        for path, mixed in mixed_values(manifest).items():
            values.setdefault(path, {})[name] = listed_text(mixed)
    return [
        f"Not the same for all evaluations: {path}, "
        f"{listed_text([f'{value} in {name}' for name, value in found.items()])}."
        for path, found in values.items()
    ]
