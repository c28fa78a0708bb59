"""The table of private names: upstream has each of them, and uses it as tdcollect expects.

What they mean is in ``test_meanings.py``, and in all tests that compare batches with TorchRL's.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torchrl.collectors as C
from tensordict import TensorDict
from tensordict import nn as N
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import module as all_modules
from torch.utils import _python_dispatch
from torchrl import _utils, modules
from torchrl import envs as E
from torchrl.collectors import _multi_async, _multi_base, _multi_sync, _runner
from torchrl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    generic,
)
from torchrl.envs import batched_envs
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.libs import gym as gym_library
from torchrl.weight_update import SharedMemWeightSyncScheme

import tdcollect._upstream
from tdcollect._upstream.torchrl import (
    MODULE_METHODS,
    PROBABILISTIC_METHODS,
    SEQUENTIAL_METHODS,
    STEPPING_METHODS,
)

from .test_private_names import is_private, source

SOURCES = sorted(Path(tdcollect._upstream.__path__[0]).glob("*.py"))

NAMES: dict[Any, str] = {
    C.Collector: "_auto_register_policy_transforms _carrier _cast_to_policy_device "
    "_compact_next_keys _final_rollout _frames _ignore_rb _increment_frames _iter "
    "_maybe_set_truncated _policy_output_keys _policy_w_state_dict _should_use_random_frames "
    "_start_new_trajectories _traj_pool _use_buffers _wrapped_policy "
    "_wrapped_policy_maybe_compiled _wrapped_policy_uncompiled",
    type(C.Collector): "_drop_inapplicable_defaults _normalize_direct_env_fn _normalize_env_fns",
    C.MultiCollector: "_flush_trajectory_assembly _frames _iter _recv_and_check "
    "_weight_sync_schemes _worker_trajs_per_batch",
    SharedMemWeightSyncScheme: "_ack_queues",
    RayCollector: "_collection_thread _external_weight_sender _frames_per_batch_corrected "
    "_remote_collectors _stop_event _sync _weight_sync_initialized",
    DistributedCollector: "_frames_per_batch_corrected _store _tensordict_out "
    "_weight_sync_schemes jobs",
    DistributedSyncCollector: "_frames_per_batch_corrected _single_tds _tensordict_out "
    "_weight_sync_schemes jobs",
    E.EnvBase: "_complete_done _observation_keys_step_mdp _reset _set_seed _skip_tensordict "
    f"_state_keys_step_mdp _step _step_proc_data _supports_set_state {' '.join(STEPPING_METHODS)}",
    E.GymWrapper: "_categorical_action_encoding _convert_actions_to_numpy _env _is_batched "
    "_output_transform _reset_output_transform read_action read_done read_obs read_reward",
    E.PettingZooWrapper: "_env",
    BatchedEnvBase: "_env_obs_keys _owns_workers _share_memory _memmap _use_buffers",
    E.SerialEnv: "_envs",
    E.ParallelEnv: "_events _metadata_from_workers _mp_start_method _seeds _workers "
    "parent_channels",
    E.EnvCreator: "_mp_values",
    E.Transform: "_apply_transform _call _container _inv_apply_transform _inv_call _parent "
    "_post_step_mdp_hooks _reset _reset_env_preprocess _step",
    E.RewardSum: "_reset_keys",
    E.VecNorm: "_init _td",
    E.VecNormV2: "_cast_int_to_float _count _loc _var initialized",
    E.EndOfLifeTransform: "_get_lives",
    modules.MLP: "_reshape_out",
    modules.SafeModule: "_spec",
    modules.EGreedyModule: "_spec",
    N.TensorDictModule: f"_get_kwargs _kwargs {' '.join(MODULE_METHODS)}",
    N.TensorDictSequential: "_select_before_return _run_module _module_iter",
    N.ProbabilisticTensorDictSequential: f"_requires_sample {' '.join(SEQUENTIAL_METHODS)}",
    N.ProbabilisticTensorDictModule: f"_generator _generator_key {' '.join(PROBABILISTIC_METHODS)}",
    TensorDict: "_fast_apply _new_unsafe",
    nn.Module: "_backward_hooks _backward_pre_hooks _compiled_call_impl _forward_hooks "
    "_forward_hooks_with_kwargs _forward_pre_hooks _parameters",
    Distribution: "_validate_args",
    gym.wrappers.TimeLimit: "_elapsed_steps _max_episode_steps",
    gym.wrappers.OrderEnforcing: "_has_reset",
}
"""The private names by their owners, and public ones that are documented nowhere."""

ELSEWHERE = {
    "_ssq": "an entry of a VecNorm, as _sum and _count",
    "_sum": "an entry of a VecNorm",
    "_private": "of Ray",
    "_global_node": "of Ray",
    "_actor_id": "of Ray",
    "_reader": "of multiprocessing's queues",
    "_schema": "of torch's operators",
    "_recv": "of EnvPool",
    "_state_keys": "of EnvPool",
    "_to": "of EnvPool",
    "_reset_key": "of single transforms of TorchRL",
    "_validated": "of single transforms of TorchRL",
    "_torchrl_native_autoreset": "of single envs of TorchRL",
    "_shutdown": "set by distributed collectors; below",
}


def sources_of(thing: Any) -> str:
    return "\n".join(map(source, thing.__mro__ if isinstance(thing, type) else [thing]))


@pytest.mark.parametrize("owner", NAMES, ids=lambda owner: owner.__name__)
def test_upstream_has_the_name(owner: Any) -> None:
    gone = [
        name
        for name in NAMES[owner].split()
        if not hasattr(owner, name)
        and f"self.{name}" not in sources_of(owner)
        and f'__dict__["{name}"]' not in sources_of(owner)
    ]
    assert not gone, f"{owner.__name__} has no {gone} any more"


def test_every_name_is_in_the_table() -> None:
    """Of each private name that a module of ``_upstream`` reads, but for those that it imports."""
    used, own = set(), {"_of", "_name", "_default"}
    for tree in (ast.parse(path.read_text()) for path in SOURCES):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Assign):
                own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Call):  # Alias("..."), attrgetter("..."), getattr(..., "...")
                used |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    listed = {name for names in NAMES.values() for name in names.split()} | {*ELSEWHERE}
    assert {name for name in used if isinstance(name, str) and is_private(name)} - own <= listed


def test_hooks_of_all_modules_have_the_names_of_those_of_one() -> None:
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        assert isinstance(getattr(all_modules, f"_global_{kind}_hooks"), dict)


RUNNER = _runner._main_async_collector_impl

TEXTS: list[tuple[Any, list[str]]] = [
    (type(E.GymEnv).__call__, ["num_workers"]),
    (type(E.ParallelEnv).__call__, ["serial_for_single"]),
    (type(C.MultiCollector).__call__, ["sync"]),
    (batched_envs._dispatch_caller_parallel.__call__, ['"_self"']),
    (_utils, ['"BATCHED_PIPE_TIMEOUT", "10000.0"']),
    (E.ParallelEnv._start_workers, ["torch.get_num_threads() - self.num_workers"]),
    (BatchedEnvBase, ["view._owns_workers = False"]),
    (gym_library.GymLikeEnv._step, ["range(self.wrapper_frame_skip)"]),
    (batched_envs._run_worker_pipe_shared_mem, ["\n            torch.manual_seed"]),
    # The messages that collectors/pipes.py knows about.
    (
        RUNNER,
        [
            *(f'"{name}"' for name in ("continue", "continue_random", "run_free", "pause")),
            '"restart"',
            '"cascade_execute"',
            'queue_out.put((idx, "paused")',
            "queue_out.put((data, j)",
            "queue_out.put((idx, j)",
            "collector_class._ignore_rb =",
            "inner_collector = collector_class(",
            "worker_idx=worker_idx",
        ],
    ),
    (_multi_sync, ["self.queue_out.get(timeout=_TIMEOUT)"]),
    (_multi_async, ["self.queue_out.get(timeout=timeout)"]),
    (_multi_base, ["_check_for_faulty_process(self.procs)"]),
    (SharedMemWeightSyncScheme, ['ack != "updated"']),
    (
        RayCollector,
        [
            "if not self._weight_sync_initialized and self._weight_sync_schemes is not None:",
            "self._remote_collectors.append(collector)",
            'other_params["worker_idx"] = i',
            "meth = self._sync_iterator",
            "meth = self._async_iterator",
            "target=self._run_collection_loop",
        ],
    ),
    (
        DistributedCollector,
        [
            "self._tensordict_out = self._tensordict_out.unbind(0)",
            "data, total_frames = self._next_sync(total_frames)",
            "data, total_frames, ready_worker_idx = self._next_async(",
            'self._store.set(f"NODE_{rank}_in", b"continue")',
            "].irecv(src=rank, return_premature=True)",
            'if getattr(self, "_shutdown", False):',
            "yield from self._iterator_dist()",
            "self._make_container()",
            "traj_ids[i] += traj_ids[i - 1].max()",
            "self._store, self._store_port = _create_tcpstore_with_retry(",
            'status = self._store.get(f"NODE_{rank}_out")',
        ],
    ),
    (generic, ["data = collector.next()"]),
    (
        DistributedSyncCollector,
        [  # if one of them is gone, so may be the fault that ours puts right
            "self._tensordict_out = _data.expand((self.num_workers, *_data.shape))",
            "self._single_tds = self._tensordict_out.unbind(0)",
            "self._single_tds[i].irecv(src=rank, return_premature=True)",
            "traj_ids[i] += traj_ids[i - 1].max()",
        ],
    ),
]


@pytest.mark.parametrize(("thing", "texts"), TEXTS, ids=lambda part: getattr(part, "__name__", ""))
def test_upstreams_code_is_as_we_know_it(thing: Any, texts: list[str]) -> None:
    missing = [text for text in texts if text not in sources_of(thing)]
    assert not missing


def test_workers_without_buffers_do_not_seed_torch() -> None:
    assert "\n            torch.manual_seed" not in sources_of(batched_envs._run_worker_pipe_direct)


def test_torch_dispatch_mode_is_a_class_of_torchs() -> None:
    assert isinstance(_python_dispatch.TorchDispatchMode, type)
