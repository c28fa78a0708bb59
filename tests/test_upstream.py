"""The private names of other packages that tdcollect uses: a failure shows what changed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.data import Bounded, Categorical, OneHot, Unbounded
from torchrl.envs import GymEnv
from torchrl.modules import LSTMModule

from tdcollect import _upstream


def test_every_name_has_a_test() -> None:
    tested = {
        "CollectorMeta",
        "append_policy_transforms",
        "encode_key_for_filesystem",
        "gym_space_to_spec",
        "make_compatible_policy",
        "rollout_with_gradients",
        "service_backend",
        "steps_of_time_limit",
        "validates_arguments",
    }
    assert set(_upstream.__all__) == tested


def test_collector_meta_is_the_class_of_torchrls_collector() -> None:
    assert type(TorchRLCollector) is _upstream.CollectorMeta


def test_collector_meta_takes_the_arguments_that_ours_dispatches_on() -> None:
    parameters = inspect.signature(_upstream.CollectorMeta.__call__).parameters
    assert set(parameters) >= {"backend", "backend_options", "num_collectors", "sync"}
    assert all(parameters[name].default is None for name in ("backend", "num_collectors", "sync"))


def test_the_collector_normalizes_functions_that_make_envs() -> None:
    args, kwargs = TorchRLCollector._normalize_direct_env_fn((), {"create_env_fn": [print]})
    assert args == ()
    assert kwargs["create_env_fn"] is print


@pytest.mark.parametrize(
    ("key", "name"), [("a", "a"), ("a/b", "a%2Fb"), ("..", "%2E%2E"), ("", "%"), ("a%", "a%25")]
)
def test_encode_key_for_filesystem_gives_the_names_of_memory_maps(
    tmp_path: Path, key: str, name: str
) -> None:
    assert _upstream.encode_key_for_filesystem(key) == name
    TensorDict({key: torch.zeros(1)}).memmap(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"meta.json", f"{name}.memmap"}


def test_service_backend_is_none_outside_a_context() -> None:
    assert not inspect.signature(_upstream.service_backend).parameters
    assert _upstream.service_backend() is None


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
    converted = _upstream.gym_space_to_spec(space, categorical_action_encoding=categorical)
    assert converted == spec
    assert converted.dtype == spec.dtype


def test_gym_space_to_spec_knows_no_dtype_that_torch_lacks() -> None:
    with pytest.raises((KeyError, TypeError)):
        _upstream.gym_space_to_spec(spaces.Box(0, 1, (2,), np.uint16))


def test_rollout_with_gradients_keeps_the_graph_that_rollout_drops() -> None:
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    collector = TorchRLCollector(GymEnv("CartPole-v1"), net, frames_per_batch=3, use_buffers=False)
    assert not collector.rollout()["action"].requires_grad
    assert _upstream.rollout_with_gradients(collector)["action"].requires_grad


def test_validates_arguments_follows_torchs_default() -> None:
    before = _upstream.validates_arguments()
    try:
        for default in (True, False):
            torch.distributions.Distribution.set_default_validate_args(default)
            assert _upstream.validates_arguments() is default
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


def test_envpools_flat_state_is_what_its_step_gives() -> None:
    """The backend reads the list that EnvPool's step() nests: ``_recv`` in order of its keys."""
    envpool = pytest.importorskip("envpool", reason="envpool is not installed")
    nested, flat = (envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=0) for _ in range(2))
    nested.reset()
    flat._reset(flat.all_env_ids)
    flat._recv()
    observation, reward, terminated, truncated, info = nested.step(np.array([0, 1, 0]))
    flat.send(np.array([0, 1, 0]))
    received = flat._recv()
    state = dict(zip(flat._state_keys, received, strict=True))
    assert (state["obs"] == observation).all()
    assert (state["reward"] == reward).all()
    assert (state["done"] & ~state["trunc"] == terminated).all()
    assert (state["trunc"] == truncated).all()
    assert (state["info:env_id"] == info["env_id"]).all()
    assert (flat._to(received, True, True)[0] == observation).all()


def test_make_compatible_policy_takes_tensordicts_tensors_and_modules() -> None:
    class Plain(nn.Linear):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return super().forward(observation)

    env = GymEnv("Pendulum-v1")
    given = TensorDict({"observation": torch.ones(5, 3)}, [5])
    plain = Plain(3, 1)
    known = TensorDictModule(plain, in_keys=["observation"], out_keys=["action"])
    make = _upstream.make_compatible_policy
    assert make(known, env.observation_spec, env=env) is known
    for policy in (plain, lambda tensordict: tensordict.set("action", plain(given["observation"]))):
        made = make(policy, env.observation_spec, env=env)
        assert torch.equal(made(given.clone())["action"], plain(given["observation"]))


def test_append_policy_transforms_adds_what_a_recurrent_policy_reads_and_only_once() -> None:
    env = GymEnv("Pendulum-v1")
    lstm = LSTMModule(3, 4, in_key="observation", out_key="action")
    appended = _upstream.append_policy_transforms(env, lstm)
    added = [type(transform).__name__ for transform in appended.transform]
    assert sorted(added) == ["InitTracker", "TensorDictPrimer"]
    assert set(lstm.in_keys) <= set(appended.reset().keys())
    assert _upstream.append_policy_transforms(appended, lstm) is appended
    assert len(appended.transform) == 2


def test_steps_of_time_limit_is_where_the_wrapper_truncates() -> None:
    env = gym.wrappers.TimeLimit(gym.make("Pendulum-v1").unwrapped, 7)
    env.reset(seed=0)
    truncated = [env.step(env.action_space.sample())[3] for _ in range(7)]
    assert truncated.index(True) + 1 == _upstream.steps_of_time_limit(env) == 7
