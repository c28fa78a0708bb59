"""``collect(episodes=...)``: an exact number of complete episodes, in the order of starting."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from torchrl.envs import (
    Compose,
    EnvBase,
    GymWrapper,
    PendulumEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)

from tdcollect import Collector, make_env, slot_seed, split_trajectories

from ..counting import (
    CountingRules,
    StatelessCountingPolicy,
    TorchCountingEnv,
    check_counting_batch,
    counting_env,
    first_episode,
    make_counting_envs,
)
from . import policies
from .envs import ENVS
from .loops import array_loop, on_arrays
from .oracle import UPSTREAM, assert_same
from .test_facts import Declaring
from .test_parent_behaviours import OPTIONS

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]


def episodes_of(batch: TensorDictBase) -> list[TensorDictBase]:
    """A flat batch cut behind each ``done``."""
    ends = batch["next", "done"].reshape(-1).nonzero().reshape(-1) + 1
    assert not len(batch) or ends[-1] == len(batch)
    return list(batch.split(ends.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()))


# ------------------------------------------------------------------- order, refilling, and waiting


def schedule(rules: CountingRules, slots: int, episodes: int) -> list[tuple[int, int, int]]:
    """(slot, episode, length) from root 0, where the slot that is free first takes the next one."""
    free = [(0, slot, first_episode(slot_seed(0, slot))) for slot in range(slots)]
    found = []
    for _ in range(episodes):
        time, slot, number = heapq.heappop(free)
        length = rules.length(slot, number)
        found.append((slot, number, length))
        heapq.heappush(free, (time + length, slot, number + 1))
    return found


MODES = {
    "serial": {},
    "disabled": {"backend": "sync"},
    "next-step": {"backend": "sync", "autoreset_mode": AutoresetMode.NEXT_STEP},
    "same-step": {"backend": "sync", "autoreset_mode": AutoresetMode.SAME_STEP},
}


@pytest.mark.behaviour(2)
@on_arrays("mode", MODES, parent=["same-step"])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    slots=st.integers(1, 5),
    counts=st.lists(st.integers(1, 13), min_size=1, max_size=3),
    block=st.integers(1, 8),
)
def test_no_slot_idles_while_an_episode_is_to_start(
    mode: str, lengths: list[int], slots: int, counts: list[int], block: int
) -> None:
    rules = CountingRules(lengths)
    env = counting_env(slots, rules=rules, **MODES[mode])
    collector = Collector(env, StatelessCountingPolicy(rules), frames_per_batch=slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tdcollect.collect.run._BLOCK_STEPS", block)
        for episodes in counts:
            batch = collector.collect(episodes=episodes, seed=0)
            found = []
            for one in episodes_of(batch):
                step, number, place = one["observation"][0].int().tolist()
                assert step == 0
                check_counting_batch(one, rules, slots=[place])
                found.append((place, number, len(one)))
            assert found == schedule(rules, slots, episodes)
    collector.shutdown()


@array_loop  # TorchRL's own env steps all slots
@pytest.mark.behaviour(4)
@pytest.mark.parametrize(
    ("slots", "lengths", "steps"),
    [(5, [4], [4, 4, 0, 0, 0]), (2, [2, 9], [2, 2])],  # the seed of slot 1 is odd
)
def test_two_episodes_step_two_slots_and_one_that_has_none_waits(
    slots: int, lengths: list[int], steps: list[int]
) -> None:
    rules = CountingRules(lengths)
    envs = [make() for make in make_counting_envs(slots, rules)]
    left = iter(envs)
    env = make_env(lambda: next(left), slots)
    collector = Collector(env, StatelessCountingPolicy(rules), frames_per_batch=slots)
    assert len(collector.collect(episodes=2, seed=0)) == sum(steps)
    assert [env._count for env in envs] == steps


# --------------------------------------------------------------------------------- following calls


@pytest.mark.behaviour(2)
def test_each_call_starts_afresh_and_so_does_iteration_after_it() -> None:
    """Trajectory ids go on, in the order of starting."""
    collector = Collector(counting_env(3), StatelessCountingPolicy(), frames_per_batch=12)
    stream = iter(collector)
    batches = [next(stream), *(collector.collect(episodes=n) for n in (5, 1, 1)), next(stream)]
    for batch in batches[1:]:
        assert (batch["observation"].flatten(0, -2)[0, 0] == 0).all()
    assert torch.equal(batches[-1]["observation"][:, 0, 0], torch.zeros(3))
    ids = [batch["collector", "traj_ids"] for batch in batches]
    assert ids[0].max() < ids[1].min()
    assert ids[-1].min() > ids[-2].max()
    together = torch.cat([found.unique_consecutive() for found in ids[1:-1]])
    assert torch.equal(together, torch.arange(7) + together[0])
    collector.shutdown()


def test_a_policy_that_raises_leaves_a_collector_that_starts_afresh() -> None:
    collector = Collector(counting_env(3), policies.tiring(10), frames_per_batch=6)
    with pytest.raises(ValueError, match="tired"):
        collector.collect(episodes=50)
    batch = next(iter(collector))
    assert (batch["observation"][:, 0, 0] == 0).all()
    assert collector.collect(episodes=5)["next", "done"].sum() == 5


# ------------------------------------------------------------------------------- max_episode_steps

LIMITED: dict[str, Callable[[CountingRules], EnvBase]] = {
    "serial": lambda rules: counting_env(3, rules=rules),
    "unbatched": lambda rules: counting_env(rules=rules),
    "next-step": lambda rules: counting_env(3, rules=rules, **MODES["next-step"]),
    "same-step": lambda rules: counting_env(3, rules=rules, **MODES["same-step"]),
    "torchrl": lambda rules: TorchCountingEnv([2, 2], rules),
}


@pytest.mark.behaviour(10)
@on_arrays("env", LIMITED, parent=["serial", "unbatched"])
def test_max_steps_truncates(env: str) -> None:
    rules = CountingRules([4, 9, 2], ends="terminated")
    instance = TransformedEnv(LIMITED[env](rules), RewardSum())
    instance.append_transform(StepCounter())
    collector = Collector(instance, StatelessCountingPolicy(rules), frames_per_batch=12)
    batch = collector.collect(episodes=11, max_episode_steps=4)
    assert collector.collect(episodes=3, max_episode_steps=4)["next", "done"].sum() == 3
    found = episodes_of(batch)
    assert len(found) == 11
    assert {len(one) for one in found} == {2, 4}
    for one in found:
        last = one[-1]["next"]
        slot, number = int(last["observation"][2]), int(last["observation"][1])
        assert bool(last["terminated"]) == (rules.length(slot, number) <= 4)
        assert bool(last["truncated"]) == (len(one) == 4)
        # The true final observation, and counts that start with the episode.
        assert last["observation"][0] == len(one) == last["step_count"]
        assert last["episode_reward"] == one["next", "reward"].sum()
        assert not one[:-1]["next", "done"].any()


# ----------------------------------------------------------------------------------------- any env


@pytest.mark.behaviour(2, 12)
@on_arrays(
    "env",
    [
        *("cartpole-one-slot", "cartpole-envpool-unbatched", "cartpole-process", "cartpole-books"),
        *("frozen-lake-unbatched", "toy-nested", "toy-pixels", "toy-one-step-episodes"),
        *("toy-dict-action", "toy-scalar-unbatched", "torchrl-gym", "torchrl-vector"),
        *("torchrl-serial-of-ours", "mock-counting", "mock-counting-batched"),
    ],
    parent=["cartpole-next-step", "toy-infos-unbatched"],
)
def test_any_env_gives_whole_episodes(env: str) -> None:
    instance = ENVS[env]()
    collector = Collector(instance, policies.actor(instance), frames_per_batch=30)
    like = collector.collect(frames=instance.batch_size.numel())
    batch = collector.collect(episodes=5)
    assert batch.names == ["time"]
    assert batch["next", "done"].sum() == 5
    assert set(batch.keys(True, True)) == set(like.keys(True, True))
    ids = batch["collector", "traj_ids"]
    assert torch.equal(ids.unique_consecutive(), ids.unique())
    for key, value in like.items(True, True):
        assert batch[key].dtype == value.dtype
        assert batch[key].shape[1:] == value.shape[len(instance.batch_size) + 1 :]
    inside = ~batch["next", "done"].reshape(-1)[:-1]
    for key in instance.observation_keys:
        following, shown = batch["next"].get(key)[:-1], batch.get(key)[1:]
        assert torch.equal(following[inside].float(), shown[inside].float()), key
    collector.shutdown()


@array_loop
@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("mock-nested", r"one 'done' flag per slot, got the flags .*; collect by frames, and"),
        ("mock-agents", r"one 'done' flag per slot"),
        ("mock-strings", r"tensors of fixed shapes, got other ones in \['string'\]"),
        ("mock-dynamic", r"tensors of fixed shapes, got other ones in \['observation'\]"),
    ],
)
def test_envs_whose_slots_have_no_episodes_of_their_own_are_refused(env: str, told: str) -> None:
    collector = Collector(ENVS[env](), frames_per_batch=30)
    with pytest.raises(ValueError, match=told):
        collector.collect(episodes=2)


def own() -> Collector:
    """Over a user's vector env in SAME_STEP mode, without resets of single slots."""
    rules = CountingRules([3, 1, 4])
    envs = make_counting_envs(3, rules)
    env = make_env(Declaring(SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)))
    return Collector(env, StatelessCountingPolicy(rules), frames_per_batch=3)


@pytest.mark.behaviour(2)
def test_slots_that_cannot_be_reset_singly_take_the_episodes_that_their_env_starts() -> None:
    collector = own()
    for seed in (0, None, 0):
        batch = collector.collect(episodes=8, seed=seed)
        found = episodes_of(batch)
        assert len(found) == 8
        assert all(one["observation"][:, 0].tolist() == [*range(len(one))] for one in found)
        check_counting_batch(collector.collect(frames=30), CountingRules([3, 1, 4]))


@array_loop
@pytest.mark.parametrize("asked", [{"max_episode_steps": 2}, {"options": {"start": 1}}])
def test_what_asks_for_single_resets_is_refused_there(asked: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"expected no {next(iter(asked))}: this vector env cannot"
    ):
        own().collect(episodes=2, **asked)


# -------------------------------------------------------------------------- statistics, and waiting


class Constant(gym.Env[Any, Any]):
    """Slot 0 shows 0 for twelve steps, each other slot 100 for one."""

    observation_space = spaces.Box(0, 100, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, slot: int):
        self.level, self.length = (100, 1) if slot else (0, 12)

    def reset(self, **_: Any) -> Any:
        self.steps = 0
        return np.full(1, self.level, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, self.level, np.float32), 0.0, self.steps == self.length, False, {}


def norm(kind: Any = VecNormV2, of: str = "observation", **options: Any) -> Any:
    return kind(in_keys=[of], decay=1.0, **options)


def constants(**options: Any) -> EnvBase:
    return make_env(Constant, 3, **options)


STATISTICS: dict[str, Callable[[], Any]] = {
    "V1": lambda: TransformedEnv(constants(), norm(VecNorm)),
    "V2": lambda: TransformedEnv(constants(), norm(reduce_batch_dims=True)),
    "V2, each slot": lambda: TransformedEnv(constants(), norm()),
    "wait_num": lambda: TransformedEnv(
        constants(backend="process", num_workers=3, wait_num=1, start_method="fork"),
        norm(reduce_batch_dims=True),
    ),
    "no pause": lambda: TransformedEnv(
        make_env(SyncVectorEnv([partial(Constant, slot) for slot in range(3)])), norm(VecNorm)
    ),
    "env by env": lambda: SerialEnv(
        3, [partial(lambda i: TransformedEnv(GymWrapper(Constant(i)), norm()), i) for i in range(3)]
    ),
}


@array_loop
@pytest.mark.filterwarnings("ignore:(This class|The VecNorm)")
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_transforms_count_no_slot_that_waits(name: str) -> None:
    """They count the resets (one of the construction) and the rows that are returned: 6 and 14."""
    env = STATISTICS[name]()
    collector = Collector(env, None, frames_per_batch=3)
    assert len(collector.collect(episodes=3)) == 14
    if name == "env by env":
        counts = [int(one._count["observation"]) for one in (e.transform for e in env._envs)]
        assert counts == [14, 3, 3]
        return
    kept = env.transform
    if isinstance(kept, VecNorm):
        total, _, count = (kept._td[f"observation_{part}"] for part in ("sum", "ssq", "count"))
        assert (total.item(), count.item()) == (600, 20)
    elif name == "V2, each slot":
        assert kept._loc["observation"].flatten().tolist() == [0, 100, 100]
    else:
        assert kept._loc["observation"].item() == pytest.approx(600 / 20)


def test_statistics_that_count_slots_that_wait_are_warned_of() -> None:
    env = TransformedEnv(SerialEnv(2, PendulumEnv), Compose(StepCounter(3), norm(of="th")))
    collector = Collector(env, None, frames_per_batch=4)
    with pytest.warns(UserWarning, match="VecNormV2 also count the rows of slots that wait"):
        collector.collect(episodes=2)
    env.transform[1].freeze()
    collector._runner._warned.clear()
    collector.collect(episodes=2)


# ----------------------------------------------------------------------------- layouts and options


@array_loop
@pytest.mark.parametrize("layout", ["padded", "jagged", "list"])
def test_layouts_are_those_of_split_trajectories(layout: Any) -> None:
    def collected(**options: Any) -> Any:
        collector = Collector(counting_env(3), StatelessCountingPolicy(), frames_per_batch=3)
        return collector.collect(episodes=5, seed=0, **options)

    flat = collected()
    expected, got = split_trajectories(flat, layout=layout), collected(layout=layout)
    assert len(got) == 5
    if layout == "jagged":
        expected, got = ([*one["observation"].unbind()] for one in (expected, got))
    assert_same(got, expected)


TRIED = [
    *("compact-obs", "no-trajectory-ids", "no-buffers", "storing-device", "same-td"),
    *("policy-and-env-device", "reset-and-truncate"),
]


@on_arrays("options", TRIED, parent=["compact-obs", "no-buffers", "reset-and-truncate"])
def test_options_mean_what_they_mean_in_iteration(options: str) -> None:
    """The same steps, and the same entries as a batch of iteration."""

    def collected(**given: Any) -> tuple[Collector, Any]:
        collector = Collector(
            counting_env(3), StatelessCountingPolicy(), frames_per_batch=12, **given
        )
        return collector, collector.collect(episodes=5, seed=0)

    _, plain = collected()
    collector, batch = collected(**OPTIONS[options])
    like = collector.collect(frames=12)
    assert set(batch.keys(True, True)) == set(like.keys(True, True))
    assert batch.device == like.device
    shared = set(plain.keys(True, True)) & set(batch.keys(True, True)) - {("collector", "traj_ids")}
    for key in shared:
        assert_same(batch[key], plain[key])


@pytest.mark.behaviour(5)
def test_random_actions_take_no_policy() -> None:
    collector = Collector(make_env("CartPole-v1", 3), frames_per_batch=3)
    found = []
    for random in (True, False):
        torch.manual_seed(0)
        found.append(collector.collect(episodes=9, seed=0, random=random)["action"])
    assert_same(*found)
