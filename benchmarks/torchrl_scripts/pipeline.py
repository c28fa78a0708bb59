"""The frame of a script's pipeline: the env classes it uses, its size, its parts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torchrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv

SEED = 42
"""The seed that most of the scripts use."""


class Envs(NamedTuple):
    """The env classes that a script imports."""

    GymEnv: Any
    SerialEnv: Any
    ParallelEnv: Any


TORCHRL = Envs(GymEnv, SerialEnv, ParallelEnv)


def ours() -> Envs | None:
    """The classes of ``tdcollect.envs``; None where it lacks one of them."""
    module = importlib.import_module("tdcollect.envs")
    classes = [getattr(module, name, None) for name in Envs._fields]
    return None if None in classes else Envs(*classes)


class Size(NamedTuple):
    """Upper bounds of what a script uses.

    ``frames`` is of a batch; ``slots`` of envs in a batched env; ``random_frames`` of frames whose
    actions are random, at a run's start; ``steps`` of an episode's length, None for the env's own;
    ``pixel_frames`` of a batch of pixels, None for ``frames``.
    """

    frames: int
    slots: int
    random_frames: int
    steps: int | None = None
    pixel_frames: int | None = None

    def options(
        self, frames: int, random_frames: int = 0, *, pixels: bool = False, **options: Any
    ) -> dict[str, Any]:
        """A collector's arguments, from a script's figures."""
        bound = self.pixel_frames if pixels and self.pixel_frames is not None else self.frames
        if random_frames:
            options["init_random_frames"] = min(random_frames, self.random_frames)
        return {"frames_per_batch": min(frames, bound), "total_frames": -1, **options}

    def limit(self, steps: int | None = None) -> int | None:
        """A time limit, from a script's."""
        limits = [limit for limit in (steps, self.steps) if limit is not None]
        return min(limits) if limits else None

    def gym(self) -> dict[str, Any]:
        """Arguments of ``gymnasium.make`` that shorten its episodes."""
        return {} if self.steps is None else {"max_episode_steps": self.steps}


class Pipeline(NamedTuple):
    """The env, the policy and the options that a script hands to its collector.

    ``env`` may be a function. ``seeded`` is True if the script has seeded it.
    """

    env: Any
    policy: Any
    options: dict[str, Any]
    seeded: bool = False

    def seeded_env(self) -> Any:
        """The env, or the function that makes it, with the first seed set."""
        if self.seeded:
            return self.env
        if isinstance(self.env, EnvBase):
            self.env.set_seed(SEED)
            return self.env
        return _Seeded(self.env)


class _Seeded:
    """A function that makes an env and seeds it."""

    def __init__(self, make: Callable[[], EnvBase]):
        self.make = make

    def __call__(self) -> EnvBase:
        env = self.make()
        env.set_seed(SEED)
        return env


class Script(NamedTuple):
    """A script of TorchRL's repository.

    ``path`` is its place there; ``make`` its env and policy, anew; ``needs`` the modules that must
    be installed; ``note`` tells where ``make`` deviates; ``sets_seed``, whether the script calls
    ``collector.set_seed``.
    """

    name: str
    path: str
    make: Callable[[Envs, Size], Pipeline]
    needs: tuple[str, ...] = ()
    note: str = ""
    sets_seed: bool = False

    def is_training(self) -> bool:
        """True for a training script; False for an example, a tutorial, and a script's variant."""
        return self.path.startswith("sota-implementations") and not self.name.endswith("_serial")

    def missing(self) -> list[str]:
        """The modules that cannot be imported."""
        return [name for name in self.needs if not _importable(name)]


SCRIPTS: dict[str, Script] = {}


def script(path: str, *needs: str, note: str = "", sets_seed: bool = False) -> Callable[[Any], Any]:
    """Register a function as the pipeline of a script."""

    def register(make: Callable[[Envs, Size], Pipeline]) -> Callable[[Envs, Size], Pipeline]:
        entry = Script(make.__name__, path, make, needs, note, sets_seed)
        SCRIPTS[entry.name] = entry
        return make

    return register


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@torch.no_grad()
def initialized(policy: Any, env: EnvBase) -> Any:
    """The policy, after a call that gives its lazy layers their sizes."""
    policy(env.fake_tensordict())
    return policy


def obstacles(explanation: Any) -> list[str]:
    """The lines of an explanation that keep a part from running on arrays."""
    return [f"{part.name} {part.what}: {part.how}" for part in explanation.obstacles]
