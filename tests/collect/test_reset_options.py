"""Reset options as a function of slot and episode, at every reset of a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, GymEnv, StepCounter, TransformedEnv

from tdcollect import Collector, EvaluationCollector, evaluate, make_env, slot_seed
from tdcollect.testing import check_env, diagnose

from .oracle import UPSTREAM

pytestmark = [pytest.mark.filterwarnings(UPSTREAM), pytest.mark.usefixtures("quick_children")]

both_ways = pytest.mark.usefixtures("arrays")
SLOTS = 3


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


class Frail(Levels):
    """Fails once in the reset of level 101, having taken its options, and once in a step of 2."""

    failed: set[int] = set()  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed, options=options)
        self.left += 2
        options.clear()
        self.fail_once(101)
        return found

    def fail_once(self, level: int) -> None:
        if self.level == level and level not in self.failed:
            self.failed.add(level)
            raise RuntimeError("once")

    def step(self, action: Any) -> Any:
        self.fail_once(2)
        return super().step(action)


def level(slot: int, episode: int) -> dict[str, int] | None:
    return None if episode == 1 else {"level": 100 * slot + episode}


def act(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", (tensordict["observation"][..., 2] > 0).long())


make = partial(make_env, Levels, SLOTS, categorical_action_encoding=True)


def vector(mode: AutoresetMode) -> EnvBase:
    env = SyncVectorEnv([Levels] * SLOTS, autoreset_mode=mode)
    return make_env(env, categorical_action_encoding=True)


ENVS: dict[str, Callable[[], EnvBase]] = {
    "serial": make,
    "transformed": lambda: TransformedEnv(make(), StepCounter()),
    "process": partial(make, backend="process", num_workers=2),
    "ready": partial(make, backend="process", num_workers=2, wait_num=1),
    "next-step": partial(vector, AutoresetMode.NEXT_STEP),
    "disabled": partial(vector, AutoresetMode.DISABLED),
}


def collector(env: EnvBase | None = None, give: Any = level, frames: int = 10) -> Collector:
    made = make() if env is None else env
    return Collector(made, act, frames_per_batch=frames * SLOTS, reset_options=give)


def plain_loop(slot: int, seed: int) -> Iterator[Any]:
    """The observations of a slot in a loop over one gymnasium env."""
    env = Levels()
    for episode in count():
        first = slot_seed(seed, slot) if episode == 0 else None
        observation, _ = env.reset(seed=first, options=level(slot, episode))
        done = False
        while not done:
            yield observation
            observation, _, done, _, _ = env.step(int(observation[2] > 0))


class Noted:
    """Notes for which episodes it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, slot: int, episode: int) -> Any:
        self.asked.append((slot, episode))
        return level(slot, episode)


# ---------------------------------------------------------------------------------------- the data


@both_ways
@pytest.mark.parametrize("name", ENVS)
def test_data_are_those_of_plain_loops(name: str) -> None:
    collecting = collector(ENVS[name]())
    collecting.set_seed(4)
    found = torch.cat([batch["observation"] for batch in islice(collecting, 4)], 1)
    collecting.shutdown()
    for slot in range(SLOTS):
        loop = np.array([*islice(plain_loop(slot, 4), 40)])
        assert (found[slot].numpy() == loop).all()


def test_episodes_count_each_reset_and_begin_anew_with_a_seed() -> None:
    noted = Noted()
    collecting = collector(give=noted)
    assert noted.asked == [(slot, 0) for slot in range(SLOTS)]
    collecting.reset()
    collecting.reset(1)
    assert noted.asked[SLOTS:] == [(0, 1), (1, 1), (2, 1), (1, 2)]
    collecting.set_seed(4)
    assert noted.asked[2 * SLOTS + 1 :] == [(slot, 0) for slot in range(SLOTS)]
    noted.asked.clear()
    batch = collecting.collect(episodes=5)
    assert noted.asked[:SLOTS] == [(slot, 1) for slot in range(SLOTS)]
    assert len(noted.asked) == 5
    assert (batch["observation"][:, 0] == -1).any()
    fixed = collecting.collect(episodes=4, options={"level": 7})
    assert (fixed["observation"][:, 0] == 7).all()
    assert len(noted.asked) == 5
    collecting.rollout()
    assert sum(episode for _, episode in noted.asked[5 : 5 + SLOTS]) == SLOTS + 5 + 4


@pytest.mark.parametrize("wait_num", [None, 1])
def test_an_env_that_fails_is_given_options_again(wait_num: int | None) -> None:
    backend = {"backend": "process", "num_workers": 3, "wait_num": 1} if wait_num else {}
    Frail.failed.clear()
    env = make_env(Frail, SLOTS, on_env_error="restart", **backend)
    give = lambda slot, episode: {"level": 100 * slot + episode}  # noqa: E731
    collecting = Collector(env, frames_per_batch=SLOTS * 60, reset_options=give)
    batch = collecting.rollout()
    collecting.shutdown()
    assert env.restarts == 2
    assert batch["next", "env_error"].sum() == 1
    for slot, levels in enumerate(batch["observation"][..., 0].int()):
        follow = levels.unique_consecutive().tolist()
        assert follow == [*range(100 * slot, 100 * slot + len(follow))]


@both_ways
@pytest.mark.parametrize("resumable", [True, False])
def test_a_resumed_collector_asks_as_one_that_goes_on(resumable: bool) -> None:
    first, other = Noted(), Noted()
    one, another = (collector(make(resumable=resumable), give) for give in (first, other))
    one.set_seed(4)
    one.collect(frames=12)
    state = one.state_dict()
    first.asked.clear()
    expected = one.collect(frames=30)
    if resumable:
        other.asked.clear()
        another.load_state_dict(state)
        assert (another.collect(frames=30) == expected).all()
        assert other.asked == first.asked
        return
    with pytest.warns(UserWarning, match="could not be resumed"):
        another.load_state_dict(state)
    assert other.asked[SLOTS:] == [min(at for at in first.asked if at[0] == s) for s in range(3)]


# ------------------------------------------------------------------------------- what is refused


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "same-step": (
        partial(vector, AutoresetMode.SAME_STEP),
        "the backend 'gymnasium' of .* takes no reset options of each slot; use make_env",
    ),
    "torchrl": (partial(GymEnv, "CartPole-v1"), "GymEnv, an env of TorchRL's own, takes no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_envs_without_options_of_each_slot_are_refused(name: str) -> None:
    make_one, told = REFUSED[name]
    with pytest.raises(ValueError, match=f"^expected no reset_options: {told}"):
        Collector(make_one(), frames_per_batch=30, reset_options=level)


def test_what_is_no_function_or_returns_no_dict_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^expected reset_options to be callable or None, got"):
        collector(give={"level": 1})
    with pytest.raises(TypeError, match=r"dict or None, got \[2\] for slot 2, episode 0$"):
        collector(give=lambda slot, episode: [2] if slot == 2 else None)


def test_options_end_with_the_collector_that_has_them() -> None:
    env = make()
    first = collector(env)
    with pytest.raises(ValueError, match=r"^expected an env of no collector with reset_options"):
        EvaluationCollector(env, act, 2)
    second = collector(env, None)
    assert (second.rollout()["observation"][..., 0] == -1).all()
    assert first.env is second.env
    assert len(list(EvaluationCollector(env, act, 2))) == 2


# ------------------------------------------------------------------- envs made from a slot's index


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
