"""The manifest: what an evaluation is of, as JSON. Equal manifests mean the same episodes."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import nn

from tdcollect.collect.fast.transforms import transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.collector import EvaluationCollector
from tdcollect.evaluation.comparable import RANDOM
from tdcollect.evaluation.data import digested_entries
from tdcollect.evaluation.records import FORMAT
from tdcollect.seeding import EVALUATION_PROTOCOL

_PACKAGES = ("tdcollect", "torch", "tensordict", "torchrl", "gymnasium", "numpy")
_ENV_PACKAGES = ("ale-py", "box2d", "envpool", "mujoco")  # named where they are installed


def describe(collector: EvaluationCollector, env_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of an evaluation that has not begun.

    Nothing in it depends on the number of slots or the backend, nor on time or place.
    """
    numbers = list(collector.episode_indices)
    seeds: dict[str, Any] = {"root": collector.seed}
    if collector.env_seeds_given:
        seeds["env"] = [collector.episode_seeds(number)[0] for number in numbers]
    return {
        "format": FORMAT,
        "protocol": EVALUATION_PROTOCOL,
        "env": {
            "id": collector.base.name,
            "kwargs": _told(env_kwargs),
            "wrappers": list(_wrappers(collector.base)),
            "transforms": [_transform(t) for t in transforms_of(collector.env)],
            "observation_space": repr(collector.base.observation_space),
            "action_space": repr(collector.base.action_space),
        },
        "entries": digested_entries(collector.env),
        "episodes": len(numbers) if numbers == list(range(len(numbers))) else numbers,
        "seeds": seeds,
        "max_episode_steps": collector.max_episode_steps,
        "policy": {
            "class": _class(collector.policy),
            "structure": structure_digest(collector.policy),
            "digest": weights_digest(collector.policy),
            "exploration": collector.exploration_type.name.lower(),
            "mode": collector.policy_mode,
        },
        "inference_batch_size": collector.inference_batch_size,
        "inference_threads": collector.inference_threads,
        "device": collector.device.type,
        "versions": dict(_versions()),
        "platform": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
        "git": _git(),
    }


def weights_digest(policy: Any) -> str | None:
    """SHA-256 of a policy's parameters and buffers; None where it has none."""
    state = policy.state_dict() if isinstance(policy, nn.Module) else {}
    if not state:
        return None
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        if isinstance(value, torch.Tensor):
            rows = value.detach().cpu().contiguous()
            digest.update(f"{name} {rows.dtype} {tuple(rows.shape)}\n".encode())
            digest.update(rows.flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()


def structure_digest(policy: Any) -> str | None:
    """SHA-256 of what a policy is made of, beside its weights: its modules, and what they call.

    Of layers of torch it holds their settings too, of other modules and functions their names.
    None for a policy that is no module.
    """
    if not isinstance(policy, nn.Module):
        return None
    digest = hashlib.sha256()
    for name, module in policy.named_modules():
        settings = module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""
        called = vars(module).get("module")  # a TensorDictModule around a function
        of = "" if called is None else _class(called)
        digest.update(f"{name} {_class(module)} {settings} {of}\n".encode())
    return digest.hexdigest()


def _class(policy: Any) -> str:
    if policy is None:
        return RANDOM
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{named.__module__}.{named.__qualname__}"


def _wrappers(env: GymnasiumEnv) -> Iterator[str]:
    """gymnasium's wrappers, outermost first, then what makes the env itself."""
    spec = env.env_spec
    if spec is None:
        return
    for wrapper in reversed(spec.additional_wrappers):
        yield f"{wrapper.name}({_told(wrapper.kwargs or {})})"
    if spec.max_episode_steps is not None:
        yield f"TimeLimit({spec.max_episode_steps})"
    yield spec.entry_point if isinstance(spec.entry_point, str) else _class(spec.entry_point)


def _told(kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as text that is the same in another process: an object's address is not."""
    return {
        name: repr(value) if _is_plain(value) else _class(value)
        for name, value in sorted(kwargs.items())
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool, np.generic))


def _transform(transform: Any) -> str:
    digest = weights_digest(transform)
    name = type(transform).__name__
    return name if digest is None else f"{name}({digest[:16]})"


@functools.cache  # reading them takes longer than many an episode
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in (*_PACKAGES, *_ENV_PACKAGES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git() -> dict[str, Any] | None:
    """The commit that is checked out here, and whether tracked files differ from it."""
    command = "git --no-optional-locks status --porcelain=v2 --branch --no-ahead-behind -uno"
    try:
        asked = subprocess.run(
            command.split(), capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = asked.stdout.splitlines()
    told = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    if told["branch.oid"] == "(initial)":
        return None
    return {
        "commit": told["branch.oid"],
        "dirty": not all(line.startswith("# ") for line in lines),
    }
