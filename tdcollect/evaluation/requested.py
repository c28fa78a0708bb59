"""Envs with wrappers, transforms and saved statistics; policies that a factory makes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect import check, policies
from tdcollect._upstream.torchrl import VecNormSums, VecNormV2Statistics
from tdcollect.cleanup import close_env, ended_on_error
from tdcollect.collect.arguments import check_instance, check_order
from tdcollect.display import one_line
from tdcollect.envs.make import alike, make_env, vec_env_advice
from tdcollect.envs.traits import all_transforms_of, flat_transforms, innermost, of_kind, runs_once
from tdcollect.evaluation.episodes.groups import of_groups
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.randomness import GlobalStream, Outside
from tdcollect.threads import turn

_MADE = "a gymnasium env that is made already goes through tdcollect.make_env(env)"


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
    else:
        with one_slot(env, env_kwargs, backend) as one:
            policy = factory(one)
    policy = of_groups(policies.recognized(policy))
    if not (callable(policy) or isinstance(policy, policies.SpacePolicy)):
        raise TypeError(f"expected {name} to give a policy, got {policy!r}")
    return policy


def recognized(policy: Any, env: Any, settings: EvaluationSettings) -> Any:
    """Return a policy as an evaluation runs it; models of Stable-Baselines3 are found out, too.

    For the spaces of these an env is made, and closed again. What is no env is refused.
    """
    check_env(env, policy=policy)
    if policy is None or isinstance(policy, TensorDictModuleBase):
        return policy
    check_instance(policy)
    of = getattr(policy, "__self__", policy)
    modules = [kind.__module__ for kind in type(of).__mro__]
    model = "stable_baselines3.common.base_class" in modules
    if (model and of is not policy) or "stable_baselines3.common.policies" in modules:
        raise TypeError(
            f"expected a model of Stable-Baselines3 itself, got its {type(policy).__name__}; pass "
            "the model, or tdcollect.policies.from_function(lambda x: model.predict(x)[0])"
        )
    if model:
        from tdcollect.evaluation.sb3 import load_policy

        with one_slot(env, alike(env, settings.env_kwargs), settings.backend) as one:
            return load_policy(policy, one)
    policy = policies.recognized(policy)
    return of_groups(policy) if isinstance(policy, Mapping) else policy


def check_env(env: Any, advice: str = "", policy: Any = None) -> None:
    """Raise TypeError, with advice, for what neither is nor makes an env of an evaluation."""
    if isinstance(env, (str, EnvBase)):
        return
    check_order(env, policy)
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)) or not callable(env):
        raise TypeError(
            "expected a gymnasium id, a callable that makes an env, or a TorchRL env, got "
            f"{env!r}; {advice or vec_env_advice(env) or _MADE}"
        )


def placed(policy: Any, device: torch.device | str | None) -> Any:
    """Return the policy, moved to the device if it is a module and one is asked for."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    return policy.to(check.device(device))


def load_weights(policy: Any, file: Path) -> None:
    """Load weights without running code from the file."""
    if not isinstance(policy, nn.Module):
        raise TypeError(
            f"expected a torch module to load {file} into, got {type(policy).__name__}; have the "
            "factory load it, and leave the checkpoint out"
        )
    with _reading(file, f"state_dict of {type(policy).__name__}", "policy"):
        policy.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


@contextmanager
def _reading(file: Path, kind: str, source: str) -> Iterator[None]:
    """Say of which kind the file of weights should be that the block reads."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{file} is no {kind} (written by torch.save({source}.state_dict(), file)): {error}"
        ) from error


def read_state(file: Path) -> dict[str, Any]:
    """Read the ``state_dict`` of an env without running code from the file."""
    with _reading(file, "state of an env", "env"):
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


def _wants_env(factory: Callable[..., Any]) -> bool:
    return any(
        one.kind <= one.POSITIONAL_OR_KEYWORD and (one.default is one.empty or one.name == "env")
        for one in inspect.signature(factory).parameters.values()
    )


@contextmanager
def closed_on_error(env: Any) -> Iterator[Any]:
    """Close an env if an error ends the block."""
    with ended_on_error(lambda: None if is_unstarted(env) else close_env(env)):
        yield env


def is_unstarted(env: Any) -> bool:
    """Return whether the envs of a batched env are not made yet; closing it would raise."""
    base = innermost(env)
    return isinstance(base, (SerialEnv, ParallelEnv)) and base.is_closed


@contextmanager
def one_slot(
    env: str | Callable[..., Any] | EnvBase, env_kwargs: dict[str, Any] | None, backend: str | None
) -> Iterator[EnvBase]:
    """Yield an env of one slot, closed afterwards; one that is made already as it is."""
    if isinstance(env, EnvBase):
        yield env
        return
    bare = env.bare if isinstance(env, RequestedEnv) else env
    one = bare if isinstance(bare, str) else bare(**env_kwargs or {})
    if isinstance(one, str):
        one = make_env(one, env_kwargs=env_kwargs, backend=backend)
    elif not isinstance(one, EnvBase):
        one = make_env(one)
    try:
        yield env.finished(one) if isinstance(env, RequestedEnv) else one
    finally:
        if not one.is_closed:
            close_env(one)


_FIRST = "transforms.0."


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
    loaded = {name: value for name, value in state.items() if name not in held}
    if loaded.keys() != wanted:
        alone = {name.removeprefix(_FIRST): value for name, value in loaded.items()}
        composed = {_FIRST + name: value for name, value in loaded.items()}
        loaded = next((s for s in (alone, composed) if s.keys() == wanted), loaded)
    faults = [f"it lacks {sorted(wanted - loaded.keys())}"] if wanted - loaded.keys() else []
    faults += [f"they have no {sorted(loaded.keys() - wanted)}"] if loaded.keys() - wanted else []
    names = ", ".join(type(part).__name__ for part in flat_transforms(transform))
    if faults:
        raise ValueError(
            f"{file} does not fit the env's transforms, {names}: {', and '.join(faults)}; name all "
            "transforms of the env that was saved, in their order"
        )
    for name, buffer in transform.named_buffers():
        value: Any = loaded.get(name)
        fits = isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value)
        if fits and nn.parameter.is_lazy(buffer):  # else refused as statistics that are missing
            buffer.materialize(value.shape, dtype=value.dtype)
    try:
        transform.load_state_dict(loaded, strict=not held)
    except Exception as error:
        raise ValueError(f"{file} does not fit the env's transforms, {names}: {error}") from error


def _check_statistics(transform: T.Transform, file: str) -> None:
    name = type(transform).__name__
    shapes = dict(_statistics(transform))
    if not shapes:
        return
    if missing := [key for key, shape in shapes.items() if shape is None]:
        raise ValueError(
            f"the transform {name} has no statistics of {missing} yet; pass the file that "
            "torch.save(env.state_dict(), file) wrote (env_state)"
        )
    parent = transform.parent
    leaves = {
        key: leaf
        for spec in (parent.full_observation_spec_unbatched, parent.full_reward_spec_unbatched)
        for key, leaf in spec.items(True, True)
    }
    for key, shape in shapes.items():
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
    """Return whether a leaf keeps its shape under statistics of a shape."""
    sizes = zip(reversed(shape), reversed(leaf), strict=False)
    return len(shape) <= len(leaf) and all(one in (1, size) for one, size in sizes)


@dataclass(frozen=True)
class Call:
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
        if self.transforms or self.state is not None:
            bare = replace(self, transforms=(), state=None)(**kwargs)
            with closed_on_error(bare):
                return self.finished(bare if isinstance(bare, EnvBase) else make_env(bare))
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
                        "any; name those that the file is of in transforms"
                    )
                _load_state(env.transform, self.state, self.file)
        for transform in all_transforms_of(env):
            _check_statistics(transform, self.file)
            freeze(transform)
            if type(transform) is T.VecNormV2 and transform.stateful:
                transform.reduce_batch_dims = True  # frozen: all slots have them in common
        return env

    def treats_rows_alone(self) -> bool:
        """Return whether a batch of slots gets from the transforms what each slot alone gets."""
        return all(
            runs_once(transform)
            or type(transform) in (T.TimeMaxPool, T.VecNorm, T.VecNormV2)
            or (type(transform) is T.CatFrames and transform.dim < 0)
            for transform in flat_transforms(self._transform())
        )

    def check_state(self) -> None:
        with _quiet_statistics():
            transform = self._transform()
            if self.state is not None:
                _load_state(transform, self.state, self.file)

    def _transform(self) -> T.Transform:
        """Make the transforms, as one."""
        transforms = []
        for call in self.transforms:
            # A constructor that draws draws the same in each slot.
            with turn(), Outside(), GlobalStream(0):
                transform = call()
            if not isinstance(transform, T.Transform):
                raise TypeError(
                    f"expected {call.name} to give a TorchRL transform, got {transform!r}; name a "
                    "class such as torchrl.envs:RewardSum, or a function that makes one"
                )
            transforms.append(transform)
        return transforms[0] if len(transforms) == 1 else T.Compose(*transforms)


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
