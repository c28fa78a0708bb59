"""Bad input to the collector is refused with a message that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tdcollect import Collector

from . import policies
from .envs import ENVS
from .oracle import UPSTREAM

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]


@pytest.mark.parametrize("frames", [0, -1, -64, [0]])
def test_frames_per_batch_that_is_not_positive(frames: Any) -> None:
    with pytest.raises(ValueError, match=r"expected frames_per_batch to be positive, got .*[01-9]"):
        Collector(ENVS["cartpole"](), frames_per_batch=frames)


def test_frames_per_batch_left_out() -> None:
    with pytest.raises(TypeError, match="frames_per_batch"):
        Collector(ENVS["cartpole"]())


def value_only(env: Any) -> TensorDictModule:
    return policies.network(env, 1, ["state_value"])


def misnamed_action(env: Any) -> TensorDictSequential:
    return TensorDictSequential(policies.network(env, 2, ["move"]), value_only(env))


ACTIONLESS: dict[str, Callable[[Any], TensorDictModuleBase]] = {
    "value-only": value_only,
    "misnamed": misnamed_action,
    "deselected": lambda env: policies.actor(env).select_out_keys("logits"),
}


@pytest.mark.parametrize("policy", ACTIONLESS)
@pytest.mark.parametrize("env", ["cartpole", "cartpole-unbatched", "torchrl-gym"])
@pytest.mark.parametrize("buffers", [None, False])
def test_policy_whose_output_misses_the_action(env: str, policy: str, buffers: Any) -> None:
    made = ENVS[env]()
    actionless = ACTIONLESS[policy](made)
    with pytest.raises(ValueError, match=r"(?s)action.*out_keys|out_keys.*action") as error:
        Collector(made, actionless, frames_per_batch=30, use_buffers=buffers)
    shown = [key for key in actionless.out_keys if not key.startswith("_")]
    assert all(key in str(error.value) for key in shown)


def test_policy_that_misses_one_of_several_actions() -> None:
    env = ENVS["toy-dict-action"]()
    present, missing = env.action_keys
    net = policies.network(env, env.full_action_spec[present].shape[-1], [present])
    with pytest.raises((KeyError, ValueError), match=str(missing[-1])):
        list(Collector(env, net, frames_per_batch=30, total_frames=30))


def test_function_that_forgets_the_action() -> None:
    """A function has no out_keys: that the action is missing is known at the first step."""
    env = ENVS["cartpole"]()
    collector = Collector(env, lambda td: td.set("move", td["done"]), frames_per_batch=30)
    with pytest.raises((KeyError, ValueError), match=r"expected the entry .*action.*out_keys"):
        next(iter(collector))


def test_action_of_another_shape() -> None:
    env = ENVS["cartpole"]()
    policy = policies.network(env, 3, ["action"])
    collector = Collector(env, policy, frames_per_batch=30)
    with pytest.raises(ValueError, match=r"expected 'action' of shape \[3, 2\].*got\s+\[3, 3\]"):
        next(iter(collector))


@pytest.mark.parametrize("env", ["toy", "toy-unbatched"])
def test_an_error_of_the_policy_reaches_its_user(env: str) -> None:
    class Fails(nn.Module):
        calls = 0

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 15:
                raise ZeroDivisionError("the policy's own error")
            return policies.one_hot(observation.sum(-1).gt(0).long())

    made = ENVS[env]()
    collector = Collector(made, Fails(), frames_per_batch=10 * made.batch_size.numel())
    with pytest.raises(ZeroDivisionError, match="the policy's own error"):
        list(collector)
    assert collector.closed


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match=r"Keys \['frames'\] are unknown to Collector"):
        Collector(ENVS["cartpole"](), frames_per_batch=30, frames=3)


def test_policy_and_policy_factory() -> None:
    env = ENVS["cartpole"]()
    with pytest.raises(TypeError, match="policy_factory cannot be used with policy"):
        Collector(env, policies.ones(env), policy_factory=lambda: None, frames_per_batch=30)


def test_closed_env_at_construction() -> None:
    env = ENVS["cartpole"]()
    env.close()
    with pytest.raises(RuntimeError, match="the env is closed; make a new one"):
        Collector(env, frames_per_batch=30)


def test_env_closed_while_collecting() -> None:
    env = ENVS["cartpole"]()
    stream = iter(Collector(env, frames_per_batch=30))
    next(stream)
    env.close()
    with pytest.raises(RuntimeError, match="the env is closed; make a new one"):
        next(stream)


@pytest.mark.parametrize("policy", [policies.random_policy, policies.actor, policies.ones])
def test_collector_that_was_shut_down(policy: Any) -> None:
    env = ENVS["cartpole"]()
    collector = Collector(env, policy(env), frames_per_batch=30)
    collector.shutdown()
    with pytest.raises((AttributeError, RuntimeError)):
        next(iter(collector))


def test_start_without_a_replay_buffer() -> None:
    with pytest.raises(RuntimeError, match="Replay buffer must be defined"):
        Collector(ENVS["cartpole"](), frames_per_batch=30).start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"split_trajs": True, "track_traj_ids": False},
            "split_trajs=True requires track_traj_ids",
        ),
        ({"traj_format": "cat"}, "trajs_per_batch"),
        ({"traj_format": "list", "trajs_per_batch": 2}, "traj_format"),
        ({"reset_when_done": False}, "reset_when_done is deprecated"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Collector(ENVS["cartpole"](), frames_per_batch=30, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"return_same_td": True},
        {"use_buffers": True},
        {"split_trajs": True, "extend_buffer": False},
    ],
)
def test_options_that_a_replay_buffer_excludes(options: dict[str, Any]) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with pytest.raises(TypeError):
        Collector(ENVS["cartpole"](), frames_per_batch=30, replay_buffer=buffer, **options)


def test_max_frames_on_an_env_that_counts_its_steps_already() -> None:
    with pytest.raises(ValueError, match="step_count"):
        Collector(ENVS["cartpole-books"](), frames_per_batch=30, max_frames_per_traj=5)


def test_set_truncated_on_an_env_without_the_flag() -> None:
    with pytest.raises(RuntimeError, match="set_truncated"):
        Collector(ENVS["mock-counting"](), frames_per_batch=30, set_truncated=True)


def test_reset_of_a_slot_that_does_not_exist() -> None:
    collector = Collector(ENVS["cartpole"](), frames_per_batch=30)
    with pytest.raises(IndexError):
        collector.reset(3)


@pytest.mark.parametrize("seed", [-1, "zero"])
def test_seed_that_is_no_seed(seed: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Collector(ENVS["cartpole"](), frames_per_batch=30).set_seed(seed)
