"""Evaluations beside a training of Stable-Baselines3."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, EventCallback
from torchrl.envs.utils import ExplorationType

from tdcollect import check
from tdcollect.cleanup import ended_on_error
from tdcollect.evaluation.curve import step_name, value_of
from tdcollect.evaluation.evaluator import SETTINGS, Evaluator
from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.requested import check_env, one_slot
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.sb3.model import load_policy, refresh
from tdcollect.files import write_atomically
from tdcollect.randomness import global_states_kept


class PendingResult(NamedTuple):
    """An evaluation of a model on its way, with the files of the model as it was at the call."""

    step: int
    result: Future[EvaluationResult]
    files: dict[str, bytes]


_INSTEAD = {
    "num_trajectories": "n_eval_episodes",
    "exploration_type": "deterministic",
    "output_dir": "log_path",
    "policy": "the model that learns",
    "busy_policy": "wait",
    "best": "callback_on_new_best",
    "on_result": "callback_after_eval",
    "log_prefix": "metrics",
}
"""Arguments of the Evaluator that the callback sets, and what decides instead."""


class EvalCallback(EventCallback):
    """Runs numbered test episodes beside the training of a model of Stable-Baselines3.

    It takes the place of their ``EvalCallback``, with its arguments. Each evaluation has the same
    episodes, in a process of its own, with the weights and the statistics of ``VecNormalize`` that
    the model has at the call. The training is the same to the bit as without it.

    Results arrive while training goes on; they are logged under the step of their call. At the end
    of ``learn`` all are there.

    Args:
        eval_env: a gymnasium id, or a function that makes one env, with its wrappers but without
            any ``VecEnv``; as for :class:`tdcollect.Evaluator`.
        callback_on_new_best: called when a mean return is the best so far.
        callback_after_eval: called after each evaluation.
        n_eval_episodes: the number of episodes.
        eval_freq: evaluate at each such call of this callback.
        log_path: a folder for ``evaluations.npz``, as theirs, and for ``evaluations/``, the output
            directory of the evaluator: curve, reports, ledgers. The same arguments go on there.
        best_model_save_path: a folder for ``best_model.zip``, the model at the call whose result
            was best, and for ``best_model_vecnormalize.pkl``, if it has a ``VecNormalize``.
        deterministic: take the most likely action rather than a drawn one.
        render: False; film episodes afterwards.
        verbose: 1 prints the results.
        warn: without effect: returns are those of the env, with and without a ``Monitor``.
        wait: wait for each result before training goes on. None: only if there is one of the
            callbacks, so that ``self.model`` is the model evaluated, as with theirs. False: they
            are called at the next evaluation, or at the end of training: at the same step in
            every run, beside a model that has learnt further.
        evaluator: further arguments of :class:`tdcollect.Evaluator`: ``seed``, ``metrics``,
            ``episode_options``, ``max_steps``, ``workers``...

    Attributes:
        evaluator: the evaluator of the training that runs, or ran last.
        last_result: the latest result that has arrived.
        best_mean_reward: the best mean return; ``last_mean_reward`` is the latest one.

    Raises:
        ModuleNotFoundError: without Stable-Baselines3.
        TypeError, ValueError: for an argument that cannot be honoured; as training starts, for an
            env of other spaces than the model's.

    Examples:
        >>> callback = EvalCallback("CartPole-v1", eval_freq=5000, log_path="runs/ppo", seed=1)
        >>> PPO("MlpPolicy", "CartPole-v1").learn(50_000, callback)
    """

    def __init__(
        self,
        eval_env: Any,
        callback_on_new_best: BaseCallback | None = None,
        callback_after_eval: BaseCallback | None = None,
        n_eval_episodes: int = 5,
        eval_freq: int = 10_000,
        log_path: str | os.PathLike[str] | None = None,
        best_model_save_path: str | os.PathLike[str] | None = None,
        deterministic: bool = True,
        render: bool = False,
        verbose: int = 1,
        warn: bool = True,
        *,
        wait: bool | None = None,
        **evaluator: Any,
    ):
        callbacks = (callback_on_new_best, callback_after_eval)
        if not all(isinstance(one, BaseCallback | None) for one in callbacks):
            raise TypeError(f"expected callbacks, such as ConvertCallback(f), got {callbacks}")
        check_env(
            eval_env,
            "each test episode has an env by itself, in another process: pass the id, or a "
            "function that makes one env as in training, with wrappers in the place of those of "
            "VecEnvs. VecNormalize is left out: its statistics are those of the training env",
        )
        check.positive_int(n_eval_episodes=n_eval_episodes)
        check.count(eval_freq=eval_freq)
        check.bools(deterministic=deterministic, wait=False if wait is None else wait)
        if render:
            raise ValueError(
                "expected render=False: episodes run in another process; film them afterwards, "
                "callback.last_result.film('worst:1') with log_path=, or tdcollect replay --film"
            )
        for name in evaluator.keys() & _INSTEAD.keys():
            raise TypeError(f"expected no {name}: {_INSTEAD[name]} decides here; leave it out")
        check.arguments(Evaluator, evaluator, [*SETTINGS])
        super().__init__(callback_after_eval, verbose=verbose)
        self.eval_env, self.callback_on_new_best = eval_env, callback_on_new_best
        if callback_on_new_best is not None:
            callback_on_new_best.parent = self
        self.eval_freq, self.n_eval_episodes = eval_freq, n_eval_episodes
        self.log_path = None if log_path is None else Path(os.path.abspath(log_path), "evaluations")
        self.best_model_save_path = best_model_save_path
        self.deterministic = deterministic
        self._has_callbacks = any(one is not None for one in callbacks)
        self._wait = self._has_callbacks if wait is None else wait
        self._options = evaluator
        self._asked: deque[PendingResult] = deque()
        self.evaluator: Evaluator | None = None
        self.last_result: EvaluationResult | None = None
        self.best_mean_reward = self.last_mean_reward = -math.inf
        self.evaluations_timesteps: list[int] = []
        self.evaluations_results: list[list[Any]] = []
        self.evaluations_length: list[list[Any]] = []
        self.evaluations_successes: list[list[bool]] = []

    def _init_callback(self) -> None:
        if self.evaluator is not None:  # of a training that an error ended
            self.evaluator.shutdown()
            self._asked.clear()
        kwargs = self._options.get("env_kwargs")
        # The env may draw as it is made.
        with global_states_kept(), one_slot(self.eval_env, kwargs, None) as env:
            self._policy = load_policy(self.model, env)
        kinds = (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC)
        self.evaluator = Evaluator(
            self.eval_env,
            self._policy,
            num_trajectories=self.n_eval_episodes,
            exploration_type=kinds[self.deterministic],
            output_dir=self.log_path,
            **self._options,
        )
        if self.log_path is not None and not self.evaluations_timesteps:  # an earlier process's
            for point in self.evaluator.curve:
                there = EvaluationResult.load(self.log_path / step_name(point.step))
                self._remember(point.step, there.episodes)
                self.best_mean_reward = max(self.best_mean_reward, value_of(point, "mean"))
        if self.callback_on_new_best is not None:
            self.callback_on_new_best.init_callback(self.model)

    def _on_step(self) -> bool:
        is_due = self.eval_freq > 0 and self.n_calls % self.eval_freq == 0
        goes_on = self._take(wait=is_due and self._has_callbacks)
        if is_due and goes_on:
            self._ask()
            goes_on = not self._wait or self._take(wait=True)
        return goes_on

    def _on_training_end(self) -> None:
        assert self.evaluator is not None
        with self.evaluator:
            self._take(wait=True)

    def _ask(self) -> None:
        assert self.evaluator is not None
        files = {}
        if self.best_model_save_path is not None:
            saved = io.BytesIO()
            self.model.save(saved)
            files["best_model.zip"] = saved.getvalue()
            if (normalization := self.model.get_vec_normalize_env()) is not None:
                files["best_model_vecnormalize.pkl"] = pickle.dumps(normalization)
        refresh(self._policy, self.model)
        result = self.evaluator.submit(step=self.num_timesteps)
        self._asked.append(PendingResult(self.num_timesteps, result, files))

    def _take(self, wait: bool) -> bool:
        """Take results: all that are asked for, or those that have arrived.

        Callbacks may act on the training, so theirs are never taken whenever they arrive. False if
        one of them stops it.
        """
        assert self.evaluator is not None
        goes_on = True
        while self._asked and (wait or (not self._has_callbacks and self._asked[0].result.done())):
            pending = self._asked.popleft()
            with ended_on_error(self.evaluator.shutdown):
                result = pending.result.result()
            goes_on = self._note(pending, result) and goes_on
        return goes_on

    def _note(self, pending: PendingResult, result: EvaluationResult) -> bool:
        """Log a result, and keep the best model; returns False if a callback stops the training."""
        self.last_result = result
        of = (result.returns, result.lengths)
        mean, length = (float(each.mean()) if len(each) else math.nan for each in of)
        self.last_mean_reward = mean
        values = {"eval/mean_reward": mean, "eval/mean_ep_length": length}
        for name, of_episodes in result.metrics.items():
            if not np.isnan(of_episodes).all():
                values[f"eval/metrics/{name}"] = float(np.nanmean(of_episodes))
        said = [e.success for e in result.episodes if e.success is not None or not e.completed]
        if any(one is not None for one in said):  # an episode that failed is no success
            values["eval/success_rate"] = sum(map(bool, said)) / len(said)
        if self.verbose >= 1:
            shown = ", ".join(f"{name.partition('/')[2]} {one:.6g}" for name, one in values.items())
            print(f"Evaluation at step {pending.step}: {shown}")
        logger = copy.copy(self.logger)  # what training has recorded so far is for its own dump
        logger.name_to_value, logger.name_to_count, logger.name_to_excluded = {}, {}, {}
        for name, value in values.items():
            logger.record(name, value)
        logger.record("time/total_timesteps", pending.step, exclude="tensorboard")
        logger.dump(pending.step)
        self._write(pending.step, result.episodes)
        goes_on = True
        if mean > self.best_mean_reward:
            self.best_mean_reward = mean
            for name, data in pending.files.items():
                write_atomically(Path(str(self.best_model_save_path), name), data)
            if self.callback_on_new_best is not None:
                goes_on = self.callback_on_new_best.on_step()
        return goes_on and self._on_event()

    def _write(self, step: int, episodes: Sequence[Episode]) -> None:
        """Write the results so far as theirs does; NaN for episodes that did not complete."""
        self._remember(step, episodes)
        if self.log_path is None:
            return
        columns: dict[str, Any] = {
            "timesteps": self.evaluations_timesteps,
            "results": self.evaluations_results,
            "ep_lengths": self.evaluations_length,
        }
        if self.evaluations_successes:
            columns["successes"] = self.evaluations_successes
        path = self.log_path.with_name("evaluations.npz")
        write_atomically(path, lambda file: np.savez(file, **columns))

    def _remember(self, step: int, episodes: Sequence[Episode]) -> None:
        ended = [(e.episode_return, e.length) if e.completed else 2 * (math.nan,) for e in episodes]
        self.evaluations_timesteps.append(step)
        self.evaluations_results.append([total for total, _ in ended])
        self.evaluations_length.append([length for _, length in ended])
        if any(e.success is not None for e in episodes):
            self.evaluations_successes.append([bool(e.success) for e in episodes])
