"""Envs with wrappers and transforms that are named, and with statistics that were saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec
from torch import nn
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect._upstream.torchrl import VecNormSums, VecNormV2Statistics
from tdcollect.display import one_line
from tdcollect.envs.make import make_env
from tdcollect.envs.traits import all_transforms_of, flat_transforms, of_kind, runs_once
from tdcollect.randomness import GlobalStream, Outside

_FIRST = "transforms.0."


def read_state(file: Path) -> dict[str, Any]:
    """Read the ``state_dict`` of an env, without running code from the file."""
    if not file.is_file():
        raise FileNotFoundError(f"expected the state of an env, got {file}, which is no file")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file} is no state of an env (written by torch.save(env.state_dict(), file)): {error}"
        ) from error
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


def load_state(transform: T.Transform, state: Mapping[str, Any], file: str) -> None:
    """Load the state of an env into its transforms.

    Entries that hold the latest steps are left out. A transform alone, and in a ``Compose``, takes
    the same state.
    """
    held = _held(transform)
    wanted = transform.state_dict(keep_vars=True).keys() - held
    given = {name: value for name, value in state.items() if name not in held}
    if given.keys() != wanted:
        alone = {name.removeprefix(_FIRST): value for name, value in given.items()}
        composed = {_FIRST + name: value for name, value in given.items()}
        given = next((s for s in (alone, composed) if s.keys() == wanted), given)
    faults = [f"it lacks {sorted(wanted - given.keys())}"] if wanted - given.keys() else []
    faults += [f"they have no {sorted(given.keys() - wanted)}"] if given.keys() - wanted else []
    names = ", ".join(type(part).__name__ for part in flat_transforms(transform))
    if faults:
        raise ValueError(
            f"{file} does not fit the env's transforms, {names}: {', and '.join(faults)}; name all "
            "transforms of the env that was saved, in their order"
        )
    _materialize(transform, given)
    try:
        transform.load_state_dict(given, strict=not held)
    except Exception as error:
        raise ValueError(f"{file} does not fit the env's transforms, {names}: {error}") from error


def check_statistics(transform: T.Transform, file: str) -> None:
    """Refuse statistics that are missing, or of several slots; other transforms pass."""
    name = type(transform).__name__
    found = dict(_statistics(transform))
    if not found:
        return
    if missing := [key for key, shape in found.items() if shape is None]:
        raise ValueError(
            f"the transform {name} has no statistics of {missing} yet; pass the file that "
            "torch.save(env.state_dict(), file) wrote (--env-state FILE)"
        )
    parent = transform.parent
    leaves = {
        key: leaf
        for spec in (parent.full_observation_spec_unbatched, parent.full_reward_spec_unbatched)
        for key, leaf in spec.items(True, True)
    }
    for key, shape in found.items():
        if key in leaves and shape is not None and not _fits(shape, leaves[key].shape):
            raise ValueError(
                f"expected statistics of {key!r} of shape {list(leaves[key].shape)} in {name}, "
                f"those of one slot, got {list(shape)} from {file}; where each slot has its own, "
                "a new one has none: train with VecNormV2(reduce_batch_dims=True), or save one "
                "slot's"
            )


def _held(transform: T.Transform, prefix: str = "") -> set[str]:
    """Return the entries of a state that hold the latest steps."""
    return {
        f"{name}.{entry}" if name else entry
        for name, part in transform.named_modules(prefix=prefix)
        if isinstance(part, of_kind("holds_episode"))
        for entry in part.state_dict(keep_vars=True)  # some have no shape yet
    }


def _materialize(transform: T.Transform, state: Mapping[str, Any]) -> None:
    """Give buffers that have no shape yet the shape and dtype of the state's."""
    for name, buffer in transform.named_buffers():
        value = state.get(name)
        if nn.parameter.is_lazy(buffer) and isinstance(value, torch.Tensor):
            if nn.parameter.is_lazy(value):
                continue  # never initialised: refused as statistics that are missing
            buffer.materialize(value.shape, dtype=value.dtype)


def _statistics(transform: T.Transform) -> Iterator[tuple[Any, torch.Size | None]]:
    """Yield the shape of a transform's statistics by key; None for those that are missing."""
    kind = type(transform)
    if kind is T.ObservationNorm:
        for key in transform.in_keys or [""]:
            yield key, transform.loc.shape if transform.initialized else None
    elif kind is T.VecNormV2 and transform.stateful:
        for key in transform.in_keys:
            loc, _, count = VecNormV2Statistics(transform).of(key)
            yield key, loc.shape if count.any() else None
    elif kind is T.VecNorm:
        for key in transform.in_keys:
            sums = VecNormSums(transform).of(key)
            yield key, None if sums is None else sums[0].shape


def _fits(shape: torch.Size, leaf: torch.Size) -> bool:
    """Tell whether a leaf keeps its shape under statistics of a shape."""
    try:
        return torch.broadcast_shapes(shape, leaf) == leaf
    except RuntimeError:
        return False


@dataclass(frozen=True)
class Call:
    """A function with its keyword arguments."""

    name: str
    function: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, **self.kwargs)


@dataclass(frozen=True, repr=False)
class RequestedEnv:
    """A callable that makes an env, with wrappers, transforms and their statistics.

    With wrappers alone it makes a ``gymnasium.Env``; with transforms, an ``EnvBase`` of batch size
    ``[]``. An evaluation steps all slots together if the transforms treat each row by itself.

    Attributes:
        name: the env's name in messages and manifests.
        env: a gymnasium id, or a callable that makes a ``gymnasium.Env`` or an ``EnvBase``.
        wrappers: called with a ``gymnasium.Env``, innermost first; each returns one.
        transforms: called without positional arguments, innermost first; each returns a transform.
        state: the ``state_dict`` of the env with its transforms, or None.
        file: the file of the state, for messages.
        outermost: one more wrapper, around all of these, which no manifest tells; or None.
    """

    name: str
    env: str | Callable[..., Any]
    wrappers: tuple[Call, ...] = ()
    transforms: tuple[Call, ...] = ()
    state: Mapping[str, Any] | None = None
    file: str = "the state"
    outermost: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None = None

    def __repr__(self) -> str:
        parts = [call.name for call in (*self.wrappers, *self.transforms)]
        return one_line(self, self.name, *parts)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def is_bare(self) -> bool:
        """True if there are no transforms, and no state of any."""
        return not self.transforms and self.state is None

    @property
    def bare(self) -> str | Callable[..., Any]:
        """The env with its wrappers and without the transforms: an id, or a callable."""
        wrappers = self.wrappers
        if self.outermost is not None:
            wrappers = (*wrappers, Call(self.name, self.outermost))
        if not wrappers:
            return self.env
        # A worker process may not know the id; gymnasium imports those of module:id.
        known = isinstance(self.env, str) and ":" not in self.env
        return Wrapped(self.name, gym.spec(self.env) if known else self.env, wrappers)  # type: ignore[arg-type]

    def __call__(self, **kwargs: Any) -> Any:
        """Make one env."""
        bare = self.bare
        made = gym.make(bare, **kwargs) if isinstance(bare, str) else bare(**kwargs)
        if self.is_bare:
            return made
        try:
            return self.finished(made if isinstance(made, EnvBase) else make_env(made))
        except BaseException:
            made.close()
            raise

    def finished(self, env: EnvBase) -> EnvBase:
        """Add the transforms to an env of any batch size.

        They are in eval mode, and their statistics are those of the state, frozen.
        """
        with warnings.catch_warnings():  # of batches, and of statistics that are not there yet
            warnings.filterwarnings("ignore", ".*VecNorm.*")
            made = self._transforms()
            if made:
                whole = made[0] if len(made) == 1 else T.Compose(*made)
                env = TransformedEnv(env, whole, auto_unwrap=True)
            if self.state is not None:
                if not isinstance(env, TransformedEnv):
                    raise ValueError(
                        f"expected an env with transforms for {self.file}, got {self.name} without "
                        "any; name those that the file is of (--transform NAME)"
                    )
                load_state(env.transform, self.state, self.file)
        for transform in all_transforms_of(env):
            check_statistics(transform, self.file)
            transform.eval()
            if getattr(transform, "frozen", None) is False:
                transform.freeze()
            if type(transform) is T.VecNormV2 and transform.stateful:
                transform.reduce_batch_dims = True  # frozen: all slots have them in common
        return env

    def treats_rows_alone(self) -> bool:
        """Tell whether a batch of slots gets from the transforms what each slot alone gets."""
        return all(
            runs_once(transform)
            or type(transform) in (T.TimeMaxPool, T.VecNorm, T.VecNormV2)
            or (type(transform) is T.CatFrames and transform.dim < 0)
            for made in self._transforms()
            for transform in flat_transforms(made)
        )

    def check_state(self) -> None:
        """Load the state into the transforms, without an env."""
        made = self._transforms()
        if made and self.state is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*VecNorm.*")
                load_state(made[0] if len(made) == 1 else T.Compose(*made), self.state, self.file)

    def _transforms(self) -> list[T.Transform]:
        """Make the transforms anew."""
        found = []
        for call in self.transforms:
            with Outside(), GlobalStream(0):  # a constructor that draws draws the same in each slot
                transform = call()
            if not isinstance(transform, T.Transform):
                raise TypeError(
                    f"expected {call.name} to give a TorchRL transform, got {transform!r}; name a "
                    "class such as torchrl.envs:RewardSum, or a function that makes one"
                )
            found.append(transform)
        return found


@dataclass(frozen=True)
class Wrapped:
    """A callable that makes a gymnasium env under wrappers."""

    name: str
    env: str | EnvSpec | Callable[..., Any]
    wrappers: tuple[Call, ...]

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, **kwargs: Any) -> gym.Env[Any, Any]:
        """Make one env."""
        if isinstance(self.env, (str, EnvSpec)):
            # gymnasium's checker takes time in each step, and changes nothing.
            make: Callable[..., Any] = partial(gym.make, self.env, disable_env_checker=True)
        else:
            make = self.env
        made = [make(**kwargs)]
        try:
            _check_gymnasium(made[0], self.name)
            for wrapper in self.wrappers:
                made.append(wrapper(made[-1]))
                _check_gymnasium(made[-1], wrapper.name)
        except BaseException:
            made[0].close()
            raise
        return made[-1]


def _check_gymnasium(env: Any, name: str) -> None:
    if not isinstance(env, gym.Env):
        raise TypeError(
            f"expected {name} to give a gymnasium.Env, got {' '.join(repr(env).split())}; wrappers "
            "are for gymnasium envs, and transforms for envs of TorchRL"
        )
