"""Envs by name with wrappers, transforms, and statistics that were saved."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
import torchrl.envs
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymEnv,
    ObservationNorm,
    RewardSum,
    TransformedEnv,
    VecNormV2,
)

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation import Request
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.pages.evaluation import again_of

from .ledgers import Payload

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*VecNorm.*"),
    pytest.mark.usefixtures("small_reports"),
]

PARTS = """
from torchrl.envs import GymEnv, Transform, TransformedEnv, VecNormV2


class Windy(gym.Wrapper):
    def __init__(self, env, strength=0.1):
        super().__init__(env)
        self.strength = strength

    def step(self, action):
        observation, *rest = self.env.step(action)
        return observation + observation.dtype.type(self.strength), *rest


def scaled(env, factor=2.0):
    return gym.wrappers.TransformReward(env, lambda reward: factor * reward)


def norm():
    return VecNormV2(in_keys=["observation"])


class Doubled(Transform):  # not known: its rows might know of each other
    def _call(self, entries):
        return entries.set("observation", 2 * entries["observation"])

    def _reset(self, entries, started):
        return self._call(started)


def doubled():
    return Doubled(in_keys=["observation"])


def transformed():
    return TransformedEnv(GymEnv("CartPole-v1"), norm())


def torchrl_env():
    return GymEnv("CartPole-v1")
"""


@pytest.fixture
def ask(here: Path) -> Callable[..., Request]:
    """Make a request; ``@`` stands for the file with policies and these parts."""
    (file,) = here.glob("policies_*.py")
    file.write_text(file.read_text() + PARTS)

    def make(env: str = "CartPole-v1", **fields: Any) -> Request:
        def meant(value: Any) -> Any:
            if isinstance(value, str):
                return value.replace("@", file.name)
            return [meant(one) for one in value] if isinstance(value, list) else value

        fields = {"policy": "@:lean", **fields}
        given = {name: meant(value) for name, value in fields.items()}
        return Request(meant(env), **given, directory=os.getcwd())

    return make


def trained(transform: Any, slots: int | None = None) -> TransformedEnv:
    """An env whose transforms have seen some steps."""
    env = TransformedEnv(tdcollect.make_env("CartPole-v1", slots, seed=3), transform)
    torch.manual_seed(0)
    if isinstance(transform, ObservationNorm):
        transform.init_stats(200)
    else:
        env.rollout(50, break_when_any_done=False)
    return env


def saved(env: TransformedEnv, file: str = "norm.pt") -> str:
    torch.save(env.state_dict(), file)
    return file


def run(asked: Request, count: int = 4, **settings: Any) -> tdcollect.EvaluationResult:
    env, policy = asked.make()
    return tdcollect.evaluate(env, policy, count, progress=False, **settings)


def norm(**settings: Any) -> VecNormV2:
    return VecNormV2(in_keys=["observation"], **settings)


def named(kind: str, **kwargs: Any) -> dict[str, Any]:
    return {"call": f"torchrl.envs:{kind}", "kwargs": {"in_keys": ["observation"], **kwargs}}


KINDS: list[tuple[str, dict[str, Any], int | None]] = [
    ("VecNormV2", {}, None),
    ("VecNormV2", {"reduce_batch_dims": True}, 4),
    ("VecNormV2", {"in_keys": ["observation", "reward"]}, None),
    ("VecNorm", {}, 4),
    ("ObservationNorm", {"standard_normal": True}, None),
]


@pytest.mark.parametrize(("kind", "kwargs", "slots"), KINDS)
def test_statistics_are_those_of_an_env_that_has_them(
    kind: str, kwargs: dict[str, Any], slots: int | None, ask
) -> None:
    asked = named(kind, **kwargs)
    made = getattr(torchrl.envs, kind)(**asked["kwargs"])
    # A Compose of one takes the same file.
    source = trained(Compose(made) if kind == "VecNormV2" and not kwargs else made, slots)
    request = ask(transforms=[asked], env_state=saved(source))

    def by_hand() -> EnvBase:
        return TransformedEnv(GymEnv("CartPole-v1"), source.transform.clone())

    _, policy = ask().make()
    expected = tdcollect.evaluate(by_hand, policy, 3, progress=False)
    found = run(request, 3, num_envs=2)
    assert found.digest == expected.digest
    # The manifest tells the statistics.
    (told,) = found.manifest["env"]["transforms"]
    assert re.fullmatch(r"\w+\([0-9a-f]{16}\)", told)
    assert expected.manifest["env"]["transforms"] == [told]


def test_envs_of_torchrl_take_them_too(ask) -> None:
    state = saved(trained(norm()))
    own = run(ask("@:transformed", env_state=state))
    given = run(ask("@:torchrl_env", env_state=state, transforms=["@:norm"]))
    arrays = run(ask(env_state=state, transforms=["@:norm"]))
    assert own.digest == given.digest == arrays.digest


@pytest.mark.usefixtures("quick_children")
def test_workers_make_them_too(ask, tmp_path: Path) -> None:
    request = ask(
        wrappers=["@:Windy"], transforms=["@:norm"], env_state=saved(trained(norm())), device="cpu"
    )
    one = run(request, output_dir=tmp_path / "one", request=request)
    two = run(request, output_dir=tmp_path / "two", request=request, workers=2)
    assert one.digest == two.digest
    for file in ("manifest.json", "episodes.jsonl"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_all_slots_are_stepped_together_where_rows_are_known_to_be_alone(ask) -> None:
    known = ask(transforms=["@:norm"], env_state=saved(trained(norm())))
    unknown = ask(transforms=["@:doubled", "torchrl.envs:RewardSum"])
    for request, slots in ((known, [4]), (unknown, [])):
        with EvaluationCollector(request.made_env(), None, 4) as collector:
            assert list(collector.env.batch_size) == slots
        assert run(request, 3, num_envs=1).digest == run(request, 3, num_envs=3).digest
    with pytest.raises(ValueError, match="expected no backend 'process': each slot is an env of"):
        run(unknown, backend="process")


def test_wrappers_are_called_in_their_order(ask) -> None:
    strong = {"call": ask().policy.replace("lean", "Windy"), "kwargs": {"strength": 0.25}}
    request = ask(wrappers=[strong, "@:scaled", "gymnasium.wrappers:TimeAwareObservation"])
    env = request.made_env()()
    assert isinstance(env, gym.wrappers.TimeAwareObservation)
    assert isinstance(env.env, gym.wrappers.TransformReward)
    assert env.env.env.strength == 0.25
    env.close()
    result = run(ask(policy="random", wrappers=request.wrappers), 3, num_envs=2)
    plain = run(ask(policy="random"), 3)
    assert result.manifest["env"]["id"] == "CartPole-v1"
    added = result.manifest["env"]["added_wrappers"]
    assert [name.rpartition(".")[2] for name in added[:2]] == [
        "TimeAwareObservation({})",
        "scaled({})",
    ]
    assert added[2].endswith(".Windy({'strength': '0.25'})")
    assert [e.episode_return for e in result.episodes] == [
        2 * e.episode_return for e in plain.episodes
    ]
    assert "added_wrappers" not in plain.manifest["env"]


@pytest.mark.usefixtures("quick_children")
def test_workers_of_an_env_know_ids_that_are_registered_here_alone(ask, monkeypatch) -> None:
    spec = copy.deepcopy(gym.spec("CartPole-v1"))
    spec.name = "Registered"
    monkeypatch.setitem(gym.registry, "Registered-v1", spec)
    request = ask(
        "Registered-v1", policy="random", wrappers=["gymnasium.wrappers:TimeAwareObservation"]
    )
    env, _ = request.make()
    made = tdcollect.make_env(env.bare, 1, backend="process", num_workers=1)
    made.reset()
    made.close()


def test_the_latest_steps_of_training_are_left_out(ask) -> None:
    kwargs = {"N": 2, "dim": -1, "in_keys": ["observation"]}
    state = saved(trained(Compose(norm(reduce_batch_dims=True), CatFrames(**kwargs)), 4))
    transforms = [named("VecNormV2", reduce_batch_dims=True), named("CatFrames", **kwargs)]
    request = ask(policy="random", transforms=transforms, env_state=state)
    assert run(request, num_envs=1).digest == run(request, num_envs=3).digest


def broken(file: str) -> None:
    Path(file).write_bytes(pickle.dumps(Payload(Path("mark"))))


NORM: dict[str, Any] = {"transforms": ["@:norm"], "env_state": "norm.pt"}
REFUSED: list[tuple[Any, ...]] = [  # fields of a request, the error, and what is done before
    ({**NORM, "env_state": "none.pt"}, "the state of an env, got .*none.pt, which is no file"),
    (
        NORM,
        r"norm.pt is no state of an env \(written by torch.save\(env.state_dict\(\), file\)\): Wei",
        lambda: broken("norm.pt"),
    ),
    (
        NORM,
        "norm.pt to hold a state_dict, got list; write it by torch.save",
        lambda: torch.save([1], "norm.pt"),
    ),
    (
        NORM,
        "norm.pt to hold statistics, got an empty state_dict: the state of a SerialEnv",
        lambda: torch.save({}, "norm.pt"),
    ),
    (
        {"env_state": "norm.pt"},
        "expected transforms for .*norm.pt, as CartPole-v1 has none; name those",
        lambda: saved(trained(norm())),
    ),
    (
        NORM,
        r"transforms, VecNormV2: it lacks \['_extra_state', 'initialized'\], and they have no "
        r"\['transforms.1._extra_state', 'transforms.1.initialized'\]; name all transforms",
        lambda: saved(trained(Compose(RewardSum(), norm()))),
    ),
    (
        NORM,
        r"of 'observation' of shape \[4\] in VecNormV2, those of one slot, got \[4, 4\] from",
        lambda: saved(trained(norm(), 4)),
    ),
    (
        {"env": "@:torchrl_env", "env_state": "norm.pt"},
        "expected an env with transforms for .*norm.pt, got torchrl_env without any; name those",
        lambda: saved(trained(norm())),
    ),
    *(
        ({"transforms": [named(kind)]}, rf"{kind} has no statistics of \['observation'\] yet; pass")
        for kind in ("VecNormV2", "VecNorm", "ObservationNorm")
    ),
    ({"transforms": ["@:scaled"]}, "missing 1 required positional argument"),
    ({"transforms": ["builtins:dict"]}, "dict to give a TorchRL transform, got {}; name a class "),
    ({"wrappers": ["@:number"]}, "expected .*:number to be callable, got 3"),
    (
        {"wrappers": ["@:nothing"]},
        "nothing to give a gymnasium.Env, got None; wrappers are for",
    ),
    (
        {"env": "@:torchrl_env", "wrappers": ["@:Windy"]},
        "expected torchrl_env to give a gymnasium.Env, got GymEnv.*; wrappers are for",
    ),
    (
        {"wrappers": ["@:Windy"], "backend": "envpool"},
        "wrappers are for gymnasium envs, and backend envpool makes none; leave one out",
    ),
    ({"wrappers": [{"called": "x:y"}]}, "only call, kwargs, got 'called'"),
    ({"wrappers": [{"call": "x:y", "kwargs": [1]}]}, "kwargs to be keyword arguments"),
    ({"wrappers": ["Windy"]}, "expected module:name or path/to/file.py:name, alone"),
]


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(ask, case: tuple[Any, ...]) -> None:
    fields, message, *prepare = case
    for each in prepare:
        each()
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        run(ask(**{"policy": "random", **fields}))
    assert not Path("mark").exists()


def test_a_file_that_does_not_fit_is_refused_before_an_env_is_made(ask, monkeypatch) -> None:
    monkeypatch.setattr(gym, "make", lambda *args, **kwargs: pytest.fail("made an env"))
    state = {"initialized": torch.tensor(True), "other": torch.zeros(2)}
    torch.save(state, "norm.pt")
    with pytest.raises(
        ValueError, match=r"it lacks \['_extra_state'\], and they have no \['other'\]"
    ):
        ask(transforms=["@:norm"], env_state="norm.pt").make()


def test_replay_runs_them_again(ask, here: Path, capsys) -> None:
    """By a file that makes them, which the page asks for."""
    asked = ask(transforms=["@:norm"], env_state=saved(trained(norm())))
    file = asked.policy.partition(":")[0]
    windy: Any = {"call": f"{file}:Windy", "kwargs": {"strength": 0.2}}
    asked = replace(asked, wrappers=[windy])
    run(asked, 2, output_dir="run", request=asked)
    (here / "own_envs.py").write_text(
        "from tdcollect.evaluation import Request\n"
        f"made = Request('CartPole-v1', 'random', wrappers=[{windy}], transforms=['{file}:norm'],\n"
        f"    env_state='norm.pt', directory={str(here)!r}).made_env()\n"
    )
    words = ["evaluate", "own_envs.py:made", "--policy", asked.policy, "--episodes", "2", "--quiet"]
    assert main([*words, "--output-dir", "typed"]) == 0
    of = [tdcollect.EvaluationResult.load(name).digest for name in ("run", "typed")]
    assert of[0] == of[1]
    again = again_of({}, Path("run"), Path(), "")
    command = again.of_row("1").removeprefix("tdcollect ")
    assert " --env FILE.py:make_env " in command
    named = command.replace("DIR", "run").replace("FILE.py:make_env", "own_envs.py:made")
    assert main(shlex.split(named)) == 0
    assert "the same to the bit" in capsys.readouterr().out
    forget(here / "own_envs.py")
    torch.save(trained(norm(decay=0.9)).state_dict(), here / "norm.pt")
    assert main(shlex.split(named)) == 1
    assert "env.transforms" in capsys.readouterr().err


def forget(file: Path) -> None:
    """Forget an imported module, as in another process."""
    sys.modules.pop(file.stem, None)
    sys.path[:] = [place for place in sys.path if place not in (str(file.parent), ".")]


def test_a_module_of_another_directory_is_not_taken_for_one_of_that_name(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twins.py").write_text(
            f"def make():\n    return lambda data: {folder!r}"
        )
    (tmp_path / "two" / "torch.py").write_text("raise SystemExit")  # an installed one is meant
    one, two = (
        Request("CartPole-v1", "twins:make", directory=str(tmp_path / n)) for n in ("one", "two")
    )
    try:
        assert one.make()[1]("") == "one"
        with pytest.raises(
            ValueError, match=r"two/twins.py for the module twins, got .*one/twins.py"
        ):
            two.make()
        forget(tmp_path / "two" / "twins.py")
        assert sys.path.index(str(tmp_path / "one")) >= 0
        assert two.make()[1]("") == "two"
        assert replace(two, policy="torch.nn:Identity").make()[1]("same") == "same"
    finally:
        forget(tmp_path / "one" / "twins.py")
        forget(tmp_path / "two" / "twins.py")


def test_episodes_with_them_are_filmed(ask) -> None:
    given = {"wrappers": ["@:Windy"], "transforms": ["torchrl.envs:RewardSum"]}
    shown = {"length": 4, "render_mode": "rgb_array"}
    request = ask("@:short", policy="random", env_kwargs=shown, **given)
    result = run(request, 2, env_kwargs=shown)
    result.replay(1, "one.mp4")
    assert Path("one.mp4").stat().st_size > 0
