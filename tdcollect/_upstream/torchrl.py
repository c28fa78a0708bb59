"""Private names of TorchRL, but for those of its collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, GymWrapper, PettingZooWrapper
from torchrl.envs import transforms as T
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform as gym_space_to_spec
from torchrl.envs.utils import _make_compatible_policy as make_compatible_policy
from torchrl.modules import MLP, AdditiveGaussianModule, EGreedyModule
from torchrl.modules.utils.utils import (
    _maybe_append_env_transforms_from_module as append_policy_transforms,
)

STEPPING_METHODS = ("_step", "_reset", "step", "reset", "step_and_maybe_reset", "maybe_reset")
"""The methods of an env that take its steps and start its episodes."""


def carried_entries(env: EnvBase) -> list[str | tuple[str, ...]]:
    """The entries that a step hands on to the next row."""
    return [*env._observation_keys_step_mdp, *env._state_keys_step_mdp]


def wrapped_env(env: Any) -> Any:
    """The env that a TorchRL wrapper stands around; the env itself where there is none."""
    return getattr(env, "_env", env)


def resets_with_seed(env: EnvBase) -> bool:
    """Tell whether an env's ``reset(seed=...)`` starts the episode of a seed.

    It does in TorchRL's wrappers of gymnasium and PettingZoo, whose ``set_seed`` resets too, so
    that the next reset starts another episode; other envs ignore the argument, or refuse it.
    """
    for kind in type(env).__mro__:
        if kind in (GymWrapper, PettingZooWrapper):
            return kind is PettingZooWrapper or isinstance(env._env, gym.Env)
        if "_set_seed" in vars(kind) or "_reset" in vars(kind):
            return False
    return False


def call_of(transform: T.Transform) -> Callable[[Any], Any]:
    """The method that applies a transform to what an env gave."""
    return transform._call


def inverse_call_of(transform: T.Transform) -> Callable[[Any], Any]:
    """The method that applies a transform to what an env is given."""
    return transform._inv_call


def reshapes_output(module: MLP) -> bool:
    """Tell whether an MLP changes the shape of its last layer's output."""
    return bool(module._reshape_out)


def exploration_spec(module: AdditiveGaussianModule | EGreedyModule) -> TensorSpec:
    """The spec of the actions that an exploration module draws."""
    return module._spec


def set_exploration_spec(module: AdditiveGaussianModule | EGreedyModule, spec: TensorSpec) -> None:
    """Give an exploration module another spec of actions."""
    module._spec = spec


__all__ = [
    "STEPPING_METHODS",
    "append_policy_transforms",
    "call_of",
    "carried_entries",
    "exploration_spec",
    "gym_space_to_spec",
    "inverse_call_of",
    "make_compatible_policy",
    "resets_with_seed",
    "reshapes_output",
    "set_exploration_spec",
    "wrapped_env",
]
