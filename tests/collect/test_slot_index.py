"""Functions that make the env of a slot from its index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import pytest

from tdcollect import EvaluationCollector, evaluate, make_env
from tdcollect.testing import check_env, diagnose

from ..counting import CountingEnv
from .oracle import UPSTREAM

pytestmark = [pytest.mark.filterwarnings(UPSTREAM), pytest.mark.usefixtures("quick_children")]


SLOTS = 3


def made(slot: int, shift: int = 0) -> gym.Env[Any, Any]:
    return CountingEnv(slot + shift, wrong_action="record")


def made_with_default(slot: int = 7) -> gym.Env[Any, Any]:
    return made(slot)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_function_with_a_slot_is_given_it(backend: str) -> None:
    def slots_of(make: Any, **kwargs: Any) -> list[int]:
        env = make_env(make, SLOTS, backend=backend, env_kwargs=kwargs)
        found = [env.reset()["observation"][:, 2].int().tolist()]
        env.stepper.rebuild([1])
        found.append(env.reset()["observation"][:, 2].int().tolist())
        env.close()
        assert found[0] == found[1]
        return found[0]

    assert slots_of(made) == slots_of(made_with_default) == [0, 1, 2]
    assert slots_of(made, shift=4) == [4, 5, 6]
    assert slots_of(partial(made, slot=2)) == slots_of(made, slot=2) == [2] * SLOTS


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
