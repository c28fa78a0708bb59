"""A suite as data: policies on tasks, from a file or from the same tables; its evaluations."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tdcollect import check
from tdcollect.display import count_text, listed_text, one_line
from tdcollect.evaluation.request import RANDOM
from tdcollect.files import distinct_names, existing
from tdcollect.lab import tables as schema
from tdcollect.lab.aggregates import METRICS, DrawnRuns, distinct
from tdcollect.lab.tables import HEAD, Policy, Preset, Task, read_task, read_text

if TYPE_CHECKING:
    from tdcollect.evaluation.request import Request
    from tdcollect.evaluation.settings import EvaluationSettings

EVALUATIONS = "evaluations"
"""The folder of the cells' directories."""


@dataclass(frozen=True, repr=False)
class SuiteCell:
    """One evaluation of a suite.

    Attributes:
        task, policy: its task and its policy.
        run: the training run of the policy.
        episodes: the number of episodes.
        seed: the root seed.
        start: the directory that relative paths start from.
    """

    task: Task
    policy: Policy
    run: str
    episodes: int
    seed: int
    start: str

    @property
    def name(self) -> str:
        """Task, policy and run, as ``task/policy/run``."""
        return f"{self.task.name}/{self.policy.name}/{self.run}"

    @property
    def path(self) -> Path:
        """Its directory, relative to that of the suite."""
        return Path(EVALUATIONS, self.name)

    @property
    def files(self) -> dict[str, Path]:
        """The files that it reads, by the attribute of the policy that names them."""
        names = ("checkpoints", "env_state", "vecnormalize")
        texts = {name: self._filled(getattr(self.policy, name)) for name in names}
        return {name: Path(self.start, text) for name, text in texts.items() if text is not None}

    @property
    def missing(self) -> dict[str, Path]:
        """Those of its files that are not there."""
        return {name: path for name, path in self.files.items() if not path.is_file()}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its episodes, as the suite's file has them."""
        return {**self.task.settings, **self.policy.settings}

    def request(self) -> Request:
        """Return its env and policy by name."""
        from tdcollect.evaluation.request import Request

        return Request(
            self.task.env,
            self._filled(self.policy.factory) or "",
            self._filled(self.policy.checkpoints),
            self._filled(self.policy.vecnormalize),
            dict(self.task.env_kwargs),
            self.settings.get("backend"),
            self.settings.get("device"),
            wrappers=[*self.task.wrappers],
            transforms=[*self.task.transforms, *self.policy.transforms],
            env_state=self._filled(self.policy.env_state),
            directory=self.start,
        )

    def evaluation_settings(self) -> EvaluationSettings:
        """Return the settings of its episodes.

        Raises:
            TypeError, ValueError: if a setting cannot be honoured, naming task and policy.
        """
        from torchrl.envs.utils import ExplorationType

        from tdcollect.evaluation.settings import EvaluationSettings, named_metrics

        settings = self.settings
        name = settings.pop("exploration", "deterministic")
        known = [kind.name.lower() for kind in ExplorationType]
        with check.within(f"task {self.task.name} with policy {self.policy.name}"):
            check.one_of(known, exploration=name)
            if "metrics" in settings:
                settings["metrics"] = named_metrics(settings["metrics"], Path(self.start))
            if isinstance(options := settings.get("episode_options"), str):
                settings["episode_options"] = Path(self.start, options)
            return EvaluationSettings(
                self.episodes,
                self.seed,
                exploration_type=ExplorationType[name.upper()],
                env_kwargs=dict(self.task.env_kwargs) or None,
                **settings,
            )

    def definition(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return all that decides its episodes, as plain values: of the task, and of the policy."""
        names = ("env", "env_kwargs", "wrappers", "transforms", "presets")
        return _deciding(self.task, names), _deciding(self.policy, ("factory", "transforms"))

    def _filled(self, text: str | None) -> str | None:
        names = {"task": self.task.name, "policy": self.policy.name, "run": self.run}
        return None if text is None else schema.filled(text, **names)

    def __repr__(self) -> str:
        return one_line(self, self.name)


def _deciding(entry: Task | Policy, names: Sequence[str]) -> dict[str, Any]:
    settings = {
        name: value
        for name, value in entry.settings.items()
        if name not in schema.HOW and value != math.inf  # which only takes a bound off
    }
    return {**{name: getattr(entry, name) for name in names}, "settings": settings}


@dataclass(frozen=True, repr=False)
class Definition:
    """A suite as data; :class:`Suite` has the attributes."""

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
    differences: bool = False
    whole: int | None = None
    directory: str = "."

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", os.path.abspath(self.directory))
        read_text(self.name, "name of [suite]")
        check.count(**{f"{key} in [suite]": getattr(self, key) for key in ("version", "seed")})
        check.positive_int(**{"episodes in [suite]": self.episodes})
        distinct_names([task.name for task in self.tasks], "tasks")
        distinct_names([policy.name for policy in self.policies], "policies")
        named = self.metrics if isinstance(self.metrics, (list, tuple)) else ()
        if not distinct([*map(str, named)], METRICS):
            raise ValueError(
                f"expected metrics in [report] of {', '.join(METRICS)}, got {self.metrics!r}"
            )
        object.__setattr__(self, "metrics", tuple(self.metrics))
        check.bools(
            **{f"{key} in [report]": getattr(self, key) for key in ("groups", "differences")}
        )
        check.share(**{"confidence in [report]": self.confidence})
        check.one_of(("n", "n-1"), **{"drawn_runs in [report]": self.drawn_runs})

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Self:
        """Read a suite from a TOML file; relative paths in it start from its folder.

        Nothing that it names is imported.

        Raises:
            FileNotFoundError: if there is no such file.
            TypeError, ValueError: for a file that is no suite.
        """
        path = existing(Path(file), "the TOML file of a suite")
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected {path} to be TOML: {error}") from error
        with check.within(path):
            return cls.of(tables, path.resolve().parent)

    @classmethod
    def of(cls, tables: Mapping[str, Any], directory: str | os.PathLike[str] = ".") -> Self:
        """Return the suite of tables as a file has them.

        Args:
            tables: ``suite``, ``tasks`` and ``policies``; ``defaults`` and ``report``.
            directory: the directory that relative paths start from.

        Raises:
            TypeError, ValueError: for tables that are no suite.
        """
        tables = {"suite": {}, "report": {}, "defaults": {}, "tasks": [], "policies": [], **tables}
        check.only_keys(tables, ("suite", "defaults", "tasks", "policies", "report"), "a suite")
        known = {"suite": (*HEAD, "presets", "description"), "report": schema.REPORT}
        for part, keys in (*known.items(), ("defaults", schema.SETTINGS)):
            check.only_keys(schema.read_table(tables[part], f"[{part}]"), keys, f"[{part}]")
        head, defaults = {"name": None, "version": 1, **tables["suite"]}, tables["defaults"]
        read_text(head.pop("description", ""), "description of [suite]", empty=True)
        presets = _list(head.pop("presets", []), "presets", "of [suite], as presets = ['minigrid']")
        tasks = [
            read_task(task, defaults, of) for of in map(_task_list, presets) for task in of.tasks
        ]
        tasks += [read_task(t, defaults) for t in _list(tables["tasks"], "tasks", "as [[tasks]]")]
        entries = _list(tables["policies"], "policies", "as [[policies]]")
        policies = [*map(schema.read_policy, entries)]
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

    def limited(self, limit: int) -> Self:
        """Return the suite with at most so many episodes of each evaluation, to try it out."""
        check.positive_int(limit=limit)
        return replace(self, episodes=min(limit, self.episodes), whole=self.episodes)

    def cells(
        self, tasks: Sequence[str] | None = None, policies: Sequence[str] | None = None
    ) -> list[SuiteCell]:
        """Return the evaluations, task by task.

        Args:
            tasks: names, or patterns such as ``"cart*"``, of the tasks to select; None for all.
            policies: likewise.

        Raises:
            ValueError: for a pattern that nothing fits.
        """
        of = _chosen(self.policies, policies, "policies")
        return [
            SuiteCell(task, policy, run, self.episodes, self.seed, self.directory)
            for task in _chosen(self.tasks, tasks, "tasks")
            for policy in of
            for run in policy.runs
        ]

    def __repr__(self) -> str:
        counts = {"task": len(self.tasks), "policy": len(self.policies), "episode": self.episodes}
        return one_line(self, self.name, *(count_text(n, thing) for thing, n in counts.items()))


def _list(value: Any, name: str, form: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected {name} to be a list, {form}, got {value!r}")
    return value


def _task_list(name: Any) -> Preset:
    listed = schema.preset(read_text(name, "an entry of presets in [suite]"))
    schema.check_kind(listed, False)
    return listed


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
