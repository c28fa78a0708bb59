"""What decides an episode is tried: by a witness, and by an episode that runs again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal

import tdcollect
from tdcollect import make_env
from tdcollect.collect.episodes import Start
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.data import Finished, first_difference, sketch
from tdcollect.evaluation.episodes.trial import Again, Feed, Trial
from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.step_files import Journal, read_block, read_steps, read_witness
from tdcollect.policies import from_function
from tdcollect.randomness import NotReproducibleError

from .envs import Failing, Walk
from .ledgers import contents, unfinished
from .policies import deterministic

pytestmark = pytest.mark.usefixtures("small_reports")

quiet = partial(tdcollect.evaluate, progress=False)
Box = gym.spaces.Box(-1, 1, (2,), np.float32)
walk: Any = partial(Walk, Box)


def actor(kind: Any = TanhNormal, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    module = TensorDictModule(net, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        module, ["loc", "scale"], distribution_class=kind, distribution_kwargs=kwargs
    )


class Gain:
    def __init__(self, gain: float):
        self.gains = [np.array(gain)]

    def __call__(self, observation: Any) -> Any:
        return np.tanh(self.gains[0] * observation[:2])


def limited(steps: int) -> Any:
    return TransformedEnv(tdcollect.make_env(walk), T.StepCounter(steps))


PAIRS: dict[str, list[tuple[Any, Any]]] = {
    "a distribution's arguments": [(walk, actor(low=-b, high=b)) for b in (1.0, 0.3)],
    "a distribution's class": [(walk, actor(kind)) for kind in (TanhNormal, IndependentNormal)],
    "an array that a function holds": [(walk, from_function(Gain(g))) for g in (1.0, 5.0)],
    "arguments of an env": [
        (partial(Walk, Box, longest), from_function(Gain(1.0))) for longest in (12, 9)
    ],
    "settings of a transform": [(partial(limited, n), from_function(Gain(1.0))) for n in (6, 3)],
}


@pytest.mark.parametrize("name", PAIRS)
def test_unlike_policies_and_envs_are_not_taken_for_one(name: str, tmp_path: Path) -> None:
    one, other = PAIRS[name]
    parts = [tmp_path / "0", tmp_path / "1"]
    for place, (env, policy) in enumerate((one, other)):
        quiet(env, policy, 4, output_dir=parts[place], shard=(place, 2))
    with pytest.raises(ValueError, match=r"episode 0, which each of them ran, is not .*: at step"):
        tdcollect.merge(parts, tmp_path / "merged")
    finished = quiet(*one, 4, output_dir=tmp_path / "out")
    assert finished.witness is not None
    for lines in (None, 2):  # finished, and interrupted
        if lines is not None:
            unfinished(tmp_path / "out", lines)
        before = contents(tmp_path / "out")
        with pytest.raises(ValueError, match="holds an evaluation of another policy or env: ep"):
            quiet(*other, 4, output_dir=tmp_path / "out")
        assert contents(tmp_path / "out") == before
    assert quiet(*one, 4, output_dir=tmp_path / "out").digest == finished.digest
    result = quiet(*other, 4, output_dir=tmp_path / "out", recheck=False)  # none runs
    assert result.digest == finished.digest


def test_the_witness_is_the_first_listed_that_completes(tmp_path: Path) -> None:
    how = {"env_seeds": [3, 1, 2, 5], "max_restarts": 0}
    failing = partial(Failing, seeds=(3,))
    result = quiet(failing, deterministic(), [2, 0, 1, 3], output_dir=tmp_path / "out", **how)
    assert result.witness is not None
    assert result.witness.record == result.record(2)
    result = quiet(failing, deterministic(), 4, output_dir=tmp_path / "other", **how)
    assert result.witness is not None
    assert result.witness.record == result.record(1)  # the first one fails
    nothing = quiet(failing, deterministic(), 1, output_dir=tmp_path / "none", **how)
    assert nothing.witness is None
    assert json.loads((tmp_path / "none" / "results.json").read_text())["witness"] is None
    assert tdcollect.verify(tmp_path / "none").passed


class OfProcess:
    """Acts otherwise in all processes but the first that acts."""

    def __init__(self, first: Path):
        self.first = first  # a file that this process makes

    def __call__(self, observation: Any) -> int:
        with contextlib.suppress(FileExistsError), self.first.open("x") as opened:
            opened.write(str(os.getpid()))
        return int(self.first.read_text() == str(os.getpid()))


@pytest.mark.usefixtures("quick_children")
def test_another_worker_runs_the_witness(tmp_path: Path) -> None:
    with pytest.raises(NotReproducibleError, match=r"is another one on worker \d .*: at step"):
        quiet(Walk, from_function(OfProcess(tmp_path / "first")), 24, num_envs=2, workers=2)


def test_across_envs_the_policy_must_be_one() -> None:
    def lean(at: int) -> Any:
        return from_function(Lean(at))

    run = partial(quiet, "CartPole-v1", episodes=8)
    other = {"env_kwargs": {"sutton_barto_reward": True}}
    compare = partial(tdcollect.compare, across_envs=True)
    compare(run(lean(2)), run(lean(2), **other))
    with pytest.raises(ValueError, match="not of one policy: for the same observations of ep"):
        compare(run(lean(2)), run(lean(3), **other))
    unseen = compare(quiet(Walk, lean(2), 4), quiet(partial(Walk, size=4), lean(2), 4))
    assert any("could not be tried" in text for text in unseen.remarks)


class Lean:
    def __init__(self, at: int):
        self.at = at

    def __call__(self, observation: Any) -> int:
        return int(observation[self.at] > 0)


# Steps


def test_steps_are_those_of_the_data(tmp_path: Path) -> None:
    def scaled() -> Any:
        env = tdcollect.make_env("Pendulum-v1", 2)
        return TransformedEnv(env, T.ClipTransform(in_keys_inv=["action"], low=-0.5, high=0.5))

    policy = TensorDictModule(
        lambda seen: (seen[:, :1], seen * 2), ["observation"], ["action", "out"]
    )
    how = {"max_episode_steps": 20, "output_dir": tmp_path, "keep_trajectories": True}
    result = quiet(scaled, policy, 3, **how)
    blocks = read_block(tmp_path / "steps" / "000000.npz")
    for index, steps in blocks.items():
        data = result.trajectory(index)
        assert steps.dtype.names == (
            *("observation/observation", "output/out", "action/action", "env_action/action"),
            "reward/reward",
        )
        seen = data["observation"].numpy()[None]
        assert steps["observation/observation"].tolist() == sketch(seen)[0].tolist()
        assert steps["action/action"].tolist() == data["action"].tolist()
        assert steps["env_action/action"].tolist() == data["action"].clamp(-0.5, 0.5).tolist()
        assert steps["reward/reward"].sum() == pytest.approx(result.record(index).episode_return)
    assert (read_steps(tmp_path, [2])[2] == blocks[2]).all()
    witness = read_witness(tmp_path)
    assert witness is not None
    assert witness.steps is not None
    assert first_difference(witness.steps, blocks[0]) is None
    quiet(scaled, policy, 3, **{**how, "output_dir": tmp_path / "without"}, keep_steps=False)
    assert not (tmp_path / "without" / "steps").exists()
    assert (tmp_path / "without" / "witness.npz").exists()


@pytest.mark.parametrize("kind", [np.float32, np.uint8, np.bool_, np.complex64, np.int64])
def test_a_sketch_depends_on_its_row_alone(kind: Any) -> None:
    rows = (np.random.default_rng(0).normal(size=(7, 9, 5, 3)) * 100).astype(kind)
    found = sketch(rows)
    for slot in range(7):
        for step in range(9):
            assert found[slot, step] == sketch(rows[slot : slot + 1, step : step + 1])[0, 0]
    assert (sketch(rows.reshape(63, 1, 5, 3))[:, 0] == found.reshape(-1)).all()


def test_a_replay_names_the_first_step_that_differs(tmp_path: Path) -> None:
    quiet(walk, from_function(Gain(1.0)), 4, output_dir=tmp_path)
    loaded = tdcollect.EvaluationResult.load(tmp_path, walk, from_function(Gain(5.0)))
    with pytest.raises(RuntimeError, match=r"The first difference, .*: at step 0, action/action"):
        loaded.replay(1)


def test_what_a_process_wrote_in_part_is_cut_off(tmp_path: Path) -> None:
    witness = quiet(Walk, deterministic(), 2).witness
    assert witness is not None
    steps: Any = witness.steps
    journal = Journal(tmp_path)
    for index in (5, 1003, 4):
        journal.add(index, steps)
    journal.close()
    file = tmp_path / "steps" / "journal"
    whole = file.read_bytes()
    for size in range(len(whole) - 1, 0, -97):
        file.write_bytes(whole[:size])
        again = Journal(tmp_path)
        assert again.read(4) is None
        again.close()
        assert whole.startswith(file.read_bytes())
    file.write_bytes(whole)
    again = Journal(tmp_path)
    again.pack([4, 5, 1003])
    assert not file.exists()
    assert [*read_block(tmp_path / "steps" / "000000.npz")] == [4, 5]
    assert (read_block(tmp_path / "steps" / "001000.npz")[1003] == steps).all()


# The trial


class Drawn(Walk):
    """Draws its problem from the entropy of the system where it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.field = np.random.default_rng().normal(size=3)

    def noise(self) -> Any:
        return super().noise() + self.field


class Sometimes(Walk):
    """Tells of success by how often it began."""

    began = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.began += 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {"is_success": self.began % 2 == 0} if info else {}


class Jitter(Walk):
    """Rewards differ below the precision of float32."""

    def step(self, action: Any) -> Any:
        shown, _, *rest = super().step(action)
        return shown, 1000.0 + 1e-6 * np.random.default_rng().random(), *rest


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("env", [Drawn, Jitter])
def test_what_no_seed_decides_is_refused(env: Callable[[], Any], slots: int) -> None:
    with pytest.raises(NotReproducibleError, match="is another one when it runs again on a new"):
        quiet(env, deterministic(), 6, num_envs=slots)


def test_success_that_depends_on_episodes_before_has_new_envs() -> None:
    results = [quiet(Sometimes, deterministic(), 12, num_envs=slots) for slots in (1, 5, 12)]
    assert {result.manifest["fresh_envs"] for result in results} == {True}
    assert len({result.digest for result in results}) == 1


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_bipedal_walkers_run_on_new_envs(slots: int) -> None:
    how = {"max_episode_steps": 60, "num_envs": slots, "seed": 3}
    found = quiet("BipedalWalker-v3", None, 12, **how)
    assert found.manifest["fresh_envs"] is True
    assert found.digest == quiet("BipedalWalker-v3", None, 12, **how, fresh_envs=True).digest


class Late(Feed):
    """Asks for episode 0 once more as all have ended, after so many slots were told of nothing."""

    def __init__(self, episodes: int, refused: int):
        super().__init__(range(episodes))
        self.late: list[Again | None] | None = None
        self.refused = refused

    def __next__(self) -> int | Again:
        if self.late is None:
            return super().__next__()
        item = self.late.pop(0) if self.late else None
        if item is None:
            raise StopIteration
        return item

    def goes_on(self) -> bool:
        if self.late is not None:
            return False
        self.late = [*[None] * self.refused, Again(0)]
        return True


@pytest.mark.parametrize("refused", range(3))
def test_an_episode_that_comes_too_late_for_the_most_used_slot_waits_for_it(refused: int) -> None:
    with EvaluationCollector(lambda: make_env("CartPole-v1", 3), None, 12) as running:
        ended = [*running.run(feed=Late(12, refused))]
    assert [one.record.index for one in ended if one.again] == [0]
    assert len(ended) == 13


@pytest.mark.parametrize("ended", [False, True])
def test_episodes_that_were_to_run_again_do_so_in_new_envs_too(ended: bool) -> None:
    """An env that is found to draw from global generators starts over: nothing is forgotten."""
    trial = Trial(3, True, None)
    trial.begin(Feed([5, Again(0), Again(1)]), lambda index: Start(index, None, index), None)
    for slot, index in enumerate((5, 0)):
        start = trial.start(slot, 0)
        assert start is not None
        assert start.index == index
    if ended:  # in the very step that shows the draws: it does not count
        trial.take(Finished(Episode(0, 0, None, "completed"), None), start.traj_id)
    trial.start_over()
    again = [trial.start(slot, 0) for slot in range(3)]
    assert [start and start.index for start in again] == [5, 0, 1]
    assert [start.traj_id for start in again if start] == [5, *trial.runs_again]
