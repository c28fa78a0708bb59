"""A suite as data: its tables, as those of a file, and their checks; presets; its evaluations."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tdcollect import check
from tdcollect.display import count_text, listed_text, number_text, one_line
from tdcollect.evaluation.request import RANDOM, SB3, called, check_parts, is_named
from tdcollect.files import distinct_names, existing, folder_name
from tdcollect.lab.aggregates import METRICS, DrawnRuns, distinct

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

        from tdcollect.evaluation.request import named_metrics
        from tdcollect.evaluation.settings import EvaluationSettings

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
        return None if text is None else filled(text, **names)

    def __repr__(self) -> str:
        return one_line(self, self.name)


def _deciding(entry: Task | Policy, names: Sequence[str]) -> dict[str, Any]:
    settings = {
        name: value
        for name, value in entry.settings.items()
        if name not in HOW and value != math.inf  # which only takes a bound off
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
        check.bools(**{"groups in [report]": self.groups})
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
        known = {"suite": (*HEAD, "presets", "description"), "report": REPORT}
        for part, keys in (*known.items(), ("defaults", SETTINGS)):
            check.only_keys(read_table(tables[part], f"[{part}]"), keys, f"[{part}]")
        head, defaults = {"name": None, "version": 1, **tables["suite"]}, tables["defaults"]
        read_text(head.pop("description", ""), "description of [suite]", empty=True)
        presets = _list(head.pop("presets", []), "presets", "of [suite], as presets = ['minigrid']")
        tasks = [
            read_task(task, defaults, of) for of in map(_task_list, presets) for task in of.tasks
        ]
        tasks += [read_task(t, defaults) for t in _list(tables["tasks"], "tasks", "as [[tasks]]")]
        entries = _list(tables["policies"], "policies", "as [[policies]]")
        policies = [*map(read_policy, entries)]
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
    listed = preset(read_text(name, "an entry of presets in [suite]"))
    check_kind(listed, False)
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


HUMAN = "human-normalized"

HEAD = ("name", "version", "episodes", "seed")
"""The keys of ``[suite]`` that decide episodes."""
REPORT = ("metrics", "groups", "confidence", "drawn_runs")
"""The keys of ``[report]``, which decide none."""

# Settings of the episodes, and of how they run.
HOW = ("num_envs", "backend", "on_env_error", "max_restarts", "fresh_envs")
"""The settings that decide no episode."""
SETTINGS_OF_POLICY = (
    "exploration",
    "inference_batch_size",
    "inference_threads",
    "eval_mode",
    "device",
)
SETTINGS = (
    *SETTINGS_OF_POLICY,
    "max_episode_steps",
    "reward_keys",
    "metrics",
    "episode_options",
    "episodes_per_slot",
    *HOW,
)

_HUMAN_SOURCE = "published scores of random play and of a human (presets/human-scores/atari.toml)"
_MOST_RUN = 10**9
_FIELDS = re.compile(r"\{(\w*)\}")
_PRESETS = Path(__file__).parent / "presets"

Call = str | dict[str, Any]
"""``module:callable``, or that with keyword arguments: ``{"call": ..., "kwargs": {...}}``."""

T = TypeVar("T", "Task", "Policy")


@dataclass(frozen=True)
class Score:
    """The range of a task's returns that is mapped to 0 and 1.

    Attributes:
        low: the mean return that scores 0; ``"random"`` for that of random actions on the same
            episodes.
        high: the mean return that scores 1.
        source: of the numbers, as text.
    """

    low: float | str
    high: float
    source: str = ""

    def __str__(self) -> str:
        low = self.low if isinstance(self.low, str) else number_text(self.low)
        return f"{low} to {number_text(self.high)}"


@dataclass(frozen=True)
class Task:
    """An env with the settings of its episodes.

    Attributes:
        name: names its folder, and it in reports.
        env: a gymnasium id, or ``module:callable`` of a function that makes an env.
        env_kwargs: for the env's constructor.
        wrappers: functions of a gymnasium env, the innermost first.
        transforms: functions that make a TorchRL transform, in the order of their effect.
        group: of tasks that are also aggregated by themselves; or None.
        score: the range of its returns; None for a task without scores.
        presets: the versions of the presets that its values are from, by name.
        settings: of its episodes, as :class:`tdcollect.evaluation.EvaluationSettings` takes them.
    """

    name: str
    env: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[Call] = ()
    transforms: Sequence[Call] = ()
    group: str | None = None
    score: Score | None = None
    presets: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.score == HUMAN:  # type: ignore[comparison-overlap]
            object.__setattr__(self, "score", Score(*human_scores(self.env), _HUMAN_SOURCE))
        _check_fields(self, "[[tasks]]")

    def __repr__(self) -> str:
        return one_line(self, self.name, self.env)


@dataclass(frozen=True)
class Policy:
    """A policy, with one test subject for each of its training runs.

    ``{task}``, ``{policy}`` and ``{run}`` in texts stand for the names.

    Attributes:
        name: names its folder, and it in reports.
        factory: ``module:factory``, ``"random"`` or ``"sb3"``.
        checkpoints: files with its weights.
        env_state: files with the statistics of the env's transforms.
        vecnormalize: files of Stable-Baselines3's ``VecNormalize``.
        transforms: of this policy, after those of the task.
        runs: the training runs, as names in the texts above.
        settings: of its episodes, in place of the task's.
    """

    name: str
    factory: str
    checkpoints: str | None = None
    env_state: str | None = None
    vecnormalize: str | None = None
    transforms: Sequence[Call] = ()
    runs: Sequence[str] = ("0",)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self, "[[policies]]")

    def __repr__(self) -> str:
        return one_line(self, self.name, self.factory, count_text(len(self.runs), "run"))


@dataclass(frozen=True, repr=False)
class Preset:
    """Conditions, or a list of tasks: data of this package, with a source for each number.

    The version counts up when anything changes. Sources are by the path of a key, such as
    ``env_kwargs.frameskip``. Defaults are values for the keys of a task: those of conditions are
    for the tasks that name them, and those of a list are in its ``tasks`` already.
    """

    name: str
    version: int
    description: str
    sources: Mapping[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    tasks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_conditions(self) -> bool:
        """True for conditions, False for a list of tasks."""
        return not self.tasks

    def __repr__(self) -> str:
        what = "conditions" if self.is_conditions else f"{len(self.tasks)} tasks"
        return one_line(self, f"{self.name}, version {self.version}", what)


# From a table to an object


def from_table(cls: type[T], entries: Any, where: str, settings: Iterable[str], **more: Any) -> T:
    """Return an object from its table: keys are its attributes, or settings of the episodes."""
    table = dict(read_table(entries, where))
    own: list[Field[Any]] = [
        entry for entry in fields(cls) if entry.name not in ("settings", *more)
    ]
    check.only_keys(table, [*(entry.name for entry in own), *settings], where)
    values = {
        entry.name: table.pop(entry.name, None)
        for entry in own
        if entry.name in table or entry.default is entry.default_factory is MISSING
    }
    return cls(**values, **more, settings=table)


def read_task(entry: Any, defaults: Mapping[str, Any], of: Preset | None = None) -> Task:
    """Return a task from its table, an entry of ``[[tasks]]``, or of the list of a preset."""
    where = _where("[[tasks]]", entry)
    table = dict(read_table(entry, where))
    presets = [] if of is None else [of]
    if (name := table.pop("preset", None)) is not None:
        conditions = preset(read_text(name, f"preset of {where}"))
        check_kind(conditions, True)
        presets.append(conditions)
        own = read_table(table.get("env_kwargs", {}), f"env_kwargs of {where}")
        table = {**conditions.defaults, **table}
        table["env_kwargs"] = {**conditions.defaults.get("env_kwargs", {}), **own}
    versions = {preset.name: preset.version for preset in presets}
    return from_table(Task, {**defaults, **table}, where, ("preset", *SETTINGS), presets=versions)


def read_policy(table: Any) -> Policy:
    """Return a policy from its table, an entry of ``[[policies]]``."""
    where = _where("[[policies]]", table)
    policy = from_table(Policy, table, where, SETTINGS_OF_POLICY)
    with check.within(where):
        check_parts(policy.factory, policy.checkpoints, policy.vecnormalize)
    texts = (policy.factory, policy.checkpoints, policy.env_state, policy.vecnormalize)
    by_run = [text for text in texts if text and "{run}" in text]
    if len(policy.runs) > 1 and not by_run:
        raise ValueError(
            f"expected {{run}} in the checkpoints of {where}, which has {len(policy.runs)} runs, "
            "got one policy for all of them; name a file for each run, or leave runs out"
        )
    if by_run and "runs" not in table:
        raise ValueError(
            f"expected the runs that {{run}} in {by_run[0]!r} stands for in {where}, got none; "
            "list them, runs = [0, 1, 2]: a pattern cannot know which files are missing"
        )
    return policy


def read_table(value: Any, where: str) -> Mapping[str, Any]:
    """Return a table; raise TypeError for another value."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected {where} to be a table, got {value!r}")
    return value


def read_text(value: Any, what: str, empty: bool = False) -> str:
    """Return a text; raise TypeError for another value, and for an empty one if none may be."""
    if not isinstance(value, str) or not (value or empty):
        raise TypeError(
            f"expected a text as {what}, got {'none' if value is None else repr(value)}"
        )
    return value


def filled(text: str, **names: str) -> str:
    """Return a pattern with the names in the place of their fields."""
    return _FIELDS.sub(lambda match: names[match[1]], text)


def _where(table: str, entry: Any) -> str:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    return f"{table} {'without a name' if name is None else repr(name)}"


def _check_fields(thing: Any, table: str) -> None:
    """Check the attributes of a task or a policy, and give them their form."""
    where = _where(table, vars(thing))
    for entry in fields(thing):
        value = getattr(thing, entry.name)
        if entry.name in _READ and not (value is None and entry.default is None):
            read = _READ[entry.name](value, f"{entry.name} of {where}")
            object.__setattr__(thing, entry.name, read)


def _name(value: Any, what: str) -> str:
    return folder_name(read_text(value, what), what)


def _pattern(value: Any, what: str) -> str:
    text = read_text(value, what)
    if not {"task", "policy", "run"}.issuperset(_FIELDS.findall(text)):
        raise ValueError(f"expected {{task}}, {{policy}} and {{run}} in {what}, got {text!r}")
    return text


def _factory(value: Any, what: str) -> str:
    factory = _pattern(value, what)
    if factory not in (RANDOM, SB3) and not is_named(_FIELDS.sub("x", factory)):
        raise ValueError(
            f"expected the {what} to be module:callable, path/to/file.py:callable, {RANDOM!r} "
            f"or {SB3!r}, got {factory!r}"
        )
    return factory


def _arguments(value: Any, what: str) -> Mapping[str, Any]:
    table = read_table(value, what)
    try:
        json.dumps(table)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"expected {what} to be values of JSON, as an evaluation keeps them, got another one "
            f"({error}); give a date as a text"
        ) from error
    return table


def _calls(values: Any, what: str) -> tuple[Call, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"expected {what} to be a list of module:callable, got {values!r}")
    for call in values:
        if isinstance(call, Mapping):
            _arguments(call.get("kwargs", {}), f"kwargs in {what}")
        with check.within(what):
            called(call)
    return tuple(dict(call) if isinstance(call, Mapping) else call for call in values)


def _score(value: Any, what: str) -> Score:
    if isinstance(value, Score):
        value = vars(value)
    if not isinstance(value, Mapping):
        raise TypeError(
            f"expected the {what} to be {HUMAN!r}, or a range such as "
            f'{{ low = "random", high = 500.0, source = "..." }}, got {value!r}'
        )
    check.only_keys(value, ("low", "high", "source"), f"the {what}")
    low, high = value.get("low"), value.get("high")
    if low != RANDOM:
        low = _end(low, 'low a number or "random"', what)
    high = _end(high, "high a number", what)
    if low == high:
        raise ValueError(f"expected the {what} to have a range, got {low} as both ends")
    return Score(low, high, read_text(value.get("source", ""), f"source of the {what}", empty=True))


def _end(value: Any, which: str, what: str) -> float:
    if check.is_number(value) and abs(value) <= sys.float_info.max:
        return float(value)
    raise ValueError(f"expected the {what} to have a range, with {which}, got {value!r}")


def _runs(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"expected {what} to be a list such as [0, 1, 2], got {values!r}")
    for run in values:
        is_text = isinstance(run, str) and run.isdecimal()
        if not (is_text or check.is_count(run)) or int(run) > _MOST_RUN:
            raise ValueError(
                f"expected {what} to be numbers that are not negative, at most {_MOST_RUN}, got "
                f"{run!r}"
            )
    runs = tuple(str(int(run)) for run in values)
    distinct_names(runs, what)
    return runs


_READ: dict[str, Callable[[Any, str], Any]] = {
    "name": _name,
    "env": read_text,
    "env_kwargs": _arguments,
    "wrappers": _calls,
    "transforms": _calls,
    "group": read_text,
    "score": _score,
    "factory": _factory,
    "checkpoints": _pattern,
    "env_state": _pattern,
    "vecnormalize": _pattern,
    "runs": _runs,
}
"""A check of an attribute of a task or a policy, which returns it in its form."""


# Presets


def presets() -> list[str]:
    """Return the names of all presets."""
    return sorted(file.stem for file in _PRESETS.glob("*.toml"))


def preset(name: str) -> Preset:
    """Return a preset by its name, maybe with its version; changes to it change no other."""
    if name in presets():
        data = _data(name)
        lines = data["description"].strip()
        tasks = [{**data.get("defaults", {}), **task} for task in data.get("tasks", [])]
        return copy.deepcopy(Preset(**{**data, "description": lines, "tasks": tasks}))
    plain, _, version = name.rpartition("-v")
    if plain in presets() and version == str((one := preset(plain)).version):
        return one
    raise ValueError(
        f"there is no preset {name!r}; {check.near(name, presets()) or 'none is like it'} (there "
        f"are {', '.join(presets())})"
    )


def check_kind(of: Preset, is_conditions: bool) -> None:
    """Raise ValueError for conditions in the place of a list of tasks, or the other way round."""
    if of.is_conditions is not is_conditions:
        raise ValueError(
            "expected a list of tasks in presets of [suite], and conditions as preset in "
            f"[[tasks]], got {of.name} in the other place"
        )


def human_scores(env_id: str) -> tuple[float, float]:
    """Return the published returns of a random policy and of a human in an Atari game.

    Its env is named as ``"ALE/Breakout-v5"``, ``"ale_py:ALE/Breakout-v5"`` or
    ``"BreakoutNoFrameskip-v4"``.
    """
    scores = _data("human-scores/atari")["games"]
    game = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", re.split("[:/]", env_id)[-1])
    if game not in scores:
        near = check.near(game, [*scores]) or "none is like it"
        raise ValueError(
            f"there are no human scores of {game!r} (env {env_id!r}); {near}, or give the task a "
            "score with low and high"
        )
    by_chance, human = map(float, scores[game])
    return by_chance, human


@functools.cache
def _data(name: str) -> dict[str, Any]:
    return tomllib.loads((_PRESETS / f"{name}.toml").read_text(encoding="utf-8"))
