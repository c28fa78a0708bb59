"""Evaluations beside a training of Stable-Baselines3: theirs, and the offline ones, are oracles."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import ExplorationType

import tdcollect
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.sb3 import EvalCallback, load_policy

sb3 = pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3 (extra dev)")
sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (extra dev)")
DummyVecEnv, VecNormalize = sb3.common.vec_env.DummyVecEnv, sb3.common.vec_env.VecNormalize
callbacks = pytest.importorskip("stable_baselines3.common.callbacks")

pytestmark = pytest.mark.usefixtures("quick_children")


class Reach(gym.Env[Any, Any]):
    """A walk to a level, which an option may set; infos tell the start, the level, the success."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        np.random.rand()  # noqa: NPY002  a draw that training must not notice
        self.level = (options or {}).get("level", 2)
        self.at = self.start = float(self.np_random.uniform(-1, 1))
        self.left = 12
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.at += float(action - 1) + float(self.np_random.normal(0, 0.3))
        self.left -= 1
        there = self.at >= self.level
        info = {"is_success": there, "start": self.start, "level": float(self.level)}
        return self._observation(), -abs(self.level - self.at), there, self.left == 0, info

    def _observation(self) -> Any:
        return np.array([self.at, self.level], np.float32)


class Flat(Reach):
    """Each episode has a return of 4, whatever the policy does."""

    def step(self, action: Any) -> Any:
        observation, _, _, _, info = super().step(action)
        return observation, 1.0, self.left == 8, False, info


class Masked(Reach):
    """Its masks have so many choices; right are three."""

    def __init__(self, choices: int):
        self.choices = choices

    def action_masks(self) -> Any:
        return np.ones(self.choices, bool)


class Written(sb3.common.logger.KVWriter):
    """Keeps what is logged, without what depends on the time."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, key_values: Any, key_excluded: Any, step: int = 0) -> None:
        timed = ("time/fps", "time/time_elapsed")
        values = {name: one for name, one in key_values.items() if name not in timed}
        self.rows.append((step, values))


def train(
    callback: Any = None, algorithm: Any = sb3.PPO, env: Any = Reach, steps: int = 256
) -> SimpleNamespace:
    """Train a small model from fixed seeds; return it with all that evaluations could change."""
    venv = VecNormalize(DummyVecEnv([env, env]), clip_obs=2.0)
    policy, size = "MlpPolicy", {"n_steps": 16, "batch_size": 16}
    if algorithm is sb3_contrib.RecurrentPPO:
        policy = "MlpLstmPolicy"
    elif algorithm is sb3.DQN:
        size = {"buffer_size": 200, "learning_starts": 20, "exploration_fraction": 0.9}
    made = algorithm(policy, venv, seed=0, device="cpu", **size)
    written = Written()
    made.set_logger(sb3.common.logger.Logger(None, [written]))
    made.learn(steps, callback, log_interval=1)
    draws = (torch.rand(()).item(), np.random.rand(), random.random())  # noqa: NPY002
    return SimpleNamespace(model=made, rows=written.rows, draws=draws, venv=venv)


OPTIONS = [{"level": 1}, {"level": 2}, {"level": 3}]
METRICS = {"start": "info:start:last", "level": "info:level:last"}


def beside(folder: Path, **options: Any) -> EvalCallback:
    """A callback with all that it can write, each 32 calls."""
    options = {"n_eval_episodes": 3, "eval_freq": 32, "verbose": 0, **options}
    return EvalCallback(Reach, log_path=folder, best_model_save_path=folder / "best", **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("trained")
    callback = beside(folder, metrics=METRICS, episode_options=OPTIONS)
    saved = callbacks.CheckpointCallback(32, str(folder / "saved"), save_vecnormalize=True)
    found = train([callback, saved])
    return SimpleNamespace(**vars(found), callback=callback, folder=folder)


def test_training_is_the_same_to_the_bit_as_without(trained: SimpleNamespace) -> None:
    plain = train()
    for ours, theirs in zip(
        trained.model.policy.parameters(), plain.model.policy.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert trained.draws == plain.draws
    assert (trained.venv.obs_rms.mean == plain.venv.obs_rms.mean).all()
    # What training logs is as without, too.
    own = [(s, row) for s, row in trained.rows if not any(n.startswith("eval/") for n in row)]
    assert own == plain.rows


def test_each_point_is_that_of_the_model_at_its_step(trained: SimpleNamespace) -> None:
    """And what their users asked for: equal starts (their issues 1331, 1480, 1765), metrics from
    infos (410), and reset options that stay (783)."""
    env = tdcollect.make_env(Reach)
    points = trained.callback.evaluator.curve
    assert [point.step for point in points] == [64, 128, 192, 256]
    means, starts = [], []
    for point in points:
        saved = trained.folder / "saved"
        policy = load_policy(
            saved / f"rl_model_{point.step}_steps.zip",
            env,
            normalization=saved / f"rl_model_vecnormalize_{point.step}_steps.pkl",
        )
        options: Any = {"episode_options": OPTIONS, "metrics": METRICS, "progress": False}
        result = tdcollect.evaluate(Reach, policy, 3, **options)
        assert result.digest == point.digest
        means.append(result.returns.mean())
        assert result.metrics["level"].tolist() == [1, 2, 3]
        starts.append(result.metrics["start"].tolist())
    assert starts == [starts[0]] * 4  # the same in every evaluation
    assert len({*starts[0]}) == 3
    assert trained.callback.best_mean_reward == max(means)
    best = trained.folder / "best"
    policy = load_policy(
        best / "best_model.zip", env, normalization=best / "best_model_vecnormalize.pkl"
    )
    found = tdcollect.evaluate(Reach, policy, 3, episode_options=OPTIONS, progress=False)
    assert found.returns.mean() == max(means)


def test_results_are_logged_and_written_under_the_names_of_theirs(
    trained: SimpleNamespace,
) -> None:
    logged = {s: row for s, row in trained.rows if "eval/mean_reward" in row}
    there = np.load(trained.folder / "evaluations.npz")
    assert there["timesteps"].tolist() == [*logged] == [64, 128, 192, 256]
    for i, (step, row) in enumerate(logged.items()):
        result = EvaluationResult.load(trained.folder / "evaluations" / f"step-{step:09d}")
        assert row == {
            "eval/mean_reward": result.returns.mean(),
            "eval/mean_ep_length": result.lengths.mean(),
            "eval/success_rate": result.summary().success.rate,
            "eval/metrics/start": pytest.approx(result.metrics["start"].mean()),
            "eval/metrics/level": 2,
            "time/total_timesteps": step,
        }
        assert there["results"][i].tolist() == result.returns.tolist()
        assert there["ep_lengths"][i].tolist() == result.lengths.tolist()
        assert there["successes"][i].tolist() == [e.success for e in result.episodes]
    assert trained.callback.last_result.digest == trained.callback.evaluator.curve[-1].digest


def test_another_process_goes_on_with_the_curve_and_the_best(
    trained: SimpleNamespace, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    before = (folder / "best" / "best_model.zip").read_bytes()
    again = beside(folder, metrics=METRICS, episode_options=OPTIONS)
    trained.model.learn(64, again, reset_num_timesteps=False)
    assert np.load(folder / "evaluations.npz")["timesteps"].tolist() == [64, 128, 192, 256, 320]
    assert again.best_mean_reward == max(again.best_mean_reward, trained.callback.best_mean_reward)
    is_better = again.last_mean_reward > trained.callback.best_mean_reward
    assert ((folder / "best" / "best_model.zip").read_bytes() != before) == is_better


def stopped_at(callback: Any) -> int:
    return train(callback, env=Flat, steps=160).model.num_timesteps


@pytest.mark.parametrize(
    ("on_best", "stop"),
    [
        (True, lambda: callbacks.StopTrainingOnRewardThreshold(4)),
        (False, lambda: callbacks.StopTrainingOnNoModelImprovement(0)),
    ],
)
def test_callbacks_stop_the_training_as_with_theirs(on_best: bool, stop: Any) -> None:
    where = "callback_on_new_best" if on_best else "callback_after_eval"
    options: Any = {"n_eval_episodes": 2, "eval_freq": 8, "verbose": 0}
    flat = VecNormalize(DummyVecEnv([Flat]), training=False, norm_reward=False)
    theirs = stopped_at(callbacks.EvalCallback(flat, **{where: stop()}, **options))
    assert stopped_at(EvalCallback(Flat, **{where: stop()}, **options)) == theirs
    # Without waiting, one evaluation later, at the same step in every run.
    assert stopped_at(EvalCallback(Flat, **{where: stop()}, **options, wait=False)) == theirs + 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (sb3.DQN, {"deterministic": False}),
        (sb3_contrib.RecurrentPPO, {}),
        (sb3_contrib.RecurrentPPO, {"deterministic": False, "workers": 2}),
        (sb3.PPO, {"wait": True}),
    ],
)
def test_other_algorithms_beside_training(algorithm: Any, options: Any, tmp_path: Path) -> None:
    callback = beside(tmp_path, **options)
    saved = callbacks.CheckpointCallback(32, str(tmp_path / "saved"), save_vecnormalize=True)
    found, plain = train([callback, saved], algorithm), train(None, algorithm)
    for ours, theirs in zip(
        found.model.policy.parameters(), plain.model.policy.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert found.draws == plain.draws
    kinds = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC
    kind = kinds[options.get("deterministic", True)]
    for point in callback.evaluator.curve:
        policy = load_policy(
            tmp_path / "saved" / f"rl_model_{point.step}_steps.zip",
            tdcollect.make_env(Reach),
            normalization=tmp_path / "saved" / f"rl_model_vecnormalize_{point.step}_steps.pkl",
        )
        result = tdcollect.evaluate(Reach, policy, 3, exploration_type=kind, progress=False)
        assert result.digest == point.digest


def test_an_evaluation_that_fails_ends_the_training_with_its_error() -> None:
    callback = EvalCallback(lambda: Masked(2), n_eval_episodes=2, eval_freq=8, verbose=0)
    with pytest.raises(ValueError, match="slot 0 to give 3 values"):
        train(callback, sb3_contrib.MaskablePPO, lambda: Masked(3))
    with pytest.raises(RuntimeError, match="is shut down"):
        callback.evaluator.evaluate()
    callback = EvalCallback("CartPole-v1", eval_freq=8)
    with pytest.raises(ValueError, match="the observation space that the model was trained on"):
        train(callback)
    assert callback.evaluator is None


def test_arguments_that_cannot_be_honoured_are_refused() -> None:
    from stable_baselines3.common.env_util import make_vec_env

    for env in (gym.make("CartPole-v1"), make_vec_env("CartPole-v1", 2)):
        with pytest.raises(TypeError, match="pass the id, or a function that makes one env"):
            EvalCallback(env)
    with pytest.raises(ValueError, match=r"expected render=False: .* film them afterwards"):
        EvalCallback(Reach, render=True)
    with pytest.raises(TypeError, match="expected no num_trajectories: n_eval_episodes decides"):
        EvalCallback(Reach, num_trajectories=3)
    with pytest.raises(TypeError, match="got sed; did you mean seed"):
        EvalCallback(Reach, sed=3)
    for how in ({"n_eval_episodes": 0}, {"eval_freq": "x"}, {"wait": "no"}):
        with pytest.raises((TypeError, ValueError), match=f"expected {next(iter(how))} to be a"):
            EvalCallback(Reach, **how)
    with pytest.raises(TypeError, match=r"expected callbacks, such as ConvertCallback\(f\), got"):
        EvalCallback(Reach, callback_after_eval=lambda: True)  # type: ignore[arg-type]
