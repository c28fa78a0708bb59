"""Functions that make the env of a slot from its index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from tdcollect import EvaluationCollector, evaluate, make_env
from tdcollect.testing import check_env, diagnose

from .oracle import UPSTREAM

pytestmark = [pytest.mark.filterwarnings(UPSTREAM), pytest.mark.usefixtures("quick_children")]


class Levels(gym.Env[Any, Any]):
    """Starts on the level of its options, or else on its own."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)
    start = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.level = options["level"] if options else self.start
        self.left = 1 + self.level % 3 + int(self.np_random.integers(3))
        return self.look(), {}

    def look(self) -> Any:
        return np.array([self.level, self.left, self.np_random.normal()])

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self.look(), float(action), self.left == 0, False, {}


SLOTS = 3


def made(slot: int, longest: int = 3) -> gym.Env[Any, Any]:
    env = Levels()
    env.start = 10 * slot + longest
    return env


def made_with_default(slot: int = 7) -> gym.Env[Any, Any]:
    return made(slot)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_function_with_a_slot_is_given_it(backend: str) -> None:
    def levels(make: Any, **kwargs: Any) -> list[int]:
        env = make_env(make, SLOTS, backend=backend, env_kwargs=kwargs)
        found = [env.reset()["observation"][:, 0].int().tolist()]
        env.stepper.rebuild([1])
        found.append(env.reset()["observation"][:, 0].int().tolist())
        env.close()
        assert found[0] == found[1]
        return found[0]

    assert levels(made) == levels(made_with_default) == [3, 13, 23]
    assert levels(made, longest=4) == [4, 14, 24]
    assert levels(partial(made, slot=2)) == levels(made, slot=2) == [23] * SLOTS


TAKES: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda make: evaluate(make, None, 2, progress=False),
    "workers": lambda make: evaluate(make, None, 2, progress=False, workers=2),
    "collector": lambda make: EvaluationCollector(make, None, 2),
    "check_env": check_env,
    "diagnose": diagnose,
}


@pytest.mark.parametrize("name", TAKES)
def test_test_episodes_refuse_slots_that_differ(name: str) -> None:
    told = r"parameter slot of made, .* depend on its slot; pass functools.partial\(made, slot=0\)$"
    with pytest.raises(ValueError, match=told):
        TAKES[name](made)


@pytest.mark.parametrize("name", TAKES)
def test_test_episodes_leave_a_slot_at_its_default(name: str) -> None:
    found = TAKES[name](made_with_default)
    if name in ("evaluate", "workers"):
        expected = evaluate(partial(made, slot=7), None, 2, progress=False)
        assert found.episodes == expected.episodes
        assert found.manifest["env"]["kwargs"] == {}


def test_test_episodes_run_where_slots_are_alike() -> None:
    assert evaluate(partial(made, slot=0), None, 2, progress=False).episodes
    assert evaluate(made, None, 2, progress=False, env_kwargs={"slot": 0}).episodes
    assert len(list(EvaluationCollector(make_env(made, 1), None, 2))) == 2
    with pytest.raises(ValueError, match=r"^expected no parameter slot of made"):
        EvaluationCollector(make_env(made, 2), None, 2)
