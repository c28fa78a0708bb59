"""gymnasium envs of consecutive slots: made, checked, built anew and closed in one process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import gymnasium as gym

EnvFactory = Callable[[], "gym.Env[Any, Any]"]
Spaces = tuple[Any, Any]
"""The observation space and the action space."""


_OLD = re.compile(r"keyword argument 'seed'|expected 5, got 4|step gave 4 values|<class 'gym\.")
_OLD_API = (
    "this is the API of gym before 0.26: wrap the env in shimmy's GymV21CompatibilityV0, or have "
    "it take reset(seed=, options=) and return five values from step()"
)


def old_api(message: str) -> str:
    """The advice for an env of gym's old API, if an error's message shows it; else empty."""
    return _OLD_API if _OLD.search(message) else ""


def spec_of(name: str) -> Any:
    """The spec of a gymnasium id."""
    try:
        return gym.spec(name)
    except gym.error.NamespaceNotFound as error:
        raise gym.error.NamespaceNotFound(
            f"{error} If it is installed, import it, or name it in the id: 'package:{name}'"
        ) from None


class EnvSlots:
    """The envs of consecutive slots in this process.

    Args:
        factories: one callable per slot, each returning a new ``gymnasium.Env``.
        first: the first slot.

    Attributes:
        envs: in the order of the slots; empty until :meth:`make`.
        spaces: the spaces of the first env, which those of the others must equal.
    """

    spaces: Spaces

    def __init__(self, factories: Sequence[EnvFactory], first: int = 0):
        self.factories = factories
        self.first = first
        self.envs: list[gym.Env[Any, Any]] = []

    def begin(self, slot: int) -> None:
        """Is called before each call of an env."""

    def make(self) -> list[tuple[int, Spaces]]:
        """Make the envs.

        Returns:
            The slots whose spaces differ from those of the first env, each with its spaces.

        Raises:
            TypeError: if a factory does not return a ``gymnasium.Env``.
            ValueError: if a factory returns the env of another slot.
        """
        differing = []
        for slot, factory in enumerate(self.factories, self.first):
            self.begin(slot)
            env = factory()
            self._check_new(slot, env)
            self.envs.append(env)
            spaces = (env.observation_space, env.action_space)
            if slot == self.first:
                self.spaces = spaces
            elif spaces != self.spaces:
                differing.append((slot, spaces))
        return differing

    def rebuild(self, slots: Sequence[int]) -> None:
        """Make the envs of ``slots`` anew, and close the old ones.

        Raises:
            RuntimeError: if a factory returns the old env again.
            TypeError, ValueError: as :meth:`make`, and if an env has other spaces.
        """
        for slot in slots:
            self.begin(slot)
            old = self.envs[slot - self.first]
            with contextlib.suppress(Exception):  # closing it may fail as it did
                old.close()
            env = self.factories[slot - self.first]()
            if env is old:
                raise RuntimeError(
                    f"cannot build the env of slot {slot} anew: it was given as one env; pass its "
                    "id or a callable that makes a new one at each call"
                )
            self._check_new(slot, env)
            check_spaces(slot, self.spaces, (env.observation_space, env.action_space))
            self.envs[slot - self.first] = env

    def _check_new(self, slot: int, env: Any) -> None:
        if isinstance(env, gym.vector.VectorEnv):
            env.close()
            raise TypeError(
                "expected a callable that makes a single gymnasium.Env, got one that makes the "
                f"vector env {env}; call it and pass the vector env itself"
            )
        if not isinstance(env, gym.Env):
            advice = old_api(str(type(env).__mro__))
            raise TypeError(
                "expected a callable that makes a gymnasium.Env, got one that returned "
                f"{type(env).__name__}" + f"; {advice}" * bool(advice)
            )
        for other, made in enumerate(self.envs, self.first):
            if env is made:
                raise ValueError(
                    "expected a callable that makes a new env at each call, got that of slot "
                    f"{other} for slot {slot} again"
                )

    def sample_info(self) -> Mapping[str, Any]:
        """Infos of a reset and a step of the first env."""
        env = self.envs[0]
        self.begin(self.first)
        info = dict(env.reset()[1])
        info.update(env.step(env.action_space.sample())[4])
        return info

    def call(
        self,
        slots: Sequence[int],
        name: str,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Call a method of the envs of ``slots``; returns one result per slot."""
        results = []
        for slot in slots:
            self.begin(slot)
            results.append(getattr(self.envs[slot - self.first], name)(*arguments, **keywords))
        return results

    def save_states(self) -> dict[int, Any]:
        """The state of each env, by slot; the envs are resumable."""
        states = {}
        for slot, env in enumerate(self.envs, self.first):
            self.begin(slot)
            states[slot] = env.save_state()  # type: ignore[attr-defined]
        return states

    def load_states(self, states: Mapping[int, Any]) -> dict[int, str]:
        """Bring envs back to states that :meth:`save_states` gave, of slots here or elsewhere.

        Returns:
            The reason by slot, for the slots here that could not be brought back.
        """
        failed = {}
        for slot, env in enumerate(self.envs, self.first):
            if slot in states:
                # A replay takes many steps: each is a call that may take its time.
                begin = partial(self.begin, slot)
                begin()
                why = env.load_state(states[slot], begin)  # type: ignore[attr-defined]
                if why is not None:
                    failed[slot] = why
        return failed

    def render(self) -> list[Any]:
        """The rendered frame of each slot."""
        frames = []
        for slot, env in enumerate(self.envs, self.first):
            self.begin(slot)
            frames.append(env.render())
        return frames

    def close(self) -> None:
        """Close every env; raises the error of the first that failed, once all were asked to."""
        errors = []
        for slot, env in enumerate(self.envs, self.first):
            self.begin(slot)
            try:
                env.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def check_spaces(slot: int, expected: Spaces, got: Spaces) -> None:
    """Raise ValueError if the spaces of ``slot`` are not those of slot 0."""
    for name, one, other in zip(("observation_space", "action_space"), expected, got, strict=True):
        if one != other:
            raise ValueError(
                f"expected the same {name} in every slot, got {one} in slot 0 and {other} in slot "
                f"{slot}; make envs of one kind share a batch, or wrap them to agree"
            )
