"""Envs for tests of evaluation: sound ones, and one for each fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation


class Walk(gym.Env[Any, Any]):
    """A random walk with noise from its own generator; ends at a random time, or truncates.

    Observations are float32 ``[size]``; rewards depend on the action, the state and the noise.
    """

    def __init__(self, actions: spaces.Space[Any] | None = None, longest: int = 12, size: int = 3):
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Discrete(2) if actions is None else actions
        self.longest = longest

    def noise(self) -> Any:
        """Standard normal numbers ``[size]``."""
        return self.np_random.normal(size=self.observation_space.shape)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.noise()
        self.left = int(self.np_random.integers(1, self.longest + 1))
        return self.place.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        flat = np.asarray(spaces.flatten(self.action_space, action), np.float64)
        self.place = 0.9 * self.place + 0.1 * self.noise() + 0.1 * (flat @ np.arange(flat.size))
        self.left -= 1
        reward = float(self.place.sum())
        success = bool(reward > 0)
        ended = self.left == 0
        return (
            self.place.astype(np.float32),
            reward,
            ended and success,
            ended and not success,
            {"is_success": success} if ended else {},
        )


def pictures(actions: spaces.Space[Any] | None = None) -> gym.Env[Any, Any]:
    """The walk, shown as an 8 x 8 picture with the channels last."""

    def shown(place: Any) -> Any:
        rows = np.outer(place, np.arange(24)) * 20
        return (np.abs(rows).reshape(8, 8, 3) % 256).astype(np.uint8)

    walk = Walk(actions or spaces.Discrete(3), size=8)
    return TransformObservation(walk, shown, spaces.Box(0, 255, (8, 8, 3), np.uint8))


class TenOrTwoHundred(gym.Env[Any, Any]):
    """Episodes of 10 or of 200 steps with equal chance, and a reward of 1 a step."""

    observation_space = spaces.Box(0, 200, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.choice([10, 200]))
        return np.array([self.left], np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.array([self.left], np.float32), 1.0, self.left == 0, False, {}


class Unseeded(Walk):
    """Ignores its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset()


class GlobalNumpy(Walk):
    """Draws from NumPy's global random numbers."""

    def noise(self) -> Any:
        return np.random.normal(size=3)  # noqa: NPY002


class GlobalTorch(Walk):
    """Draws from torch's and Python's global random numbers."""

    def noise(self) -> Any:
        import torch

        return torch.randn(3).numpy() + random.random()


class SeedsGlobal(GlobalNumpy):
    """Seeds NumPy's global random numbers with its seed, and draws from them."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)


class Leaking(Walk):
    """Carries state from one episode into the next; a new env starts without."""

    def __init__(self) -> None:
        super().__init__()
        self.drift = [0.0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.place + self.drift[0]
        self.drift[0] += 1.0
        return self.place.astype(np.float32), {}


class Sharing(Leaking):
    """Carries state from every env's episodes into those of the others."""

    common: ClassVar[list[float]] = [0.0]

    def __init__(self) -> None:
        super().__init__()
        self.drift = self.common


class Touching(Walk):
    """Steps of one env show in the others, but not in its own later episodes."""

    latest: ClassVar[dict[str, Any]] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        self.latest["place"] = self.place
        return result

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.latest["place"] = self.place = 0.5 * (self.place + self.latest["place"])
        return self.place.astype(np.float32), *result[1:]


class Failing(Walk):
    """Raises at the third step, or the reset, of episodes with some seeds: ``times`` times each."""

    failures: ClassVar[dict[int, int]] = {}

    def __init__(self, seeds: tuple[int, ...] = (), times: int = 10**6, at_reset: bool = False):
        super().__init__(longest=12)
        self.seeds, self.times, self.at_reset = seeds, times, at_reset

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        self.left += 3
        self.steps, self.seed = 0, seed
        if self.at_reset:
            self._fail()
        return result

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and not self.at_reset:
            self._fail()
        return super().step(action)

    def _fail(self) -> None:
        if self.seed in self.seeds:
            failed = self.failures[self.seed] = self.failures.get(self.seed, 0) + 1
            if failed <= self.times:
                raise RuntimeError(f"broken by seed {self.seed}")


class Strict(gym.Env[Any, Any]):
    """Refuses actions outside its space, and more resets than it allows; episodes of ten steps.

    With ``noise``, it shows random numbers that no seed reaches, from the first step on.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(
        self,
        action_space: spaces.Space[Any] = spaces.Discrete(2),
        noise: bool = False,
        resets: int | None = None,
    ):
        self.action_space = action_space
        self.noise = np.random.default_rng() if noise else None
        self.resets = resets

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.resets == 0:
            raise RuntimeError("reset too often")
        self.resets = self.resets and self.resets - 1
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"not in the space: {action}"
        self.steps += 1
        drawn = (self.noise or self.np_random).normal(size=2).astype(np.float32)
        total = np.asarray(spaces.flatten(self.action_space, action), np.float64).sum()
        return drawn, float(total), self.steps == 10, False, {}


class Masked(Strict):
    """Accepts the first action and one other, given by its masks."""

    def action_masks(self) -> Any:
        if isinstance(self.action_space, spaces.Discrete):
            sizes = np.array([self.action_space.n])
        else:
            sizes = self.action_space.nvec
        self.valid = [{0, 1 + self.steps % (size - 1)} for size in sizes]
        return np.concatenate(
            [np.isin(np.arange(size), list(v)) for size, v in zip(sizes, self.valid, strict=True)]
        )

    def step(self, action: Any) -> Any:
        self.action_masks()
        for choice, valid in zip(
            np.ravel(action - self.action_space.start), self.valid, strict=True
        ):
            assert choice in valid
        return super().step(action)


class Raising(Strict):
    """Raises at a step (0 is the reset); or from there on with some probability."""

    dice = np.random.default_rng(0)

    def __init__(self, step: int, chance: float | None = None, noise: bool = False):
        super().__init__(noise=noise)
        self.step_that_raises, self.chance = step, chance

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        self._raise()
        return result

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self._raise()
        return result

    def _raise(self) -> None:
        due = self.steps == self.step_that_raises
        if self.chance is not None:
            due = self.steps >= self.step_that_raises and self.dice.random() < self.chance
        if due:
            raise ValueError(f"at {self.steps}")


class Watched:
    """Makes envs, and records which are still open."""

    def __init__(self, kind: Callable[[], gym.Env[Any, Any]]):
        self.kind = kind
        self.open: list[Any] = []
        self.made = 0

    def __call__(self) -> gym.Env[Any, Any]:
        env = self.kind()
        self.made += 1
        self.open.append(env)
        env.close = lambda: self.open.remove(env) if env in self.open else None  # type: ignore[method-assign]
        return env


class Guess(gym.Env[Any, Any]):
    """Asks for a digit in words, beside numbers; says how the guesses went."""

    observation_space = spaces.Dict(
        {"said": spaces.Text(400, charset="ü"), "size": spaces.Box(-9, 9, (2,), np.float32)}
    )
    action_space: spaces.Space[Any] = spaces.Text(40)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.digit, self.told = int(self.np_random.integers(10)), "guess!"
        return self.seen(), {}

    def seen(self) -> Any:
        return {"said": self.told, "size": np.float32([len(self.told), self.np_random.normal()])}

    def step(self, action: Any) -> Any:
        assert isinstance(action, str)
        right = action == str(self.digit)
        self.told += f" {action} ist richtig" if right else f"\n{action} ist größer oder kleiner"
        return self.seen(), right - 0.1, right, self.told.count("\n") > 5, {}


class Says(Guess):
    """The same in words alone."""

    observation_space = spaces.Text(400)

    def seen(self) -> Any:
        return self.told
