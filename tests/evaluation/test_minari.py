"""Kept data as data sets of Minari: it reads them, and the env that it makes plays them again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardSum

from tdcollect import EvaluationResult, evaluate, make_env

from .envs import Walk

minari = pytest.importorskip("minari")

PICTURE = spaces.Box(0, 255, (32, 32, 3), np.uint8)
PARTS = spaces.Tuple((spaces.Discrete(3, start=-1), spaces.MultiBinary(2)))
KINDS: dict[str, tuple[gym.Space[Any], gym.Space[Any]]] = {
    "nested": (
        spaces.Dict(state=spaces.Box(0, 9, (2,), np.uint16), picture=PICTURE, parts=PARTS),
        spaces.Dict(move=spaces.Discrete(3, start=1), push=spaces.Box(-1, 1, (2,))),
    ),
    "picture": (PICTURE, spaces.MultiDiscrete([2, 3])),
    "discrete": (spaces.Discrete(7, start=2), spaces.Discrete(2)),
}


class Drawn(gym.Env[Any, Any]):
    """Observations of a space, drawn from what the seed, the options and the actions were."""

    def __init__(self, kind: str):
        self.observation_space, self.action_space = KINDS[kind]

    def _observe(self, *said: Any) -> Any:
        seed = [self._from, *map(ord, repr(said))]
        self.observation_space.seed(int(np.random.default_rng(seed).integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._from, self._steps = int(self.np_random.integers(100)), 0
        return self._observe(options and int(options["level"])), {"cost": float(self._from)}

    def step(self, action: Any) -> Any:
        self._steps += 1
        said = action if isinstance(action, dict) else np.asarray(action).tolist()
        if isinstance(said, dict):
            said = {name: np.asarray(said[name]).tolist() for name in sorted(said)}
        reward = float(self.np_random.integers(5))
        ended = self._steps > self._from % 7
        return self._observe(said), reward, ended, False, {"cost": float(self._steps)}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Minari keeps its data sets; and the envs are registered."""
    for kind in KINDS:
        gym.register(f"Drawn/{kind}-v0", f"{__name__}:Drawn", 5, kwargs={"kind": kind})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", "minari")
    yield tmp_path / "minari"
    for kind in KINDS:
        gym.registry.pop(f"Drawn/{kind}-v0")


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return np.asarray(one).dtype == np.asarray(other).dtype and np.array_equal(one, other)


def at(values: Any, step: int) -> Any:
    if isinstance(values, dict):
        return {name: at(part, step) for name, part in values.items()}
    return tuple(at(part, step) for part in values) if isinstance(values, tuple) else values[step]


def check_played_again(dataset: Any, result: EvaluationResult, options: Any = None) -> None:
    """Every entry of a data set is that of its env, which plays the actions again."""
    env = dataset.recover_environment()
    assert (env.observation_space, env.action_space) == (
        dataset.observation_space,
        dataset.action_space,
    )
    metadata = [*dataset.storage.get_episode_metadata(dataset.episode_indices)]
    assert len(metadata) == len(result.episodes)
    for episode, about, record in zip(dataset, metadata, result.episodes, strict=True):
        assert json.loads(about["tdcollect_record"]) == json.loads(record.to_json())
        assert len(episode.rewards) == record.length
        observation, info = env.reset(seed=about["seed"], options=about.get("options"))
        assert about.get("options") == (options and options(record.index))
        assert alike(at(episode.observations, 0), observation)
        for step in range(record.length):
            observation, *rest, info = env.step(at(episode.actions, step))
            assert alike(at(episode.observations, step + 1), observation)
            assert rest == [
                episode.rewards[step],
                *at((episode.terminations, episode.truncations), step),
            ]
            if episode.infos is not None:
                assert at(episode.infos["cost"], step + 1) == info["cost"]
        assert rest[1:] == [record.terminated, record.truncated]


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_set_is_the_env_played_again(kind: str, tmp_path: Path) -> None:
    ran = evaluate(
        f"Drawn/{kind}-v0", None, 6, max_episode_steps=4, keep_trajectories=True, progress=False
    )
    assert {e.truncated for e in ran.episodes} == {True, False}
    if minari.__version__ == "0.5.3" and kind != "discrete":
        with pytest.raises(ImportError, match=r"minari from 0\.5\.4 on, got 0\.5\.3, which"):
            ran.to_minari(f"drawn/{kind}-v0")
        return
    dataset = ran.to_minari(f"drawn/{kind}-v0", author="me", description="drawn")
    check_played_again(dataset, ran)
    assert dataset.spec.env_spec.max_episode_steps == 4
    about = dataset.storage.metadata
    assert about["tdcollect_manifest"] == ran.manifest
    assert (about["author"], about["description"]) == ({"me"}, "drawn")
    assert about["algorithm_name"] == "random actions"
    assert [*minari.list_local_datasets()] == [f"drawn/{kind}-v0"]


def test_infos_and_reset_options_and_an_env_that_is_passed(tmp_path: Path) -> None:
    def make() -> Any:
        return make_env("Drawn/discrete-v0", info_keys=["cost"], categorical_action_encoding=True)

    def options(index: int) -> dict[str, Any]:
        return {"level": index % 2}

    evaluate(
        make, None, 4, output_dir=tmp_path / "one", keep_trajectories=True, episode_options=options
    )
    ran = EvaluationResult.load(tmp_path / "one")
    with pytest.raises(ValueError, match=r"of the shapes that the env has, got others; pass env"):
        ran.to_minari("drawn/infos-v0")
    dataset = ran.to_minari("drawn/infos-v0", make)
    check_played_again(dataset, ran, options)
    assert {*dataset[0].infos} == {"cost"}


def test_what_cannot_be_a_data_set_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = evaluate("Drawn/discrete-v0", None, 2, keep_trajectories=True, progress=False)
    first = kept.to_minari("drawn/one-v0")
    with pytest.raises(ValueError, match=r"id of a new data set, got drawn/one-v0, which is in"):
        kept.to_minari("drawn/one-v0")
    with pytest.raises(ValueError, match=r"expected an id as Minari has it.*got '../one-v0'"):
        kept.to_minari("../one-v0")
    with pytest.raises(ValueError, match=r"observation_space is 'Discrete\(7, start=2\)' in the m"):
        kept.to_minari("drawn/two-v0", "CartPole-v1")
    with pytest.raises(ValueError, match=r"expected in to_minari only author, .*'autor'; did you"):
        kept.to_minari("drawn/two-v0", autor="me")
    unkept = evaluate("Drawn/discrete-v0", None, 2, progress=False)
    with pytest.raises(KeyError, match=r"keep_trajectories=True \(--keep-trajectories\)"):
        unkept.to_minari("drawn/two-v0")
    with pytest.raises(KeyError):  # what was there stays
        unkept.to_minari("drawn/one-v0", overwrite=True)
    check_played_again(minari.load_dataset("drawn/one-v0"), kept)

    def summed() -> TransformedEnv:
        return TransformedEnv(make_env("Drawn/discrete-v0"), RewardSum())

    other = evaluate(summed, None, 3, keep_trajectories=True, progress=False)
    with pytest.raises(ValueError, match="expected an env without transforms, got RewardSum"):
        other.to_minari("drawn/two-v0", summed)
    payload = {**kept.manifest, "env": {**kept.manifest["env"], "id": "this:Env-v0"}}
    sent = EvaluationResult(payload, kept.episodes, trajectories={0: kept.trajectory(0)})
    with pytest.raises(ValueError, match="only a registered env without arguments is made"):
        sent.to_minari("drawn/two-v0")
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ModuleNotFoundError, match=r"to_minari needs the minari package: pip inst"):
        kept.to_minari("drawn/two-v0")
    assert [path.name for path in (place / "drawn").iterdir() if path.is_dir()] == ["one-v0"]
    assert first.total_episodes == 2


def test_an_env_whose_spec_is_no_json_has_no_spec() -> None:
    ran = evaluate(Walk, None, 3, keep_trajectories=True, progress=False)
    assert ran.to_minari("walk/one-v0", Walk).spec.env_spec is None

    def make() -> Any:
        return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: 2 * reward)

    ran = evaluate(make, None, 1, keep_trajectories=True, progress=False)
    with pytest.warns(UserWarning, match="the data set has no env spec, so that it cannot make"):
        assert ran.to_minari("walk/two-v0", make).spec.env_spec is None


def test_the_command_writes_it_and_replaces_it_on_request(typed: Any, here: Path) -> None:
    command = "evaluate @:short --policy random --episodes 2 --output-dir one --keep-trajectories"
    assert typed(command)[0] == 0
    export = "export minari one --dataset-id short-v0 --author me --env @:short"
    status, out, err = typed(f"{export} --json")
    assert (status, err) == (0, "")
    told, dataset = json.loads(out), minari.load_dataset("short-v0")
    assert (told["episodes"], told["steps"]) == (2, dataset.total_steps)
    assert Path(told["path"]) == Path(dataset.spec.data_path)
    check_played_again(dataset, EvaluationResult.load(here / "one"))
    assert typed(export)[::2] == (1, typed(export)[2])
    assert "replace it with overwrite=True (--overwrite)" in typed(export)[2]
    status, out, _ = typed(f"{export} --overwrite")
    assert (status, out.splitlines()[0]) == (0, f"short-v0: 2 episodes, {told['steps']} steps")
    status, _, err = typed('export minari one --dataset-id other-v0 --env-kwargs {"a":1}')
    assert (status, "--env-kwargs goes with --env ENV" in err) == (2, True)
