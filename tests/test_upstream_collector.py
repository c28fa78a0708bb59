"""The private names that tdcollect uses of TorchRL's collector: failures tell what changed."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvBase, GymEnv, StepCounter, TransformedEnv
from torchrl.modules import LSTMModule

from tdcollect._upstream import collector as of_collector
from tdcollect._upstream.collector import CollectorState

IDS = ("collector", "traj_ids")


class Acting:
    """A policy without weights."""

    def __init__(self, env: EnvBase):
        self._env = env

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._env.rand_action(tensordict)


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


def make(policy: Any = None, **options: Any) -> Collector:
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=5))
    options = {"frames_per_batch": 8, "total_frames": 16, **options}
    return Collector(env, linear() if policy is None else policy, **options)


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = make()
    yield made
    made.shutdown()


# --- how it is made


def test_collector_meta_is_the_class_of_torchrls_collector() -> None:
    assert type(Collector) is of_collector.CollectorMeta


def test_collector_meta_takes_the_arguments_that_ours_dispatches_on() -> None:
    parameters = inspect.signature(of_collector.CollectorMeta.__call__).parameters
    assert set(parameters) >= {"backend", "backend_options", "num_collectors", "sync"}
    assert all(parameters[name].default is None for name in ("backend", "num_collectors", "sync"))


def test_normalize_env_functions_takes_one_function_out_of_a_list() -> None:
    args, kwargs = of_collector.normalize_env_functions(Collector, (), {"create_env_fn": [print]})
    assert args == ()
    assert kwargs["create_env_fn"] is print


def test_backends_have_longer_names() -> None:
    assert of_collector.backend_of_alias("multiprocessing") == "process"
    assert of_collector.backend_of_alias("ray") == "ray"


def test_service_backend_is_none_outside_a_context() -> None:
    assert not inspect.signature(of_collector.service_backend).parameters
    assert of_collector.service_backend() is None


def test_rollout_with_gradients_keeps_the_graph_that_rollout_drops() -> None:
    collector = make(use_buffers=False)
    assert not collector.rollout()["action"].requires_grad
    assert of_collector.rollout_with_gradients(collector)["action"].requires_grad


# --- its state


def test_collector_state_does_not_keep_the_collector_alive() -> None:
    collector = make()
    CollectorState(collector)
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None


def test_carrier_is_the_row_that_the_next_batch_begins_with(collector: Collector) -> None:
    state = CollectorState(collector)
    first = state.carrier.clone()
    batch = collector.rollout()
    for key in ("observation", "step_count", IDS):
        assert torch.equal(batch[key][0], first[key])
    state.carrier = state.carrier.clone().set("observation", torch.full((4,), 0.5))
    assert collector.rollout()["observation"][0].tolist() == [0.5] * 4


def test_start_new_trajectories_gives_the_carrier_a_new_id(collector: Collector) -> None:
    state = CollectorState(collector)
    before = int(state.carrier[IDS])
    state.start_new_trajectories()
    assert int(state.carrier[IDS]) == before + 1


def test_trajectory_ids_gives_the_next_ones_and_has_a_state(collector: Collector) -> None:
    ids = CollectorState(collector).trajectory_ids
    saved = ids.state_dict()
    drawn = ids.get_traj_and_increment(3)
    assert drawn.tolist() == [1, 2, 3]  # the slot has 0
    assert drawn.dtype == torch.int64
    ids.load_state_dict(saved)
    assert ids.get_traj_and_increment(1).tolist() == [1]
    assert "traj_pool" in collector.state_dict()


def test_preallocated_is_the_batch_that_rollout_returns() -> None:
    state = CollectorState(collector := make(use_buffers=True))
    assert state.preallocates
    assert state.preallocated.shape == (8,)
    assert collector.rollout() is state.preallocated
    other = state.preallocated = state.preallocated.clone()
    assert collector.rollout() is other
    with state.without_preallocation():
        assert not state.preallocates
        assert collector.rollout() is not other
    assert state.preallocates
    assert not CollectorState(make(use_buffers=False)).preallocates
    state.preallocates = False
    assert collector.rollout() is not other


@pytest.mark.parametrize("compact", [False, True])
def test_left_out_of_next_are_the_entries_that_batches_lack(compact: bool) -> None:
    collector = make(compact_obs=compact, use_buffers=False)
    left_out = CollectorState(collector).left_out_of_next
    expected = {("next", "observation"), ("next", "step_count")} if compact else set()
    assert set(left_out) == expected
    assert not expected & set(collector.rollout().keys(True, True))


def test_ignores_replay_buffer_has_batches_come_out_beside_one() -> None:
    assert not CollectorState(make()).ignores_replay_buffer

    class Ignoring(Collector):
        _ignore_rb = True

    env = GymEnv("CartPole-v1")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = Ignoring(
        env, linear(), replay_buffer=buffer, frames_per_batch=8, total_frames=8, use_buffers=False
    )
    assert CollectorState(collector).ignores_replay_buffer
    assert [len(batch) for batch in collector] == [8]
    assert len(buffer) == 0


@pytest.mark.parametrize("asked", [False, True])
def test_truncate_last_step_follows_set_truncated(asked: bool) -> None:
    collector = make(set_truncated=asked)
    flags = torch.zeros(8, 1, dtype=torch.bool)
    batch = TensorDict({"next": {"truncated": flags, "done": flags.clone()}}, [8])
    truncated = CollectorState(collector).truncate_last_step(batch)["next"]
    for name in ("truncated", "done"):
        assert truncated[name].flatten().tolist() == [False] * 7 + [asked]


def test_policy_call_is_what_rollout_calls_at_each_step(collector: Collector) -> None:
    state = CollectorState(collector)
    policy = state.wrapped_policy
    assert state.policy_call is policy is state.uncompiled_policy
    calls = 0

    def counting(tensordict: TensorDictBase) -> Any:
        nonlocal calls
        calls += 1
        return policy(tensordict)

    state.policy_call = counting
    assert state.wrapped_policy is counting
    assert state.uncompiled_policy is policy
    collector.rollout()
    assert calls == 8


def test_uncompiled_policy_is_the_one_under_the_compiled_one() -> None:
    collector = make(compile_policy={"backend": "eager"})
    state = CollectorState(collector)
    assert state.wrapped_policy is state.policy_call
    assert state.wrapped_policy is not state.uncompiled_policy
    assert isinstance(state.uncompiled_policy, TensorDictModule)
    assert list(state.policy_output_keys) == ["action"]


def test_casts_to_policy_device_where_the_env_is_elsewhere() -> None:
    assert not CollectorState(make(device="cpu")).casts_to_policy_device
    env = GymEnv("CartPole-v1")  # without a device
    collector = Collector(env, linear(), policy_device="cpu", frames_per_batch=8, total_frames=8)
    assert CollectorState(collector).casts_to_policy_device


def test_stateful_policy_is_the_one_of_the_state_dict() -> None:
    collector = make()
    policy = CollectorState(collector).stateful_policy
    for name, value in collector.state_dict()["policy_state_dict"].items():
        assert torch.equal(value, policy.state_dict()[name])
    without = make(Acting(GymEnv("CartPole-v1")))
    assert CollectorState(without).stateful_policy is None
    assert "policy_state_dict" not in without.state_dict()


@pytest.mark.parametrize("registers", [False, True])
def test_registers_transforms_is_read_after_it_is_set(registers: bool) -> None:
    """Ours sets it in the method that reads it, before that one does."""

    class Deciding(Collector):
        def _maybe_setup_policy_env_transforms(self, env: EnvBase, policy: Any) -> EnvBase:
            state = CollectorState(self)
            assert state.registers_transforms is None
            state.registers_transforms = registers
            return super()._maybe_setup_policy_env_transforms(env, policy)

    lstm = LSTMModule(4, 2, in_key="observation", out_key="action")
    env = GymEnv("CartPole-v1")
    if registers:
        collector = Deciding(env, lstm, frames_per_batch=8, total_frames=8)
        assert isinstance(collector.env, TransformedEnv)
        return
    with pytest.raises(KeyError, match="is_init"):  # which the policy reads, and no env gives
        Deciding(env, lstm, frames_per_batch=8, total_frames=8)


def test_frames_and_iteration_follow_the_batches() -> None:
    collector = make()
    state = CollectorState(collector)
    assert (state.frames, state.iteration) == (0, -1)
    for index, _ in enumerate(collector):
        assert (state.frames, state.iteration) == (8 * (index + 1), index)
        saved = collector.state_dict()
        assert (saved["frames"], saved["iter"]) == (state.frames, state.iteration)
    state.frames, state.iteration = 3, 1
    saved = collector.state_dict()
    assert (saved["frames"], saved["iter"]) == (3, 1)


def test_count_frames_closes_the_env_at_the_last(collector: Collector) -> None:
    state = CollectorState(collector)
    state.count_frames(8)
    assert state.frames == 8
    assert not collector.env.is_closed
    state.count_frames(8)
    assert collector.env.is_closed


def test_acts_randomly_for_the_first_frames() -> None:
    assert not CollectorState(make()).acts_randomly()
    collector = make(init_random_frames=8)
    state = CollectorState(collector)
    assert state.acts_randomly()
    state.count_frames(8)
    assert not state.acts_randomly()
