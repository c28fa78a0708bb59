"""What the rules for gymnasium envs and those for TorchRL envs share: a list, and a player."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

E = TypeVar("E")
P = TypeVar("P")
R = TypeVar("R")


class Rules(dict[str, Callable[[P], str]]):
    """Rules by their sentences, in the order in which they are tried.

    Each is a function of a probe that returns its evidence, raises ``Broken`` with it, or raises
    ``NotChecked`` with the reason.
    """

    def add(self, sentence: str) -> Callable[[Callable[[P], str]], Callable[[P], str]]:
        """Add the decorated function under its sentence."""

        def added(rule: Callable[[P], str]) -> Callable[[P], str]:
            self[sentence] = rule
            return rule

        return added


class Player(abc.ABC, Generic[E, R]):
    """Plays one env, and others like it.

    Args:
        env: the env; it is closed in the end.
        make: makes another one like it, or None.
        policy: acts; None for random actions, the same each time.
        steps: the most steps that are played.
        seed: the first seed.
    """

    def __init__(
        self,
        env: E,
        make: Callable[[], E] | None,
        policy: Callable[[Any], Any] | None,
        steps: int,
        seed: int,
    ):
        self.env = env
        self.make = make
        self.policy = policy
        self.steps = steps
        self.seed = seed

    @abc.abstractmethod
    def play(self, env: E, seed: int) -> list[R]:
        """The rows of an env from a seeded reset on."""

    @abc.abstractmethod
    def close_env(self, env: E) -> None:
        """Close an env that was made here."""

    def another(self) -> E:
        """A new env; the same one where nothing makes another."""
        return self.env if self.make is None else self.make()

    def done_with(self, env: E) -> None:
        """Close what :meth:`another` gave, if it was a new one."""
        if env is not self.env:
            self.close_env(env)

    def play_anew(self, seed: int) -> list[R]:
        """The rows of a new env, if one can be had."""
        env = self.another()
        try:
            return self.play(env, seed)
        finally:
            self.done_with(env)
