"""Suites: policies on tasks, read from a file or given as the same tables."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdcollect import check
from tdcollect.display import count_text, listed_text, one_line
from tdcollect.suites.aggregates import METRICS
from tdcollect.suites.cells import Cell
from tdcollect.suites.tables import (
    RANDOM,
    SETTINGS,
    Policy,
    Preset,
    Task,
    check_distinct,
    preset,
    read_policy,
    read_table,
    read_task,
    read_text,
)

if TYPE_CHECKING:
    from tdcollect.evaluation.workers.local import Workers
    from tdcollect.suites.aggregates import DrawnRuns
    from tdcollect.suites.results import SuiteResults
    from tdcollect.suites.validation import Validation

_HEAD = ("name", "version", "episodes", "seed")
_REPORT = ("metrics", "groups", "confidence", "drawn_runs")


@dataclass(frozen=True, repr=False)
class Suite:
    """Policies on tasks: one evaluation for each task, policy and training run.

    Make one with :meth:`read` or :meth:`of`. ``docs/suites.md`` has the form of the file.

    Attributes:
        name: of the suite.
        version: its version; a new one makes new evaluations.
        tasks: the tasks.
        policies: the policies; with one of random actions if a score needs it.
        episodes: the number of test episodes of each evaluation.
        seed: the root seed of each.
        metrics: of the aggregates, the first one ranks the policies.
        groups: True to aggregate groups of tasks too.
        confidence: of the intervals.
        drawn_runs: ``"n"`` or ``"n-1"``, the runs in a resample; see
            :func:`tdcollect.suites.aggregate`.
        whole: the number of episodes before :meth:`limited`; None if it is not.
        directory: the directory that relative paths start from.

    Examples:
        >>> suite = Suite.read("suite.toml")
        >>> results = suite.run("runs/suite", workers=4)
        >>> print(results)
    """

    name: str
    version: int
    tasks: tuple[Task, ...]
    policies: tuple[Policy, ...]
    episodes: int = 100
    seed: int = 0
    metrics: tuple[str, ...] = tuple(METRICS)
    groups: bool = True
    confidence: float = 0.95
    drawn_runs: DrawnRuns = "n"
    whole: int | None = None
    directory: str = "."

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", os.path.abspath(self.directory))
        read_text(self.name, "name of [suite]")
        for key, least in (("version", 0), ("episodes", 1), ("seed", 0)):
            if not check.is_count(value := getattr(self, key), least):
                raise ValueError(
                    f"expected {key} in [suite] to be an int of at least {least}, got {value!r}"
                )
        check_distinct([task.name for task in self.tasks], "tasks")
        check_distinct([policy.name for policy in self.policies], "policies")
        named = {*map(str, self.metrics)} if isinstance(self.metrics, (list, tuple)) else set()
        if not named or not named <= {*METRICS} or len(named) < len(self.metrics):
            raise ValueError(
                f"expected metrics in [report] of {', '.join(METRICS)}, got {self.metrics!r}"
            )
        object.__setattr__(self, "metrics", tuple(self.metrics))
        check.bools(**{"groups in [report]": self.groups})
        check.share(**{"confidence in [report]": self.confidence})
        check.one_of(("n", "n-1"), **{"drawn_runs in [report]": self.drawn_runs})

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Suite:
        """Read a suite from a TOML file; relative paths in it start from its folder.

        Nothing that it names is imported.

        Raises:
            FileNotFoundError: if there is no such file.
            TypeError, ValueError: for a file that is no suite.
        """
        path = Path(file)
        if not path.is_file():
            said = f"expected the TOML file of a suite, got {path}, which is no file"
            raise FileNotFoundError(said)
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected {path} to be TOML: {error}") from error
        try:
            return cls.of(tables, path.resolve().parent)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from error

    @classmethod
    def of(cls, tables: Mapping[str, Any], directory: str | os.PathLike[str] = ".") -> Suite:
        """Return the suite of tables as a file has them.

        Args:
            tables: ``suite``, ``tasks`` and ``policies``; ``defaults`` and ``report``.
            directory: the directory that relative paths start from.

        Raises:
            TypeError, ValueError: for tables that are no suite.
        """
        tables = {"suite": {}, "report": {}, "defaults": {}, "tasks": [], "policies": [], **tables}
        check.only_keys(tables, ("suite", "defaults", "tasks", "policies", "report"), "a suite")
        known = {"suite": (*_HEAD, "presets", "description"), "report": _REPORT}
        for part, keys in (*known.items(), ("defaults", SETTINGS)):
            check.only_keys(read_table(tables[part], f"[{part}]"), keys, f"[{part}]")
        head, defaults = {"name": None, "version": 1, **tables["suite"]}, tables["defaults"]
        read_text(head.pop("description", ""), "description of [suite]", empty=True)
        presets = _list(head.pop("presets", []), "presets", "of [suite], as presets = ['minigrid']")
        tasks = [
            read_task(task, defaults, of) for of in map(_task_list, presets) for task in of.tasks
        ]
        tasks += [read_task(t, defaults) for t in _list(tables["tasks"], "tasks", "as [[tasks]]")]
        given = _list(tables["policies"], "policies", "as [[policies]]")
        policies = [*map(read_policy, given)]
        if not tasks or not policies:
            raise ValueError(
                f"expected at least one task and one policy, got {count_text(len(tasks), 'task')} "
                f"and {len(policies)}: add [[tasks]] and [[policies]]"
            )
        by_chance = any(task.score and task.score.low == RANDOM for task in tasks)
        if by_chance and not any(policy.factory == RANDOM for policy in policies):
            policies.append(Policy(RANDOM, RANDOM))
        return cls(
            **head,
            **tables["report"],
            tasks=tuple(tasks),
            policies=tuple(policies),
            directory=str(directory),
        )

    def limited(self, limit: int) -> Suite:
        """Return the suite with at most so many episodes of each evaluation, to try it out."""
        check.positive_int(limit=limit)
        return replace(self, episodes=min(limit, self.episodes), whole=self.episodes)

    def cells(
        self, tasks: Sequence[str] | None = None, policies: Sequence[str] | None = None
    ) -> list[Cell]:
        """Return the evaluations, task by task.

        Args:
            tasks: names, or patterns such as ``"cart*"``, of the tasks to select; None for all.
            policies: likewise.

        Raises:
            ValueError: for a pattern that nothing fits.
        """
        chosen = (
            _chosen(self.tasks, tasks, "tasks"),
            _chosen(self.policies, policies, "policies"),
        )
        return list(self._cells(*chosen))

    def _cells(self, tasks: Sequence[Task], policies: Sequence[Policy]) -> Iterator[Cell]:
        for task in tasks:
            for policy in policies:
                for run in policy.runs:
                    yield Cell(task, policy, run, self.episodes, self.seed, self.directory)

    def run(
        self,
        output_dir: str | os.PathLike[str],
        *,
        workers: Workers | int | None = None,
        tasks: Sequence[str] | None = None,
        policies: Sequence[str] | None = None,
        shard: tuple[int, int] | None = None,
        keep_trajectories: bool = False,
        allow_mixed: bool = False,
        retry_lost: bool = False,
        recheck: bool = True,
        progress: bool = True,
    ) -> SuiteResults:
        """Run the evaluations that ``output_dir`` lacks, and write the report.

        An evaluation that cannot run, since its checkpoint does not fit say, does not keep the
        others from running; ``results.failures`` has the reasons, which ``output_dir`` keeps until
        it has run.

        Args:
            output_dir: the directory of the suite, with an evaluation's directory for each cell.
            workers: as for :func:`tdcollect.evaluate`; all evaluations share them.
            tasks: names or patterns of the tasks to run; None for all. The report is of all.
            policies: likewise.
            shard: ``(i, n)`` to run only the i-th of n parts of the evaluations, i from 0. Shards
                may share ``output_dir``; the last one to end writes the whole report.
            keep_trajectories: as for :func:`tdcollect.evaluate`, and so the others.
            allow_mixed: likewise.
            retry_lost: likewise, for the evaluations that are selected.
            recheck: likewise.
            progress: likewise.

        Raises:
            TypeError, ValueError: for a directory of something else, or of a task or a policy that
                has changed, naming the difference, before anything runs.
            FileNotFoundError: for checkpoints that are missing, naming them.
        """
        from tdcollect.suites.run import run_suite

        return run_suite(
            self,
            Path(os.path.abspath(output_dir)),
            self.cells(tasks, policies),
            workers=workers,
            shard=shard,
            keep_trajectories=keep_trajectories,
            allow_mixed=allow_mixed,
            retry_lost=retry_lost,
            recheck=recheck,
            progress=progress,
        )

    def results(self, output_dir: str | os.PathLike[str]) -> SuiteResults:
        """Read the results that a directory holds; the suite may be unfinished.

        Raises:
            FileNotFoundError: for a directory that is no suite's.
            ValueError: for evaluations that were altered, or are of other episodes.
        """
        from tdcollect.suites.results import read_results

        return read_results(self, self._there(output_dir))

    def report(self, output_dir: str | os.PathLike[str]) -> SuiteResults:
        """Write the report on the results that a directory holds; return them.

        Raises:
            FileNotFoundError, ValueError: as :meth:`results`.
        """
        from tdcollect.suites.report import report_on

        return report_on(self, self._there(output_dir))

    def _there(self, output_dir: str | os.PathLike[str]) -> Path:
        """Return the directory of a suite that has run."""
        from tdcollect.suites.folder import is_suite

        if not is_suite(Path(output_dir)):
            raise FileNotFoundError(
                f"expected the directory of a suite, got {output_dir}; run the suite first, "
                "tdcollect suite run FILE --output-dir DIR"
            )
        return Path(os.path.abspath(output_dir))

    def validate(
        self,
        *,
        tasks: Sequence[str] | None = None,
        policies: Sequence[str] | None = None,
        progress: bool = True,
    ) -> Validation:
        """Find before anything runs what would fail.

        This makes each env, has the doctor look at it, makes each policy with its checkpoint, and
        runs one step of each evaluation.

        Args:
            tasks: names or patterns of the tasks to look at; None for all.
            policies: likewise.
            progress: show a progress bar.
        """
        from tdcollect.suites.validation import validate

        return validate(self, self.cells(tasks, policies), progress)

    def __repr__(self) -> str:
        counts = (
            count_text(len(self.tasks), "task"),
            "1 policy" if len(self.policies) == 1 else f"{len(self.policies)} policies",
            count_text(self.episodes, "episode"),
        )
        return one_line(self, self.name, *counts)


def _list(given: Any, name: str, form: str) -> Sequence[Any]:
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"expected {name} to be a list, {form}, got {given!r}")
    return given


def _task_list(name: Any) -> Preset:
    found = preset(read_text(name, "an entry of presets in [suite]"))
    if found.is_conditions:
        raise ValueError(
            f"expected presets in [suite] to be lists of tasks, got {found.name}, conditions of "
            "tasks; name it as preset in [[tasks]]"
        )
    return found


def _chosen(items: Sequence[Any], patterns: Sequence[str] | None, things: str) -> list[Any]:
    names = [item.name for item in items]
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"expected {things} of the suite, which are {listed_text(names, 20)}, got "
                f"{pattern!r}"
            )
    wanted = ["*"] if patterns is None else patterns
    return [item for item in items if any(fnmatchcase(item.name, text) for text in wanted)]
