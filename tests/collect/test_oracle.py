"""Our collector equals the parent's, bit for bit, on every env, policy and transform."""

from __future__ import annotations

import pytest
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.testing.mocking_classes import CountingEnv

from tdcollect import make_env

from . import digests, policies
from .envs import ENVS, Toy, box
from .loops import array_loop, on_arrays
from .oracle import UPSTREAM, assert_same, check_same

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]


OF_ACTIONS = [
    *("cartpole", "cartpole-unbatched", "cartpole-next-step", "cartpole-envpool"),
    *("cartpole-process", "frozen-lake", "pendulum", "half-cheetah", "toy-many-actions"),
    *("toy-dict-action", "toy-binary", "torchrl-serial", "mock-continuous", "mock-nested"),
]
AROUND = [
    *("one-hot", "one-hot-unbatched", "two-actions", "alternates", "carries-memory"),
    *("fresh-tensordict", "context", "odd-outputs", "writes-next", "in-place", "drops-entries"),
]
"""Policies that our own code meets around TorchRL's loop."""


@array_loop
@pytest.mark.parametrize("env", ENVS)
def test_sampling_actor_on_every_env(env: str) -> None:
    check_same(ENVS[env], policies.actor)


@array_loop
@pytest.mark.parametrize("env", OF_ACTIONS)
def test_random_policy_on_envs_of_every_action(env: str) -> None:
    check_same(ENVS[env], policies.random_policy)


@on_arrays("policy", policies.POLICIES, parent=AROUND)
def test_every_policy(policy: str) -> None:
    check_same(*policies.case(policy))


@array_loop
def test_products_that_round_by_where_their_input_begins() -> None:
    """Three rows of 11 numbers: the frames of a chunk, were they packed, would begin unaligned."""

    def product(env: EnvBase) -> TensorDictModule:
        return TensorDictModule(nn.Linear(11, 4), ["observation"], ["action"])

    check_same(lambda: make_env(lambda: Toy(box(11), box(4)), 3), product)


@array_loop
@pytest.mark.parametrize(("most", "update_done"), [(3, True), (3, False), (7, True), (None, True)])
def test_step_counter_on_an_env_without_a_truncated_flag(
    most: int | None, update_done: bool
) -> None:
    def make() -> EnvBase:
        return TransformedEnv(CountingEnv(max_steps=5), StepCounter(most, update_done=update_done))

    check_same(make, policies.random_policy, make_options=lambda: {"frames_per_batch": 11})


@array_loop
def test_both_loops_give_the_same_frames_and_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = digests.main()
    monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", False)
    assert_same(digests.main(), found)
