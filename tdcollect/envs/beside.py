"""Transforms beside each slot's env, in its worker; the others run once for all slots.

An env made by TorchRL's ``GymEnv`` or ``GymWrapper``, with its transforms, is taken apart. The
gymnasium env inside is stepped by a worker. Transforms that treat every row by itself run once for
all slots, in this process. ``NoopResetEnv`` and ``EndOfLifeTransform`` stay beside the env: a
:class:`SlotEnv` has the face of a gymnasium env. Other transforms need TorchRL's own workers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from torchrl.data import Composite
from torchrl.envs import EnvBase, EnvCreator, GymWrapper, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream import torchrl as upstream
from tdcollect.envs.process.values import Begun, InfoEntry, Options
from tdcollect.envs.spaces import SpaceCodec, check_names, compose, observation_name
from tdcollect.envs.traits import NotKnown, base_of, innermost, runs_once, transforms_of
from tdcollect.keys import as_path
from tdcollect.randomness import global_states, global_states_kept, set_global_states

_BESIDE = (T.NoopResetEnv, T.EndOfLifeTransform)


class Parts(NamedTuple):
    """An env taken apart."""

    beside: int  # the number of leading transforms that run beside the env
    lifted: Sequence[T.Transform]  # that run once for all slots, without a parent
    digest: str  # identifies these transforms and their settings
    categorical: bool
    name: str  # in messages
    entries: Sequence[InfoEntry]  # that come with the infos rather than with the observation
    observation_spec: Composite  # the entries that a worker gives
    action_spec: Composite  # of the env in the worker
    spec: EnvSpec | None  # of the env, if it is stepped as gymnasium makes it


def parts_of_made(
    create: Callable[..., EnvBase], kwargs: Mapping[str, Any], known: Sequence[type[EnvBase]]
) -> Parts:
    """Make an env, take it apart, and close it; the global random states are as before.

    ``known`` are the classes of envs, without their transforms, that are understood.
    """
    if isinstance(create, EnvCreator) and upstream.shared_values(create):
        raise NotKnown("its EnvCreator shares the state of transforms between processes")
    with global_states_kept():
        env = create(**kwargs)
        try:
            return _parts_of(env, known)
        finally:
            env.close(raise_if_closed=False)


def _parts_of(env: EnvBase, known: Sequence[type[EnvBase]]) -> Parts:
    _ = env.specs  # transforms note their entries when the specs are made
    base: Any = env.base_env if type(env) is TransformedEnv else env
    transforms = transforms_of(env)
    check_gym_env(base, known)
    for transform in transforms:
        if type(transform) not in _BESIDE and not runs_once(transform):
            raise NotKnown(
                f"the transform {type(transform).__name__} is not known to be the same once for "
                "all slots; put it around the ParallelEnv"
            )
    count = 1 + max((i for i, t in enumerate(transforms) if type(t) in _BESIDE), default=-1)
    beside, lifted = transforms[:count], transforms[count:]
    if any(type(transform) not in _BESIDE for transform in beside):
        raise NotKnown("NoopResetEnv and EndOfLifeTransform are not the first of its transforms")
    ends = [t for t in beside if type(t) is T.EndOfLifeTransform]
    written = [key for end in ends for key in end.out_keys]
    if len(ends) > 1 or not all(isinstance(key, str) for key in written):
        raise NotKnown("it has several lives, or nested ones")
    if any(end.done_key != keys.DONE for end in ends):
        raise NotKnown("its lives end by another flag than done")
    inner = env if not lifted else _beside_env(base, [t.clone() for t in beside])
    _check_specs(inner, base, written)
    spec = upstream.wrapped_env(base).spec
    return Parts(
        count,
        [transform.clone() for transform in lifted],
        _digest_of(lifted),
        upstream.is_categorical(base),
        type(base).__name__ if spec is None else str(spec.id),
        [_info_entry(key, inner) for key in written],
        inner.observation_spec.clone(),
        inner.full_action_spec.clone(),
        spec if not beside and base.wrapper_frame_skip == 1 else None,
    )


def _beside_env(base: EnvBase, transforms: Sequence[T.Transform]) -> EnvBase:
    return TransformedEnv(base, T.Compose(*transforms)) if transforms else base


def check_gym_env(env: Any, known: Sequence[type[EnvBase]]) -> None:
    """Check that a TorchRL env may be stepped by its gymnasium env, without its own code."""
    if type(env) not in known:
        raise NotKnown(
            f"a {type(env).__name__} is no GymEnv; a gymnasium env is faster by make_env or GymEnv"
        )
    check_methods(env)
    inside = upstream.wrapped_env(env)
    if not isinstance(inside, gym.Env):
        raise NotKnown(f"its env is a {type(inside).__name__}, no gymnasium.Env")
    if env.info_dict_reader:
        raise NotKnown("it reads infos; use make_env(info_keys=...)")
    if not upstream.converts_actions(env):
        raise NotKnown("it hands tensors to its env")


def check_methods(env: EnvBase) -> None:
    if own := upstream.replaced_methods(env):
        raise NotKnown(f"its {type(env).__name__} has a {own[0]} of its own")


def _check_specs(inner: EnvBase, base: Any, written: Sequence[str]) -> None:
    """Check that the entries of a slot are those of a gymnasium env, and of its lives."""
    if described(inner.full_reward_spec) != {keys.REWARD: ((1,), torch.float32)}:
        raise NotKnown("the env has a reward spec of its own")
    if set(inner.full_done_spec.keys(True, True)) != set(keys.FLAGS):
        raise NotKnown("the env has other flags than done, terminated and truncated")
    env, categorical = upstream.wrapped_env(base), upstream.is_categorical(base)
    specs = inner.observation_spec, inner.full_action_spec
    try:
        check_names(*([as_path(key) for key in spec.keys(True, True)] for spec in specs))
        action = SpaceCodec(env.action_space, keys.ACTION, categorical=categorical)
        observation = SpaceCodec(
            env.observation_space,
            observation_name(env.observation_space),
            categorical=categorical,
            rename_state=True,
        )
    except (TypeError, ValueError) as error:
        raise NotKnown(str(error)) from error
    alike = _same_entries(action, inner.full_action_spec)
    if not (alike and _same_entries(observation, base.observation_spec)):
        raise NotKnown("its entries are not those of its gymnasium spaces")
    if {path[0] for path in observation.paths}.intersection(written):
        raise NotKnown("its lives have the name of an observation")


def _same_entries(codec: SpaceCodec, spec: Composite) -> bool:
    return described(compose(codec.specs, ())) == described(spec)


def described(spec: Composite) -> dict[Any, Any]:
    return {key: (tuple(s.shape), s.dtype) for key, s in spec.items(True, True)}


def _info_entry(key: Any, env: EnvBase) -> InfoEntry:
    spec = env.observation_spec[key]
    dtype = torch.empty((), dtype=spec.dtype).numpy().dtype
    return InfoEntry(key, tuple(spec.shape), dtype)


def _digest_of(transforms: Sequence[T.Transform]) -> str:
    """Identify transforms by their classes, settings and buffers."""
    digest = hashlib.sha256()
    for transform in transforms:
        digest.update(type(transform).__name__.encode())
        state = {**vars(transform), **dict(transform.named_buffers())}
        for name in sorted(state.keys() - upstream.TRANSIENT_ATTRIBUTES):
            digest.update(f"{name}={_text(state[name])};".encode())
    return digest.hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        raw = array.view(torch.uint8).numpy().tobytes() if array.ndim else repr(array.item())
        return f"{value.dtype}{tuple(value.shape)}{raw!r}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    data = (bool, int, float, str, torch.dtype, torch.device, type(None), Composite)
    return repr(value) if isinstance(value, data) else type(value).__name__


# -------------------------------------------------------------------------- one slot, in its worker


class SlotSettings(NamedTuple):
    """The settings that the slots of one ``ParallelEnv`` share."""

    beside: int  # the number of leading transforms that run beside the env
    states: Mapping[str, Any] | None  # the global random ones to start with; None for fresh ones
    seeds_torch: bool  # a seed of the env seeds torch's generator, too
    threads: int  # of torch in a worker


def make_slot(
    create: Callable[..., EnvBase], kwargs: Mapping[str, Any], settings: SlotSettings
) -> SlotEnv:
    torch.set_num_threads(settings.threads)
    return SlotEnv(create, kwargs, settings)


class SlotEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A slot that runs a TorchRL env, whose gymnasium env is stepped as it is.

    It has global random states of its own: those of the process when the env is made, seeded, asked
    by name, and when its transforms draw, in resets of ``NoopResetEnv``.
    """

    def __init__(
        self, create: Callable[..., EnvBase], kwargs: Mapping[str, Any], settings: SlotSettings
    ):
        self._states: Mapping[str, Any] = settings.states or _fresh_states()
        self._seeds_torch = settings.seeds_torch
        with self._own_states():
            self._made = create(**kwargs)
            _ = self._made.specs
        base, transforms = base_of(self._made), transforms_of(self._made)
        beside, self._lifted = transforms[: settings.beside], transforms[settings.beside :]
        self._inner = self._made
        if self._lifted:
            for transform in beside:
                transform.reset_parent()
            self._inner = _beside_env(base, beside)
        super().__init__(upstream.wrapped_env(base))
        self._stepped = repeated(base)
        self._recorder: _Recorder | None = None
        if any(type(transform) is T.NoopResetEnv for transform in beside):
            self._recorder = _Recorder(self.env)
            upstream.set_wrapped_env(base, self._recorder)
        self._end: Any = next((t for t in beside if type(t) is T.EndOfLifeTransform), None)
        self._lives: Any = 0
        if self._end is not None:
            self._present_lives = upstream.lives_reader(self._end, base)
        self._starts = HonouredStarts(self._inner)

    @contextmanager
    def _own_states(self) -> Iterator[None]:
        before = global_states()
        set_global_states(self._states)
        try:
            yield
        finally:
            self._states = global_states()
            set_global_states(before)

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]
        return self.env.spec

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def digest(self) -> str:
        return _digest_of(self._lifted)

    def lifted_state(self) -> list[Any]:
        return [dict(transform.state_dict()) for transform in self._lifted]

    def command(self, name: str | tuple[str, ...], data: Any) -> Any:
        """Answer a command of TorchRL's ``ParallelEnv``, or an attribute, as its worker would."""
        with self._own_states():
            if name == "seed":
                seed, static = data
                if self._seeds_torch:
                    torch.manual_seed(seed)
                return "seeded", self._made.set_seed(seed, static_seed=static)
            if name == "state_dict":
                return "state_dict", upstream.without_locks(self._made.state_dict())
            if name == "load_state_dict":
                self._made.load_state_dict(data)
                return None
            if name == "set_env_snapshot":
                kind = type(self._made).__name__
                why = f"Env workers of type {kind} do not support snapshot writeback"
                return "set_env_snapshot_error", why
            return self._attribute(name, data)

    def _attribute(self, name: str | tuple[str, ...], data: Any) -> Any:
        names = (name,) if isinstance(name, str) else name
        value: Any = self._made
        for part in names:
            value = getattr(value, part)
        if callable(value):
            args, kwargs = data
            value = value(*(arg for arg in args if not upstream.stands_for_env(arg)), **kwargs)
        return "done", None if names == ("to",) else value

    def close(self) -> None:
        self._made.close(raise_if_closed=False)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, terminated, truncated, info = self._stepped.step(action)
        if self._end is not None:
            before, self._lives = self._lives, self._present_lives()
            ended = before > self._lives or terminated or truncated
            info = self._with_lives(info, ended)
        return observation, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> Begun:
        ended = False
        if self._recorder is None:
            observation, info = self.env.reset(seed=seed, options=options)
            if self._end is not None:
                self._lives = self._present_lives()
        else:
            with self._own_states(), self._starts:
                arguments = {"seed": seed, "options": options}
                begun = self._inner.reset(
                    **{name: v for name, v in arguments.items() if v is not None}
                )
            observation, info = self._recorder.latest
            if self._end is not None:
                self._lives = begun[self._end.lives_key].numpy()[()]
                ended = bool(begun[self._end.eol_key].any())
        return observation, info if self._end is None else self._with_lives(info, ended)

    def _with_lives(self, info: Mapping[str, Any], ended: Any) -> dict[str, Any]:
        ends = np.array([bool(ended)])
        return {**info, self._end.eol_key: ends, self._end.lives_key: self._lives}


def repeated(env: GymWrapper) -> gym.Env[Any, Any]:
    """The gymnasium env in a TorchRL env, which repeats each action as that does."""
    inside, times = upstream.wrapped_env(env), env.wrapper_frame_skip
    return inside if times == 1 else _Repeated(inside, times)


class HonouredStarts:
    """Inside of it, TorchRL's gym wrappers add the ``start`` of their action spaces.

    By themselves they hand 0 to the env for the first action of ``Discrete(3, start=1)``.
    """

    def __init__(self, env: EnvBase):
        base = innermost(env)
        members = upstream.serial_envs(base) or () if isinstance(base, SerialEnv) else (base,)
        wrappers = [one for one in map(innermost, members) if isinstance(one, GymWrapper)]
        pairs = [(one, upstream.wrapped_env(one)) for one in wrappers]
        self._pairs = [
            (one, env) for one, env in pairs if _has_start(getattr(env, "action_space", None))
        ]

    def __enter__(self) -> None:
        for wrapper, env in self._pairs:
            upstream.set_wrapped_env(wrapper, _AddsStart(env))

    def __exit__(self, *exception: Any) -> None:
        for wrapper, env in self._pairs:
            upstream.set_wrapped_env(wrapper, env)


class _AddsStart:
    """An env whose actions count from 0."""

    def __init__(self, env: Any):
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        return self._env.step(_with_start(self._env.action_space, action))


def _has_start(space: Any) -> bool:
    if isinstance(space, gym.spaces.Dict):
        return any(map(_has_start, space.values()))
    return bool(np.any(getattr(space, "start", 0)))


def _with_start(space: Any, action: Any) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {name: _with_start(space[name], value) for name, value in action.items()}
    return action + space.start if hasattr(space, "start") else action


class _Repeated(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats each action, as ``GymEnv(frame_skip=)`` does where the env itself cannot."""

    def __init__(self, env: gym.Env[Any, Any], times: int):
        super().__init__(env)
        self.times = times

    def step(self, action: Any) -> Any:
        total: Any = 0
        for _ in range(self.times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total = total + reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class _Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the latest observation and infos of an env, as the env gave them."""

    latest: tuple[Any, dict[str, Any]]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        stepped = self.env.step(action)
        self._keep(stepped[0], stepped[4])
        return stepped

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> Begun:
        observation, info = self.env.reset(seed=seed, options=options)
        self._keep(observation, info)
        return observation, info

    def _keep(self, observation: Any, info: dict[str, Any]) -> None:
        # TorchRL encodes the entries of the dict that it is given in place.
        self.latest = (dict(observation) if isinstance(observation, dict) else observation, info)


def _fresh_states() -> dict[str, Any]:
    generator = torch.Generator()
    generator.seed()
    return {
        "torch": generator.get_state(),
        "cuda": [],
        "numpy": np.random.RandomState().get_state(),
        "python": random.Random().getstate(),
    }
