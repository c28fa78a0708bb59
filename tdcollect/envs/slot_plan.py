"""The parts of an env that a ``ParallelEnv`` is to run: beside the slots, or once for the batch.

An env made by TorchRL's ``GymEnv`` or ``GymWrapper``, with its transforms, is taken apart. The
gymnasium env inside is stepped by a worker. Transforms that treat every row by itself are lifted:
they run once for all slots, in this process. Others, and those before them, stay beside the env.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from torchrl.data import Composite, NonTensor
from torchrl.envs import EnvBase, EnvCreator, GymEnv, GymWrapper, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream.batched_envs import (
    READING_METHODS,
    TRANSIENT_ATTRIBUTES,
    converts_actions,
    is_categorical,
    is_vectorised,
    shared_values,
)
from tdcollect._upstream.torchrl import wrapped_env
from tdcollect.envs.gym_env import GymEnv as OurGymEnv
from tdcollect.envs.spaces import SpaceCodec, compose, observation_name
from tdcollect.envs.transforms import LIFTED, flat_transforms, is_lifted
from tdcollect.states import global_states, set_global_states
from tdcollect.workers.values import InfoEntry

BESIDE = (
    *LIFTED,
    T.ActionMask,
    T.CatFrames,
    T.EndOfLifeTransform,
    T.FrameSkipTransform,
    T.NoopResetEnv,
    T.RandomTruncationTransform,
    T.Resize,
    T.Reward2GoTransform,
    T.TargetReturn,
    T.TimeMaxPool,
    T.VecNorm,
    T.VecNormV2,
    T.gSDENoise,
)
"""Transforms that need no more than their own env: they can run in its worker."""

_DRAWING = (
    T.FrameSkipTransform,
    T.NoopResetEnv,
    T.RandomTruncationTransform,
    T.TensorDictPrimer,
    T.gSDENoise,
)
"""Transforms of those that may draw random numbers, or step the env themselves."""


class SlotPlan(NamedTuple):
    """The way in which a worker runs a slot.

    Attributes:
        beside: the number of leading transforms that run beside the env.
        direct: whether the gymnasium env is stepped without TensorDicts; transforms beside it can
            then only be ``NoopResetEnv`` and ``EndOfLifeTransform``.
        draws: whether transforms beside it draw random numbers when they step or reset.
        entries: entries that come with the infos rather than with the observation.
        boxes: if not direct, the other observation entries, with shape and dtype.
    """

    beside: int
    direct: bool
    draws: bool
    entries: Sequence[InfoEntry] = ()
    boxes: Sequence[tuple[tuple[str, ...], tuple[int, ...], str]] = ()


class Parts(NamedTuple):
    """An env taken apart.

    Attributes:
        plan: the way in which a worker runs it.
        lifted: the transforms that run once for all slots, without a parent.
        digest: identifies these transforms and their settings.
        categorical: whether discrete spaces are encoded as integers.
        name: the name of the env in messages.
        observation_spec: the entries that a worker gives.
        action_spec: of the env in the worker.
        spec: the gymnasium spec of the env, if it is stepped as gymnasium makes it; else None.
    """

    plan: SlotPlan
    lifted: Sequence[T.Transform]
    digest: str
    categorical: bool
    name: str
    observation_spec: Composite
    action_spec: Composite
    spec: EnvSpec | None


class NotUnderstood(Exception):
    """An env cannot be taken apart; the message says why."""


def parts_of_made(create: Callable[..., EnvBase], kwargs: Mapping[str, Any]) -> Parts:
    """Make an env, take it apart, and close it; the global random states are as before.

    Raises:
        NotUnderstood: if it must run as TorchRL runs it.
    """
    if isinstance(create, EnvCreator) and shared_values(create):
        raise NotUnderstood("its EnvCreator shares the state of transforms between processes")
    states = global_states()
    try:
        env = create(**kwargs)
        try:
            return parts_of(env)
        finally:
            env.close(raise_if_closed=False)
    finally:
        set_global_states(states)


def parts_of(env: EnvBase) -> Parts:
    """Take an env apart; its transforms are cloned.

    Raises:
        NotUnderstood: if it must run as TorchRL runs it.
    """
    _ = env.specs  # transforms note their entries when the specs are made
    base, transforms = env, []
    if type(env) is TransformedEnv:
        base, transforms = env.base_env, flat_transforms(env.transform)
    direct = _check_base(base)
    for transform in transforms:
        if type(transform) not in BESIDE:
            raise NotUnderstood(f"the transform {type(transform).__name__} is not known")
    count = 1 + max((i for i, t in enumerate(transforms) if not is_lifted(t)), default=-1)
    beside, lifted = transforms[:count], transforms[count:]
    ends = [t for t in beside if type(t) is T.EndOfLifeTransform]
    direct = (
        direct
        and all(type(t) in (T.NoopResetEnv, T.EndOfLifeTransform) for t in beside)
        and len(ends) <= 1
        and all(_is_plain(end) for end in ends)
    )
    inner = env if not lifted else beside_env(base, [t.clone() for t in beside])
    _check_specs(inner, base)
    entries: list[InfoEntry] = []
    boxes: list[tuple[tuple[str, ...], tuple[int, ...], str]] = []
    if direct:
        direct = _is_read_alike(base, [str(key) for end in ends for key in end.out_keys])
        entries = [_info_entry(str(key), inner) for end in ends for key in end.out_keys]
    if not direct:
        entries, boxes = _split(inner)
    plan = SlotPlan(count, direct, any(type(t) in _DRAWING for t in beside), entries, boxes)
    spec = wrapped_env(base).spec
    is_bare = direct and not beside and base.wrapper_frame_skip == 1
    return Parts(
        plan,
        [transform.clone() for transform in lifted],
        digest_of(lifted),
        is_categorical(base),
        type(base).__name__ if spec is None else str(spec.id),
        inner.observation_spec.clone(),
        inner.full_action_spec.clone(),
        spec if is_bare else None,
    )


def beside_env(base: EnvBase, transforms: Sequence[T.Transform]) -> EnvBase:
    """The env with the transforms that run beside it; these have no parent yet."""
    return TransformedEnv(base, T.Compose(*transforms)) if transforms else base


def _check_base(base: EnvBase) -> bool:
    """Check that the env itself can be a slot; tell whether its own code may be left out."""
    if type(base) not in (GymEnv, GymWrapper, OurGymEnv):
        raise NotUnderstood(f"the env is a {type(base).__name__}, not a GymEnv or GymWrapper")
    if is_vectorised(base) or base.batch_size:
        raise NotUnderstood("the env is vectorised itself")
    if not isinstance(wrapped_env(base), gym.Env):
        raise NotUnderstood("the env inside is not a gymnasium.Env")
    if not converts_actions(base):
        raise NotUnderstood("the env takes tensors as actions (convert_actions_to_numpy=False)")
    return not base.info_dict_reader and not any(name in vars(base) for name in READING_METHODS)


def _is_plain(end: T.EndOfLifeTransform) -> bool:
    return end.done_key == keys.DONE and all(isinstance(key, str) for key in end.out_keys)


def _check_specs(inner: EnvBase, base: EnvBase) -> None:
    """Check that rewards, flags and actions of a slot are those of a gymnasium env."""
    if list(inner.full_reward_spec.keys(True, True)) != [keys.REWARD]:
        raise NotUnderstood("the env has several rewards")
    reward = inner.reward_spec
    if tuple(reward.shape) != (1,) or reward.dtype is not torch.float32:
        raise NotUnderstood("the env has a reward spec of its own")
    if set(inner.full_done_spec.keys(True, True)) != set(keys.FLAGS):
        raise NotUnderstood("the env has other flags than done, terminated and truncated")
    if not inner.full_state_spec.is_empty():
        raise NotUnderstood("a transform beside the env reads entries of the policy")
    space = wrapped_env(base).action_space
    try:
        codec = SpaceCodec(space, keys.ACTION, categorical=is_categorical(base))
    except TypeError as error:
        raise NotUnderstood(str(error)) from error
    if not _same_entries(codec, inner.full_action_spec):
        raise NotUnderstood("the entries of its actions are not those of its action space")


def _is_read_alike(base: GymWrapper, others: Sequence[str]) -> bool:
    """Tell whether observations can be read off the env itself, rather than by TorchRL's code."""
    space = wrapped_env(base).observation_space
    try:
        codec = SpaceCodec(
            space,
            observation_name(space),
            categorical=is_categorical(base),
            rename_state=True,
        )
    except TypeError:
        return False
    clashes = {path[0] for path in codec.paths}.intersection(others)
    return not clashes and _same_entries(codec, base.observation_spec)


def _same_entries(codec: SpaceCodec, spec: Composite) -> bool:
    ours = compose(codec.paths, [leaf.spec for leaf in codec.leaves], ())
    return described(ours) == described(spec)


def described(spec: Composite) -> dict[Any, Any]:
    """The shape and dtype of each entry of a spec."""
    return {key: (tuple(s.shape), s.dtype) for key, s in spec.items(True, True)}


def _info_entry(key: Any, env: EnvBase) -> InfoEntry:
    spec = env.observation_spec[key]
    dtype = torch.empty((), dtype=spec.dtype).numpy().dtype
    return InfoEntry(key, tuple(spec.shape), dtype)


def _split(
    env: EnvBase,
) -> tuple[list[InfoEntry], list[tuple[tuple[str, ...], tuple[int, ...], str]]]:
    """Entries of an env's observation that come with the infos, and those of a gymnasium space."""
    entries, boxes = [], []
    for key, spec in env.observation_spec.items(True, True):
        if isinstance(spec, NonTensor) or -1 in spec.shape:
            raise NotUnderstood(f"the entry {key!r} is no tensor of a fixed shape")
        path = (key,) if isinstance(key, str) else tuple(key)
        try:
            entry = _info_entry(key, env)
        except TypeError as error:
            raise NotUnderstood(f"NumPy has no dtype for the entry {key!r}") from error
        if spec.shape and spec.dtype is not torch.bool:
            boxes.append((path, entry.shape, entry.dtype.str))
        elif isinstance(key, str):
            entries.append(entry)
        else:
            raise NotUnderstood(f"the entry {key!r} is a nested bool or single number")
    if not boxes:
        raise NotUnderstood("no entry of its observation is an array of numbers")
    return entries, boxes


def space_of_boxes(
    boxes: Sequence[tuple[tuple[str, ...], tuple[int, ...], str]],
) -> gym.spaces.Dict:
    """Arrays of numbers, each with its path, as a gymnasium space."""
    tree: dict[str, Any] = {}
    for path, shape, dtype in boxes:
        parent = tree
        for name in path[:-1]:
            parent = parent.setdefault(name, {})
        kind = np.dtype(dtype)
        low, high = (-np.inf, np.inf)
        if kind.kind in "iu":
            low, high = np.iinfo(kind).min, np.iinfo(kind).max
        parent[path[-1]] = gym.spaces.Box(low, high, shape, kind)
    return _dict_space(tree)


def _dict_space(tree: Mapping[str, Any]) -> gym.spaces.Dict:
    parts = {k: _dict_space(v) if isinstance(v, dict) else v for k, v in tree.items()}
    return gym.spaces.Dict(parts)


def digest_of(transforms: Sequence[T.Transform]) -> str:
    """Identify transforms by their classes, settings and buffers."""
    digest = hashlib.sha256()
    for transform in transforms:
        digest.update(type(transform).__name__.encode())
        state = {**vars(transform), **dict(transform.named_buffers())}
        for name in sorted(state.keys() - TRANSIENT_ATTRIBUTES):
            digest.update(f"{name}={_text(state[name])};".encode())
    return digest.hexdigest()


def _text(value: Any) -> str:
    """The contents of a setting, where it is data; else its type."""
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        raw = array.view(torch.uint8).numpy().tobytes() if array.ndim else repr(array.item())
        return f"{value.dtype}{tuple(value.shape)}{raw!r}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, (bool, int, float, str, torch.dtype, torch.device, type(None))):
        return repr(value)
    if isinstance(value, Composite):
        return repr(value)
    return type(value).__name__
