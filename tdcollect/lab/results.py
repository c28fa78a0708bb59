"""The directory of a suite: what decides its episodes, and the results of its evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tdcollect import display
from tdcollect.display import count_text, listed_text, number_text, one_line
from tdcollect.evaluation import ledger, statistics
from tdcollect.evaluation.ledger import (
    SUITE,
    Problem,
    leaf_differences,
    manifest_entry,
    read_directory,
)
from tdcollect.evaluation.request import RANDOM
from tdcollect.evaluation.statistics import Interval, ends, exact_mean, generator, mean_interval
from tdcollect.evaluation.verification import Kind
from tdcollect.files import check_output, locked, write_json
from tdcollect.lab.aggregates import Aggregates, aggregate
from tdcollect.lab.definition import EVALUATIONS, HEAD, Definition, Policy, SuiteCell, Task

FORMAT = 1
FINISHED, UNFINISHED, MISSING, FAILED = "finished", "unfinished", "missing", "failed"
WAIT = math.inf  # for as long as other processes write the files of a suite
_DESCRIBED = ("tasks", "policies", "files")
_TOLD = ("task", "policy", "run", "path", "status", "episodes", "completed", "success", "score")


@dataclass(frozen=True)
class CellResult:
    """The evaluation of one policy, of one training run, on one task.

    Attributes:
        task, policy, run: the names.
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
        metrics: the mean of each metric over the completed episodes that have it; None if there is
            none.
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
    metrics: Mapping[str, float | None] = field(default_factory=dict)

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
        name, version: of the suite.
        episodes: the number of test episodes of each evaluation.
        tasks, policies: as the suite has them.
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
        by_policy = {}
        for policy in self.policies:
            rows = [
                [self.cell(task, policy.name, run).score for task in tasks] for run in policy.runs
            ]
            if tasks and all(score is not None for row in rows for score in row):
                by_policy[policy.name] = np.array(rows, np.float64)
        return by_policy

    @property
    def scored_tasks(self) -> list[str]:
        """The names of the tasks that have a score, in the order of the columns of scores."""
        return [task.name for task in self.tasks if task.score is not None]

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
                    **{name: getattr(cell, name) for name in _TOLD},
                    "mean_return": cell.mean,
                    "interval": cell.interval and [*ends(cell.interval)],
                    **({"lost": cell.lost} if cell.lost else {}),
                    **({ledger.METRICS: dict(cell.metrics)} if cell.metrics else {}),
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
        aggregates = "" if self.aggregates is None else str(self.aggregates)
        table = display.text_table(self.rows(), self._header())
        remarks = "\n".join(map(display.visible, self.remarks))
        return "\n\n".join(filter(None, [self._head(), aggregates, table, remarks]))

    def __repr__(self) -> str:
        return one_line(self, self._head())

    def _repr_html_(self) -> str:
        above = "" if self.aggregates is None else self.aggregates._repr_html_()
        own = display.html_table(self._header(), self.rows(), [self._head()], self.remarks)
        return "\n".join([above, own] if above else [own])


def read_results(suite: Definition, directory: Path) -> SuiteResults:
    """Read the results of a suite; what others wrote is read as data.

    Raises:
        ValueError: for evaluations that were altered, or are of other episodes than the suite's.
    """
    read_folder(directory)
    manifests: dict[str, dict[str, Any]] = {}
    cells = [_read_cell(cell, directory, suite, manifests) for cell in suite.cells()]
    ranges = {task.name: _range(task, suite, cells) for task in suite.tasks}
    results = SuiteResults(
        suite.name,
        suite.version,
        suite.episodes,
        suite.tasks,
        suite.policies,
        tuple(_scored(cell, ranges[cell.task]) for cell in cells),
        ranges,
        None,
        (),
        directory,
    )
    if scores := results.scores():
        groups: dict[str, list[str]] = {}
        for task in suite.tasks:
            if task.group is not None and task.score is not None and suite.groups:
                groups.setdefault(task.group, []).append(task.name)
        aggregates = aggregate(
            scores,
            tasks=results.scored_tasks,
            metrics=suite.metrics,
            groups=groups if len(groups) > 1 else None,
            confidence=suite.confidence,
            drawn_runs=suite.drawn_runs,
        )
        results = replace(results, aggregates=aggregates)
    return replace(results, remarks=(*_remarks(suite, results), *_differing(manifests)))


def state_of(cell: SuiteCell, directory: Path) -> tuple[str, int]:
    """Return the status of an evaluation, and the number of its episodes so far."""
    root = directory / cell.path
    if ledger.refusal_of(root) is not None:
        return FAILED, 0
    try:
        episodes = read_directory(root).episodes
    except FileNotFoundError:
        return MISSING, 0
    return (FINISHED if ledger.is_finished(root) else UNFINISHED), len(episodes)


def _read_cell(
    cell: SuiteCell, directory: Path, suite: Definition, manifests: dict[str, dict[str, Any]]
) -> CellResult:
    """Read an evaluation, and put its manifest with the others if it is finished."""
    names = (cell.task.name, cell.policy.name, cell.run, cell.path.as_posix())
    root = directory / cell.path
    reason = read_error(root)
    if (refused := ledger.refusal_of(root)) is not None:
        return CellResult(*names, FAILED, refused)
    try:
        _, manifest, episodes, *_ = read_directory(root)
    except FileNotFoundError:
        return CellResult(*names, FAILED if reason else MISSING, reason)
    except ValueError:
        if not reason:
            raise
        return CellResult(*names, FAILED, reason)  # which is most likely the same
    count, root_seed = len(ledger.asked_indices(manifest)), manifest_entry(manifest, "seeds.root")
    if (count, root_seed) != (suite.episodes, suite.seed):
        raise ValueError(
            f"expected {count_text(suite.episodes, 'episode')} of root seed {suite.seed} in "
            f"{root}, got {count} of root seed {root_seed}: it is not of this suite as it is now "
            "(see --episodes and --limit)"
        )
    done = ledger.is_finished(root)
    if done:
        manifests[cell.name] = manifest
    completed = [episode for episode in episodes if episode.completed]
    returns = np.array([episode.episode_return for episode in completed], np.float64)
    finite = len(returns) > 0 and bool(np.isfinite(returns).all())
    said = [episode.success for episode in completed if episode.success is not None]
    confidence, failed = suite.confidence, len(episodes) - len(completed)
    resamples = statistics.check_settings(confidence, None, 0, len(episodes))
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
        metrics={name: _mean(each) for name, each in statistics.metrics_of(completed).items()},
    )


def _mean(numbers: Sequence[float | None]) -> float | None:
    """Return the mean of those that are there; None without any, and if one is not finite."""
    values = np.array([value for value in numbers if value is not None], np.float64)
    return exact_mean(values) if len(values) and np.isfinite(values).all() else None


def _range(
    task: Task, suite: Definition, cells: Sequence[CellResult]
) -> tuple[float, float] | None:
    """Return the returns of a task that score 0 and 1; None if they are not known."""
    if task.score is None:
        return None
    if not isinstance(task.score.low, str):
        return task.score.low, task.score.high
    by_chance = {policy.name for policy in suite.policies if policy.factory == RANDOM}
    own = [cell for cell in cells if cell.task == task.name and cell.policy in by_chance]
    low = next(
        (cell.mean for cell in own if cell.status == FINISHED and cell.mean is not None), None
    )
    return None if low is None or low == task.score.high else (low, task.score.high)


def _scored(cell: CellResult, ends: tuple[float, float] | None) -> CellResult:
    if ends is None or cell.mean is None or cell.status != FINISHED:
        return cell
    low, high = ends
    return replace(cell, score=(cell.mean - low) / (high - low))


def _remarks(suite: Definition, results: SuiteResults) -> Iterator[str]:
    if suite.whole is not None:
        yield (
            f"Limited to {suite.episodes} of the {suite.whole} episodes of each evaluation: a "
            "trial, not a result."
        )
    if left := [cell.name for cell in results.cells if cell.status in (MISSING, UNFINISHED)]:
        yield f"Not finished: {listed_text(left)}."
    if results.failures:
        yield f"Could not run: {listed_text([*results.failures])}."
    ranked = () if results.aggregates is None else results.aggregates.policies
    lacking = [policy.name for policy in suite.policies if policy.name not in ranked]
    if lacking and results.scored_tasks:
        yield f"No aggregates of {listed_text(lacking)}: a score of theirs is missing."
    if unscored := [task.name for task in suite.tasks if task.score is None]:
        yield (
            f"No score, as no range of returns is given: {listed_text(unscored)}. They are in no "
            "aggregate."
        )
    for cell in results.cells:
        for count, how in ((cell.failed, "failed"), (cell.lost, "were lost with their workers")):
            if count:
                percent = display.percent_text(round(count / cell.episodes, 3))
                of = count_text(cell.episodes, "episode")
                yield f"{cell.name}: {count} of {of} {how} ({percent}), and are in no mean."
    if results.lost_episodes:
        yield "The same command runs lost episodes again."


def _differing(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a remark for each entry that may change episodes and is not the same everywhere."""
    values: dict[str, dict[str, str]] = {}
    first: Mapping[str, Any] = next(iter(manifests.values()), {})
    for name, manifest in manifests.items():
        for key in ("versions", "platform", "device"):
            for path, a, b in leaf_differences(key, first.get(key), manifest.get(key)):
                values.setdefault(path, {next(iter(manifests)): repr(a)})[name] = repr(b)
    return [
        f"Not the same for all evaluations: {path}, "
        f"{listed_text([f'{value} in {name}' for name, value in by_name.items()])}."
        for path, by_name in values.items()
    ]


# The directory


def check_files(cells: Sequence[SuiteCell]) -> None:
    """Refuse cells whose files are missing, naming them."""
    missing = [f"{path} of {cell.name}" for cell in cells for path in cell.missing.values()]
    if missing:
        more = "" if len(missing) <= 3 else f", and {count_text(len(missing) - 3, 'file')} more"
        raise FileNotFoundError(
            f"expected the files that the policies name, got no {'; no '.join(missing[:3])}{more}; "
            "train these runs, or take them out of `runs`"
        )


def claim_folder(path: Path, described: Mapping[str, Any]) -> None:
    """Write into the directory what decides the episodes of some cells, beside that of others."""
    with locked(path, wait=WAIT):
        there = check_folder(path, described)
        every = {name: {**there.get(name, {}), **described[name]} for name in _DESCRIBED}
        write_json(path / SUITE, {**there, **described, **every})


def is_suite(path: Path) -> bool:
    """Tell whether a directory is that of a suite."""
    return (path / SUITE).is_file()


def read_folder(path: Path) -> dict[str, Any]:
    """Read what decides the episodes of a suite's directory; empty if there is nothing."""
    if not is_suite(path):
        return {}
    content: dict[str, Any] = ledger.read_object(path / SUITE)
    parts = [content.get(name) for name in _DESCRIBED]
    if content.get("format") != FORMAT or not all(isinstance(part, dict) for part in parts):
        raise ValueError(
            f"expected {path / SUITE} as `tdcollect suite run` of this version writes it, got "
            "something else; name another directory"
        )
    return content


def described_cells(suite: Definition, cells: Sequence[SuiteCell]) -> dict[str, Any]:
    """Return what decides the episodes of some cells; this reads their checkpoints."""
    digest = cache(ledger.sha256)
    described: dict[str, Any] = {"format": FORMAT, "tasks": {}, "policies": {}, "files": {}}
    described |= {name: getattr(suite, name) for name in HEAD}
    for cell in cells:
        task, policy = cell.definition()
        described["tasks"][cell.task.name] = task
        described["policies"][cell.policy.name] = policy
        described["files"][cell.name] = {name: digest(path) for name, path in cell.files.items()}
    return _plain(described)


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))  # a torch.device, say
    return plain


def note_report(path: Path, suite: Definition) -> None:
    """Write the suite into its directory, in place of the one before: what decides the report."""
    told = {
        name: value for name, value in asdict(suite).items() if name not in (*HEAD, "directory")
    }
    for entry in (*told["tasks"], *told["policies"]):  # settings that only take a bound off
        entry["settings"] = {n: v for n, v in entry["settings"].items() if v != math.inf}
    write_json(path / SUITE, {**read_folder(path), "report": _plain(told)})


def check_folder(path: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a directory has; refuse that of something else, or where a cell has changed."""
    there = read_folder(path)
    if not there:
        check_output(path, "a suite", (SUITE,))
        return {}
    unlike: list[tuple[str, Any, Any]] = []
    for name in HEAD:
        unlike += leaf_differences(name, there.get(name), described[name])
    for name in _DESCRIBED:
        for key in sorted(there[name].keys() & described[name].keys()):
            unlike += leaf_differences(f"{name}.{key}", there[name][key], described[name][key])
    if unlike:
        texts = [ledger.differences_text([difference]) for difference in unlike]
        raise ValueError(
            f"{path} holds the evaluations of another suite: {listed_text(texts)}. Choose another "
            "directory, give what has changed another name, or remove its evaluations and "
            f"{SUITE} to run all anew"
        )
    return there


def error_beside(root: Path) -> Path:
    """Return the file beside an evaluation with why it could not run; it is there until it has."""
    return root.with_name(f"{root.name}.error.json")


def read_error(root: Path) -> str:
    """Return why an evaluation could not run; empty if it could, or has not been tried."""
    file = error_beside(root)
    return str(ledger.read_object(file).get("reason")) if file.exists() else ""


def results_of(directory: Path, may_be_stale: bool = True) -> SuiteResults:
    """Read the results of a suite from its directory alone, and compare them with its last report.

    ``may_be_stale`` compares nothing with a report that evaluations have begun or ended since.

    Raises:
        FileNotFoundError: if there is no report.
        ValueError: for files that a suite did not write, or that were altered.
    """
    file = directory / ledger.RESULTS
    if not file.is_file():
        raise FileNotFoundError("no report yet")
    written, decided = ledger.read_object(file), read_folder(directory)
    try:
        cells = {
            f"{cell['task']}/{cell['policy']}/{cell['run']}": cell for cell in written["cells"]
        }
        suite = _suite(decided)
        if lost := decided["files"].keys() - cells.keys():
            raise ValueError(f"it lacks {min(lost)}")
        states = [(cell["status"], cell["episodes"]) for cell in cells.values()]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"expected {file} as `tdcollect suite report` writes it, got something else "
            f"({type(error).__name__}: {error}); write the report again"
        ) from error
    results = read_results(suite, directory)
    if may_be_stale and states != [(cell.status, cell.episodes) for cell in results.cells]:
        return results
    for name, value in json.loads(json.dumps(results.to_dict())).items():
        if not statistics.alike(value, written.get(name)):
            raise ValueError(
                f"{file}: its {name} are not what {SUITE} and the evaluations give: one of them "
                "was altered; `tdcollect suite report` writes it anew"
            )
    return results


def _suite(decided: Mapping[str, Any]) -> Definition:
    """Return the suite as its directory has it: what decided the episodes that ran holds first."""
    told = dict(decided["report"])
    for kind, make in (("tasks", Task), ("policies", Policy)):
        entries = [{**entry, **decided[kind].get(entry["name"], {})} for entry in told[kind]]
        told[kind] = tuple(make(**entry) for entry in entries)
    return Definition(**{name: decided[name] for name in HEAD}, **told)


def cells_of(directory: Path) -> list[Path]:
    """Return the directories of the evaluations that a suite has begun."""
    return [directory / EVALUATIONS / name for name in sorted(read_folder(directory)["files"])]


def _problems(root: Path) -> Iterator[Problem]:
    """Compare the report of a suite with its evaluations, which were checked."""
    results_of(root, may_be_stale=False)
    digests = ledger.read_object(root / ledger.RESULTS).get("files")
    if digests != {SUITE: ledger.sha256(root / SUITE)}:
        yield Problem(root / SUITE, "it is not the file that was written with the report")


KINDS = (
    Kind(
        lambda root: is_suite(root) and not (root / ledger.MANIFEST).exists(), cells_of, _problems
    ),
)
