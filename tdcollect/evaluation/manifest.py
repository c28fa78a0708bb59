"""The manifest: what decides the episodes of an evaluation, as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import isfunction
from types import CodeType
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import Composite
from torchrl.envs import EnvBase

from tdcollect._upstream.torchrl import wrapped_env
from tdcollect.envs.traits import all_transforms_of, innermost, of_kind
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.data import digested_entries
from tdcollect.evaluation.episodes.groups import GroupMeasure, GroupPolicies
from tdcollect.evaluation.ledger import (
    BATCHES,
    FORMAT,
    FRESH_ENVS,
    GLOBAL_STREAMS,
    METRICS,
    OBJECT,
    OPTIONS,
    PROCESS,
    RANDOM,
)
from tdcollect.keys import entry_path
from tdcollect.packages import versions
from tdcollect.policies import ACTING, AgentPolicy, SpacePolicy, compiled_from, parts_of
from tdcollect.seeding import BATCHED_PROTOCOL, EVALUATION_PROTOCOL
from tdcollect.surroundings import settings_of_process

if TYPE_CHECKING:
    from tdcollect.evaluation.episodes.collector import EvaluationCollector
    from tdcollect.evaluation.settings import EvaluationSettings

STREAMS = "from a stream of each episode, started from its env seed"
"""The origin of draws from the global generators in envs; without the entry, there are none."""
OF_BATCHES = "from a stream of each batch, started from its seed"
"""Likewise, of a batched simulator."""


def describe(collector: EvaluationCollector) -> dict[str, Any]:
    """Return the manifest of an evaluation that has not begun, and runs in this process."""
    return {**subject(collector), "git": git_state()}


def known_of(collector: EvaluationCollector) -> dict[str, Any]:
    """Return the entries of the manifest that are known once episodes run, as far as they are."""
    streams = STREAMS if collector.batches is None else OF_BATCHES
    known = {} if collector.fresh_envs is None else {FRESH_ENVS: collector.fresh_envs}
    return {**known, **({GLOBAL_STREAMS: streams} if collector.has_streams else {})}


def subject(collector: EvaluationCollector) -> dict[str, Any]:
    """Return the manifest but for the commit, which is that of the process that writes files.

    It does not depend on the number of slots, the backend, the time or the directory.
    """
    settings = collector.settings
    _ = collector.env.full_action_spec_unbatched  # by which transforms learn the env's actions
    indices = list(settings.episode_indices)
    seeds: dict[str, Any] = {"root": settings.seed}
    if settings.env_seeds is not None:
        seeds["env"] = [collector.episode_seeds(index)[0] for index in indices]
    added = [f"{_class(w.function)}({_texts(w.kwargs)})" for w in reversed(collector.wrappers)]
    returns, batches = collector.returns, collector.batches
    described = {
        "format": FORMAT,
        "protocol": EVALUATION_PROTOCOL if batches is None else BATCHED_PROTOCOL,
        "env": {
            "id": collector.base.name,
            "kwargs": {n: _told(v) for n, v in sorted((settings.env_kwargs or {}).items())},
            **described_env(collector.env),
            **({"added_wrappers": added} if added else {}),
            "transforms": [_transform(t) for t in all_transforms_of(collector.env)],
        },
        "entries": digested_entries(collector.env, returns, collector.policy),
        **({} if returns.is_plain else {"returns": returns.described()}),
        **({METRICS: _metrics(collector.metrics)} if collector.metrics else {}),
        "episodes": len(indices) if indices == list(range(len(indices))) else indices,
        "seeds": seeds,
        **({} if batches is None else {BATCHES: _batches(collector)}),
        **({OPTIONS: _options(settings, indices)} if settings.episode_options is not None else {}),
        "max_episode_steps": settings.step_limit,
        "policy": {
            **_policy(collector.policy),
            "exploration": settings.exploration_type.name.lower(),
            "mode": collector.policy_mode,
        },
        "inference_batch_size": settings.inference_batch_size,
        "inference_threads": settings.inference_threads,
        "device": collector.device.type,
        "versions": dict(versions()),
        PROCESS: settings_of_process(),
        "platform": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            **({"gpu": _gpu(collector.device)} if collector.device.type == "cuda" else {}),
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(described, default=int))  # NumPy's ints, too
    return plain


def _batches(collector: EvaluationCollector) -> dict[str, Any]:
    """Return the entry of a batched simulator: its slots, and where they run."""
    assert collector.batches is not None
    device = collector.env.device or torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {**collector.batches._asdict(), "device": name}


def weights_digest(policy: Any) -> str | None:
    """Return the SHA-256 of a policy's parameters and buffers, or of networks that it holds."""
    state = policy.state_dict() if isinstance(policy, nn.Module) else {}
    if isinstance(policy, SpacePolicy):
        parts = parts_of(policy.source).items()
        state = {name: part.state_dict() for name, part in parts if isinstance(part, nn.Module)}
    if not state:
        return None
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        _digest_value(digest, name, value)
    return digest.hexdigest()


def _digest_value(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        rows = value.detach().cpu().contiguous()
        digest.update(f"{name} {rows.dtype} {tuple(rows.shape)}\n".encode())
        digest.update(rows.flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (Mapping, TensorDictBase)):  # an extra state, such as VecNormV2's
        for key, part in sorted(value.items(), key=lambda item: str(item[0])):
            _digest_value(digest, f"{name}.{key}", part)
    else:
        digest.update(f"{name} {value!r}\n".encode())


def _options(settings: EvaluationSettings, indices: Sequence[int]) -> dict[str, Any]:
    """Return the entry of the episodes' reset options: where they come from, and all of them."""
    options: Any = settings.episode_options
    return {"name": options.name, "options": [options[index] for index in indices]}


def _metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of metrics: those known as text, functions by name and their code."""
    return {
        name: str(metric)
        if isinstance(metric, GroupMeasure)
        else {"function": _class(metric), "code": code_digest(metric)}
        if callable(metric)
        else metric
        for name, metric in metrics.items()
    }


def code_digest(function: Any) -> str | None:
    """Return the SHA-256 of the compiled code of a function, or of the methods of a class.

    Numbers and texts that a function encloses, or has as arguments, belong to it. Comments and line
    numbers do not count, nor does the process that it was sent to. Of another object, it is that of
    its class; None where the code is not Python's.
    """
    values: list[Any] = []
    while isinstance(function, partial):
        values += [*function.args, *sorted(function.keywords.items())]
        function = function.func
    function = compiled_from(function)
    function = getattr(function, "__func__", function)
    codes = []
    if isfunction(function):
        codes = [function.__code__]
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    if not codes:
        for kind in (function if isinstance(function, type) else type(function)).__mro__:
            parts = [getattr(v, "__func__", getattr(v, "fget", v)) for v in vars(kind).values()]
            codes += [part.__code__ for part in parts if isfunction(part)]
    digest = hashlib.sha256()
    for code in codes:
        digest.update(_code(code))
    digest.update(repr([value for value in values if _is_plain(value)]).encode())
    return digest.hexdigest() if codes else None


def _code(code: CodeType) -> bytes:
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return code.co_code + repr(names).encode() + b"".join(map(_constant, code.co_consts))


def _constant(value: Any) -> bytes:
    """Return a constant of some code as bytes that are the same in another process."""
    if isinstance(value, CodeType):
        return _code(value)
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode()


def _policy(policy: Any) -> dict[str, Any]:
    """Return the entries of a policy by itself: what it is called, and its digests."""
    return {
        **_named(policy),
        "code": code_digest(policy.source) if isinstance(policy, SpacePolicy) else None,
        "digest": weights_digest(policy),
    }


def _named(policy: Any) -> dict[str, Any]:
    """Return the entry of a policy's class, of its kind on the env's spaces, and of its groups.

    Of agents, it names the method unless that is ``select_action``.
    """
    if isinstance(policy, GroupPolicies):
        groups = {name: _policy(part) for name, part in sorted(policy.policies.items())}
        short = (f"{name}: {part['class'].rpartition('.')[2]}" for name, part in groups.items())
        return {"class": ", ".join(short), "groups": groups}
    if not isinstance(policy, SpacePolicy):
        return {"class": getattr(policy, "algorithm", None) or _class(policy)}
    method = policy.method if isinstance(policy, AgentPolicy) else ACTING[0]
    named = {} if method == ACTING[0] else {"method": method}
    return {"class": policy.algorithm or _class(policy.source), "kind": policy.kind, **named}


def _class(policy: Any) -> str:
    if policy is None:
        return RANDOM
    while isinstance(policy, partial):
        policy = policy.func
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"  # none of a slot's


def described_env(env: EnvBase) -> dict[str, Any]:
    """Return the entries of an env: its wrappers, outermost first, and its spaces or specs."""
    base = innermost(env)
    if isinstance(base, GymnasiumEnv):
        return {
            "wrappers": list(_wrappers(base.env_spec)),
            "observation_space": repr(base.observation_space),
            "action_space": repr(base.action_space),
        }
    inner = wrapped_env(base)
    return {
        "wrappers": [_class(base), *_wrappers(inner.spec if isinstance(inner, gym.Env) else None)],
        "observation_space": _spec(base.full_observation_spec_unbatched),
        "action_space": _spec(base.full_action_spec_unbatched),
    }


def _spec(spec: Composite) -> str:
    """Return a spec as text, the same for any batch size and device."""
    leaves = sorted(spec.items(True, True), key=lambda item: entry_path(item[0]))
    return "; ".join(
        f"{entry_path(key)}: {type(leaf).__name__}({list(leaf.shape)}, "
        f"{str(leaf.dtype).removeprefix('torch.')})"
        for key, leaf in leaves
    )


def _wrappers(spec: EnvSpec | None) -> Iterator[str]:
    """Yield gymnasium's wrappers, outermost first, then the env's entry point."""
    if spec is None:
        return
    for wrapper in reversed(spec.additional_wrappers):
        yield f"{wrapper.name}({_texts(wrapper.kwargs or {})})"
    if spec.max_episode_steps is not None:
        yield f"TimeLimit({spec.max_episode_steps})"
    yield spec.entry_point if isinstance(spec.entry_point, str) else _class(spec.entry_point)


def _texts(kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments as text that is the same in another process, without addresses."""
    return {name: _text(value) for name, value in sorted(kwargs.items())}


def _text(value: Any) -> str:
    return repr(value) if _is_plain(value) else _class(value)


def _told(value: Any) -> Any:
    """Return an argument as JSON has it; of one that it lacks, ``{"object": TEXT}``."""
    with suppress(TypeError, ValueError):
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    return {OBJECT: _text(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool, np.generic))


def _transform(transform: Any) -> str:
    digest = None if isinstance(transform, of_kind("holds_episode")) else weights_digest(transform)
    name = type(transform).__name__
    return name if digest is None else f"{name}({digest[:16]})"


def _gpu(device: torch.device) -> dict[str, Any]:
    """Return the entries of a GPU: its libraries, and torch's settings that change its rounding."""
    cudnn = torch.backends.cudnn
    return {
        "name": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": cudnn.version(),
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "tf32": {
            "matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
            "convolution": cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
            "recurrent": cudnn.rnn.fp32_precision == "tf32",  # type: ignore[attr-defined]
        },
    }


def git_state() -> dict[str, Any] | None:
    """Return the commit that is checked out here, and whether tracked files differ from it."""
    status = "status --porcelain=v2 --branch --no-ahead-behind -uno"
    command, quiet = ["git", "--no-optional-locks", *status.split()], subprocess.DEVNULL
    try:
        lines = subprocess.check_output(command, stderr=quiet, text=True, timeout=10).splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    if headers["branch.oid"] == "(initial)":
        return None
    return {"commit": headers["branch.oid"], "dirty": len(headers) < len(lines)}
