"""Private names of TorchRL's envs, transforms and modules, and of tensordict's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, methodcaller
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictSequential, probabilistic
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torchrl import _utils
from torchrl._utils import seed_generator as seed_generator
from torchrl.data import Bounded
from torchrl.envs import (
    EnvBase,
    EnvCreator,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    PettingZooWrapper,
    SerialEnv,
)
from torchrl.envs import transforms as T
from torchrl.modules.tensordict_module import SafeProbabilisticModule

from tdcollect._upstream import Alias, View, names
from tdcollect._upstream.names import private, warn_if_untested
from tdcollect.keys import Key

Method = Callable[..., Any]

warn_if_untested()
_append_last = private("torchrl._utils:_append_last")
_get_default_mp_start_method = private("torchrl._utils:_get_default_mp_start_method")
append_policy_transforms = private(
    "torchrl.modules.utils.utils:_maybe_append_env_transforms_from_module"
)
gym_space_to_spec = private("torchrl.envs.libs.gym:_gym_to_torchrl_spec_transform")
make_compatible_policy = private("torchrl.envs.utils:_make_compatible_policy")
project_outputs = private("torchrl.modules.tensordict_module.common:_forward_hook_safe_action")
without_locks = private("torchrl.envs.batched_envs:_recursively_strip_locks_from_state_dict")

BoundedMeta: Any = type(Bounded)
"""Gives each ``Bounded`` one of TorchRL's own two classes, whatever class was called."""

# ---------------------------------------------------------------------------------------- any env

env_step_of: Callable[[EnvBase], Method] = attrgetter("_step")
"""The method in which an env's class takes a step; gives the entries of ``"next"``."""
env_reset_of: Callable[[EnvBase], Method] = attrgetter("_reset")
"""The method in which an env's class starts episodes."""

STEPPING_METHODS = names.STEPPING_METHODS.split()
READING_METHODS = names.READING_METHODS.split()
"""The methods with which a ``GymWrapper`` reads its env's answers, and writes its actions."""


def carried_entries(env: EnvBase) -> list[Key]:
    return [*env._observation_keys_step_mdp, *env._state_keys_step_mdp]


def arguments_of_resets(env: EnvBase) -> dict[str, Any]:
    """The arguments that a reset amid a loop gives the method that an env's class resets in."""
    return {"set_state": False} if env._supports_set_state else {}


def steps_alone(env: EnvBase) -> bool:
    """Return whether an env overrides only ``_step`` and ``_reset``."""
    names = ("step", "reset", "step_and_maybe_reset", "maybe_reset", "_step_proc_data")
    plain = all(getattr(type(env), name) is getattr(EnvBase, name) for name in names)
    return plain and not vars(env).get("_torchrl_native_autoreset", False)


def complete_done(env: EnvBase, entries: Any) -> None:
    env._complete_done(env.full_done_spec, entries)


def replaced_methods(env: EnvBase) -> list[str]:
    """The stepping and reading methods that a user, not ``GymWrapper``, has set on this object."""
    return [
        name
        for name in (*STEPPING_METHODS, *READING_METHODS)
        if name in vars(env)
        and getattr(vars(env)[name], "__module__", None) != GymWrapper.__module__
    ]


def wrapped_env(env: Any) -> Any:
    return getattr(env, "_env", env)


def held_env(env: EnvBase) -> Any:
    """The env that a wrapper holds, without a question to workers; None where it holds none."""
    return vars(env).get("_env")


def resets_with_seed(env: EnvBase) -> bool:
    """Return whether an env's ``reset(seed=...)`` starts the episode of a seed.

    It does in TorchRL's wrappers of gymnasium and PettingZoo, whose ``set_seed`` resets too, so
    that the next reset starts another episode; other envs ignore the argument, or refuse it.
    """
    for kind in type(env).__mro__:
        if kind in (GymWrapper, PettingZooWrapper):
            return kind is PettingZooWrapper or isinstance(env._env, gym.Env)
        if "_set_seed" in vars(kind) or "_reset" in vars(kind):
            return False
    return False


def skipped_step(env: EnvBase, entries: TensorDictBase) -> TensorDictBase:
    return env._skip_tensordict(entries)


# ------------------------------------------------------------------------ GymWrapper, batched envs

GymEnvMeta: Any = type(GymEnv)

is_categorical: Callable[[GymWrapper], bool] = attrgetter("_categorical_action_encoding")
converts_actions: Callable[[GymWrapper], bool] = attrgetter("_convert_actions_to_numpy")
uses_buffers: Callable[[ParallelEnv], bool] = attrgetter("_use_buffers")
"""Returns whether workers write into memory that they share; they then seed torch, too."""
has_metadata_from_workers: Callable[[ParallelEnv], bool] = attrgetter("_metadata_from_workers")
owns_workers: Callable[[ParallelEnv], bool] = attrgetter("_owns_workers")
"""False for a ``ParallelEnv`` that is an index into another."""
chain_of_seeds: Callable[[ParallelEnv], list[int] | None] = attrgetter("_seeds")

TRANSIENT_ATTRIBUTES = {"_container", "_parent", "_reset_key", "_reset_keys", "_validated"}
"""Attributes of transforms that are set when their env runs."""

_PIPE_TIMEOUT = 10_000.0


def stands_for_env(argument: Any) -> bool:
    """Return whether an argument of a call by name stands for the ``ParallelEnv`` itself."""
    return isinstance(argument, str) and argument == "_self"


def set_wrapped_env(env: GymWrapper, wrapped: Any) -> None:
    env._env = wrapped


def serial_envs(env: SerialEnv) -> list[EnvBase] | None:
    """The envs of a ``SerialEnv``; None where they are not made, or it is closed."""
    return vars(env).get("_envs")


def shown_by_resets(env: SerialEnv) -> dict[Key, torch.Tensor] | None:
    """The tensors in which a ``SerialEnv`` keeps what its resets gave; None where it has none."""
    if not env._use_buffers or env.share_individual_td:
        return None
    shared = env.shared_tensordict_parent
    return {key: shared.get(key) for key in env._env_obs_keys}


def start_method(env: ParallelEnv) -> str:
    return str(env._mp_start_method or _get_default_mp_start_method())


def shares_memory(env: ParallelEnv) -> bool:
    """Return whether tensors travel in shared memory rather than in memory-mapped files."""
    return bool(env._share_memory) and not env._memmap


def set_channels(env: ParallelEnv, channels: Sequence[Any]) -> None:
    """Give a ``ParallelEnv`` channels to its slots in place of processes of its own."""
    env.parent_channels = list(channels)
    env._workers = []
    # Calls of slots return when they are done: the event has happened.
    done = SimpleNamespace(wait=lambda timeout=None: True, clear=lambda: None)
    env._events = [done for _ in channels]


def drop_channels(env: ParallelEnv) -> None:
    for name in ("parent_channels", "_workers", "_events"):
        env.__dict__.pop(name, None)


def pipe_timeout() -> float | None:
    """The seconds that workers may take; None for TorchRL's default, which is hours."""
    timeout = float(_utils.BATCHED_PIPE_TIMEOUT)
    return None if timeout == _PIPE_TIMEOUT else timeout


def limit_threads(env: ParallelEnv) -> None:
    """Give this process as many of torch's threads as TorchRL does beside its workers."""
    if env.num_threads is None:
        env.num_threads = max(1, torch.get_num_threads() - env.num_workers)
    if env.num_threads != torch.get_num_threads():
        torch.set_num_threads(env.num_threads)


def shared_values(creator: EnvCreator) -> bool:
    return bool(creator._mp_values) or bool(creator.state_dict())


# ------------------------------------------------------------------------------------- transforms

call_of: Callable[[T.Transform], Method] = attrgetter("_call")
inverse_call_of: Callable[[T.Transform], Method] = attrgetter("_inv_call")
step_of: Callable[[T.Transform], Method] = attrgetter("_step")
reset_of: Callable[[T.Transform], Method] = attrgetter("_reset")
mapping_of: Callable[[T.Transform], Method] = attrgetter("_apply_transform")
casts_integers: Callable[[T.VecNormV2], bool] = attrgetter("_cast_int_to_float")
"""Returns whether a ``VecNormV2`` averages integers as floats."""

_CALLS = ("_call", "_step", "_reset", "_inv_call", "_apply_transform", "_inv_apply_transform")


def lives_reader(transform: T.EndOfLifeTransform, base: EnvBase) -> Callable[[], Any]:
    """A function that reads the lives of an env, as an ``EndOfLifeTransform`` around it does.

    TorchRL's wrapper hands the path on to the gymnasium env inside, but lists all names of its own
    first, twice: 100 us. They are listed once here. The path is followed at every call, since an
    env may replace what lies on it.
    """
    path = transform.eol_attribute
    hands_on = getattr(type(base), "__getattr__", None) is GymWrapper.__getattr__
    if not hands_on or base.batch_size or path[0] in dir(base):
        return transform._get_lives
    follow = attrgetter(".".join(path))

    def lives() -> Any:
        value = follow(wrapped_env(base))
        return value() if callable(value) else value

    return lives


def _overrides(transform: T.Transform, *names: str) -> bool:
    kind = type(transform)
    return any(
        name in vars(transform) or getattr(kind, name) is not getattr(T.Transform, name)
        for name in names
    )


def inverts(transform: T.Transform) -> bool:
    """Return whether a transform may change what the env is given."""
    return bool(transform.in_keys_inv) or _overrides(transform, "_inv_call")


def writes_next(transform: T.Transform) -> bool:
    """Return whether its inverse may write what follows a step: TorchRL 0.15 takes that over."""
    return hasattr(T, "ClosedLoopMultiAction") and inverts(transform)


def reads_step(transform: T.Transform) -> bool:
    return _overrides(transform, "_step")


def maps_entries(transform: T.Transform) -> bool:
    """Return whether a step maps each entry by the one function of the class, and does no more."""
    return not _overrides(transform, "_step", "_call") and _overrides(transform, "_apply_transform")


def changes_loop(transform: T.Transform) -> bool:
    """Return whether a transform takes part in the env's loop in more than steps and resets."""
    return _overrides(transform, "_post_step_mdp_hooks")


def preparation_of(transform: T.Transform) -> Method | None:
    """The method that changes what the env's reset is given; None where it does nothing."""
    if transform.enable_inv_on_reset or _overrides(transform, "_reset_env_preprocess"):
        return transform._reset_env_preprocess
    return None


def does_nothing_in_steps(transform: T.Transform) -> bool:
    works = _overrides(transform, "_step", "_call", "_inv_call", "inv")
    return not works and not transform.in_keys and not transform.in_keys_inv


def settings_of(transform: T.Transform) -> dict[str, Any]:
    return {k: v for k, v in vars(transform).items() if k not in ("_container", "_parent")}


def only_applies(transform: T.Transform, known: Sequence[type[T.Transform]]) -> bool:
    """Return whether a transform only maps tensors, as the ``known`` classes do in resets, too."""
    if _overrides(transform, "_step", "_call", "_inv_call", "inv"):
        return False
    own = type(transform)._reset
    return "_reset" not in vars(transform) and own in {cls._reset for cls in known}


def replaced_calls(transform: T.Transform) -> list[str]:
    """The methods called by an env that a user has replaced on this transform object."""
    return [name for name in _CALLS if name in vars(transform)]


class VecNormSums(View):
    """The statistics of a ``VecNorm``: discounted sums, in a TensorDict or not begun yet."""

    kept = Alias[TensorDictBase | None]("_td")

    def begin(self, key: Key, entries: TensorDictBase) -> None:
        self._of._init(entries, key)

    def of(self, key: Key) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """An entry's sum, sum of squares and count, to be changed in place; None before it came."""
        sums = self.kept
        if sums is None or (total := sums.get(_append_last(key, "_sum"), None)) is None:
            return None
        return total, sums.get(_append_last(key, "_ssq")), sums.get(_append_last(key, "_count"))


class VecNormV2Statistics(View):
    """The statistics of a stateful ``VecNormV2``: moving averages."""

    @property
    def _parts(self) -> tuple[Any, Any, Any]:
        return self._of._loc, self._of._var, self._of._count

    def of(self, key: Key) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """An entry's averages, those of its squares, and their count; to be changed in place."""
        loc, var, count = self._parts
        return loc.get(key), var.get(key), count.get(key)

    def on_cpu(self, entries: Sequence[Key]) -> bool:
        """Return whether they are there for all of these entries, as tensors on the CPU."""
        return bool(self._of.initialized) and all(
            isinstance(value := part.get(key, None), torch.Tensor) and value.device.type == "cpu"
            for part in self._parts
            for key in entries
        )


def stack_buffer_name(key: Key) -> str:
    """The name under which a ``CatFrames`` keeps the latest stack of an entry."""
    return f"_cat_buffers_{key}"


def restart_stacks(transform: T.CatFrames, entries: Any, starting: torch.Tensor) -> None:
    """Begin the stacks of a ``CatFrames`` in the slots that ``starting`` ``[N]`` marks."""
    transform._call(entries, _reset=starting)


# ---------------------------------------------------------------------------------------- modules

reshapes_output: Callable[[nn.Module], bool] = attrgetter("_reshape_out")
exploration_spec: Callable[[Any], Any] = attrgetter("_spec")
"""The spec of the actions that an exploration module draws, or projects on."""
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""The module's own dict of parameters by name: later changes show in it."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
modules_in_order: Callable[[TensorDictSequential], Iterator[Any]] = methodcaller("_module_iter")
selects_output: Callable[[TensorDictSequential], bool] = attrgetter("_select_before_return")
draws_sample: Callable[[TensorDictSequential], bool] = attrgetter("_requires_sample")
draw_of: Callable[[ProbabilisticTensorDictModule], Method] = attrgetter("_dist_sample")
"""The method that draws from a distribution: ``draw(dist, interaction_type=...)``."""
get_options: Callable[[Any], dict[str, Any]] = attrgetter("_get_kwargs")
"""The arguments with which a ``TensorDictModule`` calls ``TensorDict.get`` for its inputs."""
keyword_names: Callable[[Any], list[str] | None] = attrgetter("_kwargs")
"""The keywords under which a ``TensorDictModule`` passes its inputs on; None if by position."""

SEQUENTIAL_METHODS = names.SEQUENTIAL_METHODS.split()
PROBABILISTIC_METHODS = names.PROBABILISTIC_METHODS.split()
MODULE_METHODS = names.MODULE_METHODS.split()
"""The methods that decide what a call of a ``TensorDictModule`` does; likewise the two before."""

_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")
_own_hooks = attrgetter(*(f"_{kind}_hooks" for kind in _HOOKS))
_global_hooks = attrgetter(*(f"_global_{kind}_hooks" for kind in _HOOKS))


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module also calls hooks: its own, or those of all modules."""
    return any(_own_hooks(module)) or all_modules_have_hooks()


def all_modules_have_hooks() -> bool:
    return any(_global_hooks(_module))


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def only_projects(module: nn.Module) -> bool:
    """Return whether the only hook of a module is that of ``safe=True``."""
    return (
        list(module._forward_hooks.values()) == [project_outputs]
        and not module._forward_hooks_with_kwargs
        and not any(_own_hooks(module)[1:])
        and not all_modules_have_hooks()
    )


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` has replaced what a call of the module runs."""
    return module._compiled_call_impl is not None


as_plain_tensors = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a class of tensors: results are plain ones."""


def validates_arguments() -> bool:
    """Return whether distributions check their arguments; importing TorchRL stops that."""
    return Distribution._validate_args


SCORES_DRAWS = hasattr(probabilistic, "_get_joint_sample_and_log_prob")
"""True if tensordict's module scores the very draw that it returns, as TorchRL's always does.

So it is from tensordict 0.15 on; before, it scored the result, and knew no keys but its own.
"""


def scores_draw(module: ProbabilisticTensorDictModule) -> bool:
    return SCORES_DRAWS or isinstance(module, SafeProbabilisticModule)


def has_generator(module: ProbabilisticTensorDictModule) -> bool:
    return module._generator is not None or module._generator_key is not None


def set_exploration_spec(module: Any, spec: Any) -> None:
    module._spec = spec


unchecked_tensordict: Callable[..., TensorDict] = TensorDict._new_unsafe
"""Makes one of tensors, nested in dicts, that are known to fit its batch size and device."""


def stacked_texts(texts: Any, device: torch.device | None) -> Any:
    """Texts, nested as the dims of a batch, as TorchRL stacks them.

    Each is made from an empty one, in a tenth of the time that the class itself takes.
    """
    empty = vars(NonTensorData("", device=device))

    def stacked(part: Any) -> Any:
        if not isinstance(part, str):
            return NonTensorStack._new_lazy_unsafe(*map(stacked, part))
        one = object.__new__(NonTensorData)
        vars(one).update(empty, _non_tensordict={**empty["_non_tensordict"], "data": part})
        return one

    return stacked(texts)


def set_unchecked(tensordict: TensorDictBase, path: tuple[str, ...], value: Any) -> None:
    """Set an entry that is known to fit the batch size and the device."""
    tensordict._set_tuple(path, value, inplace=False, validated=True, non_blocking=False)


def apply_unchecked(entries: Any, function: Any, batch_size: list[int]) -> Any:
    """Apply a function to all entries of a TensorDict, for a batch size that is not theirs."""
    return entries._fast_apply(function, batch_size=batch_size)
