"""An env and a policy by name; nothing that is named runs before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tdcollect.display import one_line
from tdcollect.evaluation.episodes.groups import GroupPolicies
from tdcollect.evaluation.imports import by_group, called, is_named, load_named
from tdcollect.evaluation.requested import Call, RequestedEnv, one_slot, placed, policy_from

RANDOM, SB3, LEROBOT = "random", "sb3", "lerobot"  # policies that need no factory


@dataclass(frozen=True)
class Request:
    """An env and a policy, by name.

    Attributes:
        env: a gymnasium id, or ``module:callable`` of a function that makes a ``gymnasium.Env``
            or any ``EnvBase``.
        policy: ``module:factory``, ``"random"``, ``"sb3"`` for a model file of
            Stable-Baselines3, or ``"lerobot"`` for a model of LeRobot; or one for each group of
            agents, ``"red=FILE.py:f,blue=random"``.
        checkpoint: a file with the policy's ``state_dict``, or the model file; of LeRobot the
            folder ``pretrained_model``, or the model's id on the Hub; of groups likewise.
        vecnormalize: a file of Stable-Baselines3's ``VecNormalize``, for its observations.
        env_kwargs: for the env's constructor.
        backend: of :func:`tdcollect.make_env`.
        device: the device that the policy runs on.
        wrappers: called with the gymnasium env, innermost first, each ``module:callable`` or
            ``{"call": "module:callable", "kwargs": {...}}``.
        transforms: likewise, called without positional arguments; each gives a TorchRL
            ``Transform``.
        env_state: a file with the ``state_dict`` of the env with its transforms, whose statistics
            are frozen.
        directory: the directory that modules are looked for in first, and that relative paths
            start from.
    """

    env: str
    policy: str
    checkpoint: str | None = None
    vecnormalize: str | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None
    device: str | None = None
    wrappers: list[str | dict[str, Any]] = field(default_factory=list)
    transforms: list[str | dict[str, Any]] = field(default_factory=list)
    env_state: str | None = None
    directory: str = "."

    def make(self, look: bool = True) -> tuple[str | Callable[..., Any], Any]:
        """Return the env and the policy as :func:`tdcollect.evaluate` takes them.

        This runs the code that is named. A factory with a parameter without default, or one named
        ``env``, is called with an env, made for it and closed afterwards.

        Args:
            look: look for modules in ``directory``; else only on Python's path.

        Raises:
            TypeError, ValueError: for a request that cannot be met.
            FileNotFoundError, ModuleNotFoundError, AttributeError: if something that is named
                does not exist.
        """
        here, env = Path(self.directory), self.made_env(look)
        if named := by_group(self.policy):
            return env, self._group_policies(named, look)
        if self.vecnormalize is not None and self.policy != SB3:
            raise ValueError(f"VecNormalize goes with --policy sb3, got --policy {self.policy}")
        if self.policy == RANDOM:
            if self.checkpoint is not None:
                raise ValueError("random actions have no checkpoint; leave it out")
            return env, None
        if self.policy == SB3:
            return env, placed(self._sb3(env), self.device)
        if self.policy == LEROBOT:
            from tdcollect.evaluation.lerobot import load_policy

            if self.checkpoint is None:
                raise ValueError(
                    "--policy lerobot needs the model: --checkpoint .../pretrained_model"
                )
            folder = here / self.checkpoint
            return env, load_policy(folder if folder.exists() else self.checkpoint, self.device)
        factory = _function(self.policy, here, look, "callable and to give a policy")
        policy = policy_from(factory, self.policy, env, self.env_kwargs, self.backend)
        if self.checkpoint is not None:
            _load(policy, here / self.checkpoint)
        return env, placed(policy, self.device)

    def made_env(self, look: bool = True) -> str | Callable[..., Any]:
        """Return the env as :func:`tdcollect.evaluate` takes it, with wrappers and transforms.

        Arguments and errors are those of :meth:`make`.
        """
        here = Path(self.directory)
        file = None if self.env_state is None else here / self.env_state
        state = None if file is None else _read_state(file)
        env = load_named(self.env, here, look) if is_named(self.env) else self.env
        if not (self.wrappers or self.transforms or state is not None):
            return env
        if self.wrappers and self.backend == "envpool":
            raise ValueError(
                "wrappers are for gymnasium envs, and backend envpool makes none; leave one out"
            )
        name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        wrappers, transforms = (
            tuple(
                Call(path, _function(path, here, look), kwargs)
                for path, kwargs in map(called, items)
            )
            for items in (self.wrappers, self.transforms)
        )
        requested = RequestedEnv(name, env, wrappers, transforms, state, str(file or "the state"))
        if isinstance(env, str):
            if state is not None and not transforms:
                raise ValueError(
                    f"expected transforms for {file}, as {env} has none; name those that the file "
                    "is of in transforms"
                )
            requested.check_state()
        return requested

    def names(self) -> dict[str, Any]:
        """Return what is named, as it was given, for the notes on a run."""
        return {
            name: value for name, value in asdict(self).items() if value and name != "directory"
        }

    def __repr__(self) -> str:
        return one_line(self, self.env, self.policy)

    def _group_policies(self, named: Mapping[str, str], look: bool) -> GroupPolicies:
        """Return the policies of groups that are named, each with its checkpoint."""
        files = by_group(self.checkpoint)
        if (self.checkpoint and not files) or files.keys() - named.keys():
            raise ValueError(
                f"expected checkpoints of groups that have a policy, GROUP=FILE with one of "
                f"{', '.join(named)}, got {self.checkpoint!r}"
            )
        parts = {
            group: replace(self, policy=policy, checkpoint=files.get(group))
            for group, policy in named.items()
        }
        return GroupPolicies({group: part.make(look)[1] for group, part in parts.items()})

    def _sb3(self, env: Any) -> Any:
        """Return the policy of a model file of Stable-Baselines3."""
        from tdcollect.evaluation.sb3 import load_policy

        if self.checkpoint is None:
            raise ValueError("--policy sb3 needs the model's file: --checkpoint model.zip")
        here = Path(self.directory)
        normalization = None if self.vecnormalize is None else here / self.vecnormalize
        with one_slot(env, self.env_kwargs, self.backend) as one:
            return load_policy(here / self.checkpoint, one, normalization=normalization)


def _function(name: str, directory: Path, look: bool, what: str = "callable") -> Any:
    """Return a function that is named."""
    function = load_named(name, directory, look)
    if not callable(function):
        raise TypeError(f"expected {name} to be {what}, got {function!r}")
    return function


def _load(policy: Any, file: Path) -> None:
    """Load weights without running code from the file."""
    if not isinstance(policy, nn.Module):
        raise TypeError(
            f"expected a torch module to load {file} into, got {type(policy).__name__}; have the "
            "factory load it, and leave the checkpoint out"
        )
    with _reading(file, "a checkpoint", f"state_dict of {type(policy).__name__}", "policy"):
        policy.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


@contextmanager
def _reading(file: Path, what: str, kind: str, source: str) -> Iterator[None]:
    """Say of which kind the file of weights should be that the block reads."""
    if not file.is_file():
        raise FileNotFoundError(f"expected {what}, got {file}, which is no file")
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{file} is no {kind} (written by torch.save({source}.state_dict(), file)): {error}"
        ) from error


def _read_state(file: Path) -> dict[str, Any]:
    """Read the ``state_dict`` of an env without running code from the file."""
    with _reading(file, "the state of an env", "state of an env", "env"):
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(
            f"expected {file} to hold a state_dict, got {type(state).__name__}; write it by "
            "torch.save(env.state_dict(), file)"
        )
    if not state:
        raise ValueError(
            f"expected {file} to hold statistics, got an empty state_dict: the state of a "
            "SerialEnv or a ParallelEnv has none of its envs; save the state of one of them"
        )
    return dict(state)
