"""An env's state is saved, and restored in another env."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from tdcollect import make_env
from tdcollect.envs.process.resumable import ResumableEnv, digest, make_resumable
from tdcollect.states import pack, unpack

pytestmark = pytest.mark.behaviour(29)


class Any_(gym.Env[Any, Any]):
    """Observes a random number and its action, for any action space."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._given = float((options or {}).get("start", 0))
        return self._look(), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space  # by its very type
        self._given += float(digest(action).encode()[0]) + len(repr(type(action)))
        return self._look(), 1.0, False, False, {}

    def _look(self) -> Any:
        return np.array([self._given, *self.np_random.random(2)])


def brought(
    make: Callable[[], gym.Env[Any, Any]], steps: int, history: bool = False, **start: Any
) -> tuple[str | None, Any, Any]:
    """The reason why a state was not restored, if any, and the next data of both envs."""
    env, other = make_resumable(make, history), make_resumable(make, history)
    env.action_space.seed(0)
    env.reset(**start)
    outcomes = [env.step(env.action_space.sample()) for _ in range(steps)]
    if outcomes and (outcomes[-1][2] or outcomes[-1][3]):
        env.reset()
    state = unpack(pack(env.save_state()))
    other.reset(seed=99)
    why = other.load_state(state)
    if why is not None:
        return why, None, None
    actions = [env.action_space.sample() for _ in range(5)]
    given = [[each.step(a)[:4] for a in actions] + [each.reset()[0]] for each in (env, other)]
    return why, *given


@pytest.mark.parametrize(
    ("space", "steps", "start"),
    [
        (Discrete(3, start=-1), 0, {}),
        (Box(-1, 1, (2, 3)), 6, {"seed": 3}),
        (
            Dict(a=Tuple([Discrete(2), Box(0, 1, (2,))]), b=MultiDiscrete([2, 3])),
            6,
            {"options": {"start": 7}},
        ),
        (MultiBinary(4), 6, {"seed": 3, "options": {"start": 7}}),
    ],
)
def test_another_env_is_brought_there(space: Any, steps: int, start: dict[str, Any]) -> None:
    why, there, here = brought(partial(Any_, space), steps, **start)
    assert why is None
    assert digest(there) == digest(here)


class Leaky(Any_):
    """Observes the number of its episodes, and sums over all of them."""

    _count = 0

    def reset(self, **given: Any) -> Any:
        self._count += 1
        return super().reset(**given)

    def _look(self) -> Any:
        return np.array([self._count, *self.np_random.random(2)])


def test_what_depends_on_episodes_before_is_found_out() -> None:
    env, other = (make_resumable(partial(Leaky, Discrete(2))) for _ in range(2))
    for _ in range(3):
        env.reset()
    other.reset()
    why = other.load_state(env.save_state())
    assert why is not None
    assert why.startswith("its episode came out differently as it was played again")
    # Its random numbers go on from where they were.
    assert (env.reset()[0][1:] == other.reset()[0][1:]).all()


def test_history_brings_back_what_depends_on_episodes_before() -> None:
    env, other = (make_resumable(partial(Leaky, Discrete(2)), history=True) for _ in range(2))
    other.reset()
    for length in (2, 0, 3):
        env.reset()
        for _ in range(length):
            env.step(1)
    assert other.load_state(unpack(pack(env.save_state()))) is None
    assert digest(env.step(0)[0]) == digest(other.step(0)[0])
    # And from there on to a third, with the history of both.
    third = make_resumable(partial(Leaky, Discrete(2)), history=True)
    third.reset()
    assert third.load_state(other.save_state()) is None
    assert digest(third.reset()[0]) == digest(other.reset()[0])


def test_history_needs_a_new_env_and_a_reset() -> None:
    env = make_resumable(partial(Leaky, Discrete(2)), history=True)
    one = Leaky(Discrete(2))
    other = make_resumable(lambda: one, history=True)
    assert other.load_state(env.save_state()) == "it was not reset, or its reset failed"
    env.reset()
    other.reset()
    assert other.load_state(env.save_state()) == (
        "RuntimeError: its factory gave the same env again, not a new one"
    )


class Fragile(Any_):
    """Its restore() forgets a part."""

    def snapshot(self) -> Any:
        return [self._given, "kept"]

    def restore(self, snapshot: Any) -> None:
        self._given = 0.0


class Sound(Fragile):
    def restore(self, snapshot: Any) -> None:
        self._given = snapshot[0]


def test_a_snapshot_that_does_not_come_back_is_found_out() -> None:
    why, _, _ = brought(partial(Fragile, Discrete(3)), 4)
    assert why == "its snapshot() after restore() differs from the one that was restored"


def test_a_snapshot_is_found_under_the_wrappers_of_gymnasium_make() -> None:
    def make() -> gym.Env[Any, Any]:
        inner = gym.wrappers.PassiveEnvChecker(Sound(Discrete(3)))
        return gym.wrappers.TimeLimit(gym.wrappers.OrderEnforcing(inner), 8)

    env = ResumableEnv(make())
    env.reset()
    assert env.save_state()["how"] == "snapshot"
    why, there, here = brought(make, 6)
    assert why is None
    assert [outcome[3] for outcome in here[:5]] == [False, True, True, True, True]
    assert digest(there) == digest(here)
    # Under other wrappers it would not be all.
    env = ResumableEnv(gym.wrappers.NormalizeReward(Sound(Discrete(3))))
    env.reset()
    assert env.save_state()["how"] == "replay"


@pytest.mark.parametrize(("there", "here"), [(Sound, Any_), (Any_, Sound)])
def test_a_snapshot_and_a_replay_do_not_mix(there: Any, here: Any) -> None:
    env, other = (ResumableEnv(kind(Discrete(3))) for kind in (there, here))
    env.reset()
    other.reset()
    assert "it was saved by" in str(other.load_state(env.save_state()))


def test_actions_that_are_changed_later_are_kept_as_they_were() -> None:
    env, other = (ResumableEnv(gym.make("Pendulum-v1")) for _ in range(2))
    env.reset()
    action = np.ones(1, np.float32)
    env.step(action)
    action[:] = -1
    env.step(action)
    other.reset()
    assert other.load_state(env.save_state()) is None


# ---------------------------------------------------------------------------------------- make_env


def test_resumable_envs_give_the_same_data() -> None:
    plain, noted = (
        make_env("CartPole-v1", 3, seed=0, resumable=resumable) for resumable in (False, "history")
    )
    steps = []
    for env in (plain, noted):
        env.reset()
        torch.manual_seed(0)
        steps.append(env.rollout(60, break_when_any_done=False))
        env.close()
    assert (steps[0] == steps[1]).all()


def test_what_cannot_be_resumable_is_refused() -> None:
    with pytest.raises(ValueError, match="expected resumable to be False, True or 'history'"):
        make_env("CartPole-v1", 2, resumable="always")
    with pytest.raises(ValueError, match="'envpool' cannot bring its envs back"):
        make_env("CartPole-v1", 2, backend="envpool", resumable=True)
    with pytest.raises(ValueError, match="'history' is for envs that can be made anew"):
        make_env(gym.make("CartPole-v1"), resumable="history")
    one = gym.make("CartPole-v1")
    with pytest.raises(ValueError, match="expected a callable that makes a new env at each call"):
        make_env(lambda: one, 2, resumable=True)
