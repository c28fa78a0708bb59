"""``collector.stats`` equals a gymnasium loop, TorchRL's RewardSum, and a loop over steps."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvBase, RewardSum, StepCounter, TransformedEnv
from torchrl.testing import mocking_classes as mocks

import tdcollect
from tdcollect import Collector, make_env, slot_seed
from tdcollect.collect.statistics import Collection, Tally, row_ends
from tdcollect.keys import entry_path

from .envs import ENVS, cartpole, make_toy
from .loops import on_arrays
from .oracle import UPSTREAM, seed_everything
from .policies import lean

pytestmark = [pytest.mark.filterwarnings(UPSTREAM)]

Episode = tuple[int, float, int]
both_ways = pytest.mark.usefixtures("arrays")


def toy(num_envs: int | None = 3) -> EnvBase:
    """Rewards are drawn from a normal distribution: sums in another order differ."""
    return make_env(partial(make_toy, 40), num_envs)


def episodes(found: Collection) -> list[Episode]:
    """(slot, return, length) of each episode."""
    assert found.returns.dtype == np.float64
    assert found.lengths.dtype == found.slots.dtype == np.int64
    return list(
        zip(found.slots.tolist(), found.returns.tolist(), found.lengths.tolist(), strict=True)
    )


def collected(collector: Any, batches: int) -> list[list[Episode]]:
    """The episodes that ended in each of several batches."""
    stream = iter(collector)
    return [episodes(collector.stats.latest) for _ in itertools.islice(stream, batches)]


def plain_loop(seed: int, slots: int, steps: int) -> list[tuple[int, Episode]]:
    """(last step, episode) of slots that gymnasium alone plays, in the order of ending."""
    ended = []
    for slot in range(slots):
        env = gym.make("CartPole-v1")
        observation, _ = env.reset(seed=slot_seed(seed, slot))
        total, length = 0.0, 0
        for step in range(steps):
            observation, reward, terminated, truncated, _ = env.step(int(observation[0] > 0))
            total, length = total + float(reward), length + 1
            if terminated or truncated:
                ended.append((step, (slot, total, length)))
                observation, _ = env.reset()
                total, length = 0.0, 0
    return sorted(ended)


# ------------------------------------------------------------------------------------- episodes


@both_ways
@pytest.mark.behaviour(24, 25, 26)
@pytest.mark.parametrize("steps", [1, 7])
def test_episodes_are_those_of_a_plain_gymnasium_loop(steps: int) -> None:
    collector = Collector(cartpole(), lean, frames_per_batch=3 * steps)
    collector.set_seed(5)
    batches = 70 // steps
    expected = plain_loop(5, 3, batches * steps)
    assert len(expected) > 4
    assert collected(collector, batches) == [
        [episode for step, episode in expected if step // steps == i] for i in range(batches)
    ]


def grid() -> EnvBase:
    limits = torch.tensor([[2, 4, 3], [5, 2, 7]])
    return mocks.CountingBatchedEnv(max_steps=limits, batch_size=[2, 3])


@both_ways
@pytest.mark.behaviour(26)
@on_arrays(
    "name",
    ["cartpole-books", "cartpole-same-step", "toy", "toy-one-step-episodes", "torchrl-vector"],
    parent=["cartpole-unbatched", "toy", "torchrl-serial", "grid"],
)
def test_episodes_agree_with_reward_sum_and_step_counter(name: str) -> None:
    made = grid() if name == "grid" else ENVS[name]()
    env = TransformedEnv(made, RewardSum(in_keys=["reward"], out_keys=["total"]))
    env.append_transform(StepCounter(step_count_key="count"))
    slots = env.batch_size.numel()
    seed_everything(0)
    collector = Collector(env, frames_per_batch=11 * slots)
    some = 0
    for batch in itertools.islice(collector, 5):
        rows = batch.reshape(slots, -1)["next"]
        step, slot, _ = rows["done"].transpose(0, 1).nonzero().unbind(-1)
        latest = collector.stats.latest
        assert latest.steps == batch.numel()
        assert latest.episodes == len(step)
        some += len(step)
        assert (latest.slots == slot.numpy()).all()
        assert (latest.lengths == rows["count"][slot, step, 0].numpy()).all()
        np.testing.assert_allclose(latest.returns, rows["total"][slot, step, 0], 1e-4, 1e-5)
    assert some > 0
    assert collector.stats.lifetime.episodes == some


def naive(slots: Any, reward: Any, done: Any) -> list[Episode]:
    """The episodes of rows ``[F]`` by a loop."""
    total, length, ended = defaultdict(float), defaultdict(int), []
    for slot, value, over in zip(slots.tolist(), reward.tolist(), done.tolist(), strict=True):
        total[slot] += value
        length[slot] += 1
        if over:
            ended.append((slot, total.pop(slot), length.pop(slot)))
    return ended


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    often=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    together=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_sums_over_batches_are_those_of_a_loop(
    count: int, cuts: list[int], often: float, together: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    total = sum(cuts) * (count if together else 1)
    slots = np.arange(total) % count if together else rng.integers(0, count, total)
    reward = rng.normal(size=total).astype(np.float32)
    done = rng.random(total) < often
    tally = Tally(count)
    found: list[Episode] = []
    for start, steps in zip(np.cumsum([0, *cuts]), cuts, strict=False):

        def laid(values: Any, start: int = start, steps: int = steps) -> Any:
            if not together:
                return values[start : start + steps][None]
            return values[start * count : (start + steps) * count].reshape(steps, count).T

        ends = row_ends(laid(done), None if together else laid(slots)[0])
        assert ends.steps == laid(done).size
        ended = tally.feed(ends, laid(reward))
        found += zip(*(x.tolist() for x in ended), strict=True)
    assert found == naive(slots, reward, done)


# --------------------------------------------------------------------------------------- resets


@both_ways
@pytest.mark.parametrize(
    ("reset", "left"),
    [
        (lambda collector: collector.reset(), []),
        (lambda collector: collector.set_seed(0), []),
        (lambda collector: collector.reset(1), [0, 2]),
        (lambda collector: collector.reset([1]), [0, 2]),
        (lambda collector: collector.reset(torch.tensor([False, True, False])), [0, 2]),
    ],
)
def test_episodes_that_a_reset_cuts_short_are_not_counted(reset: Any, left: list[int]) -> None:
    collector = Collector(cartpole(max_episode_steps=5), frames_per_batch=3 * 4)
    collector.rollout()  # four of five steps
    reset(collector)
    collector.rollout()
    assert episodes(collector.stats.latest) == [(slot, 5.0, 5) for slot in left]
    collector.rollout()
    begun = [(slot, 5.0, 5) for slot in range(3) if slot not in left]
    assert episodes(collector.stats.latest)[: len(begun)] == begun


@both_ways
def test_episodes_with_steps_that_an_error_took_are_not_counted() -> None:
    calls = itertools.count()

    def fails_once(tensordict: TensorDictBase) -> TensorDictBase:
        if next(calls) == 6:
            raise OSError("the sixth call")
        return lean(tensordict)

    collector = Collector(cartpole(max_episode_steps=5), fails_once, frames_per_batch=3 * 4)
    collector.rollout()
    with pytest.raises(OSError, match="the sixth call"):
        collector.rollout()
    lengths = []
    for _ in range(4):
        collector.rollout()
        lengths += collector.stats.latest.lengths.tolist()
    # The error took steps 5 and 6: the end of a slot's first episode and the start of its second.
    # Of 16 steps more, four end the second, ten are two whole ones.
    assert lengths == [5] * 3 * 2
    assert collector.stats.lifetime.episodes == 6


# ------------------------------------------------------------------------- collecting by count


@both_ways
@pytest.mark.behaviour(24, 26)
def test_collect_by_frames_goes_on_with_the_episodes_of_iteration() -> None:
    collector = Collector(cartpole(), lean, frames_per_batch=3 * 7)
    collector.set_seed(5)
    found = collected(collector, 1)
    collector.collect(frames=3 * 50)
    found += [episodes(collector.stats.latest), *collected(collector, 1)]
    expected = plain_loop(5, 3, 64)
    limits = [range(7), range(7, 57), range(57, 64)]
    assert found == [[episode for step, episode in expected if step in limit] for limit in limits]
    assert collector.stats.latest.steps == 21
    assert collector.stats.lifetime.steps == 3 * 64


@both_ways
@pytest.mark.behaviour(24, 25, 26)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_collect_by_episodes_counts_these_in_the_order_of_starting(count: int) -> None:
    collector = Collector(toy(), lean, frames_per_batch=3 * 7)
    collector.rollout()
    in_iteration = collector.stats.lifetime.episodes
    batch = collector.collect(episodes=count)
    latest = collector.stats.latest
    ends = batch["next", "done"].flatten().nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends[:-1])]
    rewards = batch["next", "reward"].flatten().double()
    assert latest.lengths.tolist() == [e + 1 - s for s, e in zip(starts, ends, strict=True)]
    assert latest.returns.tolist() == [
        sum(rewards[s : e + 1].tolist()) for s, e in zip(starts, ends, strict=True)
    ]
    assert latest.slots[:3].tolist() == list(range(min(count, 3)))
    assert latest.episodes == count
    assert latest.steps == len(batch)
    assert collector.stats.lifetime.episodes == in_iteration + count


@both_ways
def test_episodes_in_flight_do_not_outlive_a_collection_by_episodes() -> None:
    collector = Collector(cartpole(max_episode_steps=5), lean, frames_per_batch=3 * 4)
    collector.rollout()
    collector.collect(episodes=2)
    assert episodes(collector.stats.latest) == [(0, 5.0, 5), (1, 5.0, 5)]
    collector.rollout()
    assert collector.stats.latest.episodes == 0
    collector.rollout()
    assert collector.stats.latest.lengths.tolist() == [5, 5, 5]
    collector.collect(episodes=4, max_episode_steps=3)
    assert collector.stats.latest.returns.tolist() == [3.0] * 4


# ------------------------------------------------------------------------------- shaped rewards


def double(observation: Any, action: Any, reward: Any, done: Any) -> Any:
    return 2 * reward - done.float()


@both_ways
@pytest.mark.behaviour(17)
@pytest.mark.parametrize("options", [{}, {"split_trajs": True}, {"postproc": lambda b: b[..., :1]}])
def test_shaped_returns_stand_beside_the_envs(options: Any) -> None:
    collector = Collector(toy(), frames_per_batch=3 * 7, reward_shaping=double, **options)
    collector.set_seed(0)
    stream, some = iter(collector), []
    for collect in (lambda: next(stream),) * 9 + (
        lambda: collector.collect(episodes=5),
        lambda: collector.collect(frames=3 * 60),
    ):
        collect()
        latest = collector.stats.latest
        np.testing.assert_allclose(latest.shaped_returns, 2 * latest.returns - 1, 1e-6, 1e-6)
        some += latest.shaped_returns.tolist()
    assert latest.episodes > 0
    assert collector.stats.lifetime.shaped_return_stats.mean == pytest.approx(np.mean(some))
    assert "shaped    mean" in str(collector.stats)


def test_shaped_returns_leave_out_episodes_whose_steps_were_not_shaped() -> None:
    collector = Collector(
        cartpole(max_episode_steps=5), frames_per_batch=3 * 4, reward_shaping=double
    )
    collector.rollout()  # the batch as the env gave it
    assert collector.stats.latest.shaped_returns is None
    stream = iter(collector)
    next(stream)
    assert collector.stats.latest.episodes == 3
    assert len(collector.stats.latest.shaped_returns) == 0
    next(stream)
    assert collector.stats.latest.shaped_returns.tolist() == [9.0] * 3


# ------------------------------------------------------------------------------------- options


def with_buffer(**options: Any) -> dict[str, Any]:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4)
    return {"replay_buffer": buffer, **options}


def drop_rewards(batch: TensorDictBase) -> TensorDictBase:
    return batch.exclude(("next", "reward"))


def spoil_rewards(batch: TensorDictBase) -> TensorDictBase:
    batch["next", "reward"].fill_(torch.nan)
    return batch


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "split_trajs": lambda: {"split_trajs": True},
    "postproc that drops": lambda: {"postproc": drop_rewards},
    "postproc that writes": lambda: {"postproc": spoil_rewards},
    "return_same_td": lambda: {"return_same_td": True},
    "no buffers": lambda: {"use_buffers": False},
    "replay buffer": with_buffer,
    "replay buffer, step by step": lambda: with_buffer(extend_buffer=False),
    "random frames": lambda: {"init_random_frames": 60},
    "no trajectory ids": lambda: {"track_traj_ids": False},
    "set_truncated": lambda: {"set_truncated": True},
    "compact": lambda: {"compact_obs": True},
    "reset_at_each_iter": lambda: {"reset_at_each_iter": True},
    "truncated": lambda: {"max_frames_per_traj": 5},
}


@both_ways
@on_arrays("name", OPTIONS, parent=["nothing", "no buffers", "reset_at_each_iter", "truncated"])
def test_options_do_not_change_what_is_counted(name: str) -> None:
    """Slots are told apart by their lengths: 5 steps, whatever the option makes of the batch."""
    env = cartpole(**{} if name == "truncated" else {"max_episode_steps": 5})
    collector = Collector(env, frames_per_batch=3 * 7, **OPTIONS[name]())
    counts = (1,) * 5 if name == "reset_at_each_iter" else (1, 1, 2, 1, 2)
    per_batch = [[(slot, 5.0, 5) for _ in range(ended) for slot in range(3)] for ended in counts]
    assert collected(collector, 5) == per_batch


@both_ways
def test_whole_trajectories() -> None:
    collector = Collector(
        cartpole(max_episode_steps=5), frames_per_batch=3 * 7, trajs_per_batch=3, traj_format="cat"
    )
    for batch in itertools.islice(collector, 2):
        assert batch["next", "reward"].sum() == 15
    assert collector.stats.lifetime.return_stats.mean == 5


def test_a_batch_that_ends_early_counts_the_steps_taken() -> None:
    stops = iter([False] * 5 + [True])
    interruptor = SimpleNamespace(collection_stopped=lambda: next(stops))
    env = cartpole(max_episode_steps=5)
    collector = Collector(env, frames_per_batch=300, interruptor=interruptor)
    collector.rollout()
    latest = collector.stats.latest
    assert latest.steps == 3 * 6
    assert episodes(latest) == [(slot, 5.0, 5) for slot in range(3)]


# --------------------------------------------------------------------------------- kinds of envs


class Returns(tdcollect.Hooks):
    def __init__(self) -> None:
        self.of: list[float] = []

    def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> None:
        self.of += returns.tolist()


@both_ways
def test_returns_of_groups_of_agents_are_the_mean_of_their_means() -> None:
    seen = Returns()
    collector = Collector(ENVS["mock-many-keys"](), frames_per_batch=7, hooks=seen)
    batch = torch.cat([collector.rollout().clone() for _ in range(2)])["next"]
    keys, flags = (
        [batch.get(key).reshape(14, -1) for key in found]
        for found in (collector.env.reward_keys, collector.env.done_keys)
    )
    rewards = [reward.double().mean(-1) for reward in keys]
    done = torch.cat(flags, -1).any(-1)
    mean, *groups = (
        [total for _, total, _ in naive(torch.zeros(14), reward, done)]
        for reward in (torch.stack(rewards).mean(0), *rewards)
    )
    assert len(mean) > 1
    assert seen.of == collector.stats.window.returns.tolist() == pytest.approx(mean)
    latest = collector.stats.latest
    for key, returns in zip(collector.env.reward_keys, groups, strict=True):
        expected = pytest.approx(returns[-latest.episodes :])
        assert latest.group_returns[entry_path(key)].tolist() == expected
    assert "nested_2/reward  mean" in str(collector.stats)
    other = Collector(ENVS["mock-many-keys"](), frames_per_batch=7)
    other.load_state_dict(collector.state_dict(), components=["statistics"])
    assert str(other.stats) == str(collector.stats)


def truncated_alone() -> EnvBase:
    """Its episodes go on where a trajectory ends."""
    return TransformedEnv(cartpole(None), StepCounter(5, update_done=False))


@pytest.mark.parametrize(
    "make",
    [ENVS["mock-nested-flags"], ENVS["mock-many-keys"], ENVS["mock-unlike"], truncated_alone],
)
def test_episodes_end_where_the_collector_starts_a_trajectory(make: Any) -> None:
    collector = Collector(make(), frames_per_batch=30)
    batches = list(itertools.islice(collector, 2))
    ids = torch.cat([batch["collector", "traj_ids"] for batch in batches])
    _, lengths = ids.unique_consecutive(return_counts=True)
    assert collector.stats.lifetime.episodes in (len(lengths) - 1, len(lengths))
    assert collector.stats.lifetime.length_stats.max == lengths.max()


# --------------------------------------------------------------------------- figures and print


@pytest.mark.behaviour(24, 25, 26)
def test_life_and_window_hold_the_batches_together() -> None:
    collector = Collector(toy(), frames_per_batch=3 * 50, stats_window=10)
    returns, lengths, steps = [], [], 0
    for _ in itertools.islice(collector, 4):
        latest = collector.stats.latest
        for values, found in (
            (latest.returns, latest.return_stats),
            (latest.lengths, latest.length_stats),
        ):
            assert found == (values.mean(), values.std(), values.min(), values.max())
        returns += latest.returns.tolist()
        lengths += latest.lengths.tolist()
        steps += latest.steps
    life, window = collector.stats.lifetime, collector.stats.window
    assert (life.collections, life.episodes, life.steps) == (4, len(returns), steps)
    all_returns, all_lengths = np.array(returns), np.array(lengths)
    for values, found in ((all_returns, life.return_stats), (all_lengths, life.length_stats)):
        expected = (values.mean(), values.std(), values.min(), values.max())
        assert found == pytest.approx(expected, rel=1e-9)
    assert window.episodes == 10 < len(returns)
    assert window.returns.tolist() == returns[-10:]
    assert window.lengths.tolist() == lengths[-10:]
    assert window.return_stats.mean == all_returns[-10:].mean()
    assert latest.group_returns == {}
    assert "group" not in collector.state_dict()["statistics"]["form"]


@pytest.mark.behaviour(24)
def test_statistics_print_readably(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    collector = Collector(cartpole(max_episode_steps=5), frames_per_batch=3 * 7)
    assert repr(collector.stats) == "Statistics(nothing collected yet)"
    collector.rollout()
    assert str(collector.stats.latest) == (
        "episodes  3\n"
        "steps     21\n"
        "time      1 s, 21 steps/s\n"
        "returns   mean 5, std 0, min 5, max 5\n"
        "lengths   mean 5, std 0, min 5, max 5"
    )
    collector.rollout()
    lines = str(collector.stats).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "latest collection",
        "lifetime",
        "latest 6 episodes",
    ]
    assert "  steps     42" in lines
    short = Collector(cartpole(max_episode_steps=5), frames_per_batch=3 * 4)
    short.rollout()
    latest = short.stats.latest
    assert latest.episodes == len(latest.returns) == len(latest.lengths) == 0
    assert latest.return_stats is latest.length_stats is short.stats.lifetime.return_stats is None
    assert "returns   None" in str(latest)


# ----------------------------------------------------------------------------------------- timers


class Ticking:
    """A clock that advances when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


class TakesTime(gym.Env[Any, Any]):
    """An env with one second per step, two per reset, and three steps per episode."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, clock: Ticking):
        self.clock = clock

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.clock.now += 2
        self.left = 3
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.clock.now += 1
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


def timed(clock: Ticking, steps: int, **options: Any) -> Collector:
    """A collector with two slots, whose policy takes ten seconds."""

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        clock.now += 10
        return lean(tensordict)

    env = make_env(partial(TakesTime, clock), 2)
    return Collector(env, policy, frames_per_batch=2 * steps, **options)


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("timers", [False, True])
def test_timers(monkeypatch: pytest.MonkeyPatch, timers: bool, arrays: bool) -> None:
    clock = Ticking(monkeypatch)
    collector = timed(clock, 3, timers=timers)
    stream = iter(collector)
    next(stream)
    clock.now += 1000
    first = collector.stats.latest
    next(stream)
    second, life = collector.stats.latest, collector.stats.lifetime
    env_seconds, policy_seconds = 2 * (3 * 1 + 2), 3 * 10
    for found, times in ((first, 1), (second, 1), (life, 2)):
        assert found.seconds == times * (env_seconds + policy_seconds)
        assert found.steps_per_second == 6 / 40
        assert found.env_seconds == (times * env_seconds if timers else None)
        assert found.policy_seconds == (times * policy_seconds if timers else None)
    assert first.seconds_between is None
    assert second.seconds_between == life.seconds_between == 1000
    assert ("policy    30 s" in str(second)) == timers


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("count", [{"frames": 6}, {"episodes": 2}], ids=str)
def test_timers_of_collect(
    monkeypatch: pytest.MonkeyPatch, count: dict[str, int], arrays: bool
) -> None:
    collector = timed(Ticking(monkeypatch), 1, timers=True)
    collector.collect(**count)
    latest = collector.stats.latest
    assert latest.policy_seconds == 30
    # By frames, the slots restart after the last step; by episodes, before the first, and those of
    # an env that cannot wait restart at the end, too.
    first, last = ("episodes" in count) * 4, (("frames" in count) or not arrays) * 4
    assert latest.env_seconds == 2 * 3 + last
    assert latest.seconds == first + 30 + 2 * 3 + last


# ------------------------------------------------------------------------ the attribute, and off


def test_statistics_off() -> None:
    collector = Collector(cartpole(), lean, frames_per_batch=30, statistics=False)
    assert repr(collector.stats) == "Statistics(off)"
    for name in ("latest", "lifetime", "window"):
        with pytest.raises(RuntimeError, match=r"made with statistics=False; leave the option out"):
            getattr(collector.stats, name)


def test_statistics_do_not_keep_the_collector_alive() -> None:
    env = cartpole()
    collector = Collector(env, lean, frames_per_batch=30)
    stats = collector.stats
    collector.rollout()
    del collector
    assert env.is_closed
    assert stats.latest.steps == 30
    with pytest.raises(RuntimeError, match="the collector is gone"):
        stats()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="expected stats_window to be a positive int, got 0"):
        Collector(cartpole(), frames_per_batch=30, stats_window=0)
    with pytest.raises(ValueError, match=r"expected statistics=True with timers=True"):
        Collector(cartpole(), frames_per_batch=30, statistics=False, timers=True)
    with pytest.raises(ValueError, match=r"expected no timers with backend='process'.*'direct'"):
        Collector(cartpole, frames_per_batch=30, backend="process", timers=True)
