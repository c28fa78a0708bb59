"""Presets: published conditions, lists of tasks and scores, as data with a source for each number.

Reading a preset runs nothing, and makes no env.
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tdcollect.display import one_line

_FOLDER = Path(__file__).parent / "presets"
_SCORES = _FOLDER / "human-scores" / "atari.toml"
_ENTRIES = {"name", "version", "description", "sources", "defaults", "tasks"}
TASK_KEYS = (
    "name",
    "env",
    "env_kwargs",
    "wrappers",
    "transforms",
    "group",
    "score",
    "preset",
)
"""The keys of a task, beside the settings of its episodes."""
_TASK = {*TASK_KEYS, "max_episode_steps"}


@dataclass(frozen=True, repr=False)
class Preset:
    """Conditions, or a list of tasks.

    Attributes:
        name: the name that a suite gives it by.
        version: counts up when anything else changes.
        description: text, in lines.
        sources: the source of each number, by the path of its key, such as
            ``env_kwargs.frameskip``.
        defaults: values for the keys of a task. Those of conditions are for the tasks that name
            them; those of a list are in its ``tasks`` already.
        tasks: the tasks, each a dict as ``[[tasks]]`` of a suite has it; empty for conditions.
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


def presets() -> list[str]:
    """Return the names of all presets."""
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def preset(name: str) -> Preset:
    """Return a preset; changes to it change no other one.

    Args:
        name: such as ``"atari-57"``; or with its version, ``"atari-57-v1"``.

    Raises:
        ValueError: for an unknown name or version.
    """
    if name in presets():
        return copy.deepcopy(_read(_FOLDER / f"{name}.toml"))
    plain, _, version = name.rpartition("-v")
    if plain in presets():
        found = preset(plain)
        if version == str(found.version):
            return found
        raise ValueError(
            f"expected version {found.version} of the preset {plain}, the one there is, got "
            f"{name!r}; name {plain} or {plain}-v{found.version}"
        )
    raise ValueError(
        f"there is no preset {name!r}; {_nearest(name, presets())} (there are "
        f"{', '.join(presets())})"
    )


def human_scores(env_id: str) -> tuple[float, float]:
    """Return the published returns of a random policy and of a human in an Atari game.

    Args:
        env_id: such as ``"ALE/Breakout-v5"``, ``"ale_py:ALE/Breakout-v5"`` or
            ``"BreakoutNoFrameskip-v4"``.

    Raises:
        ValueError: for a game, or an env, without such scores.
    """
    scores = _human_scores()
    game = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", re.split("[:/]", env_id)[-1])
    if game not in scores:
        raise ValueError(
            f"there are no human scores of {game!r} (env {env_id!r}); "
            f"{_nearest(game, list(scores))}, or give the task a score with low and high"
        )
    return scores[game]


@functools.cache
def _human_scores() -> dict[str, tuple[float, float]]:
    games = tomllib.loads(_SCORES.read_text(encoding="utf-8"))["games"]
    return {game: (float(random), float(human)) for game, (random, human) in games.items()}


@functools.cache
def _read(file: Path) -> Preset:
    return parse(file.read_text(encoding="utf-8"), file.stem)


def parse(text: str, name: str) -> Preset:
    """Return the preset that a text in TOML describes.

    Args:
        text: the text.
        name: the name that it must have.

    Raises:
        ValueError: for a text of another form.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"expected the preset {name} to be TOML: {error}") from error
    _check(
        not (unknown := sorted(data.keys() - _ENTRIES)), name, f"no {unknown}, which no preset has"
    )
    _check(data.get("name") == name, name, f"its name to be {name!r}, got {data.get('name')!r}")
    version = data.get("version")
    _check(type(version) is int and version > 0, name, f"a version from 1, got {version!r}")
    _check(isinstance(data.get("description"), str), name, "a description")
    sources, defaults = data.get("sources", {}), data.get("defaults", {})
    for key, source in sources.items():
        _check(isinstance(source, str) and bool(source), name, f"the source of {key} to be a text")
    _check_task(defaults, name, "its defaults")
    tasks = [{**copy.deepcopy(defaults), **task} for task in data.get("tasks", [])]
    for number, task in enumerate(tasks):
        what = f"task {task.get('name', number)!r}"
        _check(
            all(isinstance(task.get(key), str) for key in ("name", "env")),
            name,
            f"{what} to have a name and an env",
        )
        _check_task(task, name, what)
    names = [task["name"] for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    _check(not twice, name, f"tasks of different names, got {twice} twice")
    _check(bool(tasks) or bool(defaults), name, "tasks or defaults")
    return Preset(name, data["version"], data["description"].strip(), sources, defaults, tasks)


def _check_task(task: Mapping[str, Any], name: str, what: str) -> None:
    unknown = sorted(task.keys() - _TASK)
    _check(not unknown, name, f"{what} to have no {unknown}, which no task has")
    score = task.get("score")
    if score is None or score == "human-normalized":
        return
    _check(isinstance(score, dict), name, f"{what} to have a score with low and high, got {score}")
    low, high = score.get("low"), score.get("high")
    _check(
        _is_number(high) and (low == "random" or _is_number(low)),
        name,
        f"{what} to have numbers for low and high, got {score}",
    )
    _check(low == "random" or low < high, name, f"{what} to have low below high, got {score}")
    _check(bool(score.get("source")), name, f"{what} to have a source of its score, got {score}")


def _check(right: bool, name: str, expected: str) -> None:
    if not right:
        raise ValueError(f"expected the preset {name} to have {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _nearest(name: str, known: list[str]) -> str:
    """Return advice: the known names that are most like this one."""
    by_folded = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_folded, n=3, cutoff=0.4)
    return (
        f"did you mean {' or '.join(by_folded[each] for each in near)}?"
        if near
        else "none is like it"
    )
