"""One slot of a ``ParallelEnv`` in its worker: a TorchRL env with the face of a gymnasium env."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream.batched_envs import (
    is_categorical,
    set_wrapped_env,
    stands_for_env,
    without_locks,
)
from tdcollect._upstream.torchrl import wrapped_env
from tdcollect.envs.slot_plan import SlotPlan, beside_env, digest_of, space_of_boxes
from tdcollect.envs.spaces import SpaceCodec, key_of
from tdcollect.envs.transforms import flat_transforms
from tdcollect.states import global_states, set_global_states


class SlotSettings:
    """The settings that the slots of one ``ParallelEnv`` share.

    Args:
        plan: the way in which a worker runs a slot.
        states: the global random states that each slot starts with; None for fresh ones.
        seeds_torch: whether a seed of the env seeds torch's generator, too.
        threads: the number of torch's threads in a worker.
    """

    def __init__(
        self, plan: SlotPlan, states: Mapping[str, Any] | None, seeds_torch: bool, threads: int
    ):
        self.plan = plan
        self.states = states
        self.seeds_torch = seeds_torch
        self.threads = threads


def make_slot(
    create: Callable[..., EnvBase], kwargs: Mapping[str, Any], settings: SlotSettings
) -> SlotEnv:
    """Make the env of a slot, in its worker."""
    torch.set_num_threads(settings.threads)
    return (_DirectSlot if settings.plan.direct else _TensorDictSlot)(create, kwargs, settings)


class SlotEnv(gym.Env[Any, Any]):
    """A slot that runs a TorchRL env.

    It has global random states of its own: those of the process when the env is made, seeded, asked
    by name, and when its transforms may draw.

    Args:
        create: makes the TorchRL env.
        kwargs: its arguments.
        settings: shared by all slots.
    """

    def __init__(
        self, create: Callable[..., EnvBase], kwargs: Mapping[str, Any], settings: SlotSettings
    ):
        self._states: Mapping[str, Any] = settings.states or _fresh_states()
        self._seeds_torch = settings.seeds_torch
        plan = settings.plan
        with self._own_states():
            self._made = create(**kwargs)
            _ = self._made.specs
        base, transforms = self._made, []
        if isinstance(base, TransformedEnv):
            base, transforms = base.base_env, flat_transforms(base.transform)
        self._base: Any = base
        beside, self._lifted = transforms[: plan.beside], transforms[plan.beside :]
        self._inner = self._made
        if self._lifted:
            for transform in beside:
                transform.reset_parent()
            self._inner = beside_env(base, beside)
        self._beside = beside
        self._env: gym.Env[Any, Any] = wrapped_env(base)
        self.action_space = self._env.action_space
        self.spec = self._env.spec
        self.metadata = self._env.metadata
        self.render_mode = self._env.render_mode
        # A draw takes the slot's own states, and costs nothing where nothing draws.
        self._draws = plan.draws

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
    def unwrapped(self) -> gym.Env[Any, Any]:
        """The gymnasium env without its wrappers."""
        return self._env.unwrapped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def digest(self) -> str:
        """Identify the transforms that run once for all slots, as this slot has them."""
        return digest_of(self._lifted)

    def lifted_state(self) -> list[Any]:
        """The state dicts of these transforms."""
        return [dict(transform.state_dict()) for transform in self._lifted]

    def command(self, name: str | tuple[str, ...], data: Any) -> Any:
        """Answer a command of TorchRL's ``ParallelEnv`` as its worker would.

        Args:
            name: ``"seed"``, ``"state_dict"``, ``"load_state_dict"``, ``"set_env_snapshot"``, or an
                attribute of the env; a tuple for one of an attribute.
            data: of the command.

        Raises:
            AttributeError: if the env has no such attribute.
        """
        with self._own_states():
            if name == "seed":
                seed, static = data
                if self._seeds_torch:
                    torch.manual_seed(seed)
                return "seeded", self._made.set_seed(seed, static_seed=static)
            if name == "state_dict":
                return "state_dict", without_locks(self._made.state_dict())
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
            value = value(*(arg for arg in args if not stands_for_env(arg)), **kwargs)
        return "done", None if names == ("to",) else value

    def get_wrapper_attr(self, name: str) -> Any:
        return self._env.get_wrapper_attr(name)

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._made.close(raise_if_closed=False)


class _DirectSlot(SlotEnv):
    """A slot whose gymnasium env is stepped as it is.

    Only resets with ``NoopResetEnv``, which draws its actions from the env's spec, run in TorchRL's
    own code.
    """

    def __init__(
        self, create: Callable[..., EnvBase], kwargs: Mapping[str, Any], settings: SlotSettings
    ):
        super().__init__(create, kwargs, settings)
        self.observation_space = self._env.observation_space
        self._repeats: int = self._base.wrapper_frame_skip
        self._recorder: _Recorder | None = None
        if any(type(transform) is T.NoopResetEnv for transform in self._beside):
            self._recorder = _Recorder(self._env)
            set_wrapped_env(self._base, self._recorder)
        ends = [t for t in self._beside if type(t) is T.EndOfLifeTransform]
        self._end: Any = ends[0] if ends else None
        self._lives: Any = 0
        if self._end is not None:
            self._read_lives = attrgetter(".".join(self._end.eol_attribute))

    def _present_lives(self) -> Any:
        lives = self._read_lives(self._base)
        return lives() if callable(lives) else lives

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        reward: Any
        observation, reward, terminated, truncated, info = self._env.step(action)
        for _ in range(self._repeats - 1):
            if terminated or truncated:
                break
            observation, more, terminated, truncated, info = self._env.step(action)
            reward = reward + more
        if self._end is not None:
            before, self._lives = self._lives, self._present_lives()
            ended = before > self._lives or terminated or truncated
            info = self._with_lives(info, ended)
        return observation, reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        ended = False
        if self._recorder is None:
            observation, info = self._env.reset(seed=seed, options=options)
            if self._end is not None:
                self._lives = self._present_lives()
        else:
            given = {"seed": seed, "options": options}
            with self._own_states():
                begun = self._inner.reset(**{k: v for k, v in given.items() if v is not None})
            observation, info = self._recorder.latest
            if self._end is not None:
                self._lives = begun[self._end.lives_key].numpy()[()]
                ended = bool(begun[self._end.eol_key].any())
        return observation, info if self._end is None else self._with_lives(info, ended)

    def _with_lives(self, info: Mapping[str, Any], ended: Any) -> dict[str, Any]:
        ends = np.array([bool(ended)])
        return {**info, self._end.eol_key: ends, self._end.lives_key: self._lives}


class _Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the latest observation and infos of an env, as the env gave them."""

    latest: tuple[Any, dict[str, Any]]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        given = self.env.step(action)
        self._keep(given[0], given[4])
        return given

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._keep(observation, info)
        return observation, info

    def _keep(self, observation: Any, info: dict[str, Any]) -> None:
        # TorchRL encodes the entries of the dict that it is given in place.
        self.latest = (dict(observation) if isinstance(observation, dict) else observation, info)


class _TensorDictSlot(SlotEnv):
    """A slot that TorchRL's own code steps, on TensorDicts."""

    def __init__(
        self, create: Callable[..., EnvBase], kwargs: Mapping[str, Any], settings: SlotSettings
    ):
        super().__init__(create, kwargs, settings)
        plan = settings.plan
        self.observation_space = space_of_boxes(plan.boxes)
        self._paths = [path for path, _, _ in plan.boxes]
        self._entries = [entry.key for entry in plan.entries]
        categorical = is_categorical(self._base)
        self._codec = SpaceCodec(self.action_space, keys.ACTION, categorical=categorical)
        self._present: Any = None

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        arrays = self._codec.empty(1)
        self._codec.write_slot(action, arrays, 0)
        given = self._present
        for path, array in zip(self._codec.paths, arrays, strict=True):
            given[key_of(path)] = torch.from_numpy(array[0, ...])
        if self._draws:
            with self._own_states():
                given = self._inner.step(given)
        else:
            given = self._inner.step(given)
        following = given[keys.NEXT]
        self._present = self._inner.step_mdp(given)
        observation, info = self._read(following)
        terminated, truncated = following[keys.TERMINATED], following[keys.TRUNCATED]
        return (
            observation,
            following[keys.REWARD].item(),
            bool(terminated),
            bool(truncated),
            info,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        given = {"seed": seed, "options": options}
        kwargs = {name: value for name, value in given.items() if value is not None}
        begin = None
        if self._present is not None:
            begin = TensorDict({keys.RESET: torch.ones(1, dtype=torch.bool)})
        if self._draws:
            with self._own_states():
                self._present = self._inner.reset(begin, **kwargs)
        else:
            self._present = self._inner.reset(begin, **kwargs)
        self._present.pop(keys.RESET, None)
        return self._read(self._present)

    def _read(self, entries: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        observation: dict[str, Any] = {}
        for path in self._paths:
            parent = observation
            for name in path[:-1]:
                parent = parent.setdefault(name, {})
            parent[path[-1]] = entries[key_of(path)].numpy(force=True)
        return observation, {key: entries[key].numpy(force=True) for key in self._entries}


def _fresh_states() -> dict[str, Any]:
    """The global random states of a process that has not seeded them."""
    generator = torch.Generator()
    generator.seed()
    return {
        "torch": generator.get_state(),
        "cuda": [],
        "numpy": np.random.RandomState().get_state(),
        "python": random.Random().getstate(),
    }
