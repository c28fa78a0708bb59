"""The private names that tdcollect uses of TorchRL, gymnasium and EnvPool.

A failure tells what upstream has renamed, or given another meaning. The tests of TorchRL's
collector are in ``test_upstream_collector.py``, of its envs and transforms in
``test_upstream_envs.py``, of torch and tensordict in ``test_upstream_modules.py``.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase, GymEnv, GymWrapper, PendulumEnv, TransformedEnv
from torchrl.envs.transforms import Compose, DoubleToFloat, RewardScaling, RewardSum, StepCounter
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    LSTMModule,
    OrnsteinUhlenbeckProcessModule,
    SafeModule,
)

from tdcollect._upstream import __path__ as path
from tdcollect._upstream import gymnasium_envs as of_gymnasium
from tdcollect._upstream import torchrl as of_torchrl
from tdcollect.collect.step_dict import StepDict

MODULES = [import_module(f"tdcollect._upstream.{module.name}") for module in iter_modules(path)]

TESTS = sorted(Path(__file__).parent.glob("test_upstream*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_has_a_test(module: ModuleType) -> None:
    """Each name that is exported, and each that a class of these has, occurs in a test."""
    asked = set(module.__all__)
    for cls in (vars(module)[name] for name in module.__all__):
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            asked |= {name for name in vars(cls) if not name.startswith("_")}
    tested = set()
    for file in TESTS:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Attribute, ast.Name)):
                tested.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    assert asked <= tested, f"expected a test of each name, got none of {sorted(asked - tested)}"


@pytest.mark.parametrize(
    ("space", "categorical", "spec"),
    [
        (spaces.Discrete(3), False, OneHot(3, dtype=torch.int64)),
        (spaces.Discrete(3), True, Categorical(3, dtype=torch.int64)),
        (spaces.Box(0, 1, (2,)), False, Bounded(0, 1, (2,), dtype=torch.float32)),
        (spaces.Box(-np.inf, np.inf, (2,)), False, Unbounded((2,), dtype=torch.float32)),
        (spaces.Box(0, 1, ()), False, Bounded(0, 1, (1,), dtype=torch.float32)),
    ],
    ids=str,
)
def test_gym_space_to_spec_converts_leaves(space: Any, categorical: bool, spec: Any) -> None:
    converted = of_torchrl.gym_space_to_spec(space, categorical_action_encoding=categorical)
    assert converted == spec
    assert converted.dtype == spec.dtype


def test_gym_space_to_spec_knows_no_dtype_that_torch_lacks() -> None:
    with pytest.raises((KeyError, TypeError)):
        of_torchrl.gym_space_to_spec(spaces.Box(0, 1, (2,), np.uint16))


def test_flat_pool_gives_and_nests_what_step_gives() -> None:
    """The backend reads the list of arrays that EnvPool's ``step`` nests."""
    envpool = pytest.importorskip("envpool", reason="envpool is not installed")
    nested, pool = (envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=0) for _ in range(2))
    flat: of_gymnasium.FlatPool = of_gymnasium.flat_pool(pool)
    first, _ = nested.reset()
    flat.reset(pool.all_env_ids)
    assert (flat.nest(flat.receive(), True, True)[0] == first).all()
    observation, reward, terminated, truncated, info = nested.step(np.array([0, 1, 0]))
    pool.send(np.array([0, 1, 0]))
    received = flat.receive()
    state = dict(zip(flat.names, received, strict=True))
    assert (state["obs"] == observation).all()
    assert (state["reward"] == reward).all()
    assert (state["done"] & ~state["trunc"] == terminated).all()
    assert (state["trunc"] == truncated).all()
    assert (state["info:env_id"] == info["env_id"]).all()
    assert (flat.nest(received, True, True)[0] == observation).all()


def test_make_compatible_policy_takes_tensordicts_tensors_and_modules() -> None:
    class Plain(nn.Linear):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return super().forward(observation)

    env = GymEnv("Pendulum-v1")
    given = TensorDict({"observation": torch.ones(5, 3)}, [5])
    plain = Plain(3, 1)
    known = TensorDictModule(plain, in_keys=["observation"], out_keys=["action"])
    make = of_torchrl.make_compatible_policy
    assert make(known, env.observation_spec, env=env) is known
    for policy in (plain, lambda tensordict: tensordict.set("action", plain(given["observation"]))):
        made = make(policy, env.observation_spec, env=env)
        assert torch.equal(made(given.clone())["action"], plain(given["observation"]))


def test_append_policy_transforms_adds_what_a_recurrent_policy_reads_and_only_once() -> None:
    env = GymEnv("Pendulum-v1")
    lstm = LSTMModule(3, 4, in_key="observation", out_key="action")
    appended = of_torchrl.append_policy_transforms(env, lstm)
    added = [type(transform).__name__ for transform in appended.transform]
    assert sorted(added) == ["InitTracker", "TensorDictPrimer"]
    assert set(lstm.in_keys) <= set(appended.reset().keys())
    assert of_torchrl.append_policy_transforms(appended, lstm) is appended
    assert len(appended.transform) == 2


def test_steps_of_time_limit_is_where_the_wrapper_truncates() -> None:
    env = gym.wrappers.TimeLimit(gym.make("Pendulum-v1").unwrapped, 7)
    env.reset(seed=0)
    truncated = [env.step(env.action_space.sample())[3] for _ in range(7)]
    assert truncated.index(True) + 1 == of_gymnasium.steps_of_time_limit(env) == 7


# --- gymnasium


def test_wrapper_state_is_all_that_tells_two_wrapped_envs_apart() -> None:
    """Steps change these attributes of the wrappers of ``gymnasium.make``, and no others."""
    used, fresh = gym.make("CartPole-v1"), gym.make("CartPole-v1")
    used.reset(seed=0)
    used.step(0)
    kinds = set()
    while used is not used.unwrapped:
        kinds.add(type(used))
        changed = {
            name
            for name, value in vars(used).items()
            if isinstance(value, (bool, int, float, type(None))) and value != vars(fresh).get(name)
        }
        saved = set(of_gymnasium.WRAPPER_STATE[type(used)])
        # The checker notes that it has checked, which decides about nothing else.
        assert changed - saved <= {"checked_reset", "checked_step", "checked_render"}
        assert saved <= set(vars(used)), f"{type(used).__name__} has no {saved} any more"
        used, fresh = used.env, fresh.env  # type: ignore[attr-defined]
    assert kinds == set(of_gymnasium.WRAPPER_STATE)


def test_wrapper_state_of_a_time_limit_decides_when_it_truncates() -> None:
    env = gym.wrappers.TimeLimit(gym.make("Pendulum-v1").unwrapped, 7)
    env.reset(seed=0)
    (elapsed,) = of_gymnasium.WRAPPER_STATE[gym.wrappers.TimeLimit]
    setattr(env, elapsed, 6)
    assert env.step(env.action_space.sample())[3]


def test_wrapper_state_of_order_enforcing_lets_an_env_step() -> None:
    env = gym.wrappers.OrderEnforcing(gym.make("Pendulum-v1").unwrapped)
    env.unwrapped.reset(seed=0)
    (has_reset,) = of_gymnasium.WRAPPER_STATE[gym.wrappers.OrderEnforcing]
    with pytest.raises(gym.error.ResetNeeded):
        env.step(env.action_space.sample())
    setattr(env, has_reset, True)
    env.step(env.action_space.sample())


# --- TorchRL


def test_stepping_methods_are_those_of_an_env() -> None:
    missing = [name for name in of_torchrl.STEPPING_METHODS if not hasattr(EnvBase, name)]
    assert not missing, f"EnvBase has no {missing} any more"


def test_carried_entries_are_those_that_step_mdp_carries() -> None:
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(StepCounter(), RewardSum()))
    step = env.rand_step(env.reset())
    carried = set(env.step_mdp(step).keys(True, True))
    flags = {"done", "terminated", "truncated"}
    assert set(of_torchrl.carried_entries(env)) == carried - flags - {"action"}


def test_wrapped_env_is_the_env_that_a_wrapper_was_given() -> None:
    inner = gym.make("Pendulum-v1")
    env = GymWrapper(inner)
    assert of_torchrl.wrapped_env(env).unwrapped is inner.unwrapped
    assert of_torchrl.wrapped_env(inner) is inner


def test_call_of_and_inverse_call_of_are_what_an_env_applies() -> None:
    scaled = RewardScaling(loc=1.0, scale=3.0)
    given = TensorDict({"reward": torch.tensor([2.0])})
    of_torchrl.call_of(scaled)(given)
    assert given["reward"].item() == 7.0
    env = TransformedEnv(GymEnv("Pendulum-v1"), scaled)
    plain = GymEnv("Pendulum-v1")
    for one in (env, plain):
        one.set_seed(0)
    action = torch.tensor([0.5])
    (shown, raw) = (
        one.step(one.reset().set("action", action))["next", "reward"] for one in (env, plain)
    )
    assert torch.allclose(shown, raw * 3 + 1)
    to_double = DoubleToFloat(in_keys_inv=["action"])
    given = TensorDict({"action": torch.zeros(1, dtype=torch.float32)})
    of_torchrl.inverse_call_of(to_double)(given)
    assert given["action"].dtype == torch.float64


def test_calls_of_transforms_run_on_dicts_of_tensors() -> None:
    """The rows of tdcollect are dicts with a little more; transforms take them for TensorDicts."""
    rows = StepDict({"reward": torch.tensor([2.0])})
    of_torchrl.call_of(RewardScaling(loc=1.0, scale=3.0))(rows)
    assert rows["reward"].item() == 7.0


def test_reshapes_output_is_where_out_features_is_a_shape() -> None:
    assert not of_torchrl.reshapes_output(MLP(in_features=2, out_features=6, depth=0))
    shaped = MLP(in_features=2, out_features=(2, 3), depth=0)
    assert of_torchrl.reshapes_output(shaped)
    assert shaped(torch.ones(2)).shape == (2, 3)


def test_exploration_spec_is_what_a_safe_module_projects_on() -> None:
    for module in (
        SafeModule(
            torch.nn.Identity(), ["action"], ["action"], spec=Bounded(-1, 1, (2,)), safe=True
        ),
        OrnsteinUhlenbeckProcessModule(Bounded(-1, 1, (2,))),
    ):
        assert of_torchrl.exploration_spec(module)["action"] == Bounded(-1, 1, (2,))
        of_torchrl.set_exploration_spec(module, Composite(action=Bounded(-3, 3, (2,))))
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            assert module(TensorDict(action=torch.tensor([5.0, 2.0])))["action"].tolist() == [3, 2]


@pytest.mark.parametrize("cls", [AdditiveGaussianModule, EGreedyModule])
def test_exploration_spec_is_what_a_module_draws_from(cls: Any) -> None:
    narrow, wide = Bounded(-1, 1, (2,)), Bounded(-1, 1, (5, 2))
    module = cls(narrow)
    module.eps.fill_(1.0) if hasattr(module, "eps") else module.sigma.fill_(1.0)
    assert of_torchrl.exploration_spec(module)["action"] == narrow
    of_torchrl.set_exploration_spec(module, Composite(action=wide, shape=[5]))
    with set_exploration_type(ExplorationType.RANDOM):
        given = TensorDict({"action": torch.zeros(5, 2)}, [5])
        assert module(given)["action"].shape == (5, 2)
    assert of_torchrl.exploration_spec(module)["action"] == wide


def test_envs_whose_reset_takes_the_seed() -> None:
    class Own(GymWrapper):
        def _set_seed(self, seed: int | None) -> None:
            super()._set_seed(seed)

    assert of_torchrl.resets_with_seed(GymEnv("CartPole-v1"))
    assert not of_torchrl.resets_with_seed(Own(gym.make("CartPole-v1")))
    assert not of_torchrl.resets_with_seed(PendulumEnv())
    env = GymEnv("CartPole-v1")
    first = env.reset(seed=3)["observation"]
    env.set_seed(3)
    assert not torch.equal(env.reset()["observation"], first)
    assert torch.equal(env.reset(seed=3)["observation"], first)
