"""Reset options of each episode: a function of its index, to the slot that starts it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import EnvBase, GymWrapper, TransformedEnv

from tdcollect import EvaluationResult, Evaluator, compare, evaluate, make_env, merge, verify
from tdcollect.evaluation import EvaluationSettings
from tdcollect.lab import Suite

from ..lab.parts import changed, folder
from .envs import Walk
from .ledgers import alter, contents
from .policies import deterministic
from .test_metrics import Plain, Unknown
from .test_protocol import check_files

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.usefixtures("quick_children")


class Levels(Walk):
    """The walk, as long as its level says; without one there is no episode."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed)
        self.level = self.left = options["level"]
        return observation, info

    def step(self, action: Any) -> Any:
        *row, info = super().step(action)
        return *row, {**info, "level": self.level}


class Greedy(Levels):
    """Takes its options out of what it is given."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed, options={"level": options.pop("level")})


class Once(Greedy):
    """Raises in the first try of each episode, in its second step."""

    tried: ClassVar[set[int | None]] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.left < self.level and self.seed not in self.tried:
            self.tried.add(self.seed)
            raise RuntimeError("once")
        return super().step(action)


class Late(Greedy):
    """Raises in the first reset with each seed."""

    tried: ClassVar[set[int | None]] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed not in self.tried:
            self.tried.add(seed)
            raise RuntimeError("late")
        return super().reset(seed=seed, options=options)


def level(index: int) -> dict[str, int]:
    return {"level": 2 + index % 5}


LENGTHS = [2 + index % 5 for index in range(9)]


def run(env: Any = Levels, options: Any = level, count: int = 9, **how: Any) -> EvaluationResult:
    how = {"progress": False, "episode_options": options, **how}
    return evaluate(env, deterministic(), count, 4, **how)


@pytest.fixture(scope="module")
def digests() -> list[str | None]:
    return [episode.digest for episode in run().episodes]


def vector(**how: Any) -> EnvBase:
    return make_env(SyncVectorEnv([Levels] * 3, **how))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": (Greedy, {"num_envs": 1}),
    "many": (Greedy, {"num_envs": 4}),
    "process": (Greedy, {"num_envs": 4, "backend": "process"}),
    "ready": (partial(make_env, Greedy, 3, backend="process", num_workers=2, wait_num=1), {}),
    "next-step": (vector, {}),
    "disabled": (partial(vector, autoreset_mode=AutoresetMode.DISABLED), {}),
    "alone": (lambda: TransformedEnv(make_env(Greedy), Unknown()), {}),
    "torchrl": (lambda: GymWrapper(Greedy()), {"num_envs": 2}),
    "fresh": (Greedy, {"fresh_envs": True}),
    "restarted": (Once, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_they_reach_the_slot_that_starts_the_episode(name: str, digests: list[str]) -> None:
    env, how = CASES[name]
    found = run(env, **how).episodes
    assert [episode.length for episode in found] == LENGTHS
    assert [episode.digest for episode in found] == digests
    assert any(episode.restarts for episode in found) == (name == "restarted")


def test_slots_that_fail_together_keep_their_own() -> None:
    ready = {"backend": "process", "num_workers": 3, "wait_num": 1}
    found = []
    for kind, how in ((Greedy, {}), (Late, ready)):
        env = make_env(kind, 3, on_env_error="restart", max_restarts=100, **how)
        found.append([one.digest for one in run(env, on_env_error="raise").episodes])
        env.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options",
    [
        [level(index) for index in range(9)],
        {index: level(index) for index in range(20)},
        tuple(level(index) for index in range(12)),
    ],
)
def test_they_may_be_given_by_index(options: Any, digests: list[str]) -> None:
    found = run(options=options)
    assert [episode.digest for episode in found.episodes] == digests
    assert found.manifest["episode_options"] == {
        "name": None,
        "options": [level(index) for index in range(9)],
    }


def test_a_file_has_a_list_or_an_object_by_index(tmp_path: Path) -> None:
    listed, named = tmp_path / "levels.json", tmp_path / "some.json"
    listed.write_text(json.dumps([level(index) for index in range(9)]))
    named.write_text(json.dumps({index: level(index) for index in (7, 3)}))
    assert [e.length for e in run(options=listed).episodes] == LENGTHS
    found = run(options=str(named), count=[7, 3])  # type: ignore[arg-type]
    assert [(e.index, e.length) for e in found.episodes] == [(3, 5), (7, 4)]
    assert found.manifest["episode_options"]["name"] == "some.json"
    assert found.manifest["episode_options"]["options"] == [level(7), level(3)]


def test_files_are_the_same_and_replays_have_them(tmp_path: Path) -> None:
    whole = run(output_dir=tmp_path / "whole")
    check_files(tmp_path / "whole")
    assert whole.manifest["episode_options"]["name"] == f"{__name__}.level"
    run(output_dir=tmp_path / "two", workers=2)
    for i in range(2):
        run(output_dir=tmp_path / f"part-{i}", shard=(i, 2))
    merge([tmp_path / "part-1", tmp_path / "part-0"], tmp_path / "merged")
    for name in ("two", "merged"):
        assert contents(tmp_path / name) == contents(tmp_path / "whole")
        assert verify(tmp_path / name).passed
    assert len(whole.replay(3)) == 5
    assert len(EvaluationResult.load(tmp_path / "whole", Levels, deterministic()).replay(4)) == 6
    with pytest.raises(
        ValueError, match=r"episode_options.options is \[\{'level': 2\}.* there and"
    ):
        run(output_dir=tmp_path / "whole", options=[{"level": 3}] * 9)
    alter(tmp_path / "two" / "manifest.json", {("episode_options", "options"): [None]})
    assert "to have the options of 9 episodes, got those of 1" in str(verify(tmp_path / "two"))


def test_suites_and_evaluators_take_them(folder: Path, small_reports: None) -> None:
    (folder / "levels.json").write_text(json.dumps([level(index) for index in range(6)]))
    given = changed("tasks.0.episode_options", "levels.json")
    given["tasks"][0]["env"] = f"{__name__}:Levels"
    suite = Suite.of(given, folder)
    results = suite.run(folder / "out", tasks=["walk"], progress=False)
    for cell in results.of("walk", "random"):
        found = EvaluationResult.load(folder / "out" / cell.path)
        assert [episode.length for episode in found.episodes] == LENGTHS[:6]
        assert found.manifest["episode_options"]["name"] == "levels.json"
    with Evaluator(Levels, deterministic(), num_trajectories=4, episode_options=level) as beside:
        found = beside.submit(step=1).result()
        assert [episode.length for episode in found.episodes] == LENGTHS[:4]
        assert len(found.replay(3)) == LENGTHS[3]


def test_evaluations_of_other_options_are_not_compared() -> None:
    first, same = run(), run(options=[level(index) for index in range(9)])
    assert compare(first, same, names=["a", "b"]).differences[0].tied == 9
    assert compare(run(count=12), first, names=["a", "b"]).episodes == 9  # it may have more
    other = run(options=lambda index: {"level": 2})
    told = r"episode_options of episode 1 is \{'level': 3\} in a and \{'level': 2\} in b"
    with pytest.raises(ValueError, match=told):
        compare(first, other, names=["a", "b"])


def test_envs_that_take_none_for_each_slot_refuse_before_they_are_reset() -> None:
    same = partial(vector, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match=r"the backend 'gymnasium' of .* takes no reset opt"):
        run(same)
    with pytest.raises(ValueError, match="Plain, an env of TorchRL's own, takes no"):
        run(Plain)


def test_envpool_refuses() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(ValueError, match="the backend 'envpool' of CartPole-v1 takes no reset opt"):
        run("CartPole-v1", backend="envpool")


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (3, TypeError, "to be one dict per episode, or a function of the episode's index, got 3"),
    ([{}] * 2, ValueError, "expected a dict for each of the episodes up to index 2, got 2 dicts"),
    ({0: {}, 1: {}}, ValueError, "expected a dict for each episode, got none for episode 2"),
    ([1] * 3, TypeError, "expected episode_options that are dicts or None, got 1 for episode 0"),
    ([{"a": {1}}] * 3, TypeError, "of values that JSON has, as the manifest keeps them, got"),
    ([{"a": float("nan")}] * 3, TypeError, "of values that JSON has"),
    ("nowhere.json", FileNotFoundError, "expected a JSON file for episode_options, got nowhere"),
]


@pytest.mark.parametrize(("options", "error", "told"), REFUSED)
def test_bad_options_are_refused(options: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        EvaluationSettings(3, episode_options=options)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    for text, told in (
        ("{", "to be JSON"),
        ("3", "a list of options, or an object with the indices of episodes as keys, got int"),
        ('{"a": {}}', "as keys, got dict"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=told):
            EvaluationSettings(1, episode_options=file)


def test_none_is_no_options_and_films_reset_with_them(tmp_path: Path) -> None:
    """CartPole takes the bounds of its first state as options."""
    wide = {"low": 0.19, "high": 0.2}
    found = evaluate(
        "CartPole-v1", None, 2, episode_options=[None, wide], num_envs=2, progress=False
    )
    plain = evaluate("CartPole-v1", None, 2, num_envs=2, progress=False)
    assert found.episodes[0] == plain.episodes[0]
    assert found.episodes[1] != plain.episodes[1]
    assert (found.replay(1)["observation"][0] >= 0.19).all()
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    film = found.replay(1, video=tmp_path / "one.mp4")
    assert (film["observation"][0] >= 0.19).all()
