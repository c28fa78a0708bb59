"""Envs for worker processes, which import this module: nothing here brings torch."""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def total(action: Any) -> float:
    """The sum of an action's numbers, however they are nested."""
    if isinstance(action, (dict, tuple)):
        return sum(map(total, action.values() if isinstance(action, dict) else action))
    return float(np.sum(action, dtype=float))


class Drawn(gym.Env):
    """Samples everything from its own generator; episodes of 1 to 6 steps.

    Args:
        observation_space: of its observations.
        action_space: of its actions.
    """

    def __init__(
        self,
        observation_space: spaces.Space = spaces.Box(-1, 1, (3,)),
        action_space: spaces.Space = spaces.Discrete(3),
    ) -> None:
        # Of its own: it draws from the space.
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space

    def _observe(self) -> Any:
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = (options or {}).get("left", int(self.np_random.integers(1, 7)))
        self.taken = 0.0
        return self._observe(), self._info()

    def step(self, action: Any) -> Any:
        self.left -= 1
        self.taken = total(action)
        reward = self.np_random.normal() + self.taken
        ending = int(self.np_random.integers(3))
        over = self.left <= 0
        return self._observe(), reward, over and ending != 1, over and ending != 0, self._info()

    def _info(self) -> dict[str, Any]:
        info = {"left": self.left, "noise": self.np_random.normal(size=2)}
        return info if self.left % 2 else {**info, "sometimes": self.taken}


class Unsendable(Drawn):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = (i for i in range(3))


class Odd(gym.Env):
    """Misbehaves as specified at its second step; otherwise observes its step count."""

    def __init__(self, what: str = "", marker: str | None = None) -> None:
        self.what, self.marker = what, marker
        self.observation_space = spaces.Box(-1, 100, (2,), np.float64)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        if self.what == "raise at reset":
            raise ValueError("no episode today")
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        observation = np.full(2, self.count, np.float64)
        if self.count == 2 and self.what:
            observation = getattr(self, self.what.replace(" ", "_"))(observation)
        return observation, float(self.count), False, False, {"count": self.count}

    def raise_(self, observation: Any) -> Any:
        raise ZeroDivisionError("the pole fell through the cart")

    def raise_unpicklable(self, observation: Any) -> Any:
        class Stubborn(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("no")

        raise Stubborn("cannot leave this process")

    def raise_exotic(self, observation: Any) -> Any:
        raise TwoArguments("one", "two")

    def die(self, observation: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, observation: Any) -> Any:
        os._exit(7)

    def spin(self, observation: Any) -> Any:
        os.write(1, b"hangs\n")  # in one piece, whoever else writes
        while True:
            pass

    def hold_the_lock(self, observation: Any) -> Any:
        os.write(1, b"hangs\n")  # in one piece, whoever else writes
        # PyDLL keeps the interpreter's lock: no other thread and no handler can run meanwhile.
        return ctypes.PyDLL(None).sleep(600)

    def close(self) -> None:
        if self.what == "raise at close":
            raise OSError("cannot close")
        if self.what == "hang at close":
            time.sleep(600)
        if self.marker is not None:
            with open(self.marker, "a") as file:
                file.write("closed\n")


class TwoArguments(Exception):
    """An exception that cannot be unpickled: it wants two arguments and keeps one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)
