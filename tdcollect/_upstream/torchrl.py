"""Private names of TorchRL, but for those of its collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import torch
from torchrl._utils import seed_generator as next_seed
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, GymWrapper, PettingZooWrapper, SerialEnv
from torchrl.envs import transforms as T
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform as gym_space_to_spec
from torchrl.envs.utils import _make_compatible_policy as make_compatible_policy
from torchrl.modules import MLP
from torchrl.modules.utils.utils import (
    _maybe_append_env_transforms_from_module as append_policy_transforms,
)

STEPPING_METHODS = ("_step", "_reset", "step", "reset", "step_and_maybe_reset", "maybe_reset")
"""The methods of an env that take its steps and start its episodes."""

READING_METHODS = (
    "read_action",
    "read_done",
    "read_obs",
    "read_reward",
    "_output_transform",
    "_reset_output_transform",
)
"""The methods with which a ``GymWrapper`` reads its env's answers, and writes its actions."""


def carried_entries(env: EnvBase) -> list[str | tuple[str, ...]]:
    """The entries that a step hands on to the next row."""
    return [*env._observation_keys_step_mdp, *env._state_keys_step_mdp]


def env_step_of(env: EnvBase) -> Callable[..., Any]:
    """The method in which an env's class takes a step."""
    return env._step


def env_reset_of(env: EnvBase) -> Callable[..., Any]:
    """The method in which an env's class starts episodes."""
    return env._reset


def arguments_of_resets(env: EnvBase) -> dict[str, Any]:
    """The arguments that a reset amid a loop gives the method that an env's class resets in."""
    return {"set_state": False} if env._supports_set_state else {}


def steps_alone(env: EnvBase) -> bool:
    """Tell whether an env's class steps and resets in the two methods meant for it alone."""
    names = ("step", "reset", "step_and_maybe_reset", "maybe_reset", "_step_proc_data")
    plain = all(getattr(type(env), name) is getattr(EnvBase, name) for name in names)
    return plain and not vars(env).get("_torchrl_native_autoreset", False)


def complete_done(env: EnvBase, entries: Any) -> None:
    """Add the flags that an env's own code has left out."""
    env._complete_done(env.full_done_spec, entries)


def replaced_methods(env: EnvBase) -> list[str]:
    """The stepping and reading methods that a user has replaced on this env object.

    ``GymWrapper`` itself keeps two of its methods, bound, on each object.
    """
    names = (*STEPPING_METHODS, *READING_METHODS)
    return [
        name
        for name in names
        if name in vars(env)
        and getattr(vars(env)[name], "__module__", None) != GymWrapper.__module__
    ]


def encodes_integers(env: GymWrapper) -> bool:
    """Tell whether discrete actions are integers rather than one-hot."""
    return bool(env._categorical_action_encoding)


def converts_actions(env: GymWrapper) -> bool:
    """Tell whether the gymnasium env is given NumPy actions."""
    return bool(env._convert_actions_to_numpy)


def apply_unchecked(entries: Any, function: Any, batch_size: list[int]) -> Any:
    """Apply a function to all entries of a TensorDict, for a batch size that is not theirs."""
    return entries._fast_apply(function, batch_size=batch_size)


def serial_envs(env: SerialEnv) -> list[EnvBase] | None:
    """The envs of a ``SerialEnv``; None where they are not made, or it is closed."""
    return vars(env).get("_envs")


def shown_by_resets(env: SerialEnv) -> dict[str | tuple[str, ...], torch.Tensor] | None:
    """The tensors in which a ``SerialEnv`` keeps what its resets gave; None where it has none."""
    if not env._use_buffers or env.share_individual_td:
        return None
    shared = env.shared_tensordict_parent
    return {key: shared.get(key) for key in env._env_obs_keys}


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


def step_of(transform: T.Transform) -> Callable[[Any, Any], Any]:
    """The method that a step calls, with the step taken and what the env gave."""
    return transform._step


def reset_of(transform: T.Transform) -> Callable[[Any, Any], Any]:
    """The method that a reset calls, with the marks of the reset and what the env gave."""
    return transform._reset


def inverts(transform: T.Transform) -> bool:
    """Tell whether a transform may change what the env is given."""
    return bool(transform.in_keys_inv) or _overrides(transform, "_inv_call")


def reads_step(transform: T.Transform) -> bool:
    """Tell whether a transform may read the step that was taken."""
    return _overrides(transform, "_step")


def preparation_of(transform: T.Transform) -> Callable[[Any], Any] | None:
    """The method that changes what the env's reset is given; None where it does nothing."""
    if transform.enable_inv_on_reset or _overrides(transform, "_reset_env_preprocess"):
        return transform._reset_env_preprocess
    return None


def changes_loop(transform: T.Transform) -> bool:
    """Tell whether a transform takes part in the env's loop in more than steps and resets."""
    return _overrides(transform, "_post_step_mdp_hooks")


def does_nothing_in_steps(transform: T.Transform) -> bool:
    """Tell whether a transform works in resets alone."""
    plain = not any(_overrides(transform, name) for name in ("_step", "_call", "_inv_call", "inv"))
    return plain and not transform.in_keys and not transform.in_keys_inv


def settings_of(transform: T.Transform) -> dict[str, Any]:
    """The attributes of a transform, without those that tie it to its env."""
    return {k: v for k, v in vars(transform).items() if k not in ("_container", "_parent")}


def only_applies(transform: T.Transform, known: Sequence[type[T.Transform]]) -> bool:
    """Tell whether a transform only maps tensors to tensors, in TorchRL's own way.

    Args:
        transform: of any class.
        known: classes whose resets do nothing but map, too.
    """
    kind = type(transform)
    if any(_overrides(transform, name) for name in ("_step", "_call", "_inv_call", "inv")):
        return False
    return "_reset" not in vars(transform) and kind._reset in {cls._reset for cls in known}


def _overrides(transform: T.Transform, name: str) -> bool:
    own = getattr(type(transform), name)
    return name in vars(transform) or own is not getattr(T.Transform, name)


def reshapes_output(module: MLP) -> bool:
    """Tell whether an MLP changes the shape of its last layer's output."""
    return bool(module._reshape_out)


def exploration_spec(module: Any) -> Any:
    """The spec of the actions that an exploration module draws, or projects on."""
    return module._spec


def set_exploration_spec(module: Any, spec: TensorSpec) -> None:
    """Give an exploration module another spec of actions."""
    module._spec = spec


__all__ = [
    "STEPPING_METHODS",
    "append_policy_transforms",
    "apply_unchecked",
    "arguments_of_resets",
    "call_of",
    "carried_entries",
    "changes_loop",
    "complete_done",
    "converts_actions",
    "does_nothing_in_steps",
    "encodes_integers",
    "env_reset_of",
    "env_step_of",
    "exploration_spec",
    "gym_space_to_spec",
    "inverse_call_of",
    "inverts",
    "make_compatible_policy",
    "next_seed",
    "only_applies",
    "preparation_of",
    "reads_step",
    "replaced_methods",
    "reset_of",
    "resets_with_seed",
    "reshapes_output",
    "serial_envs",
    "set_exploration_spec",
    "settings_of",
    "shown_by_resets",
    "step_of",
    "steps_alone",
    "wrapped_env",
]
