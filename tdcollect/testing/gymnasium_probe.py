"""Episodes of a gymnasium env, for the rules to look at."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy, deepcopy
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium as gym

from tdcollect.testing.report import Broken, NotChecked
from tdcollect.testing.rules import Player

Env = gym.Env[Any, Any]


class Row(NamedTuple):
    """What a reset (step 0) or a step gave: copies, and the very objects ``given``."""

    observation: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any
    given: tuple[Any, ...]

    @property
    def is_reset(self) -> bool:
        return len(self.given) == 2

    @property
    def ends(self) -> bool:
        return bool(self.terminated) or bool(self.truncated)


class Probe(Player[Env, Row]):
    """Plays episodes of one gymnasium env, and of others like it; see :class:`Player`."""

    closed = False

    def rows(self, env: Env, seed: int | None, action_seed: int | None = None) -> Iterator[Row]:
        """The rows of one episode, first its reset.

        Random actions are the same for every seed, so that a seed shows by what the env does;
        unless ``action_seed`` asks for others.
        """
        actions = deepcopy(env.action_space)
        actions.seed(self.seed if action_seed is None else action_seed)
        given: Any = env.reset(seed=seed)
        _expect_tuple(given, 2, "reset")
        observation = given[0]
        yield Row(deepcopy(observation), None, False, False, _copy_info(given[1]), given)
        for _ in range(self.steps):
            action = actions.sample() if self.policy is None else self.policy(observation)
            given = env.step(action)
            _expect_tuple(given, 5, "step")
            observation, reward, terminated, truncated, info = given
            flags = deepcopy((terminated, truncated))
            row = Row(deepcopy(observation), deepcopy(reward), *flags, _copy_info(info), given)
            yield row
            if row.ends:
                return

    def play(self, env: Env, seed: int) -> list[Row]:
        return list(self.rows(env, seed))

    @cached_property
    def episodes(self) -> list[list[Row]]:
        """Three episodes of the env, on three seeds."""
        return [self.play(self.env, self.seed + i) for i in range(3)]

    @property
    def ended(self) -> list[tuple[int, list[Row]]]:
        """Those that ended, with their seeds."""
        ended = [(self.seed + i, e) for i, e in enumerate(self.episodes) if e[-1].ends]
        if not ended:
            raise NotChecked(f"no episode ended in {self.steps} steps")
        return ended

    def close_env(self, env: Env) -> None:
        env.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.env.close()


def _copy_info(info: Any) -> Any:
    try:
        return deepcopy(info)
    except Exception:  # infos may hold anything; what cannot be copied is not looked at
        return copy(info)


def _expect_tuple(given: Any, count: int, call: str) -> None:
    wanted = {
        2: "(observation, info)",
        5: "(observation, reward, terminated, truncated, info)",
    }[count]
    if not isinstance(given, tuple) or len(given) != count:
        got = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        raise Broken(f"{call} gave {got}, expected {wanted}")
    if not isinstance(given[-1], dict):
        raise Broken(f"{call} gave an info that is {type(given[-1]).__name__}, expected a dict")
