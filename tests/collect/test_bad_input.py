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

from tdcollect import Collector, LogStatistics, evaluate
from tdcollect.policies import from_function

from . import policies
from .envs import ENVS
from .oracle import UPSTREAM

pytestmark = pytest.mark.filterwarnings(UPSTREAM)
both_loops = pytest.mark.usefixtures("arrays")


def made(env: str = "cartpole", *policy: Any, **options: Any) -> Collector:
    return Collector(ENVS[env](), *policy, **{"frames_per_batch": 30, **options})


def first(collector: Collector) -> Any:
    return next(iter(collector))


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
        first(Collector(env, net, frames_per_batch=30))


def test_outputs_of_the_first_step() -> None:
    """A function has no out_keys: that the action is missing is known at the first step."""
    forgets = made("cartpole", lambda td: td.set("move", td["done"]))
    with pytest.raises((KeyError, ValueError), match=r"expected the entry .*action.*out_keys"):
        first(forgets)
    env = ENVS["cartpole"]()
    collector = Collector(env, policies.network(env, 3, ["action"]), frames_per_batch=30)
    with pytest.raises(ValueError, match=r"expected 'action' of shape \[3, 2\].*got\s+\[3, 3\]"):
        first(collector)
    collector = made("pendulum", lambda observation: [1.0], use_buffers=False)
    with pytest.raises(ValueError, match=r"entry 'action' to have the batch size \[2\].*a list"):
        first(collector)


@both_loops
def test_closed_envs() -> None:
    env = ENVS["cartpole"]()
    stream = iter(Collector(env, frames_per_batch=30))
    next(stream)
    env.close()
    with pytest.raises(RuntimeError, match="the env is closed; make a new one"):
        next(stream)
    with pytest.raises(RuntimeError, match="the env is closed; make a new one"):
        Collector(env, frames_per_batch=30)


BUFFER = ReplayBuffer(storage=LazyTensorStorage(100))
POSITIVE = "frames_per_batch to be a positive int, got"
REFUSED: list[tuple[type[Exception], Callable[[], Any], str]] = [
    (TypeError, lambda: Collector(ENVS["cartpole"]()), "frames_per_batch"),
    (
        TypeError,
        lambda: made("toy", nn.Identity(), policy_factory=lambda: None),
        "policy_factory cannot be used with policy",
    ),
    (RuntimeError, lambda: made().start(), "Replay buffer must be defined"),
    (
        ValueError,
        lambda: made(split_trajs=True, track_traj_ids=False),
        "split_trajs=True requires track_traj_ids",
    ),
    (ValueError, lambda: made(traj_format="cat"), "trajs_per_batch"),
    (ValueError, lambda: made(traj_format="list", trajs_per_batch=2), "traj_format"),
    (ValueError, lambda: made(reset_when_done=False), "reset_when_done is deprecated"),
    (TypeError, lambda: made(replay_buffer=BUFFER, return_same_td=True), "return_same_td must be"),
    (TypeError, lambda: made(replay_buffer=BUFFER, use_buffers=True), "exclusive with use_buf"),
    (
        TypeError,
        lambda: made(replay_buffer=BUFFER, split_trajs=True, extend_buffer=False),
        "split_trajs must be",
    ),
    (ValueError, lambda: made("cartpole-books", max_frames_per_traj=5), "step_count"),
    (RuntimeError, lambda: made("mock-counting", set_truncated=True), "set_truncated"),
    (IndexError, lambda: made().reset(3), "out of bounds"),
    (ValueError, lambda: made(frames_per_batch=0), f"{POSITIVE} 0"),
    (ValueError, lambda: made(frames_per_batch=None), f"{POSITIVE} None"),
    (
        TypeError,
        lambda: made(frames_per_batch=[10]),
        r"frames_per_batch to be an int, got \[10\]; several are for .*backend='process'",
    ),
    (TypeError, lambda: made(frame_per_batch=3), r"got frame_per_batch; did you mean frames_per"),
    (ValueError, lambda: made(total_frames=0), "total_frames to be positive, or -1 for no end"),
    (ValueError, lambda: made(storing_device="cuda:99"), "got storing_device='cuda:99', and torch"),
    (ValueError, lambda: made(device="gpu"), "expected device to be one of torch, .*got 'gpu'"),
    (TypeError, lambda: LogStatistics(object()), r"log_scalar\(name, value, step\), got object"),
    (ValueError, lambda: made(trajs_per_batch=1.5), "trajs_per_batch to be a positive int or None"),
    (TypeError, lambda: made(postproc=3), "postproc to be a function, got 3"),
    (TypeError, lambda: made(policy_factory="x"), "policy_factory to be a function, got 'x'"),
    (TypeError, lambda: made(post_collect_hook="x"), "post_collect_hook to be a function, got 'x'"),
    (
        TypeError,
        lambda: made(policy_factory=nn.Linear(4, 2)),
        "policy_factory .* got a Linear; pass it as the policy",
    ),
    (
        TypeError,
        lambda: first(made(postproc=lambda batch: None)),
        "expected postproc to return a TensorDict, got None",
    ),
    (
        KeyError,
        lambda: made("pendulum", lambda td: td),
        "expected the policy to write an action.*'action'",
    ),
]


@pytest.mark.parametrize(("error", "call", "message"), REFUSED)
def test_it_is_refused(error: type[Exception], call: Callable[[], Any], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# ----------------------------------------------------------------------------------------- the env


def sync_vector() -> Any:
    return gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)


NO_ENVS: dict[str, tuple[Callable[[], Any], str]] = {
    "id": (lambda: "CartPole-v1", r"got 'CartPole-v1'; pass tdcollect.make_env\('CartPole-v1'\)"),
    "gymnasium": (lambda: gym.make("CartPole-v1"), r"got a TimeLimit; .*tdcollect.make_env\(env\)"),
    "vector": (sync_vector, r"got a SyncVectorEnv; pass tdcollect.make_env\(env\)"),
    "none": (lambda: None, r"got None; pass tdcollect.make_env"),
    "number": (lambda: 3, r"got 3; pass tdcollect.make_env"),
    "policy": (
        lambda: nn.Linear(4, 2),
        r"the env first, then the policy, got a Linear, then None",
    ),
    "function": (
        lambda: lambda: gym.make("CartPole-v1"),
        r"returned a TimeLimit; have it .*make_env",
    ),
}


@pytest.mark.parametrize("name", NO_ENVS)
def test_what_is_no_env(name: str) -> None:
    make, message = NO_ENVS[name]
    with pytest.raises(TypeError, match=f"expected .*{message}"):
        Collector(make(), frames_per_batch=30)


@pytest.mark.parametrize(
    "options",
    [
        {"frames_per_batch": np.int64(30), "total_frames": 1e6, "init_random_frames": 5.0},
        {"frames_per_batch": torch.tensor(30), "total_frames": None, "interruptor": None},
    ],
)
def test_what_the_parent_takes(options: dict[str, Any]) -> None:
    assert first(made(**options)).shape == (3, 10)


# -------------------------------------------------------------------------------------- the policy

NO_POLICIES: dict[str, tuple[Any, str]] = {
    "linear": (nn.Linear(3, 1), r"named like .*\['observation'\], got a Linear, which takes \(inp"),
    "sequential": (nn.Sequential(nn.Linear(3, 1)), r"got a Sequential.*TensorDictModule\(policy"),
    "two arguments": (lambda a, b: None, r"got a function, which takes \(a, b\)"),
    "text": ("random", r"can be called with a TensorDict, got 'random'"),
    "model of SB3": (types.SimpleNamespace(predict=None), r"got a Simple.*sb3.load_policy"),
    "class": (nn.Linear, r"got the class Linear; pass an instance"),
    "int": (lambda td: 1, r"to return the TensorDict that it was given.* got 1; write td"),
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


METHODS: list[tuple[type[Exception], Callable[[Any], Any], str]] = [
    *(
        (TypeError, lambda c, w=w: c.update_policy_weights_(w), "; pass TensorDict.from_mod")
        for w in ({"a": 1}, nn.Linear(3, 1), nn.Linear)
    ),
    *(
        (TypeError, lambda c, s=s: c.load_state_dict(s), "expected a state dict.* got .*torch.load")
        for s in (None, "file.pt")
    ),
    *(
        (TypeError, lambda c, e=e: c.load_state_dict({**c.state_dict(), e: 3}), f"'{e}' .* got int")
        for e in ("statistics", "random", "envs")
    ),
    *(
        (ValueError, lambda c, n=n: c.state_dict(components=n), "expected components to be some of")
        for n in (3, "policy", ["weights"])
    ),
    (TypeError, lambda c: c.collect(frames=10, options=3), "expected options to be a dict.* got 3"),
    (TypeError, lambda c: c.collect(episodes=1, options="x"), "to be a dict.* got 'x'; leave it"),
]


@pytest.mark.parametrize(("error", "call", "message"), METHODS)
def test_methods_refuse(error: type[Exception], call: Callable[[Any], Any], message: str) -> None:
    env = ENVS["pendulum"]()
    collector = Collector(env, policies.network(env, 1, ["action"]), frames_per_batch=10)
    with pytest.raises(error, match=message):
        call(collector)


def at_the_end(*_: Any) -> Any:
    return next(iter(()))


def ends_late(limit: int) -> Any:
    env, calls = ENVS["cartpole"](), iter(range(limit))
    return lambda tensordict: (next(calls), env.rand_action(tensordict))[1]


ENDS: dict[str, Callable[[], Any]] = {
    "policy": lambda: list(made("cartpole", ends_late(4), total_frames=60)),
    "policy, episodes": lambda: made("cartpole", ends_late(4)).collect(episodes=9),
    "shaping": lambda: list(made(reward_shaping=at_the_end, total_frames=60)),
    "postproc": lambda: list(made(postproc=at_the_end, total_frames=60)),
    "evaluation": lambda: evaluate(
        "CartPole-v1", from_function(at_the_end), 2, recheck=False, progress=False
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_stop_iteration_of_the_users_code_is_named_with_its_place(case: str) -> None:
    """It would end the collector's own generator, or read "generator raised StopIteration"."""
    place = "lambda" if "policy" in case else "at_the_end"
    with pytest.raises(RuntimeError, match=rf"StopIteration from .*{place}.*{__file__}, line \d"):
        ENDS[case]()
