"""Models of Stable-Baselines3 as policies to evaluate, and evaluations beside their training."""

from __future__ import annotations

import copy
import inspect
import io
import math
import os
import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, exploration_type

from tdcollect import check
from tdcollect.cleanup import ended_on_error
from tdcollect.evaluation.curve import step_name, value_of
from tdcollect.evaluation.episodes.agents import OnSpaces
from tdcollect.evaluation.episodes.opening import check_env
from tdcollect.evaluation.episodes.policy import ACTION_MASKS, check_masks, choices_of
from tdcollect.evaluation.evaluator import Evaluator
from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.requested import one_slot
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import check_names
from tdcollect.files import write_atomically
from tdcollect.packages import extra_module
from tdcollect.policies import AgentPolicy, from_agent
from tdcollect.randomness import global_states, set_global_states

try:
    from stable_baselines3.common.callbacks import BaseCallback, EventCallback
except ModuleNotFoundError:  # making an EvalCallback says what to install
    EventCallback = object  # type: ignore[assignment, misc]


def load_policy(
    model: str | os.PathLike[str] | Any,
    env: EnvBase,
    *,
    normalization: str | os.PathLike[str] | Any = None,
) -> SB3Policy | AgentPolicy:
    """Return a model of Stable-Baselines3 as a policy for :func:`tdcollect.evaluate`.

    Its actions are those of ``model.predict(observation, deterministic=...)``: deterministic for
    every exploration type but ``RANDOM``.

    Args:
        model: a file that ``model.save`` wrote, of PPO, A2C, DQN, SAC, TD3, DDPG, of sb3-contrib's
            MaskablePPO, RecurrentPPO, QRDQN, TQC, TRPO, ARS, CrossQ, or of another algorithm whose
            policy acts on the observation alone; or a model.
        env: of :func:`tdcollect.make_env`, bare or under transforms; for its spaces and keys.
        normalization: the ``VecNormalize`` that the model was trained under, or the file that its
            ``save`` wrote. Its statistics stay as they are.

    Raises:
        ModuleNotFoundError: without Stable-Baselines3.
        FileNotFoundError: if there is no such file.
        ValueError: for a model of other spaces than the env's; for one that takes masks, and an
            env without ``action_masks()`` or not of backend ``"serial"``.

    Note:
        Stable-Baselines3's files hold pickled objects: load only files that you trust.

    Examples:
        >>> env = tdcollect.make_env("CartPole-v1", num_envs=16)
        >>> result = tdcollect.evaluate(env, load_policy("ppo.zip", env), episodes=100)
    """
    extra_module("stable_baselines3", "a model of Stable-Baselines3")
    file = model
    if not isinstance(model, (str, os.PathLike)):
        file = io.BytesIO()
        model.save(file)  # a copy, which later training leaves as it is
        file.seek(0)
    elif not Path(model).is_file():
        raise FileNotFoundError(
            f"expected a model of Stable-Baselines3, got {model}, which is no file"
        )
    policy, settings = _read(file)
    if isinstance(normalization, (str, os.PathLike)):
        normalization = _read_normalization(Path(normalization))
    on = OnSpaces(env)
    _check_spaces(policy, on.observation.space, on.action.space)
    if hasattr(policy, "lstm_actor"):
        # Statistics have names here, so that the manifest has their digest.
        make = partial(RecurrentAgent, policy, _frozen(normalization), **_statistics(normalization))
        return from_agent(make)
    # The share of random actions that DQN's and QRDQN's ``predict`` draws; others have none.
    epsilon = float(settings.get("exploration_rate", 0.0))
    return SB3Policy(policy, env, normalization, epsilon)


class RecurrentAgent:
    """A model with a hidden state, in one episode."""

    def __init__(
        self, policy: Any, normalization: Normalization | None, **statistics: torch.Tensor
    ):
        self._policy, self._normalization, self._statistics = policy, normalization, statistics

    def reset(self) -> None:
        """Begin an episode."""
        self._state: Any = None

    def select_action(self, observation: Any) -> Any:
        """Return the action at an observation, as ``predict`` does with the state so far."""
        if self._normalization is not None:
            observation = self._normalization(observation, self._statistics)
        begins = np.array([self._state is None])
        action, self._state = self._policy.predict(
            observation, self._state, begins, deterministic=not _explores(self._policy)
        )
        return action


class SB3Policy(TensorDictModuleBase):
    """Reads observations and writes actions, as the env's specs have them.

    Attributes:
        mask_size: the number of choices that masks tell apart; None for a model without masks.
            An evaluation then adds the env's masks under ``"action_masks"``.
    """

    def __init__(self, policy: Any, env: EnvBase, normalization: Any = None, epsilon: float = 0.0):
        super().__init__()
        self._on = OnSpaces(env)
        self.in_keys = [*self._on.in_keys]
        self.mask_size: int | None = None
        if ACTION_MASKS in inspect.signature(policy.predict).parameters:
            check_masks(env)
            self.mask_size = int(choices_of(policy.action_space).sum())
            self.in_keys.append(ACTION_MASKS)
        self.out_keys = self._on.out_keys
        # Parameters and statistics are part of this module: a manifest holds their digest, and an
        # Evaluator sends them like weights.
        self.policy = policy
        self.eval()  # as `predict` has it
        self._normalization = _frozen(normalization)
        for name, value in _statistics(normalization).items():
            self.register_buffer(name, value)
        self.register_buffer("exploration_rate", torch.tensor(epsilon))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the actions for observations ``[B, ...]``."""
        explores = _explores(self.policy)
        observation = self._on.observation.read(self._on.observed(tensordict))
        if self._normalization is not None:
            statistics = dict(self.named_buffers(recurse=False))
            observation = self._normalization(observation, statistics)
        options: dict[str, Any] = {"deterministic": not explores}
        if self.mask_size is not None:
            options["action_masks"] = tensordict.get(ACTION_MASKS).cpu().numpy()
        action, _ = self.policy.predict(observation, **options)
        if explores and (epsilon := float(self.get_buffer("exploration_rate"))):
            action = self._explored(action, epsilon)
        device = tensordict.get(self.in_keys[0]).device
        for key, entry in self._on.encoded(action, len(action)).items():
            tensordict.set(key, entry.to(device))
        return tensordict

    def _explored(self, action: Any, epsilon: float) -> Any:
        """Replace each action by a random one with a chance of epsilon, as DQN and QRDQN do."""
        rows = (len(action),)
        instead = torch.rand(rows) < epsilon
        drawn = torch.randint(int(self._on.action.space.n), rows)  # type: ignore[attr-defined]
        return np.where(instead.numpy(), drawn.numpy() + self._on.action.space.start, action)  # type: ignore[attr-defined]


class Asked(NamedTuple):
    """An evaluation of a model on its way, with the files of the model as it was at the call."""

    step: int
    result: Future[EvaluationResult]
    files: dict[str, bytes]


_INSTEAD = {
    "num_trajectories": "n_eval_episodes",
    "exploration_type": "deterministic",
    "output_dir": "log_path",
    "policy": "the model that learns",
    "policy_factory": "the model that learns",
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
            ``episode_options``, ``max_steps``, ``workers``, ``report_episodes``...

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
        extra_module("stable_baselines3", "tdcollect.evaluation.sb3.EvalCallback")
        super().__init__(callback_after_eval, verbose=verbose)
        check_env(
            eval_env,
            "each test episode has an env by itself, in another process: pass the id, or a "
            "function that makes one env as in training, with wrappers in the place of those of "
            "VecEnvs. VecNormalize is left out: its statistics are those of the training env",
        )
        check.positive_int(n_eval_episodes=n_eval_episodes)
        if render:
            raise ValueError(
                "expected render=False: episodes run in another process; film them afterwards, "
                "callback.last_result.film('worst:1') with log_path=, or tdcollect replay --film"
            )
        for name in evaluator.keys() & _INSTEAD.keys():
            raise TypeError(f"expected no {name}: {_INSTEAD[name]} decides here; leave it out")
        check_names(Evaluator, evaluator)
        self.eval_env, self.callback_on_new_best = eval_env, callback_on_new_best
        if callback_on_new_best is not None:
            callback_on_new_best.parent = self
        self.eval_freq, self.n_eval_episodes = eval_freq, n_eval_episodes
        self.log_path = None if log_path is None else Path(os.path.abspath(log_path), "evaluations")
        self.best_model_save_path = best_model_save_path
        self.deterministic = deterministic
        callbacks = (callback_on_new_best, callback_after_eval)
        self._has_callbacks = any(one is not None for one in callbacks)
        self._wait = self._has_callbacks if wait is None else wait
        self._options = evaluator
        self._asked: deque[Asked] = deque()
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
        before = global_states()
        try:
            with one_slot(self.eval_env, self._options.get("env_kwargs"), None) as env:
                normalization = self.model.get_vec_normalize_env()
                self._policy = load_policy(self.model, env, normalization=normalization)
        finally:
            set_global_states(before)  # the env may draw as it is made
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
        with self.evaluator:  # which reports on the best, if it is asked to
            self._take(wait=True)

    def _ask(self) -> None:
        """Evaluate the model as it is now."""
        assert self.evaluator is not None
        files = {}
        if self.best_model_save_path is not None:
            saved = io.BytesIO()
            self.model.save(saved)
            files["best_model.zip"] = saved.getvalue()
            if (normalization := self.model.get_vec_normalize_env()) is not None:
                files["best_model_vecnormalize.pkl"] = pickle.dumps(normalization)
        _refresh(self._policy, self.model)
        result = self.evaluator.submit(step=self.num_timesteps)
        self._asked.append(Asked(self.num_timesteps, result, files))

    def _take(self, wait: bool) -> bool:
        """Take results: all that are asked for, or those that have arrived.

        Callbacks may act on the training, so theirs are never taken whenever they arrive.

        Returns:
            False if a callback stops the training.
        """
        assert self.evaluator is not None
        goes_on = True
        while self._asked and (wait or (not self._has_callbacks and self._asked[0].result.done())):
            asked = self._asked.popleft()
            with ended_on_error(self.evaluator.shutdown):
                result = asked.result.result()
            goes_on = self._note(asked, result) and goes_on
        return goes_on

    def _note(self, asked: Asked, result: EvaluationResult) -> bool:
        """Log a result, and keep the best model; returns False if a callback stops the training."""
        self.last_result = result
        mean = float(result.returns.mean()) if len(result.returns) else math.nan
        length = float(result.lengths.mean()) if len(result.lengths) else math.nan
        self.last_mean_reward = mean
        values = {"eval/mean_reward": mean, "eval/mean_ep_length": length}
        for name, of_episodes in result.metrics.items():
            if not np.isnan(of_episodes).all():
                values[f"eval/metrics/{name}"] = float(np.nanmean(of_episodes))
        successes = [e.success for e in result.episodes if e.success is not None]
        if successes:
            values["eval/success_rate"] = sum(successes) / len(result.episodes)
        if self.verbose >= 1:
            shown = ", ".join(f"{name.partition('/')[2]} {one:.6g}" for name, one in values.items())
            print(f"Evaluation at step {asked.step}: {shown}")
        logger = copy.copy(self.logger)  # what training has recorded so far is for its own dump
        logger.name_to_value, logger.name_to_count, logger.name_to_excluded = {}, {}, {}
        for name, value in values.items():
            logger.record(name, value)
        logger.record("time/total_timesteps", asked.step, exclude="tensorboard")
        logger.dump(asked.step)
        self._write(asked.step, result.episodes)
        is_best, goes_on = mean > self.best_mean_reward, True
        if is_best:
            self.best_mean_reward = mean
            for name, data in asked.files.items():
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
        ended = [
            (e.episode_return, e.length) if e.completed else (math.nan, math.nan) for e in episodes
        ]
        self.evaluations_timesteps.append(step)
        self.evaluations_results.append([total for total, _ in ended])
        self.evaluations_length.append([length for _, length in ended])
        if any(e.success is not None for e in episodes):
            self.evaluations_successes.append([bool(e.success) for e in episodes])


def _refresh(policy: SB3Policy | AgentPolicy, model: Any) -> None:
    """Give a policy of :func:`load_policy` the weights and statistics that its model has now."""
    now = _statistics(model.get_vec_normalize_env())
    if isinstance(policy, SB3Policy):
        inner, own = policy.policy, dict(policy.named_buffers(recurse=False))
        now["exploration_rate"] = torch.tensor(float(getattr(model, "exploration_rate", 0.0)))
    else:
        made: Any = policy.source
        inner, own = made.args[0], made.keywords
    inner.load_state_dict(model.policy.state_dict())
    for name, value in now.items():
        own[name].copy_(value)


def _explores(policy: Any) -> bool:
    """Tell whether actions are drawn; refuse to, if their noise is not the episode's."""
    explores = exploration_type() is ExplorationType.RANDOM
    if explores and getattr(policy, "use_sde", False):
        raise ValueError(
            "the noise of gSDE is drawn at each rollout, and no model file holds it; evaluate "
            "with a deterministic exploration type"
        )
    return explores


def _read(file: Any) -> tuple[Any, Mapping[str, Any]]:
    """Read the policy of a model's file, and the settings of its algorithm."""
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.save_util import load_from_zip_file

    settings, parameters, _ = load_from_zip_file(file, device="cpu")
    if settings is None or "policy_class" not in settings or "policy" not in parameters:
        raise ValueError(f"expected a model of Stable-Baselines3, got {file}, which holds none")
    with torch.random.fork_rng(devices=[]):  # weights are drawn before they are loaded
        made = settings["policy_class"]
        options = dict(settings["policy_kwargs"])
        if issubclass(made, ActorCriticPolicy):  # the one that its algorithm tells apart from these
            options["use_sde"] = settings["use_sde"]
        given = [settings["observation_space"], settings["action_space"]]
        if "lr_schedule" in inspect.signature(made).parameters:  # ARS has none
            given.append(lambda _: 0.0)
        policy = made(*given, **options)
    policy.load_state_dict(parameters["policy"])
    return policy, settings


def _read_normalization(file: Path) -> Any:
    from stable_baselines3.common.vec_env import VecNormalize

    if not file.is_file():
        raise FileNotFoundError(f"expected a file of VecNormalize, got {file}, which is no file")
    normalization = pickle.loads(file.read_bytes())  # as VecNormalize.load does, without its envs
    if not isinstance(normalization, VecNormalize):
        raise ValueError(  # noqa: TRY004, the file's content is wrong and no argument's type
            f"expected a file of VecNormalize, got {file}, which holds another object"
        )
    return normalization


class Normalization:
    """The normalization of a ``VecNormalize``, without its envs, by statistics that it is given.

    It travels as bytes, since a ``VecNormalize`` without envs cannot be pickled again.
    """

    def __init__(self, pickled: bytes):
        self._pickled, self._of = pickled, pickle.loads(pickled)

    def __reduce__(self) -> Any:
        return Normalization, (self._pickled,)

    def __call__(self, observation: Any, statistics: Mapping[str, torch.Tensor]) -> Any:
        """Return an observation, or a batch of them, as the model was trained on."""
        for name, rms, part in _running(self._of):
            setattr(rms, part, statistics[name].cpu().numpy())
        return self._of.normalize_obs(observation)


def _frozen(normalization: Any) -> Normalization | None:
    if normalization is None:
        return None
    if "class_attributes" not in vars(normalization):  # one of a file; pickling takes it for there
        normalization.class_attributes, normalization.returns = {}, None
    return Normalization(pickle.dumps(normalization))


def _running(normalization: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the statistics of observations: a name, the object that has them, its attribute."""
    of = normalization.obs_rms if normalization.norm_obs else {}
    for key, rms in (of if isinstance(of, dict) else {"observation": of}).items():
        for part in ("mean", "var"):
            yield f"{key.replace('.', '_')}_{part}", rms, part


def _statistics(normalization: Any) -> dict[str, torch.Tensor]:
    """Return the statistics that observations are normalized with, as tensors."""
    if normalization is None:
        return {}
    statistics = {
        name: torch.as_tensor(np.asarray(getattr(rms, part))).clone()
        for name, rms, part in _running(normalization)
    }
    settings = ("clip_obs", "epsilon") if statistics else ()
    return statistics | {name: torch.tensor(getattr(normalization, name)) for name in settings}


def _check_spaces(policy: Any, observation: Any, action: Any) -> None:
    from stable_baselines3.common.vec_env import VecTransposeImage

    wanted = _form(policy.observation_space)
    if wanted not in (_form(observation), _form(observation, VecTransposeImage.transpose_space)):
        raise ValueError(
            f"expected the observation space that the model was trained on, "
            f"{policy.observation_space}, got an env with {observation}; evaluate it on the env, "
            "with the wrappers, that it was trained on"
        )
    if policy.action_space != action:
        raise ValueError(
            f"expected the action space that the model was trained on, {policy.action_space}, got "
            f"an env with {action}"
        )


def _form(space: Any, transpose: Any = None) -> Any:
    """Return the shapes that a model needs of an observation space; normalizing moves bounds.

    With ``transpose``, images have their channels first, as ``predict`` transposes them.
    """
    from stable_baselines3.common.preprocessing import is_image_space

    if isinstance(space, spaces.Dict):
        return {name: _form(part, transpose) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Box):
        channels_last = is_image_space(space) and space.shape[0] not in (1, 3, 4)
        return (transpose(space) if transpose and channels_last else space).shape
    return space


__all__ = ["EvalCallback", "SB3Policy", "load_policy"]
