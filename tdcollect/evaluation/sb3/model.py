"""Models of Stable-Baselines3 as policies to evaluate."""

from __future__ import annotations

import inspect
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.data import Binary, Composite
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type

from tdcollect import keys
from tdcollect.envs.backends import SerialBackend
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.agents import OnSpaces
from tdcollect.files import existing
from tdcollect.packages import extra_module
from tdcollect.policies import AgentPolicy, from_agent

ACTION_MASKS = "action_masks"
"""The name of the envs' method, as in sb3-contrib, and of the entry of the masks."""


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
        model: a file that ``model.save`` wrote, with ``.zip`` or without, of PPO, A2C, DQN, SAC,
            TD3, DDPG, of sb3-contrib's MaskablePPO, RecurrentPPO, QRDQN, TQC, TRPO, ARS, CrossQ, or
            of another algorithm whose policy acts on the observation alone; or a model.
        env: of :func:`tdcollect.make_env`, bare or under transforms; for its spaces and keys.
        normalization: the ``VecNormalize`` that the model was trained under, or the file that its
            ``save`` wrote; None for the one that the model holds, if it is no file; False for none.
            Its statistics stay as they are.

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
    if normalization is None and hasattr(model, "get_vec_normalize_env"):
        normalization = model.get_vec_normalize_env()
    if hasattr(model, "save"):
        file = io.BytesIO()
        model.save(file)  # a copy, which later training leaves as it is
        file.seek(0)
    else:
        file = existing(Path(str(model)), "a model of Stable-Baselines3", ".zip")
    policy, settings = _read(file)
    if isinstance(normalization, (str, os.PathLike)):
        normalization = _read_normalization(Path(normalization))
    on = OnSpaces(env)
    _check_spaces(policy, on.observation.space, on.action.space)
    if normalization and normalization.norm_obs:
        _check_normalized(normalization.observation_space, on.observation.space)
    one: SB3Policy | AgentPolicy
    if hasattr(policy, "lstm_actor"):
        # Statistics are a module here, so that the manifest has their digest.
        statistics = KnownStatistics(_statistics(normalization))
        one = from_agent(partial(RecurrentAgent, policy, _frozen(normalization), statistics))
    else:
        # The share of random actions that DQN's and QRDQN's ``predict`` draws; others have none.
        epsilon = float(settings.get("exploration_rate", 0.0))
        one = SB3Policy(policy, env, normalization, epsilon)
    one.algorithm = _algorithm(type(policy), settings)
    return one


class KnownStatistics(nn.Module):
    def __init__(self, named: Mapping[str, torch.Tensor]):
        super().__init__()
        self.eval()
        for name, value in named.items():
            self.register_buffer(name, value)


class RecurrentAgent:
    """A model with a hidden state, in one episode."""

    def __init__(
        self, policy: Any, normalization: Normalization | None, statistics: KnownStatistics
    ):
        self._policy, self._normalization = policy, normalization
        self._statistics = dict(statistics.named_buffers())

    def reset(self) -> None:
        self._state: Any = None

    def select_action(self, observation: Any) -> Any:
        if self._normalization is not None:
            observation = self._normalization(observation, self._statistics)
        begins = np.array([self._state is None])
        action, self._state = self._policy.predict(
            observation, self._state, begins, deterministic=not _explores(self._policy)
        )
        return action


class SB3Policy(TensorDictModuleBase):
    """Reads observations and writes actions, as the env's specs have them.

    Of a model that takes masks, it reads those of the env under ``"action_masks"``.
    """

    algorithm = ""

    def __init__(self, policy: Any, env: EnvBase, normalization: Any = None, epsilon: float = 0.0):
        super().__init__()
        self._on = OnSpaces(env)
        self.in_keys = [*self._on.in_keys]
        self._mask_size: int | None = None  # the number of choices that masks tell apart
        if ACTION_MASKS in inspect.signature(policy.predict).parameters:
            check_masks(env)
            self._mask_size = _choices(policy.action_space)
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

    def finish_env(self, env: EnvBase) -> EnvBase:
        """Return an env to be evaluated in, under a transform that adds masks if there are any."""
        if self._mask_size is None:
            return env
        check_masks(env)
        # Its transforms are those of the env given, which stays as it is.
        return TransformedEnv(env, auto_unwrap=True).append_transform(ActionMasks(self._mask_size))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        explores = _explores(self.policy)
        observation = self._on.observation.read(self._on.observed(tensordict))
        if self._normalization is not None:
            statistics = dict(self.named_buffers(recurse=False))
            observation = self._normalization(observation, statistics)
        options: dict[str, Any] = {"deterministic": not explores}
        if self._mask_size is not None:
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


def refresh(policy: SB3Policy | AgentPolicy, model: Any) -> None:
    """Give a policy of :func:`load_policy` the weights and statistics that its model has now."""
    now = _statistics(model.get_vec_normalize_env())
    if isinstance(policy, SB3Policy):
        inner, own = policy.policy, dict(policy.named_buffers(recurse=False))
        now["exploration_rate"] = torch.tensor(float(getattr(model, "exploration_rate", 0.0)))
    else:
        partial_agent: Any = policy.source
        inner, own = partial_agent.args[0], dict(partial_agent.args[2].named_buffers())
    inner.load_state_dict(model.policy.state_dict())
    for name, value in now.items():
        own[name].copy_(value)


def _explores(policy: Any) -> bool:
    """Return whether actions are drawn; refuse to, if their noise is not the episode's."""
    explores = exploration_type() is ExplorationType.RANDOM
    if explores and getattr(policy, "use_sde", False):
        raise ValueError(
            "the noise of gSDE is drawn at each rollout, and no model file holds it; evaluate "
            "with a deterministic exploration type"
        )
    return explores


def _read(file: Any) -> tuple[Any, Mapping[str, Any]]:
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.save_util import load_from_zip_file

    settings, parameters, _ = load_from_zip_file(file, device="cpu")
    if settings is None or "policy_class" not in settings or "policy" not in parameters:
        raise ValueError(f"expected a model of Stable-Baselines3, got {file}, which holds none")
    with torch.random.fork_rng(devices=[]):  # weights are drawn before they are loaded
        kind = settings["policy_class"]
        options = dict(settings["policy_kwargs"])
        if issubclass(kind, ActorCriticPolicy):  # the one that its algorithm tells apart from these
            options["use_sde"] = settings["use_sde"]
        arguments = [settings["observation_space"], settings["action_space"]]
        if "lr_schedule" in inspect.signature(kind).parameters:  # ARS has none
            arguments.append(lambda _: 0.0)
        policy = kind(*arguments, **options)
    policy.load_state_dict(parameters["policy"])
    return policy, settings


# By a module of its policy, or a setting: the first one that a file has.
_ALGORITHMS = {
    "maskable": "MaskablePPO",
    "recurrent": "RecurrentPPO",
    "crossq": "CrossQ",
    **{name.lower(): name for name in ("QRDQN", "DQN", "TQC", "SAC", "TD3", "ARS")},
    "cg_max_steps": "TRPO",
    "clip_range": "PPO",
    "vf_coef": "A2C",
}


def _algorithm(kind: type, settings: Mapping[str, Any]) -> str:
    """Return the algorithm that trained a policy, which files do not name."""
    told = {part for base in kind.__mro__ for part in base.__module__.split(".")} | settings.keys()
    name = next((name for part, name in _ALGORITHMS.items() if part in told), kind.__name__)
    return "DDPG" if name == "TD3" and settings.get("policy_delay") == 1 else name


def _read_normalization(file: Path) -> Any:
    from stable_baselines3.common.vec_env import VecNormalize

    file = existing(file, "a file of VecNormalize")
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
        for name, rms, part in _running(self._of):
            setattr(rms, part, statistics[name].cpu().numpy())
        return self._of.normalize_obs(observation)


def _frozen(normalization: Any) -> Normalization | None:
    if not normalization:
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
    if not normalization:
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


def _check_normalized(normalized: Any, observation: Any) -> None:
    if _form(normalized) != _form(observation):
        raise ValueError(
            f"expected a VecNormalize of observations as the env gives them, {observation}, got "
            f"one of {normalized}, inside of a VecFrameStack, say; normalize in the env, in the "
            "place where training did, and pass normalization=False"
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


def check_masks(env: EnvBase) -> None:
    """Raise ValueError for an env without masks, or one whose masks cannot be read."""
    base = base_of(env)
    name = base.backend_name if isinstance(base, GymnasiumEnv) else type(base).__name__
    if name != SerialBackend.name:
        raise ValueError(
            f"expected backend='serial', got {name!r}: "
            "the policy asks for masks of valid actions, and the envs' action_masks() can be "
            "called in this process only; make the env with backend='serial'"
        )
    for slot, one in enumerate(base.slot_envs):
        try:
            one.get_wrapper_attr(ACTION_MASKS)
        except AttributeError:
            raise ValueError(
                f"expected an env with a method action_masks(), got {one} in slot {slot}: the "
                "policy asks for masks of valid actions; wrap the env as in training "
                "(sb3_contrib.common.wrappers.ActionMasker)"
            ) from None


def _choices(space: Any) -> int:
    if isinstance(space, spaces.MultiBinary):
        return 2 * int(np.prod(space.shape))
    return int(np.sum(space.n if isinstance(space, spaces.Discrete) else space.nvec))


class ActionMasks(Transform):
    """Adds the masks of the envs in this process, bool ``[N, size]``, True for valid actions.

    They are read after each reset and step of a slot; all are True once its episode has ended.
    """

    def __init__(self, size: int):
        super().__init__(in_keys=[], out_keys=[ACTION_MASKS])
        self._size = size

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = next_tensordict.get(keys.DONE).reshape(-1).tolist()
        masks = np.ones((len(done), self._size), bool)
        base = base_of(self.parent)
        for slot, env in enumerate(base.slot_envs):
            if not done[slot]:
                mask = np.asarray(env.get_wrapper_attr(ACTION_MASKS)())
                if mask.size != self._size:
                    raise ValueError(
                        f"expected action_masks() of slot {slot} to give {self._size} values, one "
                        f"for each choice, got shape {mask.shape}; correct the env"
                    )
                masks[slot] = mask.reshape(-1).astype(bool)
        shape = (*next_tensordict.batch_size, self._size)
        return next_tensordict.set(ACTION_MASKS, torch.from_numpy(masks).reshape(shape))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        shape = (*observation_spec.shape, self._size)
        observation_spec[ACTION_MASKS] = Binary(self._size, shape=shape, dtype=torch.bool)
        return observation_spec
