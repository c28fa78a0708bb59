"""A sound env, and others that change one thing each."""

from __future__ import annotations

import random
import time
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Sound(gym.Env[Any, Any]):
    """A random walk in two dimensions that ends where it goes too far."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.position = self.draw().astype(np.float32)
        return self.position.copy(), {"speed": 0.0}

    def step(self, action: Any) -> Any:
        self.position += np.asarray(action, np.float32) + 0.1 * self.draw().astype(np.float32)
        far = bool(np.abs(self.position).max() > 4)
        return self.position.copy(), float(self.position[0]), far, False, {"speed": 1.0}

    def draw(self) -> Any:
        return self.np_random.normal(size=2)


class WithoutChance(Sound):
    def draw(self) -> Any:
        return np.zeros(2)


class Nested(Sound):
    """Observations in a dict, with a tuple and a discrete part in it."""

    observation_space = spaces.Dict(
        walk=spaces.Box(-np.inf, np.inf, (2,), np.float32),
        side=spaces.Tuple([spaces.Discrete(2), spaces.Box(-9, 9, (1,), np.float32)]),
    )

    def _nested(self, walk: Any) -> Any:
        return {"walk": walk, "side": (np.int64(walk[0] > 0), walk[:1].copy())}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        walk, info = super().reset(seed=seed)
        return self._nested(walk), info

    def step(self, action: Any) -> Any:
        walk, *rest = super().step(action)
        return self._nested(walk), *rest


class OwnGenerator(Sound):
    """No seed reaches its generator."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def draw(self) -> Any:
        return self.generator.normal(size=2)


class IgnoresSeed(OwnGenerator):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)


class DrawsFromNumpy(Sound):
    def draw(self) -> Any:
        return np.random.normal(size=2)  # noqa: NPY002


class DrawsFromPython(Sound):
    def draw(self) -> Any:
        return np.array([random.gauss(0, 1), random.gauss(0, 1)])


class DrawsFromTorch(Sound):
    def draw(self) -> Any:
        import torch  # here alone: worker processes import this module

        return torch.randn(2).numpy()


class SeedsNumpy(Sound):
    """Repeatable, but it seeds the global generator."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)


class DrawsWhenMade(Sound):
    def __init__(self) -> None:
        np.random.random()  # noqa: NPY002


class Leaks(Sound):
    """Its wind blows on from one episode into the next."""

    wind = 0.0

    def step(self, action: Any) -> Any:
        self.wind += 1e-3
        self.position += np.float32(self.wind)
        return super().step(action)


class LeaksInside(Leaks):
    """The same, in state that no attribute shows."""

    class Simulator:
        wind = 0.0

    def __init__(self) -> None:
        self.simulator = self.Simulator()

    @property
    def wind(self) -> Any:
        return self.simulator.wind

    @wind.setter
    def wind(self, wind: float) -> None:
        self.simulator.wind = wind


class LeaksALittle(LeaksInside):
    def step(self, action: Any) -> Any:
        self.simulator.wind += 1e-6
        self.position += np.float32(self.simulator.wind)
        return Sound.step(self, action)


class SharesState(Sound):
    """The latest position of any env of the class; each reset puts it right again."""

    latest: ClassVar[Any] = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        given = super().reset(seed=seed)
        SharesState.latest = self.position
        return given

    def step(self, action: Any) -> Any:
        self.position = SharesState.latest.copy()
        given = super().step(action)
        SharesState.latest = self.position
        return given


class NeverEnds(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


class EndsAtALimit(Sound):
    """A time limit reported as termination."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        self.steps += 1
        return observation, reward, self.steps == 30, False, info


class FlagsAreInts(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, int(terminated), int(truncated), info


class RestartsItself(Sound):
    """Gives the next episode's first observation at the end of one."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated:
            observation, info = self.reset()
        return observation, reward, terminated, truncated, info


class OtherDtype(Sound):
    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return observation.astype(np.float64), *rest


class OutOfBounds(Sound):
    observation_space = spaces.Box(-2.0, 2.0, (2,), np.float32)


class GivesNaN(Sound):
    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        observation[1] = np.nan
        return observation, *rest


class GivesInfinity(Sound):
    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        observation[1] = np.inf
        return observation, *rest


class NaNReward(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


class BoolReward(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, True, *rest


class ReusesItsBuffer(Sound):
    buffer: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed)
        self.buffer = observation
        return observation, info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        self.buffer[:] = observation
        return self.buffer, *rest


class GivesItsState(Sound):
    """Returns a new array at each step, but continues from it."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        _, info = super().reset(seed=seed)
        return self.position, info

    def step(self, action: Any) -> Any:
        self.position = self.position.copy()
        _, *rest = super().step(action)
        return self.position, *rest


class ChangesItsAction(Sound):
    def step(self, action: Any) -> Any:
        action *= 0.5
        return super().step(action)


class InfoChangesType(Sound):
    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        return *rest, {"speed": "fast"}


class InfoComesAndGoes(Sound):
    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        if self.position[0] > 0:
            info["right"] = 1.0
        return *rest, info


class InfoAtTheEnd(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated:
            info["success"] = True
        return observation, reward, terminated, truncated, info


class RaisesWhenMade(Sound):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class RaisesInStep(Sound):
    def step(self, action: Any) -> Any:
        raise ZeroDivisionError("a step too far")


class RaisesLater(Sound):
    """Raises at seed 4, which comes after the first checks."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed == 4:
            raise ZeroDivisionError("no seed 4")
        return super().reset(seed=seed)


class RaisesUnseeded(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is None:
            raise ValueError("no seed")
        return super().reset(seed=seed)


class FourValues(Sound):
    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


class Slow(NeverEnds):
    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


A_NUMBER = 5
_only = Sound()


def the_same_env() -> Any:
    return _only


def not_an_env() -> Any:
    return 3


class Process(Sound):
    """Its behaviour depends on the process that it runs in."""

    def draw(self) -> Any:
        import multiprocessing
        import sys

        elsewhere = "torchrl" not in sys.modules
        return super().draw() + (multiprocessing.parent_process() is not None or elsewhere)


class Ages(Sound):
    """Changes after 1,000 steps in its life."""

    def __init__(self) -> None:
        self.life = 0

    def step(self, action: Any) -> Any:
        self.life += 1
        if self.life > 1000:
            self.position *= np.float32(0.9)
        return super().step(action)


class AllAge(Ages):
    """The same, in the life of the process."""

    life_of_all: ClassVar[list[int]] = [0]

    @property
    def life(self) -> Any:
        return self.life_of_all[0]

    @life.setter
    def life(self, steps: int) -> None:
        if steps:
            self.life_of_all[0] = steps

    def step(self, action: Any) -> Any:
        self.life += 1
        if self.life > 500:
            self.position *= np.float32(0.9)
        return Sound.step(self, action)


class DrawsSeldom(Sound):
    """Draws an unseeded number in one of the first 600 steps or so."""

    generator: Any = None
    left: Any = 400

    def step(self, action: Any) -> Any:
        DrawsSeldom.left -= 1
        if DrawsSeldom.left == 0:
            self.position += np.float32(np.random.default_rng().normal())
        return super().step(action)


class SeedsAndDraws(SeedsNumpy):
    """Seeds NumPy's global generator, from which all envs draw."""

    def draw(self) -> Any:
        return np.random.normal(size=2)  # noqa: NPY002


class InnerGenerator(Sound):
    """Seeds its own generator, which gymnasium does not know, as in ALE."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        return super().reset()

    def draw(self) -> Any:
        return self.generator.normal(size=2)


class BadSnapshot(Sound):
    """Its ``restore`` restores nothing."""

    def snapshot(self) -> Any:
        return {"position": self.position}

    def restore(self, snapshot: Any) -> None:
        pass


class WithText(Sound):
    """Observes a mission beside the position, like MiniGrid."""

    observation_space: Any = spaces.Dict(
        position=Sound.observation_space, mission=spaces.Text(20, charset="go right")
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed)
        return {"position": observation, "mission": "go right"}, info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return {"position": observation, "mission": "go right"}, *rest


class WithOtherText(WithText):
    """Observes a mission that is not in its space."""

    observation_space: Any = spaces.Dict(
        position=Sound.observation_space, mission=spaces.Text(20, charset="left")
    )


class Composite(Sound):
    """Takes actions in parts whose order differs from that of their names."""

    action_space: Any = spaces.Dict(
        [
            ("move", spaces.Box(-1.0, 1.0, (2,), np.float32)),
            ("force", spaces.Box(2.0, 3.0, (2,), np.float32)),
        ]
    )

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return super().step(action["move"] * action["force"])
