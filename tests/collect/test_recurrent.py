"""Hidden state: stored before the step, zero at the start of episodes, carried over batches."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector as ParentCollector
from torchrl.data import Unbounded
from torchrl.envs import SerialEnv, TensorDictPrimer, TransformedEnv

import tdcollect

from ..counting import HIDDEN, CountingPolicy, CountingRules, counting_env
from . import policies
from .envs import ENVS
from .oracle import UPSTREAM, assert_same, batches, run

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]

RULES = CountingRules()


def counting_module() -> TensorDictModule:
    """The counting policy as a function of tensors, which trusts that its state starts at zero."""

    def act(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = RULES.action(hidden.squeeze(-1).long())
        return nn.functional.one_hot(action, RULES.num_actions), hidden + 1

    return TensorDictModule(act, in_keys=[HIDDEN], out_keys=["action", ("next", HIDDEN)])


def with_primer(env: Any) -> Any:
    return TransformedEnv(env, TensorDictPrimer({HIDDEN: Unbounded((1,))}, expand_specs=True))


SAME_STEP = {"backend": "sync", "autoreset_mode": AutoresetMode.SAME_STEP}
PIPELINES = {
    "declared by the policy": lambda n: (counting_env(n), CountingPolicy()),
    "with is_init": lambda n: (counting_env(n, is_init=True), CountingPolicy()),
    "primer on the env": lambda n: (with_primer(counting_env(n)), counting_module()),
    "slots that reset themselves": lambda n: (counting_env(n, **SAME_STEP), CountingPolicy()),
}
PAIRS = [*zip(PIPELINES, (4, None, 1), strict=False), ("primer on the env", None)]
PAIRS += [("slots that reset themselves", 3)]


def check(batch: Any) -> None:
    """The state fed at a step is the number of the step; the env refuses any other action."""
    step = batch["observation"][..., :1]
    assert torch.equal(batch[HIDDEN], step)
    assert torch.equal(batch["next", HIDDEN], step + 1)
    if "is_init" in batch.keys():  # noqa: SIM118
        assert torch.equal(batch["is_init"], step == 0)


@pytest.mark.behaviour(16)
@pytest.mark.parametrize(("pipeline", "slots"), PAIRS)
def test_a_policy_that_counts_in_its_hidden_state_predicts_the_env(
    pipeline: str, slots: int | None, arrays: bool
) -> None:
    env, policy = PIPELINES[pipeline](slots)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector = tdcollect.Collector(env, policy, frames_per_batch=13 * (slots or 1))
    assert ("steps on arrays" in str(collector.explain())) == arrays
    stream = iter(collector)
    for _ in range(2):
        batch = next(stream)
        check(batch)
        assert batch["next", "done"].any()
        check(collector.collect(frames=5 * (slots or 1)))
    for episodes in (1, 7):
        batch = collector.collect(episodes=episodes)
        check(batch)
        assert batch["next", "done"].sum() == episodes
    check(next(stream))
    check(collector.collect(frames=5 * (slots or 1), seed=4))
    collector.shutdown()


@pytest.mark.behaviour(16)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("frames", [1, 4])
def test_forced_resets_start_the_hidden_state_again(pipeline: str, frames: int) -> None:
    env, policy = PIPELINES[pipeline](3)
    collector = tdcollect.Collector(env, policy, frames_per_batch=3 * frames)
    stream = iter(collector)
    check(next(stream))
    every: Any = slice(None)
    for reset, begun in (
        (lambda: None, []),
        (lambda: collector.reset(1), [1]),
        (collector.reset, every),
        (lambda: collector.set_seed(5), every),
        (lambda: collector.reset(0), [0]),
        (lambda: collector.reset(2), [2]),
    ):
        reset()
        batch = next(stream)
        check(batch)
        assert (batch["observation"][begun, 0, 0] == 0).all()
    collector.shutdown()


# ------------------------------------------------------------------------- what is added by itself


def first_batches(collector_class: Any, env: str, make_policy: Any, **options: Any) -> Any:
    options = {"frames_per_batch": 30, **options}
    return run(collector_class, ENVS[env], make_policy, batches(2), lambda: options)[1:]


@pytest.mark.parametrize(
    ("env", "kind", "frames"),
    [("cartpole", "lstm", 60), ("cartpole-unbatched", "gru", 0), ("cartpole-init", "gru", 60)],
)
def test_the_default_is_what_torchrl_does_on_request(
    env: str, kind: str, frames: int, arrays: bool
) -> None:
    policy = partial(policies.recurrent, kind)
    options = {"init_random_frames": frames or None}
    ours = first_batches(tdcollect.Collector, env, policy, **options)
    options["auto_register_policy_transforms"] = True
    assert_same(ours, first_batches(ParentCollector, env, policy, **options))
    collector = tdcollect.Collector(ENVS[env](), policy(ENVS[env]()), frames_per_batch=30)
    assert ("its own code, on arrays" in str(collector.explain())) == arrays


@pytest.mark.parametrize("buffers", [False, True])
def test_compact_obs_leaves_out_the_state_that_torchrls_buffers_have_as_zeros(
    buffers: bool,
) -> None:
    options = {"use_buffers": buffers, "auto_register_policy_transforms": True, "compact_obs": True}
    policy = partial(policies.recurrent, "gru")
    theirs = first_batches(ParentCollector, "cartpole", policy, **options)
    for _, batch, _ in theirs[:2] if buffers else ():
        assert batch["recurrent_state"].any()
        assert not batch["next"].pop("recurrent_state").any()
    assert_same(first_batches(tdcollect.Collector, "cartpole", policy, **options), theirs)


def test_a_policy_that_asks_where_episodes_begin_is_told() -> None:
    env = ENVS["pendulum"]()
    policy = policies.ornstein_uhlenbeck(env)
    batch = next(iter(tdcollect.Collector(env, policy, frames_per_batch=28)))
    assert torch.equal(batch["is_init"][:, 1:], batch["next", "done"][:, :-1])
    assert batch["is_init"][:, 0].all()


def test_a_policy_without_a_state_and_one_that_opts_out_leave_the_env_as_it_is() -> None:
    env = ENVS["cartpole"]()
    collector = tdcollect.Collector(env, policies.actor(env), frames_per_batch=30)
    assert collector.env is env
    options = {"frames_per_batch": 30, "auto_register_policy_transforms": False}
    with pytest.raises(KeyError, match="is_init"):
        tdcollect.Collector(env, policies.recurrent("gru", env), **options)


def test_state_on_an_env_of_torchrl() -> None:
    env = SerialEnv(2, lambda: counting_env())
    collector = tdcollect.Collector(env, CountingPolicy(), frames_per_batch=26)
    stream = iter(collector)
    for _ in range(3):
        check(next(stream))
    collector.shutdown()
