"""An env and a policy by name, as data; and envs with wrappers, transforms and saved statistics."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec
from torch import nn
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect._upstream.torchrl import VecNormSums, VecNormV2Statistics
from tdcollect.display import one_line
from tdcollect.envs.make import make_env
from tdcollect.envs.traits import all_transforms_of, flat_transforms, innermost, of_kind, runs_once
from tdcollect.evaluation.episodes.policy import known_device
from tdcollect.evaluation.imports import called, has_module, is_named, load_named, with_file
from tdcollect.files import write_json
from tdcollect.randomness import GlobalStream, Outside

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

        This runs the code that is named; a factory as :func:`policy_from` calls it.

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
            return env, placed(self._sb3(env), self.device)
        factory = load_named(self.policy, here, look)
        if not callable(factory):
            raise TypeError(
                f"expected {self.policy} to be callable and to give a policy, got {factory!r}"
            )
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
        with _one_slot(env, self.env_kwargs, self.backend) as one:
            return load_policy(here / self.checkpoint, one, normalization=normalization)

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

    def command(
        self, index: int | str, directory: str | os.PathLike[str], start: str | os.PathLike[str]
    ) -> str:
        """Return the shell command that runs an episode again, as it is typed in ``start``."""
        seen = self.with_paths(lambda path: _relative(os.path.join(self.directory, path), start))
        typed = ["tdcollect", "replay", _relative(directory, start), str(index)]
        entries = {**vars(seen), "env_kwargs": seen.env_kwargs or None, "directory": None}
        typed += typed_options(entries)
        command = shlex.join(typed)
        beside = _relative(self.directory, start)
        names = [self.env, self.policy]
        names += [called(item)[0] for item in (*self.wrappers, *self.transforms)]
        if beside != "." and any(has_module(name, Path(self.directory)) for name in names):
            command = f"PYTHONPATH={shlex.quote(beside)} {command}"  # where evaluate found it
        return command

    def with_paths(self, change: Callable[[str], str]) -> Request:
        """Return the request with the paths of its files changed."""
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


def policy_from(
    factory: Callable[..., Any],
    name: str,
    env: Any,
    env_kwargs: dict[str, Any] | None,
    backend: str | None = None,
) -> Any:
    """Return the policy that a factory makes after ``torch.manual_seed(0)``.

    A factory with a parameter without default, or one named ``env``, is called with an env, made
    for it and closed afterwards; any other without arguments.

    Raises:
        TypeError: if it gives no policy; ``name`` is the factory's there.
    """
    torch.manual_seed(0)
    if not _wants_env(factory):
        policy = factory()
    elif isinstance(env, EnvBase):
        policy = factory(env)
    else:
        with _one_slot(env, env_kwargs, backend) as one:
            policy = factory(one)
    if not callable(policy):
        raise TypeError(f"expected {name} to give a policy, got {policy!r}")
    return policy


def placed(policy: Any, device: torch.device | str | None) -> Any:
    """Return the policy, moved to the device if it is a module and one is asked for."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    return policy.to(known_device(device))


def _wants_env(factory: Callable[..., Any]) -> bool:
    return any(
        one.kind <= one.POSITIONAL_OR_KEYWORD and (one.default is one.empty or one.name == "env")
        for one in inspect.signature(factory).parameters.values()
    )


@contextmanager
def closed_on_error(env: Any) -> Iterator[Any]:
    """Close an env if an error ends the block."""
    try:
        yield env
    except BaseException:
        if not is_unstarted(env):
            env.close()
        raise


def is_unstarted(env: Any) -> bool:
    """Tell whether the envs of a batched env are not made yet; closing it would raise."""
    base = innermost(env)
    return isinstance(base, (SerialEnv, ParallelEnv)) and base.is_closed


@contextmanager
def _one_slot(
    env: str | Callable[..., Any], env_kwargs: dict[str, Any] | None, backend: str | None
) -> Iterator[EnvBase]:
    """Yield an env of one slot, closed afterwards."""
    bare = env.bare if isinstance(env, RequestedEnv) else env
    made = bare if isinstance(bare, str) else bare(**env_kwargs or {})
    if isinstance(made, str):
        made = make_env(made, env_kwargs=env_kwargs, backend=backend)
    elif not isinstance(made, EnvBase):
        made = make_env(made)
    try:
        yield env.finished(made) if isinstance(env, RequestedEnv) else made
    finally:
        if not made.is_closed:
            made.close()


def option_of(name: str) -> str:
    """Return the option of the command line that gives an entry of a request."""
    return {"wrappers": "wrapper", "transforms": "transform"}.get(name, name.replace("_", "-"))


def typed_options(given: Mapping[str, Any]) -> list[str]:
    """Return the words that give entries of a request, but for those that are None."""
    typed = []
    for name, value in given.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        for one in values if value is not None else ():
            text = one if isinstance(one, str) else json.dumps(one, sort_keys=True)
            typed += [f"--{option_of(name)}", text]
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


_FIRST = "transforms.0."


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


def _load_state(transform: T.Transform, state: Mapping[str, Any], file: str) -> None:
    """Load the state of an env into its transforms, but for entries that hold the latest steps.

    A transform alone, and in a ``Compose``, takes the same state.
    """
    held = {
        f"{name}.{entry}" if name else entry
        for name, part in transform.named_modules()
        if isinstance(part, of_kind("holds_episode"))
        for entry in part.state_dict(keep_vars=True)  # some have no shape yet
    }
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
    for name, buffer in transform.named_buffers():
        value: Any = given.get(name)
        fits = isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value)
        if fits and nn.parameter.is_lazy(buffer):  # else refused as statistics that are missing
            buffer.materialize(value.shape, dtype=value.dtype)
    try:
        transform.load_state_dict(given, strict=not held)
    except Exception as error:
        raise ValueError(f"{file} does not fit the env's transforms, {names}: {error}") from error


def _check_statistics(transform: T.Transform, file: str) -> None:
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
    sizes = zip(reversed(shape), reversed(leaf), strict=False)
    return len(shape) <= len(leaf) and all(one in (1, size) for one, size in sizes)


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
    def bare(self) -> str | Callable[..., Any]:
        """The env with its wrappers and without the transforms: an id, or a callable."""
        env: Any = self.env
        if not (self.wrappers or self.outermost):
            return env
        # A worker process may not know the id; gymnasium imports those of module:id.
        spec: Any = gym.spec(env) if isinstance(env, str) and ":" not in env else env
        return replace(self, env=spec, transforms=(), state=None)

    def __call__(self, **kwargs: Any) -> Any:
        """Make one env."""
        if self.transforms or self.state is not None:
            made = replace(self, transforms=(), state=None)(**kwargs)
            with closed_on_error(made):
                return self.finished(made if isinstance(made, EnvBase) else make_env(made))
        make: Any = self.env
        if isinstance(make, (str, EnvSpec)):
            # gymnasium's checker takes time in each step, and changes nothing.
            make = partial(gym.make, make, disable_env_checker=True)
        wrappers = list(self.wrappers)
        if self.outermost is not None:
            wrappers.append(Call(self.name, self.outermost))
        env = make(**kwargs)
        with closed_on_error(env):
            if wrappers:
                _check_gymnasium(env, self.name)
            for wrapper in wrappers:
                env = wrapper(env)
                _check_gymnasium(env, wrapper.name)
        return env

    def finished(self, env: EnvBase) -> EnvBase:
        """Add the transforms to an env of any batch size.

        They are in eval mode, and their statistics are those of the state, frozen.
        """
        with _quiet_statistics():
            if self.transforms:
                env = TransformedEnv(env, self._transform(), auto_unwrap=True)
            if self.state is not None:
                if not isinstance(env, TransformedEnv):
                    raise ValueError(
                        f"expected an env with transforms for {self.file}, got {self.name} without "
                        "any; name those that the file is of (--transform NAME)"
                    )
                _load_state(env.transform, self.state, self.file)
        for transform in all_transforms_of(env):
            _check_statistics(transform, self.file)
            freeze(transform)
            if type(transform) is T.VecNormV2 and transform.stateful:
                transform.reduce_batch_dims = True  # frozen: all slots have them in common
        return env

    def treats_rows_alone(self) -> bool:
        """Tell whether a batch of slots gets from the transforms what each slot alone gets."""
        return all(
            runs_once(transform)
            or type(transform) in (T.TimeMaxPool, T.VecNorm, T.VecNormV2)
            or (type(transform) is T.CatFrames and transform.dim < 0)
            for transform in flat_transforms(self._transform())
        )

    def check_state(self) -> None:
        """Load the state into the transforms, without an env."""
        with _quiet_statistics():
            made = self._transform()
            if self.state is not None:
                _load_state(made, self.state, self.file)

    def _transform(self) -> T.Transform:
        """Make the transforms anew, as one."""
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
        return found[0] if len(found) == 1 else T.Compose(*found)


def freeze(transform: T.Transform) -> None:
    """Put a transform into eval mode, with its running statistics frozen."""
    transform.eval()
    if getattr(transform, "frozen", None) is False:
        transform.freeze()


@contextmanager
def _quiet_statistics() -> Iterator[None]:
    """Silence the warnings of VecNorm: of batches, and of statistics that are not there yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*VecNorm.*")
        yield


def _check_gymnasium(env: Any, name: str) -> None:
    if not isinstance(env, gym.Env):
        raise TypeError(
            f"expected {name} to give a gymnasium.Env, got {' '.join(repr(env).split())}; wrappers "
            "are for gymnasium envs, and transforms for envs of TorchRL"
        )
