"""Bad input to the collector is refused with a message that says what to do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tdcollect import Collector

from . import policies
from .envs import ENVS
from .oracle import UPSTREAM

pytestmark = pytest.mark.filterwarnings(UPSTREAM)
both_loops = pytest.mark.usefixtures("arrays")


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


@pytest.mark.parametrize(
    ("env", "policy", "buffers"),
    [
        ("cartpole", "value-only", None),
        ("cartpole-unbatched", "misnamed", False),
        ("torchrl-gym", "deselected", None),
        ("cartpole", "deselected", False),
    ],
)
def test_policy_whose_output_misses_the_action(env: str, policy: str, buffers: Any) -> None:
    made = ENVS[env]()
    actionless = ACTIONLESS[policy](made)
    with pytest.raises(ValueError, match=r"(?s)action.*out_keys|out_keys.*action") as error:
        Collector(made, actionless, frames_per_batch=30, use_buffers=buffers)
    shown = [key for key in actionless.out_keys if not key.startswith("_")]
    assert all(key in str(error.value) for key in shown)


@both_loops
def test_policy_that_misses_one_of_several_actions() -> None:
    env = ENVS["toy-dict-action"]()
    present, missing = env.action_keys
    net = policies.network(env, env.full_action_spec[present].shape[-1], [present])
    with pytest.raises((KeyError, ValueError), match=str(missing[-1])):
        list(Collector(env, net, frames_per_batch=30, total_frames=30))


@both_loops
def test_function_that_forgets_the_action() -> None:
    """A function has no out_keys: that the action is missing is known at the first step."""
    env = ENVS["cartpole"]()
    collector = Collector(env, lambda td: td.set("move", td["done"]), frames_per_batch=30)
    with pytest.raises((KeyError, ValueError), match=r"expected the entry .*action.*out_keys"):
        next(iter(collector))


@both_loops
def test_action_of_another_shape() -> None:
    env = ENVS["cartpole"]()
    policy = policies.network(env, 3, ["action"])
    collector = Collector(env, policy, frames_per_batch=30)
    with pytest.raises(ValueError, match=r"expected 'action' of shape \[3, 2\].*got\s+\[3, 3\]"):
        next(iter(collector))


@both_loops
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


@both_loops
def test_env_closed_while_collecting() -> None:
    env = ENVS["cartpole"]()
    stream = iter(Collector(env, frames_per_batch=30))
    next(stream)
    env.close()
    with pytest.raises(RuntimeError, match="the env is closed; make a new one"):
        next(stream)


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


# ----------------------------------------------------------------------------------------- the env


def sync_vector() -> Any:
    return gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)


NO_ENVS: dict[str, tuple[Callable[[], Any], str]] = {
    "id": (lambda: "CartPole-v1", r"got 'CartPole-v1'; pass tdcollect.make_env\('CartPole-v1'\)"),
    "gymnasium": (lambda: gym.make("CartPole-v1"), r"got a TimeLimit; .*tdcollect.make_env\(env\)"),
    "vector": (sync_vector, r"got a SyncVectorEnv; pass tdcollect.make_env\(env\)"),
    "none": (lambda: None, r"got None; pass tdcollect.make_env"),
    "number": (lambda: 3, r"got 3; pass tdcollect.make_env"),
    "policy": (lambda: nn.Linear(4, 2), r"got a Linear; pass the env first, then the policy"),
}


@pytest.mark.parametrize("name", NO_ENVS)
def test_what_is_no_env(name: str) -> None:
    make, message = NO_ENVS[name]
    with pytest.raises(TypeError, match=f"expected an env of TorchRL.*{message}"):
        Collector(make(), frames_per_batch=30)


@pytest.mark.parametrize("made", [None, "gymnasium"])
def test_function_that_makes_no_env(made: Any) -> None:
    def make() -> Any:
        return gym.make("CartPole-v1") if made else None

    with pytest.raises(TypeError, match=r"returned (a TimeLimit|None); have it .*make_env"):
        Collector(make, frames_per_batch=30)


def test_several_envs() -> None:
    envs = [ENVS["cartpole"](), ENVS["cartpole"]()]
    with pytest.raises(ValueError, match=r"expected one env.* got 2; pass one env of several"):
        Collector(envs, frames_per_batch=30)


# -------------------------------------------------------------------------------------- the counts

COUNTS: list[tuple[dict[str, Any], str]] = [
    ({"frames_per_batch": 0}, r"frames_per_batch to be a positive int, got 0"),
    ({"frames_per_batch": [0]}, r"frames_per_batch to be a positive int, got 0"),
    ({"frames_per_batch": 1e3}, r"frames_per_batch to be a positive int, got 1000.0"),
    ({"frames_per_batch": None}, r"frames_per_batch to be a positive int, got None"),
    (
        {"frames_per_batch": [10]},
        r"frames_per_batch to be an int, got \[10\]; several are for .*backend='process'",
    ),
    ({"trajs_per_batch": 1.5}, r"trajs_per_batch to be a positive int or None, got 1.5"),
    ({"stats_window": 0}, r"stats_window to be a positive int, got 0"),
    ({"postproc": 3}, r"postproc to be a function, got 3"),
    ({"pre_collect_hook": 3}, r"pre_collect_hook to be a function, got 3"),
    ({"post_collect_hook": "x"}, r"post_collect_hook to be a function, got 'x'"),
    ({"policy_factory": "x"}, r"policy_factory to be a function, got 'x'"),
    ({"policy_factory": nn.Linear(4, 2)}, r"policy_factory .* got a Linear; pass it as the policy"),
]


@pytest.mark.parametrize(("options", "message"), COUNTS)
def test_arguments_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"expected {message}"):
        Collector(ENVS["cartpole"](), **{"frames_per_batch": 30, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"frames_per_batch": np.int64(30)},
        {"frames_per_batch": torch.tensor(30)},
        {"total_frames": 1e6},
        {"total_frames": None},
        {"total_frames": -1},
        {"init_random_frames": 5.0},
        {"interruptor": None},
    ],
)
def test_what_the_parent_takes(options: dict[str, Any]) -> None:
    collector = Collector(ENVS["cartpole"](), **{"frames_per_batch": 30, **options})
    assert next(iter(collector)).shape == (3, 10)


def test_postproc_that_returns_nothing() -> None:
    collector = Collector(ENVS["cartpole"](), frames_per_batch=30, postproc=lambda batch: None)
    with pytest.raises(TypeError, match="expected postproc to return a TensorDict, got None"):
        next(iter(collector))


# -------------------------------------------------------------------------------------- the policy

NO_POLICIES: dict[str, tuple[Any, str]] = {
    "linear": (nn.Linear(3, 1), r"named like .*\['observation'\], got a Linear, which takes \(inp"),
    "sequential": (nn.Sequential(nn.Linear(3, 1)), r"got a Sequential.*TensorDictModule\(policy"),
    "two arguments": (lambda a, b: None, r"got a function, which takes \(a, b\)"),
    "text": ("random", r"can be called with a TensorDict, got 'random'"),
    "model of SB3": (types.SimpleNamespace(predict=None), r"got a Simple.*sb3.load_policy"),
    "class": (nn.Linear, r"got the class Linear; pass an instance"),
    "module class": (TensorDictModule, r"got the class TensorDictModule; pass an instance"),
    "int": (lambda td: 1, r"to return the TensorDict that it was given.* got 1; write td"),
    "none": (lambda td: None, r"to return the TensorDict that it was given.* got None"),
    "tensor": (lambda td: torch.ones(2, 1), r"to return the TensorDict .* got a Tensor"),
    "dict": (lambda td: {"action": torch.ones(2, 1)}, r"to return the TensorDict .* got a dict"),
    "number": (lambda observation: 1, r"the action as a tensor, 'action' \[2, 1\], got 1"),
}


@pytest.mark.parametrize("name", NO_POLICIES)
def test_what_is_no_policy(name: str) -> None:
    policy, message = NO_POLICIES[name]
    with pytest.raises(TypeError, match=f"expected .*{message}"):
        Collector(ENVS["pendulum"](), policy, frames_per_batch=10)


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError])
def test_an_error_of_the_policy_when_it_is_wrapped_is_its_own(error: type[Exception]) -> None:
    """TorchRL calls a function once to wrap it; its arguments are not what is wrong."""

    def policy(observation: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        raise error("the policy's own")

    with pytest.raises(error, match=r"^the policy's own$"):
        Collector(ENVS["pendulum"](), policy, frames_per_batch=10)


def test_a_policy_that_writes_nothing() -> None:
    with pytest.raises(KeyError, match=r"expected the policy to write an action.*'action'"):
        Collector(ENVS["pendulum"](), lambda td: td, frames_per_batch=10)


@both_loops
def test_a_list_in_place_of_an_action() -> None:
    collector = Collector(
        ENVS["pendulum"](), lambda observation: [1.0], frames_per_batch=10, use_buffers=False
    )
    with pytest.raises(ValueError, match=r"entry 'action' to have the batch size \[2\].*a list"):
        next(iter(collector))


@pytest.mark.parametrize(
    "policy", [lambda td: 1, TensorDictModule(nn.Linear(3, 1), ["observation"], ["move"])]
)
def test_a_policy_that_is_refused_closes_what_was_made(policy: Any) -> None:
    made = []

    def make() -> Any:
        made.append(ENVS["pendulum"]())
        return made[0]

    with pytest.raises((TypeError, ValueError), match=r"to return the TensorDict|out_keys"):
        Collector(make, policy, frames_per_batch=10)
    assert made[0].is_closed


@both_loops
@pytest.mark.parametrize(
    ("env", "buffers", "key"),
    [
        ("pendulum", None, "obs"),
        ("pendulum", False, ("agents", "observation")),
        ("torchrl-gym-pendulum", False, "obs"),
    ],
)
def test_in_keys_that_are_no_entries(env: str, buffers: Any, key: Any) -> None:
    """Without buffers TorchRL does not call the policy before the first step."""
    policy = TensorDictModule(nn.Linear(3, 1), [key], ["action"])
    message = r"expected in_keys .*'observation'.*, got \[.*obs.*\]; name the policy's in_keys"
    with pytest.raises(KeyError, match=message):
        next(iter(Collector(ENVS[env](), policy, frames_per_batch=10, use_buffers=buffers)))


@both_loops
def test_policy_that_returns_no_tensordict_later_on() -> None:
    calls = []

    def policy(td: Any) -> Any:
        calls.append(td)
        return td.set("action", torch.zeros(2, 1)) if len(calls) < 4 else 1

    collector = Collector(ENVS["pendulum"](), policy, frames_per_batch=10)
    with pytest.raises((AttributeError, TypeError), match=r"TensorDict|'int' object"):
        next(iter(collector))


# ------------------------------------------------------------------------------------- the methods


def pendulum_collector() -> Collector:
    env = ENVS["pendulum"]()
    return Collector(env, policies.network(env, 1, ["action"]), frames_per_batch=10)


@pytest.mark.parametrize("weights", [3, {"a": 1}, nn.Linear(3, 1), nn.Linear])
def test_weights_that_are_none(weights: Any) -> None:
    with pytest.raises(
        TypeError, match=r"expected .*TensorDict.* got .*; pass TensorDict.from_mod"
    ):
        pendulum_collector().update_policy_weights_(weights)


@pytest.mark.parametrize("state", [None, 3, "file.pt", [1]])
def test_state_that_is_no_dict(state: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a state dict.* got .*torch.load"):
        pendulum_collector().load_state_dict(state)


@pytest.mark.parametrize("entry", ["statistics", "random", "envs"])
def test_state_with_an_entry_that_is_no_dict(entry: str) -> None:
    collector = pendulum_collector()
    with pytest.raises(TypeError, match=f"expected the entry '{entry}' .* got int"):
        collector.load_state_dict({**collector.state_dict(), entry: 3})


@pytest.mark.parametrize("components", [3, "policy", ["weights"]])
def test_components_that_are_none(components: Any) -> None:
    with pytest.raises(ValueError, match=r"expected components to be some of policy, .* got"):
        pendulum_collector().state_dict(components=components)


@pytest.mark.parametrize(("count", "options"), [({"frames": 10}, 3), ({"episodes": 1}, "x")])
def test_options_that_are_no_dict(count: dict[str, int], options: Any) -> None:
    with pytest.raises(TypeError, match=r"expected options to be a dict.* got .*; leave it out"):
        pendulum_collector().collect(**count, options=options)
