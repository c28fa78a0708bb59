"""Exports: Stable-Baselines3's own files, a pandas DataFrame."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from tdcollect.evaluation import export, to_pandas

from .ledgers import ledger

# Stable-Baselines3


class SuccessWhenLong(gym.Wrapper):
    """CartPole that reports success if an episode lasts more than 20 steps."""

    def reset(self, **kwargs):
        self.steps = 0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        if terminated or truncated:
            info = info | {"is_success": self.steps > 20}
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("with_success", [False, True])
def test_arrays_are_those_that_sb3s_callback_writes(tmp_path: Path, with_success: bool) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    callbacks = pytest.importorskip("stable_baselines3.common.callbacks")
    monitor = pytest.importorskip("stable_baselines3.common.monitor")

    def make_env() -> gym.Env:
        env = gym.make("CartPole-v1")
        return monitor.Monitor(SuccessWhenLong(env) if with_success else env)

    callback = callbacks.EvalCallback(
        make_env(), n_eval_episodes=4, eval_freq=16, log_path=str(tmp_path / "sb3"), verbose=0
    )
    model = sb3.PPO("MlpPolicy", make_env(), n_steps=16, batch_size=16, seed=0, device="cpu")
    model.learn(32, callback=callback)
    expected = dict(np.load(tmp_path / "sb3" / "evaluations.npz"))
    assert ("successes" in expected) == with_success

    evaluations = {}
    for row, steps in enumerate(expected["timesteps"].tolist()):
        success = dict(enumerate(expected["successes"][row].tolist())) if with_success else None
        records = ledger(expected["results"][row], success=success)
        lengths = expected["ep_lengths"][row].tolist()
        evaluations[steps] = [replace(e, length=lengths[e.index]) for e in records]
    written = export(evaluations, "npz", tmp_path / "ours" / "evaluations.npz")

    found = dict(np.load(written))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_evaluations_are_written_by_training_steps_and_episodes_by_index(tmp_path: Path) -> None:
    early, late = ledger([1.0, 2.0]), ledger([3.0, 4.0])
    found = np.load(export({100: late[::-1], 0: early}, "npz", tmp_path / "e.npz"))
    assert found["timesteps"].tolist() == [0, 100]
    assert found["results"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_the_same_ledger_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (export({0: ledger([1.0, 2.0])}, "npz", tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_successes_are_left_out_where_the_env_did_not_say_of_every_episode(tmp_path: Path) -> None:
    records = ledger([1.0, 2.0], success={0: True})
    assert "successes" not in np.load(export({0: records}, "npz", tmp_path / "e.npz"))


def test_zero_episodes_give_empty_arrays(tmp_path: Path) -> None:
    found = np.load(export({0: []}, "npz", tmp_path / "e.npz"))
    assert found["results"].shape == found["ep_lengths"].shape == (1, 0)


def test_evaluations_of_different_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the same number of episodes .* by step, {0: 1, 9: 2}"):
        export({0: ledger([1.0]), 9: ledger([1.0, 2.0])}, "npz", tmp_path / "e.npz")


# Failed episodes, which the format cannot hold


def test_failed_episodes_are_refused_unless_they_are_to_be_dropped(tmp_path) -> None:
    records = ledger([1.0, 2.0, 3.0], failed=[1])
    with pytest.raises(ValueError, match=r"got 1 failed of 3 at step 5: pass drop_failed=True"):
        export({5: records}, "npz", tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert export({5: records}, "npz", tmp_path / "file", drop_failed=True).exists()


def test_no_evaluation_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"at least one evaluation, as \{0: episodes\}, got none"):
        export({}, "npz", tmp_path / "file")


# pandas


def test_a_frame_has_a_row_an_episode_and_the_ledgers_keys() -> None:
    pytest.importorskip("pandas")
    records = ledger([1.5, 2.0, 2.5], failed=[1], success={0: True, 2: False})
    frame = to_pandas(records[::-1])
    assert frame.index.tolist() == [0, 1, 2]
    assert ["index", *frame.columns] == list(json.loads(records[0].to_json()))
    assert frame["return"].mean() == 2.0
    assert frame["length"].tolist()[::2] == [10, 12]
    assert frame["success"].tolist()[::2] == [True, False]
    assert frame.loc[1, ["return", "length", "terminated", "success", "digest"]].isna().all()
    assert frame["policy_seed"].tolist() == [e.policy_seed for e in records]


def test_the_columns_of_an_empty_frame_have_their_dtypes() -> None:
    pytest.importorskip("pandas")
    assert to_pandas([]).dtypes.equals(to_pandas(ledger([1.0])).dtypes)


def test_seeds_of_any_size_fit_in_a_frame() -> None:
    pytest.importorskip("pandas")
    (record,) = ledger([1.0])
    assert to_pandas([replace(record, env_seed=2**70)]).loc[0, "env_seed"] == 2**70


def test_missing_pandas_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="to_pandas needs the pandas package: pip inst"):
        to_pandas([])
