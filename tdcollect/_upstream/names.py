"""The private names that collecting needs, and those that the installed versions lack.

A newer TorchRL may have dropped some: its own loop then collects, and ``explain()`` names them.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from multiprocessing import parent_process
from pkgutil import resolve_name
from typing import Any

from tdcollect.packages import KNOWN, untested

STEPPING_METHODS = "_step _reset step reset step_and_maybe_reset maybe_reset"
READING_METHODS = (
    "read_action read_done read_obs read_reward _output_transform _reset_output_transform"
)
SEQUENTIAL_METHODS = (
    "forward _run_module _module_iter get_dist_params det_part _last_module __call__"
)
PROBABILISTIC_METHODS = "forward get_dist _dist_sample __call__"
MODULE_METHODS = "forward _call_module _write_to_tensordict __call__"

NAMES = {
    "torchrl.collectors:Collector": "_auto_register_policy_transforms _carrier "
    "_cast_to_policy_device _compact_next_keys _final_rollout _frames _ignore_rb "
    "_increment_frames _iter _maybe_set_truncated _policy_output_keys _policy_w_state_dict "
    "_should_use_random_frames _start_new_trajectories _traj_pool _use_buffers _wrapped_policy "
    "_wrapped_policy_maybe_compiled _wrapped_policy_uncompiled",
    "torchrl.envs:EnvBase": "_complete_done _observation_keys_step_mdp _reset _set_seed "
    f"_skip_tensordict _state_keys_step_mdp _step_proc_data _supports_set_state {STEPPING_METHODS}",
    "torchrl.envs:GymWrapper": "_categorical_action_encoding _convert_actions_to_numpy _env "
    + READING_METHODS,
    "torchrl.envs:PettingZooWrapper": "_env",
    "torchrl.envs.batched_envs:BatchedEnvBase": "_env_obs_keys _owns_workers _share_memory "
    "_memmap _use_buffers",
    "torchrl.envs:SerialEnv": "_envs",
    "torchrl.envs:ParallelEnv": "_events _metadata_from_workers _mp_start_method _seeds _workers "
    "parent_channels",
    "torchrl.envs:EnvCreator": "_mp_values",
    "torchrl.envs:Transform": "_apply_transform _call _container _inv_apply_transform _inv_call "
    "_parent _post_step_mdp_hooks _reset _reset_env_preprocess _step",
    "torchrl.envs:RewardSum": "_reset_keys",
    "torchrl.envs:VecNorm": "_init _td",
    "torchrl.envs:VecNormV2": "_cast_int_to_float _count _loc _var initialized",
    "torchrl.envs:EndOfLifeTransform": "_get_lives",
    "torchrl.modules:MLP": "_reshape_out",
    "torchrl.modules:SafeModule": "_spec",
    "torchrl.modules:EGreedyModule": "_spec",
    "tensordict.nn:TensorDictModule": f"_get_kwargs _kwargs {MODULE_METHODS}",
    "tensordict.nn:TensorDictSequential": "_select_before_return _run_module _module_iter",
    "tensordict.nn:ProbabilisticTensorDictSequential": f"_requires_sample {SEQUENTIAL_METHODS}",
    "tensordict.nn:ProbabilisticTensorDictModule": "_generator _generator_key "
    f"{PROBABILISTIC_METHODS}",
    "tensordict:TensorDict": "_fast_apply _new_unsafe _set_tuple",
    "tensordict:NonTensorStack": "_new_lazy_unsafe",
    "tensordict:NonTensorData": "_non_tensordict",
    "torch.nn:Module": "_backward_hooks _backward_pre_hooks _compiled_call_impl _forward_hooks "
    "_forward_hooks_with_kwargs _forward_pre_hooks _parameters",
    "torch.distributions:Distribution": "_validate_args",
}
"""The names by the classes that have them, in TorchRL 0.14 and tensordict 0.14."""

_gone: list[str] = []


def warn_if_untested() -> None:
    """Warn of newer versions than those that were tested; in the main process alone."""
    if (newer := untested()) and parent_process() is None:
        tested = " and ".join(f"{name} below {end}" for name, (_, end) in KNOWN.items() if end)
        warnings.warn(
            f"{newer} is newer than what was tested, {tested}; collector.explain() tells if "
            "something is slower for it",
            stacklevel=2,
        )


def private(path: str) -> Any:
    """Return what ``"module:name"`` is; where it is gone, a function that says so when called."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError):
        _gone.append(path)

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{path} is gone from {untested() or 'what is installed'}; install a TorchRL that "
            f"this tdcollect knows: pip install 'torchrl<{KNOWN['torchrl'][1]}'"
        )

    return gone


@functools.cache
def missing() -> list[str]:
    """Return a text for each name that is gone; only versions never tested are looked through."""
    newer = untested()
    names = (
        [f"{at}.{n}" for at, names in NAMES.items() for n in lacking(at, names)] if newer else []
    )
    return [f"{name} is gone from {newer or 'TorchRL'}" for name in (*_gone, *names)]


def lacking(path: str, names: str) -> list[str]:
    """Return those of the names that a class has neither itself nor on its objects."""
    try:
        owner = resolve_name(path)
    except (ImportError, AttributeError):
        return names.split()
    wanted = [name for name in names.split() if not hasattr(owner, name)]
    source = "\n".join(map(_source, owner.__mro__)) if wanted else ""
    return [n for n in wanted if f"self.{n}" not in source and f'__dict__["{n}"]' not in source]


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # of a class that is not written in Python
        return ""
