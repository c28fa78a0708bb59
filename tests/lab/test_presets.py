"""Presets: data with sources, of envs that there are."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

import tdcollect
from tdcollect.evaluation import Request
from tdcollect.lab import definition as tables
from tdcollect.lab.definition import human_scores, preset, presets, read_task

FILES = Path(tables.__file__).parent / "presets"
LISTS = [name for name in presets() if not preset(name).is_conditions]
CONDITIONS = [name for name in presets() if preset(name).is_conditions]


def numbers(value: Any, path: str = "") -> Iterator[str]:
    """The paths of the numbers in a table."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from numbers(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part, path)
    elif isinstance(value, (int, float)):
        yield path


def spec_of(env: str) -> EnvSpec:
    """The spec of an env, whose module is imported for it as by ``gymnasium.make``."""
    module, _, name = env.rpartition(":")
    if module:
        importlib.import_module(module)
    return gym.spec(name)


def test_the_presets_are_those_that_the_docs_name() -> None:
    assert LISTS == ["atari-26", "atari-5", "atari-57", "classic-control", "minigrid", "mujoco-v5"]
    assert CONDITIONS == ["atari-machado-2018", "atari-machado-2018-raw"]


@pytest.mark.parametrize("name", presets())
def test_each_number_has_a_source(name: str) -> None:
    found = preset(name)
    assert (found.name, found.version > 0) == (name, True)
    assert found.description
    assert found.sources
    assert all(isinstance(source, str) and source for source in found.sources.values())
    for path in numbers(found.defaults):
        own = path.startswith("score.")  # a score has its source beside it, which is checked
        assert own or path in found.sources or path.split(".")[0] in found.sources, path
    assert found.is_conditions or "tasks" in found.sources


@pytest.mark.parametrize("name", LISTS)
def test_each_task_is_an_env_with_a_range(name: str) -> None:
    tasks = preset(name).tasks
    assert len({task["name"] for task in tasks}) == len(tasks)
    for task in tasks:
        assert not read_task(task, {}).settings.keys() - {"max_episode_steps"}
        assert task["env"].endswith(spec_of(task["env"]).id)
        if task["score"] == "human-normalized":
            low, high = human_scores(task["env"])
            assert low < high
        else:
            assert task["score"]["low"] == "random" or task["score"]["low"] < task["score"]["high"]
            assert task["score"]["source"]
        assert "preset" not in task or preset(task["preset"]).is_conditions


def test_the_lists_of_atari_are_those_of_the_papers() -> None:
    import ale_py

    lists = {name: [t["env"] for t in preset(name).tasks] for name in LISTS if "atari" in name}
    sizes = {name: len(set(envs)) for name, envs in lists.items()}
    assert sizes == {"atari-26": 26, "atari-5": 5, "atari-57": 57}
    assert set(lists["atari-26"]) | set(lists["atari-5"]) <= set(lists["atari-57"])
    games = {spec_of(env).kwargs["game"] for env in lists["atari-57"]}
    assert len(games) == 57
    assert games <= set(ale_py.roms.get_all_rom_ids())
    scored = tomllib.loads((FILES / "human-scores" / "atari.toml").read_text())["games"]
    assert {f"ale_py:ALE/{game}-v5" for game in scored} == set(lists["atari-57"])


def test_conditions_of_atari_are_met_by_the_env() -> None:
    conditions = preset("atari-machado-2018-raw").defaults
    task = preset("atari-5").tasks[0]
    request = Request(task["env"], "random", env_kwargs=conditions["env_kwargs"], wrappers=[])
    env = gym.make(request.env, **request.env_kwargs)
    assert env.action_space.n == 18
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0.25
    assert env.unwrapped.ale.getInt("max_num_frames_per_episode") == 108_000
    env.reset(seed=0)
    env.step(0)
    assert env.unwrapped.ale.getEpisodeFrameNumber() == 4
    env.close()
    frames = conditions["env_kwargs"]["max_num_frames_per_episode"]
    assert conditions["max_episode_steps"] * 4 == frames
    whole = preset("atari-machado-2018").defaults
    assert whole["wrappers"][0]["kwargs"]["frame_skip"] * whole["max_episode_steps"] == frames
    same = {**whole["env_kwargs"], "frameskip": 4}
    assert same == conditions["env_kwargs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classic-control", "minigrid", "mujoco-v5"])
def test_a_random_policy_scores_within_the_bounds(name: str) -> None:
    for task in preset(name).tasks[:: 12 if name == "minigrid" else 3]:
        request = Request(
            task["env"],
            "random",
            env_kwargs=task.get("env_kwargs", {}),
            wrappers=task.get("wrappers", []),
        )
        env, policy = request.make()
        result = tdcollect.evaluate(env, policy, 2, num_envs=1, progress=False)
        score = task["score"]
        low = -float("inf") if score["low"] == "random" else score["low"]
        assert all(low <= e.episode_return <= score["high"] for e in result.episodes)


def test_tasks_have_the_defaults_of_their_list_and_can_be_changed_alone() -> None:
    tasks = {task["name"]: task for task in preset("minigrid").tasks}
    assert tasks["four-rooms"]["score"]["low"] == 0
    assert tasks["dynamic-obstacles-8x8"]["score"]["low"] == -1
    tasks["four-rooms"]["wrappers"].append("m:f")
    preset("atari-machado-2018").defaults["env_kwargs"]["frameskip"] = 9
    wrappers = [task["wrappers"] for task in preset("minigrid").tasks]
    assert wrappers == [["minigrid.wrappers:ImgObsWrapper"]] * len(tasks)
    assert preset("atari-machado-2018").defaults["env_kwargs"]["frameskip"] == 1


def test_names_may_have_the_version() -> None:
    assert preset("mujoco-v5-v1") == preset("mujoco-v5")
    assert preset("atari-57-v1").version == 1
    assert repr(preset("atari-57")) == "Preset(atari-57, version 1, 57 tasks)"
    assert repr(preset("atari-machado-2018")).endswith("conditions)")


def test_unknown_names_are_refused() -> None:
    for env in ("ALE/Breakout-v5", "ale_py:ALE/Breakout-v5", "BreakoutNoFrameskip-v4"):
        assert human_scores(env) == (1.7, 30.5)
    pacman = r"no human scores of 'Pacman' \(env 'ALE/Pacman-v5'\); did you mean MsPacman"
    for find, name, message in [
        (preset, "atari57", "there is no preset 'atari57'; did you mean atari-57"),
        (preset, "qqqqqq", r"there is no preset 'qqqqqq'; none is like it \(there are atari-26, "),
        (preset, "../presets/atari-57", "there is no preset"),
        (preset, "atari-57-v2", "there is no preset 'atari-57-v2'; did you mean atari"),
        (human_scores, "ALE/Pacman-v5", pacman),
    ]:
        with pytest.raises(ValueError, match=message):
            find(name)
