"""An evaluation as data: env, policy and files by name, opened again in another process."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrl.envs import EnvBase

from tdcollect.display import one_line
from tdcollect.evaluation.episodes.opening import open_one, wants_env
from tdcollect.evaluation.episodes.policy import known_device
from tdcollect.evaluation.episodes.requested_env import Call, RequestedEnv, read_state
from tdcollect.evaluation.imports import called, has_module, is_named, load_named, with_file
from tdcollect.files import write_json

REQUEST = "request.json"
RANDOM, SB3 = "random", "sb3"  # policies that need no factory


@dataclass(frozen=True)
class Request:
    """An env and a policy, by name.

    Attributes:
        env: a gymnasium id, or ``module:callable`` of a function that makes a ``gymnasium.Env``
            or any ``EnvBase``.
        policy: ``module:factory``, ``"random"``, or ``"sb3"`` for a model file of
            Stable-Baselines3.
        checkpoint: a file with the policy's ``state_dict``, or the model file.
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

        This runs the code that is named.

        A factory with a parameter without default is called with an env, made for it and closed
        afterwards; any other is called without arguments. ``torch.manual_seed(0)`` comes first.

        Args:
            look: look for modules in ``directory``; else only on Python's path.

        Raises:
            TypeError, ValueError: for a request that cannot be met.
            FileNotFoundError, ModuleNotFoundError, AttributeError: if something that is named
                does not exist.
        """
        here = Path(self.directory)
        env = self.made_env(look)
        if self.vecnormalize is not None and self.policy != SB3:
            raise ValueError(f"VecNormalize goes with --policy sb3, got --policy {self.policy}")
        if self.policy == RANDOM:
            if self.checkpoint is not None:
                raise ValueError("random actions have no checkpoint; leave it out")
            return env, None
        if self.policy == SB3:
            return env, self._placed(self._sb3(env))
        factory = load_named(self.policy, here, look)
        if not callable(factory):
            raise TypeError(
                f"expected {self.policy} to be callable and to give a policy, got {factory!r}"
            )
        torch.manual_seed(0)
        if wants_env(factory):
            one = self._one_slot(env)
            try:
                policy = factory(one)
            finally:
                one.close()
        else:
            policy = factory()
        if not callable(policy):
            raise TypeError(f"expected {self.policy} to give a policy, got {policy!r}")
        if self.checkpoint is not None:
            _load(policy, here / self.checkpoint)
        return env, self._placed(policy)

    def _placed(self, policy: Any) -> Any:
        """Return the policy on the device that it is to run on, if it is a module."""
        if self.device is None or not isinstance(policy, nn.Module):
            return policy
        return policy.to(known_device(self.device))

    def made_env(self, look: bool = True) -> str | Callable[..., Any]:
        """Return the env as :func:`tdcollect.evaluate` takes it, with wrappers and transforms.

        Args:
            look: as for :meth:`make`.

        Raises:
            TypeError, ValueError: for parts that do not fit.
            FileNotFoundError, ModuleNotFoundError, AttributeError: if something that is named
                does not exist.
        """
        here = Path(self.directory)
        file = None if self.env_state is None else here / self.env_state
        state = None if file is None else read_state(file)
        env = load_named(self.env, here, look) if is_named(self.env) else self.env
        if not (self.wrappers or self.transforms or state is not None):
            return env
        if self.wrappers and self.backend == "envpool":
            raise ValueError(
                "wrappers are for gymnasium envs, and backend envpool makes none; leave one out"
            )
        name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        wrappers, transforms = (
            tuple(self._call(item, look) for item in items)
            for items in (self.wrappers, self.transforms)
        )
        requested = RequestedEnv(name, env, wrappers, transforms, state, str(file or "the state"))
        if isinstance(env, str):
            if state is not None and not transforms:
                raise ValueError(
                    f"expected transforms for {file}, as {env} has none; name those that the file "
                    "is of: --transform NAME"
                )
            requested.check_state()
        return requested

    def _call(self, item: str | dict[str, Any], look: bool) -> Call:
        name, kwargs = called(item)
        function = load_named(name, Path(self.directory), look)
        if not callable(function):
            raise TypeError(f"expected {name} to be callable, got {function!r}")
        return Call(name, function, kwargs)

    def _sb3(self, env: Any) -> Any:
        from tdcollect.evaluation.sb3 import load_policy

        if self.checkpoint is None:
            raise ValueError("--policy sb3 needs the model's file: --checkpoint model.zip")
        here = Path(self.directory)
        normalization = None if self.vecnormalize is None else here / self.vecnormalize
        one = self._one_slot(env)
        try:
            return load_policy(here / self.checkpoint, one, normalization=normalization)
        finally:
            one.close()

    def _one_slot(self, env: Any) -> EnvBase:
        """Make the env with one slot."""
        return open_one(env, self.env_kwargs, self.backend)

    def __repr__(self) -> str:
        return one_line(self, self.env, self.policy)

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write the request beside the evaluation's files.

        Paths are relative, so that a tree of folders can be moved; a path that has no folder in
        common with the directory is absolute.
        """
        kept = self._with_paths(
            lambda path: _near(path, self.directory) if os.path.isabs(path) else path
        )
        kept = replace(kept, directory=_near(self.directory, directory))
        write_json(Path(directory) / REQUEST, asdict(kept))

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> Request | None:
        """Read the request that a directory keeps; None if it keeps none. Nothing of it is run.

        Raises:
            ValueError: for a file that holds something else.
        """
        file = Path(directory) / REQUEST
        if not file.exists():
            return None
        try:
            if not file.is_file():  # a pipe has no end
                raise ValueError("it is no file")
            kept = cls(**_checked(json.loads(file.read_bytes())))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"expected {file} to hold a request as `tdcollect evaluate` writes it: {error}; "
                "name what to run instead, --env ENV --policy MODULE:FACTORY, without --trust"
            ) from error
        start = os.path.realpath(directory)
        return replace(kept, directory=os.path.normpath(os.path.join(start, kept.directory)))

    def command(
        self, index: int | str, directory: str | os.PathLike[str], start: str | os.PathLike[str]
    ) -> str:
        """Return the shell command that runs an episode again, with all names.

        Args:
            index: the episode's index.
            directory: the directory of the evaluation.
            start: the directory that the command will be typed in; its paths are relative to this.
        """
        seen = self._with_paths(lambda path: _relative(os.path.join(self.directory, path), start))
        options = {
            "--env": seen.env,
            "--policy": seen.policy,
            "--checkpoint": seen.checkpoint,
            "--vecnormalize": seen.vecnormalize,
            "--env-kwargs": seen.env_kwargs or None,
            "--backend": seen.backend,
            "--device": seen.device,
            "--wrapper": seen.wrappers,
            "--transform": seen.transforms,
            "--env-state": seen.env_state,
        }
        typed = ["tdcollect", "replay", _relative(directory, start), str(index)]
        for option, value in options.items():
            typed += typed_option(option, value)
        command = shlex.join(typed)
        beside = _relative(self.directory, start)
        names = [self.env, self.policy]
        names += [called(item)[0] for item in (*self.wrappers, *self.transforms)]
        if beside != "." and any(has_module(name, Path(self.directory)) for name in names):
            command = f"PYTHONPATH={shlex.quote(beside)} {command}"  # where evaluate found it
        return command

    def _with_paths(self, change: Callable[[str], str]) -> Request:
        """Return the request with each of its paths changed, except the directory."""
        return replace(
            self,
            env=with_file(self.env, change),
            policy=with_file(self.policy, change),
            checkpoint=self.checkpoint and change(self.checkpoint),
            vecnormalize=self.vecnormalize and change(self.vecnormalize),
            wrappers=[with_call(item, change) for item in self.wrappers],
            transforms=[with_call(item, change) for item in self.transforms],
            env_state=self.env_state and change(self.env_state),
        )


def typed_option(option: str, value: Any) -> list[str]:
    """Return the words that give an option of ``tdcollect replay`` its value; none for None."""
    if value is None:
        return []
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = (one if isinstance(one, str) else json.dumps(one, sort_keys=True) for one in values)
    return [word for text in texts for word in (option, text)]


def with_call(item: str | Mapping[str, Any], change: Callable[[str], str]) -> Any:
    """Return a function that is named, with the path of its file changed, if it has one."""
    if isinstance(item, str):
        return with_file(item, change)
    return {**item, "call": with_file(called(item)[0], change)}


def _checked(value: Any) -> Mapping[str, Any]:
    """Return the entries of a request, with their types checked."""
    if not isinstance(value, dict):
        raise TypeError(f"it is no JSON object but {type(value).__name__}")
    known = {entry.name for entry in fields(Request)}
    unknown = sorted(value.keys() - known)
    if unknown:
        raise ValueError(f"it has {unknown}, which no request has")
    for name in sorted(known):
        several = name in ("wrappers", "transforms")
        entry = value.get(name, {} if name == "env_kwargs" else [] if several else None)
        if name == "env_kwargs":
            right = isinstance(entry, dict)
        elif several:
            right = isinstance(entry, list) and all("\0" not in called(i)[0] for i in entry)
        elif name in ("env", "policy"):
            right = isinstance(entry, str) and bool(entry)
        else:
            right = isinstance(entry, str) or (entry is None and name != "directory")
            right |= name not in value
        if isinstance(entry, str):
            right &= b"\0" not in os.fsencode(entry)
        if not right:
            raise TypeError(f"its {name} is {entry!r}")
    return value


def _relative(path: str | os.PathLike[str], start: str | os.PathLike[str]) -> str:
    """Return the path relative to a folder; links are followed, as `..` would not lead back."""
    seen = os.path.relpath(os.path.realpath(path), os.path.realpath(start))
    return f"./{seen}" if seen.startswith("-") else seen


def _near(path: str | os.PathLike[str], start: str | os.PathLike[str]) -> str:
    """Return the path relative to a folder; absolute if they have no folder in common."""
    ends = [os.path.realpath(path), os.path.realpath(start)]
    common = os.path.commonpath(ends)
    return ends[0] if common == os.path.dirname(common) else _relative(path, start)


def _load(policy: Any, file: Path) -> None:
    """Load weights, without running code from the file."""
    if not isinstance(policy, nn.Module):
        raise TypeError(
            f"expected a torch module to load {file} into, got {type(policy).__name__}; have the "
            "factory load it, and leave the checkpoint out"
        )
    if not file.is_file():
        raise FileNotFoundError(f"expected a checkpoint, got {file}, which is no file")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        policy.load_state_dict(state)
    except Exception as error:
        raise ValueError(
            f"{file} is no state_dict of {type(policy).__name__} (written by "
            f"torch.save(policy.state_dict(), file)): {error}"
        ) from error
