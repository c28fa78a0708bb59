"""An env and a policy by name, as data; nothing that is named runs before it is asked for."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tdcollect.display import one_line
from tdcollect.evaluation.imports import (
    by_group,
    called,
    each_group,
    has_module,
    is_named,
    load_named,
    with_file,
)
from tdcollect.files import write_json

REQUEST = "request.json"
RANDOM, SB3, LEROBOT = "random", "sb3", "lerobot"  # policies that need no factory
MAKE_ENV = "FILE.py:make_env"  # in commands, where no option names what is around the env


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

        This runs the code that is named; a factory as :func:`policy_from` calls it.

        Args:
            look: look for modules in ``directory``; else only on Python's path.

        Raises:
            TypeError, ValueError: for a request that cannot be met.
            FileNotFoundError, ModuleNotFoundError, AttributeError: if something that is named
                does not exist.
        """
        if named := by_group(self.policy):
            return self.made_env(look), self._group_policies(named, look)
        if self.vecnormalize is not None and self.policy != SB3:
            raise ValueError(f"VecNormalize goes with --policy sb3, got --policy {self.policy}")
        env = self.made_env(look)
        return env, self._made_policy(env, look)

    def made_env(self, look: bool = True) -> str | Callable[..., Any]:
        """Return the env as :func:`tdcollect.evaluate` takes it, with wrappers and transforms.

        Arguments and errors are those of :meth:`make`.
        """
        from tdcollect.evaluation import requested

        file = None if self.env_state is None else Path(self.directory, self.env_state)
        state = None if file is None else requested.read_state(file)
        env = load_named(self.env, Path(self.directory), look) if is_named(self.env) else self.env
        if not (self.wrappers or self.transforms or state is not None):
            return env
        if self.wrappers and self.backend == "envpool":
            raise ValueError(
                "wrappers are for gymnasium envs, and backend envpool makes none; leave one out"
            )

        def call(item: str | dict[str, Any]) -> requested.Call:
            name, kwargs = called(item)
            function = load_named(name, Path(self.directory), look)
            if not callable(function):
                raise TypeError(f"expected {name} to be callable, got {function!r}")
            return requested.Call(name, function, kwargs)

        name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        around = (tuple(map(call, self.wrappers)), tuple(map(call, self.transforms)))
        made = requested.RequestedEnv(name, env, *around, state, str(file or "the state"))
        if isinstance(env, str):
            if state is not None and not self.transforms:
                raise ValueError(
                    f"expected transforms for {file}, as {env} has none; name those that the file "
                    "is of in transforms"
                )
            made.check_state()
        return made

    def _group_policies(self, named: Mapping[str, str], look: bool) -> Any:
        from tdcollect.evaluation.episodes.groups import GroupPolicies

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

    def _made_policy(self, env: Any, look: bool) -> Any:
        from tdcollect.evaluation import requested

        here, checkpoint = Path(self.directory), self.checkpoint
        if self.policy == RANDOM:
            if checkpoint is not None:
                raise ValueError("random actions have no checkpoint; leave it out")
            return None
        if self.policy == SB3:
            from tdcollect.evaluation.sb3 import load_policy

            if checkpoint is None:
                raise ValueError("--policy sb3 needs the model's file: --checkpoint model.zip")
            normalization = None if self.vecnormalize is None else here / self.vecnormalize
            with requested.one_slot(env, self.env_kwargs, self.backend) as one:
                model = load_policy(here / checkpoint, one, normalization=normalization)
            return requested.placed(model, self.device)
        if self.policy == LEROBOT:
            from tdcollect.evaluation import lerobot

            if checkpoint is None:
                raise ValueError(
                    "--policy lerobot needs the model: --checkpoint .../pretrained_model"
                )
            folder = here / checkpoint
            return lerobot.load_policy(folder if folder.exists() else checkpoint, self.device)
        factory = load_named(self.policy, here, look)
        if not callable(factory):
            raise TypeError(
                f"expected {self.policy} to be callable and to give a policy, got {factory!r}"
            )
        policy = requested.policy_from(factory, self.policy, env, self.env_kwargs, self.backend)
        if checkpoint is not None:
            requested.load_weights(policy, here / checkpoint)
        return requested.placed(policy, self.device)

    def __repr__(self) -> str:
        return one_line(self, self.env, self.policy)

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write the request beside the evaluation's files; its paths are relative if they can be.

        So a tree of folders can be moved.
        """
        kept = self.with_paths(
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

    @classmethod
    def readable(cls, directory: str | os.PathLike[str]) -> Request | None:
        """Read the request that a directory keeps; None for one that cannot be read, too."""
        with suppress(ValueError, OSError):
            return cls.read(directory)
        return None

    def command(
        self, asked: str, directory: str | os.PathLike[str], start: str | os.PathLike[str]
    ) -> str:
        """Return the shell command that runs an episode again, as it is typed in ``start``.

        What is asked for is the index of the episode, or ``--film`` with several. No option names
        wrappers, transforms and their statistics: a function of the user's makes such an env.
        """
        seen = self.with_paths(lambda path: _relative(os.path.join(self.directory, path), start))
        typed = ["tdcollect", "replay", _relative(directory, start), *asked.split()]
        around = bool(self.wrappers or self.transforms or self.env_state)
        env = MAKE_ENV if around else seen.env
        entries = {**vars(seen), "env": env, "env_kwargs": seen.env_kwargs or None}
        none = dict.fromkeys(("wrappers", "transforms", "env_state", "directory"))
        typed += typed_options(entries | none)
        command = shlex.join(typed)
        beside = _relative(self.directory, start)
        names = [env, *(by_group(self.policy) or {"": self.policy}).values()]
        if beside != "." and any(has_module(name, Path(self.directory)) for name in names):
            command = f"PYTHONPATH={shlex.quote(beside)} {command}"  # where evaluate found it
        return command

    def with_paths(self, change: Callable[[str], str]) -> Request:
        """Return the request with the paths of its files changed."""
        return replace(
            self,
            env=with_file(self.env, change),
            policy=each_group(self.policy, lambda name: with_file(name, change)),
            checkpoint=self.checkpoint and each_group(self.checkpoint, change),
            vecnormalize=self.vecnormalize and change(self.vecnormalize),
            wrappers=[with_call(item, change) for item in self.wrappers],
            transforms=[with_call(item, change) for item in self.transforms],
            env_state=self.env_state and change(self.env_state),
        )


def typed_options(given: Mapping[str, Any]) -> list[str]:
    """Return the words that give entries of a request, but for those that are None."""
    typed = []
    for name, value in given.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            typed += [f"--{name.replace('_', '-')}", text]
    return typed


def with_call(item: str | Mapping[str, Any], change: Callable[[str], str]) -> Any:
    """Return a function that is named, with the path of its file changed."""
    if isinstance(item, str):
        return with_file(item, change)
    return {**item, "call": with_file(called(item)[0], change)}


def _checked(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"it is no JSON object but {type(value).__name__}")
    unknown = sorted(value.keys() - {entry.name for entry in fields(Request)})
    if unknown:
        raise ValueError(f"it has {unknown}, which no request has")
    for name, entry in {"env": None, "policy": None, **value}.items():
        if name == "env_kwargs":
            right = isinstance(entry, dict)
        elif name in ("wrappers", "transforms"):
            right = isinstance(entry, list) and all("\0" not in called(i)[0] for i in entry)
        elif isinstance(entry, str):
            needed = name in ("env", "policy")
            right = b"\0" not in os.fsencode(entry) and not (needed and not entry)
        else:
            right = entry is None and name not in ("env", "policy", "directory")
        if not right:
            raise TypeError(f"its {name} is {entry!r}")
    return value


def _relative(path: str | os.PathLike[str], start: str | os.PathLike[str]) -> str:
    """Return the path relative to a folder; links are followed, as `..` would not lead back."""
    seen = os.path.relpath(os.path.realpath(path), os.path.realpath(start))
    return f"./{seen}" if seen.startswith("-") else seen


def _near(path: str | os.PathLike[str], start: str | os.PathLike[str]) -> str:
    """Return the path relative to a folder; absolute if they have none in common."""
    ends = [os.path.realpath(path), os.path.realpath(start)]
    common = os.path.commonpath(ends)
    return ends[0] if common == os.path.dirname(common) else _relative(path, start)
