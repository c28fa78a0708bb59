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
from torch.nn.modules import module as all_modules
from torch.utils import _python_dispatch
from torchrl import _utils
from torchrl import envs as E
from torchrl.collectors import _multi_async, _multi_base, _multi_sync, _runner
from torchrl.collectors.distributed import (
    RayCollector,
)
from torchrl.collectors.utils import _TrajectoryPool
from torchrl.envs import batched_envs
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.libs import gym as gym_library
from torchrl.weight_update import SharedMemWeightSyncScheme

import tdcollect._upstream
from tdcollect._upstream.names import NAMES, lacking

from .test_private_names import is_private, source

SOURCES = sorted(Path(tdcollect._upstream.__path__[0]).glob("*.py"))

MORE: dict[Any, str] = {
    C.MultiCollector: "_flush_trajectory_assembly _frames _iter _recv_and_check "
    "_weight_sync_schemes",
    SharedMemWeightSyncScheme: "_ack_queues",
    _TrajectoryPool: "_traj_id lock",
    RayCollector: "_collection_thread _external_weight_sender _frames_per_batch_corrected "
    "_remote_collectors _stop_event _sync _weight_sync_initialized",
    gym.wrappers.TimeLimit: "_elapsed_steps _max_episode_steps",
    gym.wrappers.OrderEnforcing: "_has_reset",
}
"""Private names by their owners, and public ones that are documented nowhere, beside `NAMES`."""

ELSEWHERE = {
    "_ssq": "an entry of a VecNorm, as _sum and _count",
    "_sum": "an entry of a VecNorm",
    "_private": "of Ray",
    "_global_node": "of Ray",
    "_actor_id": "of Ray",
    "_reader": "of multiprocessing's queues",
    "_semlock": "of multiprocessing's locks",
    "_schema": "of torch's operators",
    "_C": "torch's own module; the next, of it and of tensors, may be missing",
    **dict.fromkeys(("_storage_Use_Count", "_use_count", "_cdata", "_version"), "of tensors"),
    "_disabled_torch_function_impl": "of torch, for classes of tensors",
    "_get_joint_sample_and_log_prob": "of tensordict from 0.15 on",
    "_acknowledged_policy_version": "of TorchRL from 0.15 on",
    "_record_stepped_frames": "of TorchRL from 0.15 on",
    "_load_progress_state_dict": "of TorchRL from 0.15 on",
    "_recv": "of EnvPool",
    "_state_keys": "of EnvPool",
    "_to": "of EnvPool",
    "_reset_key": "of single transforms of TorchRL",
    "_validated": "of single transforms of TorchRL",
    "_torchrl_native_autoreset": "of single envs of TorchRL",
}


def sources_of(thing: Any) -> str:
    return "\n".join(map(source, thing.__mro__ if isinstance(thing, type) else [thing]))


EVERY = {**NAMES, **{f"{owner.__module__}:{owner.__name__}": MORE[owner] for owner in MORE}}


@pytest.mark.parametrize("owner", EVERY)
def test_upstream_has_the_name(owner: str) -> None:
    assert lacking(owner, f"{EVERY[owner]} _no_such_name") == ["_no_such_name"]


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
    listed = {name for names in EVERY.values() for name in names.split()} | {*ELSEWHERE}
    assert {name for name in used if isinstance(name, str) and is_private(name)} - own <= listed


def test_hooks_of_all_modules_have_the_names_of_those_of_one() -> None:
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        assert isinstance(getattr(all_modules, f"_global_{kind}_hooks"), dict)


RUNNER = _runner._main_async_collector_impl

TEXTS: list[tuple[Any, list[str]]] = [
    (type(E.GymEnv).__call__, ["num_workers"]),
    (type(C.MultiCollector).__call__, ["sync"]),
    (batched_envs._dispatch_caller_parallel.__call__, ['"_self"']),
    (_utils, ['"BATCHED_PIPE_TIMEOUT", "10000.0"']),
    (E.ParallelEnv._start_workers, ["torch.get_num_threads() - self.num_workers"]),
    (BatchedEnvBase, ["view._owns_workers = False"]),
    (gym_library.GymLikeEnv._step, ["range(self.wrapper_frame_skip)"]),
    (batched_envs._run_worker_pipe_shared_mem, ["\n            torch.manual_seed"]),
    # The messages that collectors/multi.py knows about.
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
]


@pytest.mark.parametrize(("thing", "texts"), TEXTS, ids=lambda part: getattr(part, "__name__", ""))
def test_upstreams_code_is_as_we_know_it(thing: Any, texts: list[str]) -> None:
    missing = [text for text in texts if text not in sources_of(thing)]
    assert not missing


def test_workers_without_buffers_do_not_seed_torch() -> None:
    assert "\n            torch.manual_seed" not in sources_of(batched_envs._run_worker_pipe_direct)


def test_torch_dispatch_mode_is_a_class_of_torchs() -> None:
    assert isinstance(_python_dispatch.TorchDispatchMode, type)
