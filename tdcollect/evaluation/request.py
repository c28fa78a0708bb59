"""What an evaluation was asked to run, by names and paths: enough to run it in another process."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrl.envs import EnvBase

from tdcollect.envs.make import make_env
from tdcollect.evaluation.named import is_named, load_named
from tdcollect.files import write_atomically

REQUEST = "request.json"
RANDOM, SB3 = "random", "sb3"  # policies that need no factory


@dataclass(frozen=True)
class Request:
    """An env and a policy, named.

    Attributes:
        env: a gymnasium id, or ``module:callable`` for what makes a ``gymnasium.Env`` or an
            ``EnvBase``.
        policy: ``module:factory``, ``"random"``, or ``"sb3"`` for a model file of
            Stable-Baselines3.
        checkpoint: a file with the policy's ``state_dict``, or the model file.
        vecnormalize: a file of Stable-Baselines3's ``VecNormalize``, for its observations.
        env_kwargs: for the env's constructor.
        backend: of :func:`tdcollect.make_env`.
        device: where the policy runs.
        directory: absolute; modules are looked for here first, and relative paths start here.
    """

    env: str
    policy: str
    checkpoint: str | None = None
    vecnormalize: str | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None
    device: str | None = None
    directory: str = "."

    def make(self) -> tuple[str | Callable[..., Any], Any]:
        """What to give :func:`tdcollect.evaluate`: the env, and the policy.

        A factory is called with an env, made for it and closed afterwards, if it has a parameter
        without default, and with nothing otherwise. Weights that it draws start from
        ``torch.manual_seed(0)``.

        Raises:
            ValueError: for a request that cannot be met.
            FileNotFoundError, ModuleNotFoundError, AttributeError: where something that is named
                is not there.
        """
        here = Path(self.directory)
        env = load_named(self.env, here) if is_named(self.env) else self.env
        if self.vecnormalize is not None and self.policy != SB3:
            raise ValueError(f"VecNormalize goes with --policy sb3, got --policy {self.policy}")
        if self.policy == RANDOM:
            if self.checkpoint is not None:
                raise ValueError("random actions have no checkpoint; leave it out")
            return env, None
        if self.policy == SB3:
            return env, self._sb3(env)
        factory = load_named(self.policy, here)
        if not callable(factory):
            raise TypeError(
                f"expected {self.policy} to be callable and to give a policy, got {factory!r}"
            )
        torch.manual_seed(0)
        if _wants_env(factory):
            shown = self._an_env(env)
            try:
                policy = factory(shown)
            finally:
                shown.close()
        else:
            policy = factory()
        if not callable(policy):
            raise TypeError(f"expected {self.policy} to give a policy, got {policy!r}")
        if self.checkpoint is not None:
            _load(policy, here / self.checkpoint)
        return env, policy

    def _sb3(self, env: Any) -> Any:
        from tdcollect.evaluation.sb3 import load_policy

        if self.checkpoint is None:
            raise ValueError("--policy sb3 needs the model's file: --checkpoint model.zip")
        here = Path(self.directory)
        normalization = None if self.vecnormalize is None else here / self.vecnormalize
        shown = self._an_env(env)
        try:
            return load_policy(here / self.checkpoint, shown, normalization=normalization)
        finally:
            shown.close()

    def _an_env(self, env: Any) -> EnvBase:
        """One slot of the env."""
        if not callable(env):
            return make_env(env, env_kwargs=self.env_kwargs, backend=self.backend)
        made = env(**self.env_kwargs)
        return made if isinstance(made, EnvBase) else make_env(made)

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Keep the request beside the evaluation's files."""
        text = json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"
        write_atomically(Path(directory) / REQUEST, text.encode())

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> Request | None:
        """The request that a directory keeps, None where it keeps none."""
        file = Path(directory) / REQUEST
        return cls(**json.loads(file.read_text())) if file.exists() else None


def _wants_env(factory: Callable[..., Any]) -> bool:
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(factory).parameters.values()
    )


def _load(policy: Any, file: Path) -> None:
    """Load weights, and nothing that runs code."""
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
