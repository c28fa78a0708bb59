"""The parts of a suite: tasks, policies and scores, read from TOML and checked."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tdcollect.display import count_text, listed_text, number_text, one_line
from tdcollect.evaluation.imports import called, is_named
from tdcollect.evaluation.ledger.records import is_count
from tdcollect.suites.presets import TASK_KEYS, Preset, human_scores, preset

HUMAN, RANDOM, SB3 = "human-normalized", "random", "sb3"

_HUMAN_SOURCE = "published scores of random play and of a human (presets/human-scores/atari.toml)"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST_RUN = 10**9
_FIELDS = re.compile(r"\{(\w*)\}")

Call = str | Mapping[str, Any]
"""``module:callable``, or that with keyword arguments: ``{"call": ..., "kwargs": {...}}``."""


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

    def __repr__(self) -> str:
        return one_line(self, self.name, self.factory, count_text(len(self.runs), "run"))


def read_task(given: Any, defaults: Mapping[str, Any], of: Preset | None = None) -> Task:
    """Return a task from its table.

    Args:
        given: an entry of ``[[tasks]]``.
        defaults: the table ``[defaults]``.
        of: the list of tasks that it is from; or None.

    Raises:
        TypeError, ValueError: for a table that is no task.
    """
    where = f"[[tasks]] {_name_of(given)}"
    table = dict(read_table(given, where))
    presets = [] if of is None else [of]
    if (name := table.pop("preset", None)) is not None:
        conditions = preset(read_text(name, f"preset of {where}"))
        if not conditions.is_conditions:
            raise ValueError(
                f"expected the preset of {where} to be conditions, got {conditions.name}, a list "
                "of tasks; name it in presets of [suite]"
            )
        presets.append(conditions)
        own = read_table(table.get("env_kwargs", {}), f"env_kwargs of {where}")
        table = {**conditions.defaults, **table}
        table["env_kwargs"] = {**conditions.defaults.get("env_kwargs", {}), **own}
    table = {**defaults, **table}
    texts = {
        name: read_text(table.pop(name, None), f"{name} of {where}") for name in ("name", "env")
    }
    _check_name(texts["name"], "task")
    group = table.pop("group", None)
    return Task(
        **texts,
        env_kwargs=_arguments(table.pop("env_kwargs", {}), f"env_kwargs of {where}"),
        wrappers=_calls(table.pop("wrappers", []), f"wrappers of {where}"),
        transforms=_calls(table.pop("transforms", []), f"transforms of {where}"),
        group=None if group is None else read_text(group, f"group of {where}"),
        score=_score(table.pop("score", None), texts["env"], where),
        presets={preset.name: preset.version for preset in presets},
        settings=_settings(table, where, (*TASK_KEYS, *SETTINGS)),
    )


def read_policy(given: Any) -> Policy:
    """Return a policy from its table, an entry of ``[[policies]]``.

    Raises:
        TypeError, ValueError: for a table that is no policy.
    """
    where = f"[[policies]] {_name_of(given)}"
    table = dict(read_table(given, where))
    texts = {
        name: read_text(table.pop(name, None), f"{name} of {where}") for name in ("name", "factory")
    }
    _check_name(texts["name"], "policy")
    patterns = {
        name: _pattern(table.pop(name), f"{name} of {where}")
        for name in ("checkpoints", "env_state", "vecnormalize")
        if name in table
    }
    runs = _runs(table.pop("runs", None), where)
    _check_factory(_pattern(texts["factory"], f"factory of {where}"), patterns, where)
    by_run = [text for text in (texts["factory"], *patterns.values()) if "{run}" in text]
    if len(runs or ()) > 1 and not by_run:
        raise ValueError(
            f"expected {{run}} in the checkpoints of {where}, which has {len(runs or ())} runs, "
            "got one policy for all of them; name a file for each run, or leave runs out"
        )
    if by_run and runs is None:
        raise ValueError(
            f"expected the runs that {{run}} in {by_run[0]!r} stands for in {where}, got none; "
            "list them, runs = [0, 1, 2]: a pattern cannot know which files are missing"
        )
    return Policy(
        **texts,
        **patterns,
        transforms=_calls(table.pop("transforms", []), f"transforms of {where}"),
        runs=runs or ("0",),
        settings=_settings(table, where, (*POLICY_KEYS, *SETTINGS_OF_POLICY)),
    )


def read_defaults(given: Any) -> dict[str, Any]:
    """Return the table ``[defaults]``, checked."""
    return _settings(read_table(given, "[defaults]"), "[defaults]", SETTINGS)


# Settings of the episodes, and of how they run.
SETTINGS_OF_POLICY = (
    "exploration",
    "inference_batch_size",
    "inference_threads",
    "eval_mode",
    "device",
)
SETTINGS = (
    *SETTINGS_OF_POLICY,
    "num_envs",
    "max_episode_steps",
    "reward_keys",
    "backend",
    "on_env_error",
    "max_restarts",
    "fresh_envs",
)
HOW = ("num_envs", "backend", "on_env_error", "max_restarts", "fresh_envs")
"""The settings that decide no episode."""
POLICY_KEYS = (
    "name",
    "factory",
    "checkpoints",
    "env_state",
    "vecnormalize",
    "transforms",
    "runs",
)


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse keys that a table does not have, with those that are near.

    Raises:
        ValueError: naming the first one.
    """
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), n=1)
            did = f"; did you mean {near[0]!r}?" if near else ""
            names = ", ".join(known)
            raise ValueError(f"expected in {where} only {names}, got {key!r}{did}")


def filled(text: str, **names: str) -> str:
    """Return a pattern with the names in the place of their fields."""
    return _FIELDS.sub(lambda found: names[found[1]], text)


def check_distinct(names: Sequence[str], things: str) -> None:
    """Refuse names that recur; names of folders may not differ in case alone.

    Raises:
        ValueError: naming the first one.
    """
    seen: dict[str, str] = {}
    for name in names:
        if name.lower() in seen:
            both = listed_text([seen[name.lower()], name])
            raise ValueError(f"expected {things} with names of their own, got {both}; rename one")
        seen[name.lower()] = name


def _score(given: Any, env: str, where: str) -> Score | None:
    if given is None:
        return None
    if given == HUMAN:
        return Score(*human_scores(env), _HUMAN_SOURCE)
    if not isinstance(given, Mapping):
        raise TypeError(
            f"expected the score of {where} to be {HUMAN!r}, or a range such as "
            f'{{ low = "random", high = 500.0, source = "..." }}, got {given!r}'
        )
    check_keys(given, ("low", "high", "source"), f"the score of {where}")
    low, high = _end(given, "low", where), _end(given, "high", where)
    if low == high:
        raise ValueError(f"expected the score of {where} to have a range, got {low} as both ends")
    source = read_text(given.get("source", ""), f"source of {where}", empty=True)
    return Score(low, float(high), source)


def _end(given: Mapping[str, Any], name: str, where: str) -> float | str:
    value = given.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(value):
                return float(value)
    if name == "low" and value == RANDOM:
        return RANDOM
    also = ' or "random"' if name == "low" else ""
    raise ValueError(
        f"expected the score of {where} to have a range, with {name} a number{also}, got {value!r}"
    )


def _settings(table: Mapping[str, Any], where: str, known: Sequence[str]) -> dict[str, Any]:
    check_keys(table, known, where)
    return dict(table)


def _runs(given: Any, where: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(f"expected runs of {where} to be a list such as [0, 1, 2], got {given!r}")
    for run in given:
        if not is_count(run) or run > _MOST_RUN:
            raise ValueError(
                f"expected runs of {where} to be numbers that are not negative, at most "
                f"{_MOST_RUN}, got {run!r}"
            )
    runs = tuple(str(int(run)) for run in given)
    check_distinct(runs, f"runs of {where}")
    return runs


def _pattern(given: Any, where: str) -> str:
    text = read_text(given, where)
    for name in _FIELDS.findall(text):
        if name not in ("task", "policy", "run"):
            raise ValueError(f"expected {{task}}, {{policy}} and {{run}} in {where}, got {text!r}")
    return text


def _check_factory(factory: str, files: Container[str], where: str) -> None:
    """Refuse a factory of another form, and files that do not go with it."""
    if factory not in (RANDOM, SB3) and not is_named(_FIELDS.sub("x", factory)):
        raise ValueError(
            f"expected the factory of {where} to be module:callable, path/to/file.py:callable, "
            f"{RANDOM!r} or {SB3!r}, got {factory!r}"
        )
    if factory == RANDOM and "checkpoints" in files:
        raise ValueError(f"expected no checkpoints in {where}: random actions have none")
    if factory == SB3 and "checkpoints" not in files:
        raise ValueError(f"expected checkpoints in {where}: {SB3!r} reads the models' files")
    if factory != SB3 and "vecnormalize" in files:
        raise ValueError(
            f"expected vecnormalize only with factory = {SB3!r}, got it in {where}; for the "
            "statistics of a TorchRL transform there is env_state"
        )


def _calls(given: Any, where: str) -> tuple[Call, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"expected {where} to be a list of module:callable, got {given!r}")
    for call in given:
        if isinstance(call, Mapping):
            check_keys(call, ("call", "kwargs"), where)
            _arguments(call.get("kwargs", {}), f"kwargs in {where}")
        try:
            called(call)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error
    return tuple(given)


def read_table(given: Any, where: str) -> Mapping[str, Any]:
    """Return a table.

    Raises:
        TypeError: for another value.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"expected {where} to be a table, got {given!r}")
    return given


def _arguments(given: Any, where: str) -> Mapping[str, Any]:
    table = read_table(given, where)
    try:
        json.dumps(table)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"expected {where} to be values of JSON, as an evaluation keeps them, got another one "
            f"({error}); give a date as a text"
        ) from error
    return table


def read_text(given: Any, where: str, empty: bool = False) -> str:
    """Return a text.

    Raises:
        TypeError: for another value, and for an empty text unless that is allowed.
    """
    if not isinstance(given, str) or not (given or empty):
        what = "none" if given is None else repr(given)
        raise TypeError(f"expected a text as {where}, got {what}")
    return given


def _name_of(given: Any) -> str:
    name = given.get("name") if isinstance(given, Mapping) else None
    return repr(name) if name is not None else "without a name"


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"expected the name of a {what} to be letters, digits, '.', '-' and '_', 100 at most, "
            f"as it names a folder, got {name!r}"
        )
