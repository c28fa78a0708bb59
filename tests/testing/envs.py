"""Sound envs, and others that change one thing each."""

from __future__ import annotations

import copy
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Sound(gym.Env[Any, Any]):
    """A random walk in two dimensions that ends where it goes too far."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.begin(seed)
        super().reset(seed=seed)
        self.position = self.draw().astype(np.float32)
        return self.observed(), {"speed": 0.0}

    def step(self, action: Any) -> Any:
        self.move(np.asarray(action, np.float32))
        far = bool(np.abs(self.position).max() > 4)
        return self.observed(), float(self.position[0]), far, False, {"speed": 1.0}

    def begin(self, seed: int | None) -> None:
        pass

    def move(self, action: Any) -> None:
        self.position += action + 0.1 * self.draw().astype(np.float32)

    def observed(self) -> Any:
        return self.position.copy()

    def draw(self) -> Any:
        return self.np_random.normal(size=2)


def changed(name: str, change: Callable[..., Any]) -> type[Sound]:
    """A sound env whose steps pass through ``change``."""

    def step(self: Any, action: Any) -> Any:
        return change(self, *Sound.step(self, action))

    # In the name of this module, so that processes of its backend find it.
    return type(name, (Sound,), {"step": step, "__module__": __name__})


class Composite(Sound):
    """Takes actions in parts whose order differs from that of their names."""

    action_space = spaces.Dict(
        [
            ("move", spaces.Box(-1.0, 1.0, (2,), np.float32)),
            ("force", spaces.Box(2.0, 3.0, (2,), np.float32)),
        ]
    )

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return super().step(action["move"] * action["force"])


class Nested(Composite):
    """Observes a dict, with a tuple of discrete parts in it; its infos hold what no batch does."""

    observation_space = spaces.Dict(
        walk=spaces.Box(-np.inf, np.inf, (2,), np.float64),
        side=spaces.Tuple([spaces.Discrete(2, start=1), spaces.MultiBinary(2)]),
    )

    def observed(self) -> Any:
        right = self.position > 0
        walk = self.position.astype(float)
        return {"walk": walk, "side": (1 + int(right[0]), right.astype(np.int8))}

    def step(self, action: Any) -> Any:
        walk, reward, far, _, _ = super().step(action)
        return walk, np.array(reward), np.bool_(far), False, {"of": object()}


class WithText(Sound):
    """Observes a mission beside the position, like MiniGrid."""

    observation_space = spaces.Dict(
        position=Sound.observation_space, mission=spaces.Text(20, charset="go right")
    )

    def observed(self) -> Any:
        return {"position": super().observed(), "mission": "go right"}


class WithOtherText(WithText):
    """Observes a mission that is not in its space."""

    observation_space = spaces.Dict(
        position=Sound.observation_space, mission=spaces.Text(20, charset="left")
    )


class TellsItsProcess(WithText):
    """Observes another mission in a worker process."""

    def observed(self) -> Any:
        there = multiprocessing.parent_process() is not None or "torchrl" not in sys.modules
        return {**super().observed(), "mission": "go right" if there else "go"}


class OutOfBounds(Sound):
    observation_space = spaces.Box(-2.0, 2.0, (2,), np.float32)


def _with(observation: Any, value: float) -> Any:
    observation[1] = value
    return observation


GivesNaN = changed("GivesNaN", lambda env, o, *rest: (_with(o, np.nan), *rest))
GivesInfinity = changed("GivesInfinity", lambda env, o, *rest: (_with(o, np.inf), *rest))
OtherShape = changed("OtherShape", lambda env, o, *rest: (o[:1], *rest))
OtherDtype = changed("OtherDtype", lambda env, o, *rest: (o.astype(np.float64), *rest))
GivesAList = changed("GivesAList", lambda env, o, *rest: (o.tolist(), *rest))
NaNReward = changed("NaNReward", lambda env, o, r, *rest: (o, float("nan"), *rest))
BoolReward = changed("BoolReward", lambda env, o, r, *rest: (o, True, *rest))
ArrayReward = changed("ArrayReward", lambda env, o, r, *rest: (o, np.array([1.0]), *rest))
FlagsAreInts = changed("FlagsAreInts", lambda env, o, r, d, t, info: (o, r, int(d), int(t), info))
FourValues = changed("FourValues", lambda env, *given: given[:4])
NeverEnds = changed("NeverEnds", lambda env, o, r, d, t, info: (o, r, False, False, info))
InfoChangesType = changed("InfoChangesType", lambda env, *given: (*given[:4], {"speed": "fast"}))
InfoComesAndGoes = changed(
    "InfoComesAndGoes",
    lambda env, *given: (*given[:4], {"right": 1.0} if env.position[0] > 0 else {}),
)
InfoAtTheEnd = changed(
    "InfoAtTheEnd", lambda env, o, r, d, *rest: (o, r, d, rest[0], {"success": True} if d else {})
)


def restart(env: Any, observation: Any, reward: Any, terminated: bool, *rest: Any) -> Any:
    """Give the next episode's first observation at the end of one."""
    if terminated:
        observation, _ = env.reset()
    return observation, reward, terminated, *rest


RestartsItself = changed("RestartsItself", restart)


def drawing(name: str, draw: Callable[[Any], Any], **attributes: Any) -> type[Sound]:
    """A sound env but for its draws."""
    return type(name, (Sound,), {"draw": draw, "__module__": __name__, **attributes})


def _torch_draw(env: Any) -> Any:
    import torch  # here alone: worker processes import this module

    return torch.randn(2).numpy()


WithoutChance = drawing("WithoutChance", lambda env: np.zeros(2))
DrawsFromNumpy = drawing("DrawsFromNumpy", lambda env: np.random.normal(size=2))  # noqa: NPY002
DrawsFromPython = drawing(
    "DrawsFromPython", lambda env: np.array([random.gauss(0, 1), random.gauss(0, 1)])
)
DrawsFromTorch = drawing("DrawsFromTorch", _torch_draw)


class OwnGenerator(Sound):
    """No seed reaches its generator."""

    seeds: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.generator = np.random.default_rng(*self.seeds)

    def draw(self) -> Any:
        return self.generator.normal(size=2)


class IgnoresSeed(OwnGenerator):
    seeds = (0,)


class SeedsNumpy(Sound):
    """Repeatable, but it seeds the global generator."""

    def begin(self, seed: int | None) -> None:
        if seed is not None:
            np.random.seed(seed)  # noqa: NPY002


HELD = np.random.RandomState(0)


class SeedsHeld(Sound):
    """Repeatable, but it seeds a generator that its module holds for all envs."""

    def begin(self, seed: int | None) -> None:
        if seed is not None:
            HELD.seed(seed)


class SeedsAndDraws(SeedsNumpy):
    """Seeds NumPy's global generator, from which all envs draw."""

    draw = DrawsFromNumpy.draw


class DrawsWhenMade(Sound):
    def __init__(self) -> None:
        np.random.random()  # noqa: NPY002


class DrawsSeldom(Sound):
    """Draws an unseeded number in one of the first 600 steps or so."""

    left: Any = 400
    scale = 1.0

    def move(self, action: Any) -> None:
        DrawsSeldom.left -= 1
        if DrawsSeldom.left == 0:
            self.position += np.float32(self.scale * np.random.default_rng().normal())
        super().move(action)


class SumsInAnyOrder(Sound):
    """Adds up a set whose order differs now and then, which shows in the reward's last bit."""

    order: Any = random.Random(0)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward * (1 + 2e-16 * (self.order.random() < 0.1)), *rest


class InnerGenerator(Sound):
    """Seeds its own generator, which gymnasium does not know, as in ALE."""

    def begin(self, seed: int | None) -> None:
        if seed is not None:
            self.generator = np.random.default_rng(seed)

    draw = OwnGenerator.draw


class Leaks(Sound):
    """Its wind blows on from one episode into the next."""

    wind = 0.0
    more = 1e-3

    def move(self, action: Any) -> None:
        self.wind += self.more
        self.position += np.float32(self.wind)
        super().move(action)


class LeaksInside(Leaks):
    """The same, in state that no attribute shows."""

    class Simulator:
        __slots__ = ("wind",)

        def __init__(self) -> None:
            self.wind = 0.0

    def __init__(self) -> None:
        self.simulator = self.Simulator()

    @property
    def wind(self) -> Any:
        return self.simulator.wind

    @wind.setter
    def wind(self, wind: float) -> None:
        self.simulator.wind = wind


class LeaksALittle(LeaksInside):
    more = 1e-6


class ReplacesSeed(Sound):
    """Takes the method of its action space for an attribute."""

    def __init__(self) -> None:
        self.action_space = copy.copy(Sound.action_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.action_space.seed = seed
        return super().reset(seed=seed, options=options)


class SharesState(Sound):
    """The latest position of any env of the class; each reset puts it right again."""

    latest: ClassVar[Any] = None

    def move(self, action: Any) -> None:
        self.position = SharesState.latest.copy()
        super().move(action)

    def observed(self) -> Any:
        SharesState.latest = self.position
        return super().observed()


class Ages(Sound):
    """Changes after 1,000 steps in its life."""

    most = 1000

    def __init__(self) -> None:
        self.life = 0

    def move(self, action: Any) -> None:
        self.life += 1
        if self.life > self.most:
            self.position *= np.float32(0.9)
        super().move(action)


class AllAge(Ages):
    """The same, in the life of the process."""

    most = 500
    life_of_all: ClassVar[list[int]] = [0]

    @property
    def life(self) -> Any:
        return self.life_of_all[0]

    @life.setter
    def life(self, steps: int) -> None:
        if steps:
            self.life_of_all[0] = steps


class Process(Sound):
    """Its behaviour depends on the process that it runs in."""

    def draw(self) -> Any:
        elsewhere = "torchrl" not in sys.modules
        return super().draw() + (multiprocessing.parent_process() is not None or elsewhere)


class Ordered(Sound):
    """Shows the order of a set of strings."""

    def observed(self) -> Any:
        return np.array([int(name) for name in {*map(str, range(30))}][:2], np.float32)


class EndsAtALimit(Sound):
    """A time limit reported as termination."""

    def begin(self, seed: int | None) -> None:
        self.steps = 0

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        self.steps += 1
        return observation, reward, self.steps == 30, False, info


class ReusesItsBuffer(Sound):
    def begin(self, seed: int | None) -> None:
        self.buffer = np.zeros(2, np.float32)

    def observed(self) -> Any:
        self.buffer[:] = self.position
        return self.buffer


class GivesItsState(Sound):
    """Returns a new array at each step, but continues from it."""

    def move(self, action: Any) -> None:
        self.position = self.position.copy()
        super().move(action)

    def observed(self) -> Any:
        return self.position


class ChangesItsAction(Sound):
    def move(self, action: Any) -> None:
        action *= 0.5
        super().move(action)


class BadSnapshot(Sound):
    """Its ``restore`` restores nothing."""

    def snapshot(self) -> Any:
        return {"position": self.position}

    def restore(self, snapshot: Any) -> None:
        pass


class ClosesOnce(Sound):
    closed = False

    def close(self) -> None:
        assert not self.closed, "closed already"
        self.closed = True


class RaisesWhenMade(Sound):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class RaisesInStep(Sound):
    def move(self, action: Any) -> None:
        raise ZeroDivisionError("a step too far")


class RaisesLater(Sound):
    """Raises at seed 4, which comes after the first checks."""

    def begin(self, seed: int | None) -> None:
        if seed == 4:
            raise ZeroDivisionError("no seed 4")


class RaisesUnseeded(Sound):
    def begin(self, seed: int | None) -> None:
        if seed is None:
            raise ValueError("no seed")


class Slow(NeverEnds):  # type: ignore[misc, valid-type]
    def move(self, action: Any) -> None:
        time.sleep(0.005)
        super().move(action)


A_NUMBER = 5
_only = Sound()


def the_same_env() -> Any:
    return _only


def not_an_env() -> Any:
    return 3
