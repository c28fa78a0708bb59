"""Arguments of tdcollect.Evaluator that cannot be honoured are refused, before a process starts."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from torchrl.envs import GymEnv, TransformedEnv
from torchrl.modules import RandomPolicy
from torchrl.record import VideoRecorder
from torchrl.record.loggers import CSVLogger

import tdcollect
from tdcollect import Evaluator
from tdcollect.processes.child import Spawned

from .envs import Walk
from .policies import categorical, deterministic
from .torchrl_envs import teams

POLICY = categorical()


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawned(*_: Any) -> None:
        raise AssertionError("a process started")

    monkeypatch.setattr(Spawned, "_begin", spawned)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"policy": None}, "policy or policy_factory must be provided, got neither; for random acti"),
    ({"policy_factory": categorical}, "expected policy or policy_factory, not both"),
    ({"policy": 3}, "expected policy to be callable or None, got 3"),
    ({"env": 3}, "expected a gymnasium id, a callable that makes an env, or a TorchRL env, got 3"),
    ({"env": gym.make("CartPole-v1")}, "got <TimeLimit.*; pass a function that makes it"),
    ({"num_trajectories": 0}, "expected num_trajectories to be a positive int, got 0"),
    ({"num_trajectories": 2.5}, "expected num_trajectories to be a positive int, got 2.5"),
    ({"queue_size": 0}, "expected queue_size to be a positive int, got 0"),
    ({"max_steps": -1}, "expected max_episode_steps to be a positive int or None, got -1"),
    ({"seed": -1}, "expected seed to be an int and not negative, got -1"),
    ({"busy_policy": "replace"}, "busy_policy to be 'queue', 'skip' or 'error', got 'repl"),
    ({"backend": "invalid"}, "expected backend to be 'thread', 'process' or 'ray', got 'inv"),
    ({"best": "median"}, "expected best to be 'mean' or 'iqm', got 'median'"),
    ({"exploration_type": "mean"}, "expected exploration_type to be one of torchrl's Exploration"),
    ({"frames_per_batch": 9}, "expected arguments of Evaluator.., got frames_per_batch; "),
    ({"device_": "cpu"}, "got device_; did you mean device"),
    ({"num_trajectory": 5}, "got num_trajectory; did you mean num_trajectories"),
    ({"metrics_fn": 3}, "expected metrics_fn to be callable or None, got 3"),
    ({"on_result": "log"}, "expected on_result to be callable or None, got 'log'"),
    ({"init_fn": 0}, "expected init_fn to be callable or None, got 0"),
    ({"ray_kwargs": {"memory": 1}}, "expected ray_kwargs for backend='ray' only"),
    ({"policy": partial(print, threading.Lock())},
     "expected policy to be picklable, .*got partial .*; make.*an Evaluator "
     "takes a function that makes it, policy_factory="),
    ({"env": tdcollect.make_env(Walk, 2, backend="process", start_method="fork")},
     "expected env to be picklable, .*pass a function that makes it, lambda: make_env"),
    ({"metrics_fn": partial(print, threading.Lock())}, "expected metrics_fn to be picklable"),
    ({"init_fn": partial(print, threading.Lock())}, "expected init_fn to be picklable"),
]  # fmt: skip


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("given", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_honoured_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Evaluator(**{"env": Walk, "policy": POLICY, **given})


@pytest.mark.usefixtures("no_process")
def test_a_directory_of_something_else_and_missing_packages_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"directory of an Evaluator, got .*which holds notes.txt"):
        Evaluator(Walk, POLICY, output_dir=tmp_path)
    with pytest.raises(ValueError, match="expected output_dir to be a directory, got the file"):
        Evaluator(Walk, POLICY, output_dir=tmp_path / "notes.txt")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ModuleNotFoundError, match=r"tdcollect.Evaluator needs the scipy package"):
        Evaluator(Walk, POLICY)


@pytest.mark.usefixtures("quick_children")
def test_arguments_of_torchrls_are_taken_and_reward_keys_choose_among_groups() -> None:
    """The others change nothing."""
    policy = RandomPolicy(teams().action_spec)
    with Evaluator(
        teams,
        policy,
        num_trajectories=2,
        max_steps=0,
        reward_keys=[("next", "red", "reward")],
        backend="process",
        num_gpus=0,
        log_prefix="test",
    ) as evaluator:
        result = evaluator.submit().result(60)
        assert "test/reward" in evaluator.evaluate()
    offline = tdcollect.evaluate(teams, policy, 2, reward_keys=("red", "reward"), progress=False)
    assert (result.digest, result.manifest) == (offline.digest, offline.manifest)
    assert result.manifest["returns"]["rewards"] == ["red/reward"]


def filmed(folder: str) -> Any:
    env = GymEnv("CartPole-v1", from_pixels=True, pixels_only=False)
    return TransformedEnv(env, VideoRecorder(CSVLogger("film", folder), tag="film"))


@pytest.mark.usefixtures("quick_children")
def test_recorders_are_refused_unless_nothing_is_dumped(tmp_path: Path) -> None:
    make = partial(filmed, str(tmp_path))
    with (
        Evaluator(make, deterministic(4), num_trajectories=1) as evaluator,
        pytest.raises(ValueError, match=r"without VideoRecorder for dump_video=True: .*rep"),
    ):
        evaluator.evaluate()


@pytest.mark.usefixtures("quick_children")
def test_errors_of_env_policy_and_functions_are_raised_once_and_the_next_one_runs() -> None:
    class Refused(Exception):
        pass

    calls = []

    def metrics_fn(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 1:
            raise Refused("by the user")
        return {"calls": len(calls)} if len(calls) < 3 else "nothing"

    with Evaluator(Walk, POLICY, num_trajectories=2, metrics_fn=metrics_fn) as evaluator:
        evaluator.trigger_eval()
        with pytest.raises(Refused, match="by the user") as raised:
            evaluator.wait(60)
        assert "in the process that evaluates:\n\nTraceback" in str(raised.value.__cause__)
        assert evaluator.wait() is None
        assert evaluator.evaluate()["eval/calls"] == 2
        with pytest.raises(
            TypeError, match=r"expected metrics_fn to return a dict .* got 'nothing'"
        ):
            evaluator.submit().result(60)

    def broken() -> Any:
        raise ZeroDivisionError("in the factory")

    with Evaluator(broken, POLICY) as evaluator:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="in the factory"):
                evaluator.evaluate()
    with (
        Evaluator(Walk, policy_factory=lambda env: None) as evaluator,
        pytest.raises(TypeError, match="expected policy_factory to give a policy, got None"),
    ):
        evaluator.evaluate()
