"""An env whose state can be saved, and brought back in another process.

Where the env has ``snapshot()`` and ``restore(snapshot)``, these are used. Else its present episode
is played again, from the state of its random generator before the reset, and the actions since; or
on request all of its episodes, in a new env.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tdcollect._upstream.others import WRAPPER_STATE
from tdcollect.envs.process.values import Begun, Options, as_begun

State = dict[str, Any]
"""An env's state: ``"how"`` to bring it back, and the data for that. Built-in and NumPy types."""

_MARK = "_tdcollect_resumable"


class ResumableEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Records an env's actions, or takes its snapshots, so that it can be brought back.

    The env's ``snapshot()`` and ``restore(snapshot)``, where it has them, cover all that decides
    about its future but its ``np_random``, in dicts, lists and tuples of numbers, strings, bytes
    and arrays. The env that has them may be under the wrappers of ``gymnasium.make``, but under no
    others. With ``rebuild``, which makes a new env, all episodes since it was made are recorded,
    not the present one only, and played again in a new one.
    """

    def __init__(self, env: gym.Env[Any, Any], rebuild: Callable[[], Any] | None = None):
        super().__init__(env)
        self._rebuild = rebuild
        self._past: list[_Episode] = []
        self._present: _Episode | None = None
        self._latest: Any = None
        self._look_inside()

    def _look_inside(self) -> None:
        env = self.env
        self._wrappers: list[tuple[Any, tuple[str, ...]]] = []
        while type(env) in WRAPPER_STATE:
            self._wrappers.append((env, WRAPPER_STATE[type(env)]))
            env = env.env  # type: ignore[attr-defined]
        self._inner: Any = env
        methods = (getattr(env, name, None) for name in ("snapshot", "restore"))
        self._snapshots = all(map(callable, methods))

    @property
    def spec(self) -> Any:  # type: ignore[override]
        return self.env.spec

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> Begun:
        if self._rebuild is not None and self._present is not None and not self._snapshots:
            self._past.append(self._present._replace(actions=_stacked(self._present.actions)))
        self._present = None  # until it is known how it begins
        present = _Episode(seed, copy.deepcopy(options), _generator_state(self.env), [])
        observation, info = as_begun(self.env.reset(seed=seed, options=options))
        self._present, self._latest = present, observation
        self._note = (lambda _: None) if self._snapshots else present.actions.append
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._note(action.copy() if type(action) is np.ndarray else copy.deepcopy(action))
        self._latest = outcome = self.env.step(action)
        return outcome

    def save_state(self) -> State:
        """The env's state, for :meth:`load_state`; the env is left as it is."""
        present = self._present
        if present is None:
            return {"how": "nothing", "why": "it was not reset, or its reset failed"}
        began = {"seed": present.seed, "options": present.options}
        if self._snapshots:
            snapshot = self._snapshot()
            return {
                "how": "snapshot",
                "began": began,
                "snapshot": snapshot,
                "generator": snapshot["generator"],
                "digest": digest(snapshot),
            }
        episodes = [*self._past, present]
        return {
            "how": "replay",
            "history": self._rebuild is not None,
            "first_generator": episodes[0].generator,
            "episodes": [(e.seed, e.options, len(e.actions)) for e in episodes],
            "actions": _stacked([action for e in episodes for action in e.actions]),
            "generator": _generator_state(self.env),
            "digest": digest(self._seen()),
        }

    def load_state(self, state: State, stepping: Callable[[], object] = lambda: None) -> str | None:
        """Bring a saved state back, calling ``stepping`` before each step that is played again.

        Returns:
            None if it is back, which a digest proves; else the reason. The env must then be reset;
            its generator goes on from where it was.
        """
        if state["how"] == "nothing":
            return str(state["why"])
        try:
            if state["how"] == "snapshot":
                why = self._restore(state)
            else:
                why = self._replay(state, stepping)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            self._present = None
            _set_generator(self.env, state["generator"])
        return why

    def _restore(self, state: State) -> str | None:
        if not self._snapshots:
            return "it was saved by the env's snapshot(), which the env here does not have"
        self.reset(**state["began"])
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
        if state["history"] and self._rebuild is None:
            return "it was saved with its history, and the env here is made to keep none"
        if self._rebuild is not None:
            self._renew()
        _set_generator(self.env, state["first_generator"])
        actions = iter(state["actions"])
        for seed, options, length in state["episodes"]:
            self.reset(seed=seed, options=options)
            for _ in range(length):
                stepping()
                self.step(next(actions))
        if digest(self._seen()) != state["digest"]:
            return (
                "its episode came out differently as it was played again: something beside its "
                "seed and np_random decides about it"
            )
        return None

    def _renew(self) -> None:
        assert self._rebuild is not None
        env = self._rebuild()
        if env is self.env:
            raise RuntimeError("its factory gave the same env again, not a new one")
        self.env.close()
        self.env = env
        self._past, self._present = [], None
        self._look_inside()

    def _seen(self) -> Any:
        latest = self._latest
        # All of a step but its info, whose objects may have no digest.
        shown = latest[:4] if type(latest) is tuple and len(latest) == 5 else latest
        return [shown, _generator_state(self.env)]


class _Episode(NamedTuple):
    """The beginning of an episode, and its actions: a list while it is the present one."""

    seed: int | None
    options: dict[str, Any] | None
    generator: Mapping[str, Any] | None
    actions: Any


def make_resumable(factory: Callable[[], Any], history: bool = False) -> Any:
    """A factory's env, whose state can be saved, with or without all of its episodes.

    Any other object of the factory is passed on, for the caller to refuse.
    """
    env = factory()
    if not isinstance(env, gym.Env):
        return env
    resumable = getattr(env, _MARK, None)  # the same again, for the caller to see
    if resumable is None:
        resumable = ResumableEnv(env, factory if history else None)
        setattr(env, _MARK, resumable)
    return resumable


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


def _stacked(actions: list[Any]) -> Any:
    kinds = {
        (type(a), a.dtype.str, a.shape) if isinstance(a, (np.ndarray, np.generic)) else type(a)
        for a in actions
    }
    if len(kinds) == 1 and isinstance(actions[0], (np.ndarray, np.generic)):
        return np.array(actions)  # scalars come out of it as they went in
    return list(actions)


def digest(value: Any) -> str:
    """A digest of nested values and the bits of their arrays."""
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
