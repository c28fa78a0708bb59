"""``make_env``: valid arguments, and errors for wrong ones before anything is made."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import EnvBase, GymEnv

from tdcollect import evaluate, make_env
from tdcollect.envs.slots import SlotError
from tdcollect.testing import check_env, diagnose


class Plain(gym.Env):
    """Records when it is made and closed."""

    def __init__(self, log: list[str], size: int = 2, actions: int = 2, action: Any = None) -> None:
        log.append("made")
        self.log = log
        self.observation_space = spaces.Box(-1, 1, (size,), np.float32)
        self.action_space = spaces.Discrete(actions) if action is None else action

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(self.observation_space.shape, np.float32), 0.0, False, False, {}

    def close(self) -> None:
        self.log.append("closed")


@pytest.fixture
def log() -> list[str]:
    return []


# --- what it takes -----------------------------------------------------------------------------


def test_a_class_of_wrappers_is_a_callable_that_makes_an_env() -> None:
    class Inverted(gym.RewardWrapper):
        def __init__(self) -> None:
            super().__init__(gym.make("CartPole-v1"))

        def reward(self, reward: Any) -> float:
            return -float(reward)

    env = make_env(Inverted, num_envs=2)
    assert env.name == "Inverted"
    assert env.rollout(1)["next", "reward"].tolist() == [[[-1.0]], [[-1.0]]]


def test_num_envs_makes_a_batched_env(log: list[str]) -> None:
    for env in ("CartPole-v1", Plain(log)):
        made = make_env(env)
        assert isinstance(made, EnvBase)
        assert made.batch_size == torch.Size([])
        assert make_env(env, num_envs=1).batch_size == torch.Size([1])
    assert make_env("CartPole-v1", num_envs=4).batch_size == torch.Size([4])
    for options in ({}, {"num_envs": 2}, {"backend": "gymnasium"}):
        assert make_env(vector(2), **options).batch_size == torch.Size([2])


def test_gymnasiums_checker_is_in_the_first_slot_alone_unless_asked_for() -> None:
    def checked(**kwargs: Any) -> list[bool]:
        env = make_env("CartPole-v1", num_envs=3, env_kwargs=kwargs)
        return ["PassiveEnvChecker" in str(slot) for slot in env.stepper.backend.envs]

    assert checked() == [True, False, False]
    assert checked(disable_env_checker=False) == [True] * 3
    assert checked(disable_env_checker=True) == [False] * 3


def test_numpy_integers_count_as_ints() -> None:
    env = make_env("CartPole-v1", np.int64(2), max_episode_steps=np.int64(3), seed=np.int64(4))
    assert env.rollout(10).shape == (2, 3)


def test_a_callable_is_called_once_a_slot_and_closing_closes_each(log: list[str]) -> None:
    env = make_env(lambda: Plain(log), num_envs=3)
    assert log == ["made"] * 3
    env.close()
    assert log == ["made"] * 3 + ["closed"] * 3


def test_env_kwargs_reach_the_env(log: list[str]) -> None:
    env = make_env(Plain, env_kwargs={"log": log, "size": 5})
    assert env.observation_spec["observation"].shape == (5,)
    env = make_env("FrozenLake-v1", env_kwargs={"map_name": "8x8"})
    assert env.observation_spec["observation"].shape == (64,)


# --- refused before an env is made -------------------------------------------------------------


NO_SECONDS = [0, -1.0, True, float("inf"), float("nan"), "2"]
NO_COUNT = [0, -1, True, 1.5, "2"]
TWO = {"backend": "process", "num_envs": 2}
COUNT = "expected {} to be an int from 1 to 2, .*, got"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seed": [1, 2, 3], "num_envs": 2}, "one seed for each of the 2 slots"),
    ({"seed": -1, "num_envs": 2}, "expected seeds that are not negative, got -1"),
    ({"seed": 1.0, "num_envs": 2}, "expected a seed that is an int"),
    ({"backend": "x"}, "backend to be .serial., .process., .gymnasium. or .envpool., got 'x'"),
    ({"backend": "gymnasium"}, r"expects a gymnasium.vector.VectorEnv \("),
    ({"backend": "envpool"}, "backend='envpool' expects an EnvPool id"),
    ({**TWO, "start_method": "thread"}, "start_method to be .spawn., .fork. or None, got 'thread'"),
    ({"num_workers": 2}, "backend='serial' takes no num_workers; use backend='process'"),
    ({"timeout": 1}, "backend='serial' takes no timeout; use backend='process'"),
    ({"start_method": "fork"}, "backend='serial' takes no start_method; use backend='process'"),
    ({**TWO, "wait_timeout": 0.5}, "expected wait_num with wait_timeout=0.5, got none"),
    ({"num_envs": 2, "wait_num": 1}, "backend='serial' takes no wait_num; use backend='process'"),
    ({"backend": "process", "wait_num": 1}, "expected num_envs with wait_num=1, got none"),
    *(
        ({**more, name: value}, told.format(name))
        for name, values, told, more in [
            ("num_envs", NO_COUNT, "expected {} to be a positive int or None", {}),
            ("max_episode_steps", NO_COUNT, "expected {} to be a positive int or None, got", {}),
            ("num_workers", [*NO_COUNT, 3], COUNT, TWO),
            ("wait_num", [*NO_COUNT, 3], COUNT, TWO),
            ("timeout", NO_SECONDS, "expected {} to be seconds above 0, or None, got", TWO),
            ("wait_timeout", NO_SECONDS, "expected {} to be seconds above", {**TWO, "wait_num": 1}),
            ("info_keys", ["length", 3, [1]], "expected {} to be a sequence of names", {}),
            ("env_kwargs", [3, [{}, {}], "x"], "expected {} to be a dict.*; pass one dict", {}),
        ]
        for value in values
    ),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=str)
def test_an_argument_is_refused(log: list[str], options: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        make_env(lambda: Plain(log), **options)
    assert not log


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(gym.error.NameNotFound, match="NoSuchEnv"):
        make_env("NoSuchEnv-v0", num_envs=2)
    with pytest.raises(gym.error.VersionNotFound, match="v99"):
        make_env("CartPole-v99")


def test_what_envpool_does_not_take_is_refused() -> None:
    pytest.importorskip("envpool", reason="the envpool extra is not installed")
    with pytest.raises(ValueError, match=r"expected an id of envpool.list_all_envs\(\), got"):
        make_env("NoSuchEnv-v0", 2, backend="envpool")
    with pytest.raises(ValueError, match="expected batch_size=4, the number of envs, got 2"):
        make_env("CartPole-v1", 4, backend="envpool", env_kwargs={"batch_size": 2})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[envpool\]' in a clone"):
        make_env("CartPole-v1", backend="envpool")


def test_an_env_steps_all_slots_however_many_a_collector_waits_for() -> None:
    wait = {"wait_num": np.int64(1)}
    env = make_env("CartPole-v1", 2, backend="process", start_method="fork", seed=0, **wait)
    expected = make_env("CartPole-v1", 2, seed=0)
    torch.manual_seed(0)
    found = env.rollout(9, break_when_any_done=False)
    torch.manual_seed(0)
    assert (found == expected.rollout(9, break_when_any_done=False)).all()
    env.close()


def vector(slots: int = 1) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Plain([])] * slots)


A_PROCESS_ENV = (
    r"backend='process' expects a gymnasium id or a callable that makes a gymnasium\.Env"
)
MISPLACED: list[tuple[Any, dict[str, Any], str]] = [
    (Plain([]), {"backend": "process"}, A_PROCESS_ENV),
    (vector(), {"backend": "process"}, A_PROCESS_ENV),
    (vector(), {"backend": "serial"}, "backend='serial' expects .*, got SyncVectorEnv"),
    (vector(), {"backend": "envpool"}, "backend='envpool' expects .*, got SyncVectorEnv"),
    (vector(2), {"num_envs": 3}, "expected num_envs=2, which the vector env has, got 3"),
    (Plain([]), {"num_envs": 2}, "a callable to make 2 slots from, got the single env"),
    (vector(), {"env_kwargs": {"size": 3}}, r"\['size'\] cannot change an env that is made"),
    (Plain([]), {"env_kwargs": {"size": 3}}, r"\['size'\] cannot change an env that is made"),
    (3, {}, "expects a gymnasium id, a callable that makes"),
    (None, {}, "expects a gymnasium id, a callable that makes"),
    (["CartPole-v1"], {}, "expects a gymnasium id, a callable that makes"),
    (GymEnv("CartPole-v1"), {}, r"expects .*, got GymEnv\(.*; collect from it directly"),
]


@pytest.mark.parametrize(("env", "options", "told"), MISPLACED, ids=str)
def test_an_env_is_refused(env: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        make_env(env, **options)


# --- refused once an env is made, and then closed ----------------------------------------------


def test_a_callable_must_return_a_new_env_each_time(log: list[str]) -> None:
    with pytest.raises(TypeError, match=r"a single gymnasium\.Env, got one that returned dict"):
        make_env(dict)
    with pytest.raises(TypeError, match="got one that returned SyncVectorEnv; call it and pass"):
        make_env(lambda: SyncVectorEnv([lambda: Plain(log)]), num_envs=2)
    assert log == ["made", "closed"]
    env = Plain(log)
    with pytest.raises(ValueError, match="a new env at each call, got that of slot 0 for slot 1"):
        make_env(lambda: env, num_envs=2)
    assert log == ["made", "closed"] * 2


@pytest.mark.parametrize("name", ["size", "actions"])
def test_spaces_must_agree_between_slots(log: list[str], name: str) -> None:
    sizes = iter([2, 2, 3])
    with pytest.raises(ValueError, match=r"the same \w+_space .* in slot 0 and .* in slot 2"):
        make_env(lambda: Plain(log, **{name: next(sizes)}), num_envs=3)
    assert log == ["made"] * 3 + ["closed"] * 3


REFUSED_LATE = {
    "a space without arrays": {"env_kwargs": {"action": spaces.Sequence(spaces.Discrete(3))}},
    "an unknown info": {"info_keys": ["length"]},
    "an info with a taken name": {"info_keys": {"reward": 0}},
    "an action with a taken name": {
        "env_kwargs": {"action": spaces.Dict(reward=spaces.Discrete(2))}
    },
}


@pytest.mark.parametrize("case", REFUSED_LATE)
def test_envs_made_are_closed_when_construction_fails(log: list[str], case: str) -> None:
    options: dict[str, Any] = {"env_kwargs": {}, **REFUSED_LATE[case]}
    options["env_kwargs"] = {**options["env_kwargs"], "log": log}
    with pytest.raises((TypeError, ValueError, KeyError, RuntimeError)):
        make_env(Plain, 2, **options)
    assert log == ["made", "made", "closed", "closed"]


def test_entries_with_taken_names_are_refused(log: list[str]) -> None:
    options = dict.fromkeys(("step_count", "is_init", "episode_reward"), True)

    def make(name: str) -> gym.Env:
        env = Plain(log)
        env.observation_space = spaces.Dict({name: env.observation_space})
        return env

    for name in ("action", "reward", "next", "", "device", "shape", "_goal", *options):
        with pytest.raises(ValueError, match=f"the entry '{name}' .* rename it in the env"):
            make_env(make, env_kwargs={"name": name}, **options)
    for name in ("reward", "done", "_reset", "observation"):
        action = spaces.Dict({name: spaces.Discrete(2)})
        with pytest.raises(ValueError, match=f"the entry '{name}' .* rename it in the env"):
            make_env(Plain, env_kwargs={"log": log, "action": action})


def test_a_name_of_both_spaces_is_told(log: list[str]) -> None:
    action = spaces.Dict(observation=spaces.Discrete(2))
    with pytest.raises(ValueError, match="both the observations and the actions have it"):
        make_env(Plain, env_kwargs={"log": log, "action": action})


class Quiet(Plain):
    """Gives something else than a dict for its infos."""

    info: Any = None

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], self.info


@pytest.mark.parametrize("backend", [{}, {"backend": "process", "start_method": "fork"}])
def test_an_info_that_is_none_is_empty_and_others_are_told(backend: Any, log: list[str]) -> None:
    env = make_env(partial(Quiet, log), 2, info_keys={"left": 0.0}, **backend)
    assert not env.rollout(3)["next", "left"].any()
    env.close()
    options: Any = {"max_episode_steps": 3, "progress": False}
    options |= {"backend": backend["backend"]} if backend else {}
    with pytest.warns(UserWarning, match="expected an info 'left' for the metric 'left' in"):
        result = evaluate(partial(Quiet, log), None, 2, metrics={"left": "info:left"}, **options)
    assert result.lengths.tolist() == [3, 3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quiet, "info", ["left"])
        env = make_env(partial(Quiet, log), 2, info_keys={"left": 0.0}, **backend)
        with pytest.raises(SlotError, match="TypeError: expected the info to be a dict, got list"):
            env.rollout(3)
        env.close()


class Unequal(spaces.Box):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def test_spaces_of_old_gym_and_spaces_that_never_equal_are_told(log: list[str]) -> None:
    def make(space: Any) -> gym.Env:
        env = Plain(log)
        env.observation_space = space
        return env

    with pytest.raises(ValueError, match="give Unequal an __eq__"):
        make_env(lambda: make(Unequal(-1, 1, (2,))), 2)
    old = type("Box", (gym.Space,), {"__module__": "gym.spaces.box"})
    with pytest.raises(TypeError, match=r"a Box of the package gym, .* make it with gymnasium"):
        make_env(lambda: make(old((2,), np.float32)))


def test_an_action_may_be_called_action(log: list[str]) -> None:
    action = spaces.Dict(action=spaces.Discrete(2), more=spaces.Discrete(3))
    env = make_env(Plain, 2, env_kwargs={"log": log, "action": action})
    assert env.rollout(3)["more"].shape == (2, 3, 3)


# --- refused at a step -------------------------------------------------------------------------


def test_an_action_of_another_shape_and_a_missing_one_are_refused() -> None:
    env = make_env("CartPole-v1", 2)
    td = env.reset()
    with pytest.raises(KeyError, match=r"the entry 'action' in the input of step\(\)"):
        env.step(td)
    for shape in ((2,), (2, 3), (2, 2, 1)):
        with pytest.raises(ValueError, match=r"expected 'action' of shape \[2, 2\], as"):
            env.step(td.set("action", torch.zeros(shape)))


def test_a_vector_env_is_closed_once_it_was_taken(log: list[str]) -> None:
    vector = SyncVectorEnv([lambda: Plain(log)], autoreset_mode=AutoresetMode.DISABLED)
    mode, vector.autoreset_mode = vector.metadata.pop("autoreset_mode"), None
    with pytest.raises(ValueError, match="does not say how it resets"):
        make_env(vector)
    assert log == ["made"]
    vector.autoreset_mode = mode
    with pytest.raises(KeyError):
        make_env(vector, info_keys=["length"])
    assert log == ["made", "closed"]


def test_each_frame_begins_where_a_tensor_of_torchs_own_would() -> None:
    """Products round by where their input begins."""
    env = make_env("MountainCar-v0", 3, step_count=True)
    for buffers in env.allocate(5):
        assert all(tensor.data_ptr() % 64 == 0 for tensor in buffers.tensors)
        assert all(tensor.is_contiguous() for tensor in buffers.tensors)
    env.close()


class Gym21:
    """An env of the package gym: its classes lie in gym's modules."""

    __module__ = "gym.core"
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)


class OldReset(Plain):
    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros(2, np.float32)


class OldStep(Plain):
    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, {}


@pytest.mark.parametrize("kind", [Gym21, OldReset, OldStep])
def test_an_env_of_the_old_api_is_told(kind: Any) -> None:
    make = kind if kind is Gym21 else partial(kind, [])
    with pytest.raises(
        (TypeError, RuntimeError), match=r"the API of gym before 0\.26: wrap the env"
    ):
        make_env(make, 2).rollout(2)
    (finding, *_) = diagnose(make).findings
    assert finding.status == "failed"
    assert "the API of gym before 0.26" in finding.advice


@pytest.mark.parametrize("use", [make_env, diagnose, check_env])
def test_an_id_of_a_package_that_is_not_imported_is_told(use: Any) -> None:
    for name, error in (
        ("Meta-World/MT1", gym.error.NamespaceNotFound),
        ("Fetchreach-v99", gym.error.NameNotFound),
    ):
        text = (
            rf"has it, import that, or name it in the id: 'package:{name}', such as gymnasium_rob"
        )
        with pytest.raises(error, match=text):
            use(name)


class NoSpaces(gym.Env[Any, Any]):
    pass


class OldReset(gym.Env[Any, Any]):
    """Its reset returns the observation alone, two numbers, as gym's did before 0.26."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32)


@pytest.mark.parametrize(
    "how", [{}, {"backend": "process"}, {"resumable": True}, {"info_keys": ["cost"]}]
)
def test_envs_without_spaces_or_infos_are_told(how: dict[str, Any]) -> None:
    text = r"observation_space to be of gymnasium.spaces, got none in .*NoSpaces ins.*; set self"
    with pytest.raises(TypeError, match=text):
        make_env(NoSpaces, 2, **how)
    text = r"reset\(\) to return an observation and a dict of infos, got ndarray"
    with pytest.raises((SlotError, TypeError), match=text) as caught:
        make_env(OldReset, 2, **how).reset()
    if isinstance(caught.value, SlotError):
        assert "this is the API of gym before 0.26: wrap the env" in str(caught.value)


def test_arguments_of_unknown_names_and_devices_that_are_not_here_are_refused_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, near in (("n_envs", "num_envs"), ("env_kwarg", "env_kwargs")):
        with pytest.raises(TypeError, match=rf"make_env\(\), got {name}; did you mean {near}\?"):
            make_env("CartPole-v1", **{name: 2})  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device, text in (("cuda", "and torch sees 0 GPUs; leave device out"), ("x", "got 'x'")):
        with pytest.raises(ValueError, match=f"expected .*device.*{text}"):
            make_env(NoSpaces, device=device)
