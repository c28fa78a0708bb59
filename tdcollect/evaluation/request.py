"""Code by name, ``module:name`` and ``path/to/file.py:name``; an env and a policy by name.

Nothing that is named runs before it is asked for. Without torch until then, so that names and files
that are not there are refused at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tdcollect import check, cleanup
from tdcollect.display import one_line
from tdcollect.evaluation.episodes.data import INFO
from tdcollect.files import existing

RANDOM, SB3, LEROBOT = "random", "sb3", "lerobot"  # policies that need no factory
_MODELS = {SB3: "model.zip", LEROBOT: ".../pretrained_model"}


@dataclass(frozen=True)
class Request:
    """An env and a policy, by name.

    Attributes:
        env: a gymnasium id, or ``module:callable`` of a function that makes a ``gymnasium.Env``
            or any ``EnvBase``.
        policy: ``module:factory``, ``"random"``, ``"sb3"`` for a model file of
            Stable-Baselines3, or ``"lerobot"`` for a model of LeRobot.
        checkpoint: a file with the policy's ``state_dict``, or the model file; of LeRobot the
            folder ``pretrained_model``, or the model's id on the Hub.
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
        self.check()
        from tdcollect.evaluation.requested import load_weights, one_slot, placed, policy_from

        here, env = Path(self.directory), self.made_env(look)
        file = here / (self.checkpoint or "")
        if self.policy == RANDOM:
            return env, None
        if self.policy == SB3:
            from tdcollect.evaluation.sb3 import load_policy

            normalization = self.vecnormalize and here / self.vecnormalize
            with one_slot(env, self.env_kwargs, self.backend) as one:
                return env, placed(load_policy(file, one, normalization=normalization), self.device)
        if self.policy == LEROBOT:
            from tdcollect.evaluation.lerobot import load_policy as load

            return env, load(file if file.exists() else self.checkpoint or "", self.device)
        factory = _function(self.policy, here, look, "callable and to give a policy")
        policy = policy_from(factory, self.policy, env, self.env_kwargs, self.backend)
        if self.checkpoint is not None:
            load_weights(policy, file)
        return env, placed(policy, self.device)

    def check(self) -> None:
        """Raise for what :meth:`make` cannot meet; nothing that is named is imported, nor torch."""
        here = Path(self.directory)
        if is_named(self.env):
            check_named(self.env, here)
        if self.env_state is not None:
            existing(here / self.env_state, "the state of an env")
        check_parts(self.policy, self.checkpoint, self.vecnormalize)
        if self.policy not in (RANDOM, *_MODELS):
            check_named(self.policy, here)
        elif not (is_named(self.env) or ":" in self.env or self.backend == "envpool"):
            from tdcollect.envs.process.worker import spec_of

            spec_of(self.env)  # no code that is named could register it
        if self.vecnormalize is not None:
            existing(here / self.vecnormalize, "a file of VecNormalize")
        if self.checkpoint is not None and self.policy != LEROBOT:  # whose models have ids, too
            what = "a model of Stable-Baselines3" if self.policy == SB3 else "a checkpoint"
            existing(here / self.checkpoint, what, ".zip" * (self.policy == SB3))

    def made_env(self, look: bool = True) -> str | Callable[..., Any]:
        """Return the env as :func:`tdcollect.evaluate` takes it, with wrappers and transforms.

        Arguments and errors are those of :meth:`make`.
        """
        from tdcollect.evaluation.requested import Call, RequestedEnv, read_state

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


def named_metrics(metrics: Any, directory: Path) -> Any:
    """Return metrics with their functions loaded, which are named ``module:name``."""
    if not isinstance(metrics, Mapping):
        return metrics  # which is refused as it is
    return {
        name: load_named(text, directory)
        if isinstance(text, str) and is_named(text) and not text.startswith(INFO)
        else text
        for name, text in metrics.items()
    }


def check_parts(policy: str, checkpoint: str | None, vecnormalize: str | None) -> None:
    """Raise ValueError for a policy that lacks a file, or that has one which it does not take."""
    if policy in _MODELS and not checkpoint:
        raise ValueError(
            f"expected a checkpoint with the policy {policy!r}, got none; name the model's file, "
            f"such as {_MODELS[policy]}"
        )
    if policy == RANDOM and checkpoint:
        raise ValueError(f"expected no checkpoint with random actions, got {checkpoint}")
    if policy != SB3 and vecnormalize:
        raise ValueError(
            f"expected vecnormalize with the policy {SB3!r} alone, got it with {policy!r}; "
            "statistics of TorchRL's transforms are an env_state"
        )


def _function(name: str, directory: Path, look: bool, what: str = "callable") -> Any:
    """Return a function that is named."""
    function = load_named(name, directory, look)
    if not callable(function):
        raise TypeError(f"expected {name} to be {what}, got {function!r}")
    return function


# --- code by name


def is_named(text: str) -> bool:
    """Return whether a text is ``module:name``; the id ``ale_py:ALE/Pong-v5`` is not."""
    module, colon, name = text.rpartition(":")
    return bool(colon and module) and re.fullmatch(r"[^\W\d][\w.]*", name) is not None


def check_named(text: str, directory: Path) -> tuple[str, str]:
    """Return file or module, and the name in it, that a text names; nothing is imported.

    Raises:
        ValueError: for a text of another form.
        FileNotFoundError, ModuleNotFoundError: if there is no such file, or no such package.
    """
    where, _, name = text.rpartition(":")
    if not is_named(text) or not (where.endswith(".py") or all(where.split("."))):
        raise ValueError(
            f"expected module:name or path/to/file.py:name, got {text!r} (for example "
            "examples/policies.py:lean)"
        )
    top = where.partition(".")[0]
    if where.endswith(".py"):
        existing(directory / where, "a Python file")
    elif not (top in sys.modules or find_spec(top) or PathFinder.find_spec(top, [str(directory)])):
        raise ModuleNotFoundError(
            f"there is no module {top} in {directory} or where Python looks; name a module, or a "
            "file by its path with .py at the end",
            name=top,
        )
    return where, name


def load_named(text: str, directory: Path, look: bool = True) -> Any:
    """Import the object that a text names.

    Args:
        text: ``module:name`` or ``path/to/file.py:name``; the name may have dots in it.
        directory: the directory that relative paths start from.
        look: look for modules in the directory first; else only on Python's path.

    Raises:
        ValueError: for a text of another form.
        FileNotFoundError, ModuleNotFoundError, AttributeError: if there is no such object.
    """
    where, name = check_named(text, directory)
    thing: Any
    if where.endswith(".py"):
        thing = _module_of_file((directory / where).resolve())
    else:
        thing = _module(where, directory if look else None)
    for part in name.split("."):
        if not hasattr(thing, part):
            raise AttributeError(f"expected {where} to have {name!r}, which it has not")
        thing = getattr(thing, part)
    return thing


def called(item: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the keyword arguments of a function that is named."""
    name: Any = item
    kwargs: Any = {}
    if isinstance(item, Mapping):
        check.only_keys(item, ("call", "kwargs"), repr(item))
        name, kwargs = item.get("call"), item.get("kwargs", {})
    if not isinstance(name, str) or not is_named(name):
        raise ValueError(
            f"expected module:name or path/to/file.py:name, alone or as {{'call': 'module:name', "
            f"'kwargs': {{...}}}}, got {item!r}"
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError(f"expected kwargs to be keyword arguments, got {kwargs!r} in {item!r}")
    return name, dict(kwargs)


def exits_refused() -> AbstractContextManager[None]:
    """Make an error of the end of the program, which a script that is no module may ask for."""
    advice = "put what a script runs under `if __name__ == '__main__':`"
    return cleanup.exits_refused("the code that was named", advice)


def _module(name: str, directory: Path | None) -> ModuleType:
    if directory is not None:
        _look_in(directory)
    module = importlib.import_module(name)
    if directory is not None:
        _check_imported(name.partition(".")[0], directory)
    return module


def _check_imported(name: str, directory: Path) -> None:
    """Refuse a module of a directory if another one is imported under its name.

    An installed package that a folder there has the name of is meant, and is no other one.
    """
    imported = getattr(sys.modules.get(name), "__file__", None)
    spec = PathFinder.find_spec(name, [str(directory.absolute())])
    own = None if spec is None else spec.origin
    if imported is None or own is None or Path(imported).resolve() == Path(own).resolve():
        return
    if not any(Path(imported).is_relative_to(place) for place in sysconfig.get_paths().values()):
        raise ValueError(
            f"expected {own} for the module {name}, got {imported}, which is imported under that "
            "name already; give one of them another name, or run it in another process"
        )


def _module_of_file(path: Path) -> ModuleType:
    imported = sys.modules.get(path.stem)
    if imported is not None:
        if getattr(imported, "__file__", None) == str(path):
            return imported
        raise ValueError(
            f"the name of {path} is that of a module which is imported already ({path.stem}); "
            "give the file another name"
        )
    _look_in(path.parent)  # for the modules beside it, as Python does for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with cleanup.ended_on_error(lambda: sys.modules.pop(path.stem)):
        spec.loader.exec_module(module)
    return module


def _look_in(directory: Path) -> None:
    place = str(directory.absolute())  # a relative one would follow the working directory
    if place not in sys.path:
        sys.path.insert(0, place)
