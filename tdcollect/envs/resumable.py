"""An env whose state can be saved, and brought back in another process.

Where the env has ``snapshot()`` and ``restore(snapshot)``, these are used. Else its present episode
is played again, from the state of its random generator before the reset, and the actions since.

This file is sent to worker processes as it is. It imports nothing of tdcollect, which would bring
torch along.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

State = dict[str, Any]
"""What a slot's env is saved as: ``"how"``, and what that takes. Built-in and NumPy types only."""

_MARK = "_tdcollect_resumable"

_WRAPPERS: dict[type, tuple[str, ...]] = {
    TimeLimit: ("_elapsed_steps",),
    OrderEnforcing: ("_has_reset",),
    PassiveEnvChecker: (),
}
"""What ``gymnasium.make`` puts around an env, and the attributes that hold their state."""


class ResumableEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Notes of an env what it takes to bring it back.

    Args:
        env: with all of its wrappers. Its methods ``snapshot()`` and ``restore(snapshot)``, where
            it has them, cover all that decides about its future but its ``np_random``, in dicts,
            lists and tuples of numbers, strings, bytes and arrays. The env that has them may be
            under the wrappers of ``gymnasium.make``, but under no others.
    """

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self._wrappers: list[tuple[gym.Env[Any, Any], tuple[str, ...]]] = []
        while type(env) in _WRAPPERS:
            self._wrappers.append((env, _WRAPPERS[type(env)]))
            env = env.env  # type: ignore[attr-defined]
        self._inner: Any = env
        methods = (getattr(env, name, None) for name in ("snapshot", "restore"))
        self._snapshots = all(map(callable, methods))
        self._began: State | None = None
        self._actions: list[Any] = []
        self._latest: Any = None

    @property
    def spec(self) -> Any:
        """The env's own: this wrapper changes nothing."""
        return self.env.spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and note how."""
        self._began = None  # for as long as it is not known how it begins
        began = {
            "seed": seed,
            "options": copy.deepcopy(options),
            "generator": _generator_state(self.env),
        }
        observation, info = self.env.reset(seed=seed, options=options)
        self._began, self._actions, self._latest = began, [], observation
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and note the action."""
        if not self._snapshots:
            self._actions.append(_copied(action))
        outcome = self.env.step(action)
        self._latest = outcome[:4]
        return outcome

    def save_state(self) -> State:
        """What :meth:`load_state` takes; the env is left as it is."""
        if self._began is None:
            return {"how": "nothing", "why": "it was not reset, or its reset failed"}
        if self._snapshots:
            snapshot = self._snapshot()
            return {
                "how": "snapshot",
                "began": self._began,
                "snapshot": snapshot,
                "generator": snapshot["generator"],
                "digest": digest(snapshot),
            }
        return {
            "how": "replay",
            "began": self._began,
            "actions": _stacked(self._actions),
            "generator": _generator_state(self.env),
            "digest": digest(self._seen()),
        }

    def load_state(
        self, state: State, stepping: Callable[[], object] = lambda: None
    ) -> str | None:
        """Bring a saved state back.

        Args:
            state: what :meth:`save_state` gave.
            stepping: is called before each step that is played again.

        Returns:
            None where it is back, which a digest proves; else why it is not. The env must then be
            reset; its generator goes on from where it was.
        """
        if state["how"] == "nothing":
            return str(state["why"])
        try:
            why = (
                self._restore(state)
                if state["how"] == "snapshot"
                else self._replay(state, stepping)
            )
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            self._began = None
            _set_generator(self.env, state.get("generator"))
        return why

    def _restore(self, state: State) -> str | None:
        if not self._snapshots:
            return "it was saved by the env's snapshot(), which the env here does not have"
        self.reset(seed=state["began"]["seed"], options=state["began"]["options"])
        self._began = state["began"]
        snapshot = state["snapshot"]
        for (wrapper, names), values in zip(self._wrappers, snapshot["wrappers"], strict=True):
            for name, value in zip(names, values, strict=True):
                setattr(wrapper, name, value)
        self._inner.restore(copy.deepcopy(snapshot["env"]))
        _set_generator(self.env, snapshot["generator"])
        if digest(self._snapshot()) != state["digest"]:
            return "its snapshot() after restore() differs from the one that was restored"
        return None

    def _snapshot(self) -> State:
        return {
            "env": copy.deepcopy(self._inner.snapshot()),
            "wrappers": [[getattr(w, name) for name in names] for w, names in self._wrappers],
            "generator": _generator_state(self.env),
        }

    def _replay(self, state: State, stepping: Callable[[], object]) -> str | None:
        if self._snapshots:
            return "it was saved by its actions, and the env here takes snapshots"
        began = state["began"]
        _set_generator(self.env, began["generator"])
        self.reset(seed=began["seed"], options=began["options"])
        self._began = began
        actions = _listed(state["actions"])
        for action in actions:
            stepping()
            self.step(action)
        if digest(self._seen()) != state["digest"]:
            return (
                f"its episode came out differently when its {len(actions)} actions were played "
                "again: something beside its seed and np_random decides about it"
            )
        return None

    def _seen(self) -> Any:
        return [self._latest, _generator_state(self.env)]


class Resumable:
    """Makes envs of a factory whose state can be saved.

    Args:
        factory: returns a new ``gymnasium.Env`` at each call.
    """

    def __init__(self, factory: Callable[[], Any]):
        self._factory = factory

    def __call__(self) -> Any:
        """A new env; what is none is returned as it is, for its caller to refuse."""
        env = self._factory()
        if not isinstance(env, gym.Env):
            return env
        made = getattr(env, _MARK, None)  # the same again, for its caller to see
        if made is None:
            made = ResumableEnv(env)
            setattr(env, _MARK, made)
        return made


def _generator_state(env: gym.Env[Any, Any]) -> Mapping[str, Any] | None:
    generator = env.unwrapped.np_random
    if not isinstance(generator, np.random.Generator):
        return None
    return generator.bit_generator.state


def _set_generator(env: gym.Env[Any, Any], state: Mapping[str, Any] | None) -> None:
    """Put the env's generator in a state, in place: parts of the env may hold it."""
    if state is None:
        return
    generator = env.unwrapped.np_random
    kind = state["bit_generator"]
    same = isinstance(generator, np.random.Generator)
    if not same or type(generator.bit_generator).__name__ != kind:
        generator = np.random.Generator(getattr(np.random, kind)())
        env.unwrapped.np_random = generator
    generator.bit_generator.state = state


def _copied(action: Any) -> Any:
    return action.copy() if type(action) is np.ndarray else copy.deepcopy(action)


def _stacked(actions: list[Any]) -> Any:
    """Many actions as one array, where they are alike."""
    kinds = {
        (type(a), a.dtype.str, a.shape) if isinstance(a, (np.ndarray, np.generic)) else type(a)
        for a in actions
    }
    if len(kinds) == 1:
        first = actions[0]
        if isinstance(first, np.ndarray):
            return {"arrays": np.stack(actions)}
        if isinstance(first, np.generic):
            return {"scalars": np.array(actions)}
    return {"values": list(actions)}


def _listed(stacked: Mapping[str, Any]) -> list[Any]:
    ((_, actions),) = stacked.items()
    return list(actions)


def digest(value: Any) -> str:
    """Of nested values and the bits of their arrays."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(value, hasher)
    return hasher.hexdigest()


def _feed(value: Any, hasher: Any) -> None:
    if isinstance(value, Mapping):
        hasher.update(b"{%d" % len(value))
        for key in sorted(value, key=repr):
            _feed(key, hasher)
            _feed(value[key], hasher)
    elif isinstance(value, (list, tuple)):
        hasher.update(b"[%d" % len(value))
        for item in value:
            _feed(item, hasher)
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        hasher.update(f"{value.dtype.str}{value.shape}".encode())
        hasher.update(value.tobytes())
    else:
        hasher.update(repr(value).encode() + b";")
