"""An env and a policy by name; nothing that is named runs before it is asked for.

Without torch until then, so that names and files that are not there are refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tdcollect.display import one_line
from tdcollect.evaluation.imports import called, check_named, is_named, load_named
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
