"""The settings of an evaluation: one list of them, whoever takes them."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from torchrl.envs import ExplorationType

from tdcollect import EvaluationCollector, EvaluationResult, evaluate
from tdcollect.cli.commands import evaluate as command
from tdcollect.evaluation import EvaluationSettings
from tdcollect.evaluation.manifest import describe
from tdcollect.evaluation.replay import settings_of

from .envs import Walk
from .policies import categorical

SETTINGS = {field.name: field.default for field in fields(EvaluationSettings) if field.init}


def test_signatures_and_commands_have_every_setting_with_its_default() -> None:
    for function in (evaluate, EvaluationCollector):
        shown = inspect.signature(function).parameters
        assert {name: shown[name].default for name in SETTINGS} == SETTINGS
        assert all(p.kind is not p.VAR_KEYWORD for p in shown.values())
        assert [p.name for p in shown.values() if p.kind is not p.KEYWORD_ONLY] == [
            *("env", "policy", "episodes", "seed")
        ]
    options = {option.name: option.default for option in command.params}
    assert SETTINGS.keys() - options.keys() == {"fresh_envs"}
    same = ("seed", "inference_batch_size", "inference_threads", "eval_mode", "on_env_error")
    for name in (*same, "max_restarts"):
        assert options[name] == SETTINGS[name]
    assert options["exploration_type"] == SETTINGS["exploration_type"].name.lower()


@pytest.mark.parametrize("seeds", [range(10, 20), {3: 13, 5: 15}, lambda index: 10 + index])
def test_env_seeds_are_kept_by_index_and_travel(seeds: Any) -> None:
    settings = EvaluationSettings([3, 5], env_seeds=seeds, env_kwargs={"a": 1}, device="cpu")
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.env_seeds == {3: 13, 5: 15}
    one = replace(again, episodes=[5])
    assert (list(one.episode_indices), one.env_seeds) == ([5], {5: 15})
    assert one.seed_schedule()(5) == settings.seed_schedule()(5)
    with pytest.raises(ValueError, match="a seed for each episode, got none for episode 4"):
        replace(again, episodes=[4])


def test_only_settings_that_are_not_the_default_are_in_the_repr() -> None:
    settings = EvaluationSettings([4, 9], 3, env_seeds={4: 1, 9: 2}, backend="process")
    assert repr(settings) == (
        "EvaluationSettings(2 episodes, seed=3, env_seeds given, backend='process')"
    )


def test_a_manifest_gives_back_the_settings_it_was_written_from() -> None:
    settings = EvaluationSettings(
        [2, 7],
        3,
        env_seeds={2: 20, 7: 70},
        exploration_type=ExplorationType.RANDOM,
        max_episode_steps=9,
        inference_batch_size=4,
        inference_threads=2,
    )
    with EvaluationCollector.from_settings(Walk, categorical(), settings) as collector:
        manifest = describe(collector)
        (episode, *_) = (finished.record for finished in collector.run())
    assert isinstance(EvaluationResult(manifest, [episode]).digest, str)
    again = settings_of(manifest, [episode])
    assert asdict(again) == asdict(replace(settings, episodes=[episode.index]))


def test_an_unknown_setting_is_told_with_the_one_that_is_meant() -> None:
    for function, name, told in (
        (evaluate, "num_env", r"evaluate\(\), got num_env; did you mean num_envs\?"),
        (EvaluationCollector, "exploration", r"Collector\(\), .* you mean exploration_type\?"),
        (evaluate, "xyz", "got xyz; see help"),
    ):
        with pytest.raises(TypeError, match=f"^expected arguments of .*{told}"):
            function("CartPole-v1", **{name: 1})


def test_an_index_that_is_no_int_is_told() -> None:
    result = evaluate("CartPole-v1", None, 2, progress=False)
    for method in (result.replay, result.record, result.trajectory):
        with pytest.raises(TypeError, match="the index of an episode, an int from 0, got '0'"):
            method("0")  # type: ignore[arg-type]
