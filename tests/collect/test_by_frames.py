"""``collect(frames=...)``: the data of iteration on request, with settings for one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl.collectors import Collector as ParentCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvBase, ExplorationType

from tdcollect import Collector, make_env
from tdcollect.envs.slots import SlotError

from ..counting import (
    CountingEnv,
    CountingRules,
    StatelessCountingPolicy,
    check_counting_batch,
    counting_env,
)
from . import policies, transforms
from .envs import ENVS, Toy, box
from .loops import array_loop, on_arrays
from .oracle import UPSTREAM, Script, assert_same, assert_same_record, batches, run, seed_everything
from .test_parent_behaviours import OPTIONS

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]

SLOTS = 3


def iterate(count: int = 3) -> Script:
    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        for _ in range(count):
            yield next(stream)

    return script


def by_frames(count: int = 3, **options: Any) -> Script:
    def script(collector: Any) -> Iterator[Any]:
        for _ in range(count):
            yield collector.collect(frames=collector.requested_frames_per_batch, **options)

    return script


def cartpole(**options: Any) -> EnvBase:
    return make_env("CartPole-v1", SLOTS, **options)


def counting() -> Collector:
    return Collector(counting_env(SLOTS), StatelessCountingPolicy(), frames_per_batch=SLOTS * 4)


# ------------------------------------------------------------------------------- the same batches


# Iteration over all envs and policies is compared with TorchRL's in test_oracle.


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], dict[str, Any]]] = {
    **{env: (ENVS[env], policies.actor, {}) for env in ("toy", "toy-unbatched", "torchrl-vector")},
    "agents": (ENVS["mock-agents"], policies.random_policy, {}),
    "nested": (ENVS["mock-nested"], policies.actor, {}),
    "books": (partial(transforms.make, "books"), policies.actor, {}),
    **{
        policy: (*policies.case(policy), {})
        for policy in ("alternates-unbatched", "q-values", "call-counter", "carries-memory")
    },
    **{
        name: (cartpole, policies.actor, OPTIONS[name])
        for name in ("compact-obs", "no-trajectory-ids", "no-buffers", "storing-device", "same-td")
    },
    "devices": (cartpole, policies.actor, OPTIONS["policy-and-env-device"]),
    "resets": (cartpole, policies.actor, OPTIONS["reset-and-truncate"]),
    "split": (cartpole, policies.actor, OPTIONS["postproc-split"]),
    "max-frames": (cartpole, policies.actor, {"max_frames_per_traj": 4}),
    "version": (cartpole, policies.actor, {"track_policy_version": True}),
}


@pytest.mark.behaviour(1)
@on_arrays("name", CASES, parent=["toy-unbatched", "carries-memory", "resets", "max-frames"])
def test_batches_are_those_of_torchrls_collector(name: str) -> None:
    make, policy, options = CASES[name]
    theirs = run(ParentCollector, make, policy, iterate(), lambda: options)
    ours = run(Collector, make, policy, by_frames(), lambda: options)
    assert_same_record(ours, theirs)


@pytest.mark.behaviour(1)
@pytest.mark.parametrize("name", ["no-trajectory-ids", "same-td", "max-frames"])
def test_collecting_and_iterating_take_turns(name: str) -> None:
    make, policy, options = CASES[name]

    def in_turns(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        yield next(stream)
        yield collector.collect(frames=30)
        yield next(stream)
        yield collector.collect(frames=30)

    theirs = run(ParentCollector, make, policy, batches(4), lambda: options)[:-1]
    assert_same_record(run(Collector, make, policy, in_turns, lambda: options), theirs)


@pytest.mark.behaviour(1)
def test_any_number_of_frames_goes_on_in_the_middle_of_episodes() -> None:
    collector = counting()
    parts = [collector.collect(frames=SLOTS * steps) for steps in (1, 5, 2, 70)]
    assert [part.shape for part in parts] == [(SLOTS, 1), (SLOTS, 5), (SLOTS, 2), (SLOTS, 70)]
    check_counting_batch(torch.cat(parts, 1))


# ------------------------------------------------------------------------------------- what counts


@pytest.mark.behaviour(4)
def test_frames_are_rounded_up_to_the_slots_with_a_warning() -> None:
    told = r"^7 frames are no multiple of the 3 slots: collecting 9, 3 per slot$"
    with pytest.warns(UserWarning, match=told):
        assert counting().collect(frames=7).shape == (SLOTS, 3)


def test_frames_on_request_count_for_neither_total_frames_nor_the_buffer() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=1))
    told: list[Any] = []
    collector = Collector(
        cartpole(),
        frames_per_batch=6,
        total_frames=12,
        replay_buffer=buffer,
        pre_collect_hook=lambda: told.append("before"),
        post_collect_hook=lambda batch: told.append(getattr(batch, "shape", None)),
    )
    for _ in range(5):
        assert collector.collect(frames=6).names == [None, "time"]
    assert told == ["before", (3, 2)] * 5  # the user's hooks are called
    assert len(buffer) == 0
    assert len(list(collector)) == 2
    assert len(buffer) == 6


# ------------------------------------------------------------------------------- other settings


@pytest.mark.behaviour(5)
@pytest.mark.parametrize("policy", [policies.actor, policies.random_policy])
def test_random_actions_come_from_the_action_spec(policy: Callable[[EnvBase], Any]) -> None:
    """As TorchRL draws its init_random_frames; without a policy there are no others."""
    theirs = run(ParentCollector, cartpole, policy, iterate(), lambda: {"init_random_frames": 90})
    ours = run(Collector, cartpole, policy, by_frames(random=True))
    for (_, batch, state), (_, expected, expected_state) in zip(ours[1:], theirs[1:], strict=True):
        assert_same(batch, expected.select(*batch.keys(True, True)))
        assert_same(state, expected_state)


@pytest.mark.parametrize("count", [{"frames": 6}, {"episodes": 2}])
def test_random_actions_have_no_outputs_of_the_policy(count: dict[str, int]) -> None:
    """Though the carried step has those of its last call."""
    found = []
    for policy in (policies.actor, policies.random_policy):
        env = cartpole()
        collector = Collector(env, policy(env), frames_per_batch=6)
        next(iter(collector))
        found.append(sorted(map(str, collector.collect(**count, random=True).keys(True, True))))
    assert found[0] == found[1]


@pytest.mark.behaviour(6)
def test_exploration_is_set_for_one_call() -> None:
    env = ENVS["pendulum"]()
    policy = policies.actor(env)
    collector = Collector(env, policy, frames_per_batch=20)
    for kind in (ExplorationType.DETERMINISTIC, None, ExplorationType.RANDOM):
        batch = collector.collect(frames=20, exploration_type=kind)
        mode = policy.get_dist(batch.flatten()).deterministic_sample
        same = torch.allclose(batch["action"].flatten(0, 1), mode, atol=1e-5)
        assert same == (kind is ExplorationType.DETERMINISTIC)


def outputs(policy: Any, env: EnvBase, batch: Any) -> Any:
    """The outputs of the policy's network for the observations of a flat batch."""
    shown = batch.select(*policies.observation_keys(env))
    if env.batch_size:
        return policy.module[0](shown)
    return torch.stack([policy.module[0](row) for row in shown.unbind(0)])


@pytest.mark.behaviour(7)
@pytest.mark.parametrize(
    ("env", "count"),
    [("toy", "frames"), ("toy-unbatched", "episodes"), ("torchrl-gym", "frames")],
)
def test_gradients_are_those_of_the_policy_on_the_batch(env: str, count: str) -> None:
    seed_everything(0)
    instance = ENVS[env]()
    policy = policies.actor(instance)
    collector = Collector(instance, policy, frames_per_batch=20 * instance.batch_size.numel())
    number = {"frames": 20 * instance.batch_size.numel(), "episodes": 5}[count]
    for _ in range(2):  # nor does a batch keep the graph of the one before
        assert not collector.collect(**{count: number})["logits"].requires_grad
        batch = collector.collect(**{count: number}, gradients=True)
    assert not any(value.requires_grad for value in next(iter(collector)).values(True, True))
    parameters = list(policy.parameters())
    batch = batch.flatten()
    again = outputs(policy, instance, batch.detach())["logits"]
    direction = torch.randn_like(again)
    ours = torch.autograd.grad((batch["logits"] * direction).sum(), parameters, retain_graph=True)
    theirs = torch.autograd.grad((again * direction).sum(), parameters)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected)


# -------------------------------------------------------------------------------------- restarting


class Starting(Toy):
    """Shows the options of its reset."""

    def __init__(self) -> None:
        super().__init__(box(1), gym.spaces.Discrete(2), longest=4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        _, info = super().reset(seed=seed)
        return np.array([(options or {}).get("start", 0)], np.float32), info


@pytest.mark.behaviour(8)
def test_a_reset_can_be_forced() -> None:
    collector = counting()
    before = collector.collect(frames=SLOTS * 2)
    after = collector.collect(frames=SLOTS * 2, reset=True)
    assert (after["observation"][:, 0, 0] == 0).all()
    assert after["collector", "traj_ids"].min() > before["collector", "traj_ids"].max()


@pytest.mark.behaviour(8)
@pytest.mark.parametrize("count", [{"frames": 30}, {"episodes": 9}])
def test_reset_options_reach_the_env(count: dict[str, int]) -> None:
    collector = Collector(make_env(Starting, SLOTS), frames_per_batch=30)
    batch = collector.collect(**count, options={"start": 2.0})
    ids = batch["collector", "traj_ids"].flatten()
    starts = torch.stack(
        [batch["observation"].flatten(0, -2)[ids == i][0, 0] for i in ids.unique()]
    )
    # By frames, the first reset alone is the caller's.
    expected = 9 if "episodes" in count else SLOTS
    assert (starts == 2).sum() == expected


# ------------------------------------------------------------------------------------------ faults


def broken(slots: int = SLOTS, hooks: Any = None, **options: Any) -> Collector:
    """A collector of counting envs; slot 1, or the only one, raises once, at its third step."""
    fuel, numbers, rules = iter([ValueError("out of fuel")]), iter(range(slots)), CountingRules(5)
    fails = min(1, slots - 1)

    class Broken(CountingEnv):
        def step(self, action: Any) -> Any:
            if self.slot == fails and self._count == 2 and (error := next(fuel, None)):
                raise error
            return super().step(action)

    env = make_env(lambda: Broken(next(numbers, fails), rules), slots, **options)
    return Collector(env, StatelessCountingPolicy(rules), frames_per_batch=30, hooks=hooks)


@pytest.mark.parametrize("count", [{"frames": 30}, {"episodes": 5}])
def test_what_follows_an_env_that_raised_starts_afresh(count: dict[str, int], arrays: bool) -> None:
    """The other slots may have taken the lost step."""
    collector = broken()
    told = r"in step\(\) of slot 1, episode [01], step 2: ValueError: out of fuel"
    with pytest.raises(SlotError, match=told):
        collector.collect(**count)
    if not arrays:
        collector.reset()  # on TorchRL's own loop, it is for the user to do
    batch = collector.collect(frames=30)
    assert (batch["observation"][:, 0, 0] == 0).all()
    check_counting_batch(batch, CountingRules(5))
    assert collector.collect(episodes=1)["next", "done"].sum() == 1


# -------------------------------------------------------------------------------------- bad input

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both": (
        {"frames": 3, "episodes": 2},
        r"^expected either frames or episodes, got frames=3 and episodes=2$",
    ),
    "neither": ({}, r"^expected either frames or episodes, got frames=None and episodes=None$"),
    "zero": ({"frames": 0}, r"^expected frames to be a positive int or None, got 0$"),
    "bool": ({"episodes": True}, r"^expected episodes to be a positive int or None, got True$"),
    "string": ({"frames": "6"}, r"^expected frames to be a positive int or None, got '6'$"),
    "max-steps": (
        {"episodes": 1, "max_episode_steps": 0},
        r"^expected max_episode_steps to be a positive int or None, got 0$",
    ),
    "frames-layout": ({"frames": 6, "layout": "list"}, r"layout are for collecting by episodes"),
    "frames-max-steps": (
        {"frames": 6, "max_episode_steps": 2},
        r"by frames use make_env's max_episode_steps",
    ),
    "layout": (
        {"episodes": 1, "layout": "square"},
        r"^expected layout to be .*padded.*, got 'square'$",
    ),
}


@array_loop
@pytest.mark.behaviour(3)
@pytest.mark.parametrize("case", REFUSED)
def test_counts_that_make_no_sense_are_refused_before_anything_runs(case: str) -> None:
    arguments, told = REFUSED[case]
    collector = counting()
    collector.collect(frames=SLOTS * 2)
    with pytest.raises(ValueError, match=told):
        collector.collect(**arguments)
    check_counting_batch(collector.collect(frames=SLOTS * 3))


@array_loop
@pytest.mark.behaviour(3)
@pytest.mark.parametrize("seed", [-1, True, "4", 2.0])
def test_seeds_that_cannot_be_honoured_are_refused(seed: Any) -> None:
    for count in ({"frames": 3}, {"episodes": 3}):
        with pytest.raises((TypeError, ValueError), match="expected"):
            counting().collect(**count, seed=seed)
