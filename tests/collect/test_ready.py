"""Slots that go on as they are ready: the data of in step, without its waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SliceSampler
from torchrl.envs import EnvBase, ExplorationType, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import LSTMModule

from tdcollect import Collector, Hooks
from tdcollect.collect.turns import _where

from ..counting import CountingEnv, CountingRules, check_counting_batch
from ..evaluation.policies import deterministic, recurrent
from ..workers.test_process_exit import gone
from ..zoo.uneven import Gated, Naps, Pace, ready_env
from .envs import Toy, box, make_toy
from .oracle import UPSTREAM, assert_same, assert_same_record, random_states, seed_everything
from .policies import tiring

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

FEW = settings(max_examples=4, deadline=None)
THREE = Pace(3, 3, 1, None)


def bests() -> Any:
    """A policy without memory that draws nothing."""
    return deterministic()


def remembering() -> Any:
    """A policy with a hidden state, which draws nothing where exploration is off."""
    return recurrent(LSTMModule)


def collector_of(env: EnvBase, policy: Any = None, **options: Any) -> Collector:
    options = {"frames_per_batch": 4 * env.batch_size.numel(), **options}
    policy = bests() if policy is None else policy
    return Collector(env, policy, exploration_type=ExplorationType.DETERMINISTIC, **options)


Script = Callable[[Any], Iterator[Any]]


def observed(env: EnvBase, script: Script, **options: Any) -> list[tuple[str, Any, Any]]:
    """The values that a script yields of a collector, with the global random states."""
    seed_everything(0)
    env.set_seed(7)
    collector = collector_of(env, **options)
    try:
        return [(f"yield {i}", value, random_states()) for i, value in enumerate(script(collector))]
    finally:
        collector.shutdown(close_env=False)


def told(collector: Collector) -> dict[str, Any]:
    """The statistics, whatever the order in which slots came."""
    latest, lifetime = collector.stats.latest, collector.stats.lifetime
    by_slot = np.argsort(latest.slots, kind="stable")
    episodes = {name: getattr(latest, name)[by_slot] for name in ("slots", "returns", "lengths")}
    return {
        **{name: values.tolist() for name, values in episodes.items()},
        "steps": [latest.steps, lifetime.steps],
        "episodes": lifetime.episodes,
    }


# --------------------------------------------------------------------- batches and whole episodes

BOOKS = {"step_count": True, "episode_reward": True, "is_init": True, "max_episode_steps": 4}
PACES: list[tuple[Pace, dict[str, Any]]] = [
    (Pace(1, 1, 1, None), {}),
    (Pace(3, 3, 1, None), BOOKS),
    (Pace(4, 4, 3, None), {"info_keys": ["left", "noise"], "device": "cpu"}),
    (Pace(5, 3, 2, 0.0005), {}),
]
Pair = tuple[EnvBase, EnvBase]


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[Pair]]:
    """For each pace, an env that is ready and one in step; started once."""
    made = [
        (pace.ready(make_toy, **options), pace.in_step(make_toy, **options))
        for pace, options in PACES
    ]
    yield made
    for pair in made:
        for env in pair:
            env.close()


any_pace = st.integers(0, len(PACES) - 1)


@pytest.mark.behaviour(13)
@pytest.mark.parametrize("policy", [bests, remembering])
@FEW
@given(pace=any_pace, counts=st.lists(st.integers(1, 9), min_size=2, max_size=2))
def test_batches_and_episodes_are_those_of_in_step(
    policy: Callable[[], Any], pairs: list[Pair], pace: int, counts: list[int]
) -> None:
    slots = PACES[pace][0].num_envs

    def script(collector: Any) -> Iterator[Any]:
        collector.set_seed(3)
        stream = iter(collector)
        for count in counts:
            yield next(stream)
            yield told(collector)
            yield collector.collect(frames=count * slots)
        yield collector.collect(frames=2 * slots, reset=True)
        for seed, count in enumerate(counts):
            yield collector.collect(episodes=count, seed=seed)
            yield told(collector)
        yield collector.collect(episodes=counts[0], seed=9, max_episode_steps=3)
        yield collector.collect(frames=3 * slots, seed=5)
        collector.env.set_seed(5)  # the env itself is in step
        yield collector.env.rollout(4, bests(), break_when_any_done=False)

    found, expected = (observed(env, script, policy=policy()) for env in pairs[pace])
    assert_same_record(found, expected)


def test_what_a_policy_keeps_by_itself_is_zeroed_where_an_episode_starts(pairs: list[Pair]) -> None:
    def counts(td: TensorDictBase) -> TensorDictBase:
        td["count"] = td.get("count", torch.zeros(*td.batch_size, 1)) + 1
        return td.set("action", nn.functional.one_hot((td["count"][:, 0] % 2).long(), 2))

    for env in pairs[2]:
        ((_, batch, _),) = observed(env, lambda c: iter([c.collect(episodes=9)]), policy=counts)
        goes_on = torch.where(batch["next", "done"], 0.0, batch["count"])[:-1]
        assert torch.equal(batch["count"], torch.cat([torch.ones(1, 1), goes_on + 1]))


def test_a_program_that_collects_episodes_repeats(pairs: list[Pair]) -> None:
    """Slots run on beyond the episodes asked for, by how long depends on the moment."""

    def script(collector: Any) -> Iterator[Any]:
        collector.set_seed(3)
        for _ in range(3):
            yield collector.collect(episodes=4)
            yield collector.collect(frames=6)

    other = Pace(3, 1, 3, None).ready(make_toy, **BOOKS)
    once, again = (observed(env, script) for env in (pairs[1][0], other))
    assert_same_record(again, once)
    other.close()


class Opening(nn.Module):
    """Draws nothing; opens the gate once another slot has got so far."""

    def __init__(self, gate: Path, far: Callable[[torch.Tensor], bool]):
        super().__init__()
        self.gate, self.far = gate, far
        self.opened = False

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if not self.opened and self.far(observation[:, 0]):
            self.gate.touch()
            self.opened = True
        return torch.nn.functional.one_hot(torch.zeros(observation.shape[:-1]).long(), 2)


def opening(gate: Path, far: Callable[[torch.Tensor], bool]) -> TensorDictModule:
    return TensorDictModule(Opening(gate, far), in_keys=["observation"], out_keys=["action"])


@pytest.mark.behaviour(13)
def test_a_batch_goes_on_beside_a_slot_that_takes_its_time(tmp_path: Path) -> None:
    """Slot 0 waits at its first step, until slots 1 and 2 are at their second one."""
    gate = tmp_path / "gate"
    policy = opening(gate, lambda steps: bool((steps[1:] == 2).all()))
    collector = collector_of(ready_env(partial(Gated, gate), 3, wait_num=2), policy)
    collector.set_seed(0)
    batch = next(iter(collector))
    assert batch["observation"][..., 0].tolist() == [[0, 1, 2, 0]] * 3
    collector.shutdown()


@pytest.mark.behaviour(13)
def test_episodes_go_on_beside_a_slot_that_takes_its_time(tmp_path: Path) -> None:
    """Slot 0 waits until another one is at its third episode."""
    gate = tmp_path / "gate"
    starts = [0]

    def far(steps: torch.Tensor) -> bool:
        starts[0] += int(steps[1] == 1)
        return starts[0] == 3

    collector = collector_of(ready_env(partial(Gated, gate), 2), opening(gate, far))
    batch = collector.collect(episodes=6, seed=0)
    assert batch["observation"][:, 0].tolist() == [0, 1, 2] * 6
    collector.shutdown()


# ------------------------------------------------------------------------------------- by arrival

SLOT, IDS = ("collector", "slot"), ("collector", "traj_ids")


def by_slot(batches: list[TensorDictBase], num_envs: int) -> list[TensorDictBase]:
    """The rows of each slot, in their order."""
    rows = torch.cat(batches)
    return [rows[rows[SLOT] == slot] for slot in range(num_envs)]


def plain(rows: TensorDictBase) -> TensorDictBase:
    """The rows without the collector's entries, their device and the name of their dimension."""
    rows = rows.exclude("collector").contiguous().clear_device_()
    rows.names = [None]
    return rows


def check_rows(batches: list[TensorDictBase], expected: TensorDictBase) -> None:
    """Check rows by arrival against the first steps ``[N, T]`` of in step."""
    for mine, theirs in zip(by_slot(batches, len(expected)), expected, strict=True):
        assert len(mine) <= len(theirs)
        same = theirs[: len(mine)]
        assert_same(plain(mine), plain(same))
        pairs = {*zip(mine[IDS].tolist(), same[IDS].tolist(), strict=True)}
        ours, theirs_ids = ({pair[i] for pair in pairs} for i in (0, 1))
        assert len(pairs) == len(ours) == len(theirs_ids)
    rows = torch.cat(batches)
    assert rows[SLOT].dtype == rows[IDS].dtype == torch.int64
    owners = {*zip(rows[IDS].tolist(), rows[SLOT].tolist(), strict=True)}
    assert len(owners) == len({trajectory for trajectory, _ in owners})


def check_goes_on(rows: TensorDictBase) -> None:
    """Check that each row of a slot begins where the one before led to, in a trajectory."""
    same = rows[IDS][1:] == rows[IDS][:-1]
    assert torch.equal(rows["next", "observation"][:-1][same], rows["observation"][1:][same])


def first_steps(env: EnvBase, steps: int, policy: Any = None) -> TensorDictBase:
    """The first steps ``[N, T]`` of each slot, in step."""
    collector = collector_of(env, policy)
    batch = collector.collect(frames=steps * collector.n_env, seed=3)
    collector.shutdown(close_env=False)
    return batch


@pytest.mark.behaviour(13)
@pytest.mark.parametrize("policy", [bests, remembering])
@FEW
@given(
    pace=any_pace,
    frames=st.integers(1, 11),
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=2),
)
def test_rows_by_arrival_are_each_slots_own_in_order(
    policy: Callable[[], Any], pairs: list[Pair], pace: int, frames: int, counts: list[int]
) -> None:
    """None is lost or doubled across batches, of whatever sizes."""
    ready, in_step = pairs[pace]
    collector = collector_of(ready, policy(), by_arrival=True, frames_per_batch=frames)
    collector.set_seed(3)
    stream, batches = iter(collector), []
    for count in counts:
        batches.append(next(stream))
        assert batches[-1].shape == (frames,)
        batches.append(collector.collect(frames=count))
        assert batches[-1].shape == (count,)
    total = 2 * frames + sum(counts)
    assert collector.stats.lifetime.steps == total
    collector.shutdown(close_env=False)
    check_rows(batches, first_steps(in_step, total, policy()))


class Weighing(nn.Module):
    """Acts by its weight, whatever it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(*observation.shape[:-1], 1).clone()


class Weighed(Gated):
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,))


@pytest.mark.behaviour(13)
@pytest.mark.parametrize("wait", [{"wait_num": 2}, {"wait_num": 3, "wait_timeout": 0.01}], ids=str)
def test_no_batch_waits_and_rows_hold_the_version_of_the_weights_that_acted(
    wait: dict[str, Any], tmp_path: Path
) -> None:
    """Those of slots in flight, when weights change, are older than the rest of their batch."""
    gate, weighing = tmp_path / "gate", Weighing()
    policy = TensorDictModule(weighing, in_keys=["observation"], out_keys=["action"])
    env = ready_env(partial(Weighed, gate), 3, **wait)
    collector = collector_of(
        env, policy, by_arrival=True, frames_per_batch=10, track_policy_version=True
    )
    collector.set_seed(0)
    stream, batches = iter(collector), []
    for version in range(3):
        batches.append(next(stream))
        assert {*batches[-1][SLOT].tolist()} == {1, 2}
        assert batches[-1]["next", "policy_version"].max() == version
        with torch.no_grad():
            weighing.weight += 1
        collector.update_policy_weights_()
    gate.touch()
    while 0 not in batches[-1][SLOT]:
        batches.append(next(stream))
    for rows in batches:
        assert torch.equal(rows["action"][:, 0].long(), rows["next", "policy_version"])
        assert torch.equal(rows["policy_version"], rows["next", "policy_version"])
    for slot, rows in enumerate(by_slot(batches, 3)):
        assert rows["observation"][:, 0].tolist() == [i % 3 for i in range(len(rows))]
        assert (rows["next", "policy_version"].diff() >= 0).all()
        assert rows["next", "policy_version"][0] == 0 or slot
    assert collector.collect(frames=6)["next", "policy_version"][-1] == 3
    collector.shutdown()


class Noting(Hooks):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.ended: list[tuple[int, float, int]] = []

    def stepped(self, slots: Any, step: TensorDictBase) -> None:
        self.slots += slots.tolist()

    def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> None:
        self.ended += zip(slots.tolist(), returns.tolist(), lengths.tolist(), strict=True)


def test_hooks_and_statistics_see_rows_by_arrival(pairs: list[Pair]) -> None:
    hooks = Noting()
    collector = collector_of(pairs[3][0], by_arrival=True, hooks=hooks, timers=True)
    rows = collector.collect(frames=60, seed=3)
    ended = []
    for row in rows["next", "done"][:, 0].nonzero()[:, 0].tolist():
        mine = rows[: row + 1][rows[IDS][: row + 1] == rows[IDS][row]]
        rewards = mine["next", "reward"].double().sum().item()
        ended.append((int(mine[SLOT][0]), rewards, len(mine)))
    # Rows that came with the last ones, and are beyond the count, are of the next batch.
    assert hooks.slots[:60] == rows[SLOT].tolist()
    assert np.allclose(hooks.ended[: len(ended)], ended)
    latest = collector.stats.latest
    told = [*zip(latest.slots, latest.returns, latest.lengths, strict=True)]
    assert np.allclose(sorted(told), sorted(ended))
    assert latest.steps == 60
    assert latest.policy_seconds > 0
    assert latest.env_seconds > 0
    collector.shutdown(close_env=False)


# --------------------------------------------------------------------------------- replay buffers


@pytest.mark.parametrize("apart", [False, True])
def test_replay_buffers_take_rows_as_they_arrive(apart: bool, pairs: list[Pair]) -> None:
    """Each slot has a buffer of its own in an ensemble."""
    members = [
        ReplayBuffer(
            storage=LazyTensorStorage(200),
            sampler=SliceSampler(slice_len=2, traj_key=IDS) if apart else None,
            batch_size=8,
        )
        for _ in range(5 if apart else 1)
    ]
    collector = collector_of(
        PACES[3][0].ready(make_toy),  # closed with its total_frames
        by_arrival=True,
        frames_per_batch=20,
        total_frames=120,
        replay_buffer=ReplayBufferEnsemble(*members, batch_size=40, routing_key=SLOT)
        if apart
        else members[0],
    )
    collector.set_seed(3)
    assert list(collector) == [None] * 6
    held = [member[:] for member in members]
    assert sum(map(len, held)) == 120
    check_rows(held, first_steps(pairs[3][1], 120))
    if apart:
        assert [{*rows[SLOT].tolist()} for rows in held] == [{slot} for slot in range(5)]
    for member in members if apart else ():
        slices = member.sample().reshape(-1, 2)
        assert torch.equal(slices["next", "observation"][:, 0], slices["observation"][:, 1])
        assert torch.equal(slices[IDS][:, 0], slices[IDS][:, 1])


# -------------------------------------------------------------------------------------- refusals


def test_what_has_no_meaning_by_arrival_is_refused(pairs: list[Pair]) -> None:
    sampler = SliceSampler(slice_len=2, traj_key=IDS)
    sliced = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
    ensemble = ReplayBufferEnsemble(*[ReplayBuffer(storage=LazyTensorStorage(9))] * 2)
    ready, in_step = pairs[1]
    for env, told, options in (
        *((ready, name, {name: True}) for name in ("split_trajs", "reset_at_each_iter")),
        (ready, "return_same_td", {"return_same_td": True}),
        (ready, "SliceSampler", {"replay_buffer": sliced}),
        (ready, "ReplayBufferEnsemble", {"replay_buffer": ensemble}),
        (in_step, "wait_num", {}),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            collector_of(env, by_arrival=True, **options)


# ------------------------------------------------------------------------------ following programs


def test_seeding_and_resetting_restart_slots_in_flight(pairs: list[Pair]) -> None:
    collector = collector_of(pairs[3][0], by_arrival=True, frames_per_batch=8)
    expected = first_steps(pairs[3][1], 16)
    earlier = -1
    for restart in (collector.set_seed, lambda seed: collector.collect(frames=1, seed=seed)):
        next(iter(collector))
        begun = restart(3)
        batches = [begun] if isinstance(begun, TensorDictBase) else []
        batches.append(next(iter(collector)))
        check_rows(batches, expected)
        assert torch.cat(batches)[IDS].min() > earlier
        earlier = int(torch.cat(batches)[IDS].max())
    collector.reset()
    assert (next(iter(collector))[IDS] > earlier).all()
    collector.shutdown(close_env=False)


RULES = CountingRules((3, 5, 2))


@pytest.mark.parametrize(
    ("error", "count"),
    [(KeyboardInterrupt, {"frames": 90}), (ZeroDivisionError, {"episodes": 30})],
)
def test_an_interrupt_amid_flight_leaves_a_collector_to_go_on_with(
    error: type[BaseException], count: dict[str, int]
) -> None:
    """The counting env raises at a step after an episode's end, and at a wrong action."""
    env = Pace(1, 1, 1, None).ready(partial(CountingEnv, 0, RULES))
    several = THREE.ready(partial(CountingEnv, 0, RULES))
    for made in (env, several):
        collector = collector_of(made, tiring(18, error, RULES))
        with pytest.raises(error):
            collector.collect(**count)
        batch = collector.collect(frames=60)
        if made is env:
            check_counting_batch(batch, rules=RULES)
        for rows in batch:
            check_goes_on(rows)
        assert collector.collect(episodes=5)["next", "done"].sum() == 5
        collector.shutdown()


def test_random_rows_and_those_of_the_policy_do_not_mix(pairs: list[Pair]) -> None:
    """A row that acted randomly has none of the policy's outputs, though it may arrive late."""
    collector = collector_of(
        pairs[3][0], remembering(), by_arrival=True, frames_per_batch=7, init_random_frames=7
    )
    stream = iter(collector)
    rows = torch.cat([next(stream) for _ in range(2)])
    rows = torch.cat([rows, collector.collect(frames=7, random=True), next(stream)])
    acted = (rows["features"] != 0).any(-1)
    assert not acted[:7].any()
    assert acted[-1]
    for mine in by_slot([rows], 5):
        check_goes_on(mine)
    collector.shutdown(close_env=False)


def test_gradients_by_arrival_end_with_the_batch(pairs: list[Pair]) -> None:
    ready, in_step = pairs[3]
    collector = collector_of(ready, remembering(), by_arrival=True)
    collector.set_seed(3)
    batches = [
        collector.collect(frames=7, gradients=gradients) for gradients in (True, True, False)
    ]
    for batch, gradients in zip(batches, (True, True, False), strict=True):
        assert any(value.requires_grad for value in batch.values(True, True)) is gradients
        if gradients:
            batch["features"].sum().backward()
    collector.shutdown(close_env=False)
    check_rows([batch.detach() for batch in batches], first_steps(in_step, 21, remembering()))


def test_slots_in_flight_that_somebody_moved_start_anew(pairs: list[Pair]) -> None:
    def refused() -> None:
        with pytest.raises(RuntimeError, match="reset"):
            env.rand_step()

    env = pairs[3][0]
    collector = collector_of(env, by_arrival=True, frames_per_batch=9)
    stream = iter(collector)
    for move in (env.reset, partial(env.rollout, 3), refused):
        earlier = next(stream)[IDS].max()
        while not env.stepper.away:
            earlier = next(stream)[IDS].max()
        move()
        rows = torch.cat([next(stream) for _ in range(6)])
        assert rows[SLOT].unique().tolist() == [0, 1, 2, 3, 4]
        assert (rows[IDS] > earlier).all()
    collector.shutdown(close_env=False)


def leaning(observation: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot((observation[..., 2] > 0).long(), 2)


@pytest.mark.parametrize("components", [None, ["counters", "statistics"]], ids=str)
def test_loading_a_state_takes_slots_out_of_flight(components: list[str] | None) -> None:
    env = THREE.ready(partial(gym.make, "CartPole-v1"), resumable=True)
    balance = TensorDictModule(leaning, ["observation"], ["action"])
    collector = collector_of(env, balance, by_arrival=True, frames_per_batch=9)
    collector.set_seed(3)
    before = next(iter(collector))
    state = collector.state_dict(components)
    on = torch.cat([collector.collect(frames=9) for _ in range(3)])
    collector.load_state_dict(state, components=components)
    again = torch.cat([collector.collect(frames=9) for _ in range(3)])
    if components is None:
        pairs = zip(by_slot([before, on], 3), by_slot([before, again], 3), strict=True)
        for mine, theirs in pairs:
            count = min(len(mine), len(theirs))
            assert_same(plain(mine[:count]), plain(theirs[:count]))
    for mine in by_slot([again], 3):
        check_goes_on(mine)
    collector.shutdown()


def test_a_reset_of_some_slots_drops_their_rows_in_flight() -> None:
    """Statistics and hooks count episodes by what the env itself adds up."""
    env, hooks = Pace(4, 2, 1, None).ready(make_toy, episode_reward=True), Noting()
    collector = collector_of(env, by_arrival=True, frames_per_batch=5, hooks=[hooks])
    stream = iter(collector)
    expected: list[float] = []
    for _ in range(12):
        batch = next(stream)
        done = batch["next", "done"][:, 0]
        returns = batch["next", "episode_reward"][done, 0].tolist()
        assert sorted(collector.stats.latest.returns) == pytest.approx(sorted(returns), abs=1e-5)
        expected += returns
        collector.reset([0, 1])
    rounded = {round(value, 3) for _, value, _ in hooks.ended}
    assert rounded.issuperset(round(value, 3) for value in expected)
    collector.shutdown()


def test_rows_from_two_devices_come_together_where_the_new_ones_are() -> None:
    """The hidden state of a policy on a device begins on the CPU. Meta plays the device."""
    mask = torch.tensor([True, False])
    for new, old in (("meta", "cpu"), ("cpu", "cpu")):
        value, other = torch.ones(2, 3, device=new), torch.zeros(2, 3, device=old)
        assert _where(mask, value, other).device.type == new


class Dying(Toy):
    """Kills its worker at a reset, when a file is there; the file goes with it."""

    def __init__(self, file: Path):
        super().__init__(box(3), gym.spaces.Discrete(2))
        self.file = file

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.file.exists():
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("by_arrival", [True, False])
def test_slots_that_fall_with_their_worker_start_anew(by_arrival: bool, tmp_path: Path) -> None:
    """One that was ready meanwhile falls, too, and its worker is at the other's reset by then."""
    file = tmp_path / "file"
    env = ready_env(
        lambda: Naps(Dying(file)), 4, num_workers=2, on_env_error="restart", max_restarts=99
    )
    collector = collector_of(env, by_arrival=by_arrival)
    collector.set_seed(3)
    batches = []
    for _ in range(6):
        file.touch()
        batches.append(collector.collect(frames=16))
    assert env.restarts > 6
    slots = by_slot(batches, 4) if by_arrival else torch.cat(batches, 1)
    for rows in slots:
        check_goes_on(rows)
    collector.shutdown()


@pytest.mark.parametrize("by_arrival", [True, False])
def test_ending_amid_flight_leaves_no_worker(by_arrival: bool, tmp_path: Path) -> None:
    env = ready_env(partial(Gated, tmp_path / "gate"), 3, timeout=None)
    pids = [process.pid for process in env.stepper.backend._pool.processes]
    calls = iter(range(100))

    def far(steps: torch.Tensor) -> bool:
        if next(calls) == 20:
            raise KeyboardInterrupt
        return False

    policy = opening(tmp_path / "other", far)
    collector = collector_of(env, policy, frames_per_batch=300, by_arrival=by_arrival)
    with pytest.raises(KeyboardInterrupt):
        collector.collect(frames=300, seed=0)
    (tmp_path / "gate").touch()
    collector.shutdown()
    assert gone(pids)


# ------------------------------------------------------------------------------------- transforms


class Unknown(T.Transform):
    """Looks at a single row at a time, which nobody knows."""

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("twice", 2 * next_tensordict["observation"])

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        return self._call(reset)


TRANSFORMS: dict[str, list[Callable[[], T.Transform]]] = {
    "counters": [T.StepCounter, T.RewardSum, T.InitTracker],
    "limit": [partial(T.StepCounter, max_steps=3)],
    "on-rows": [
        partial(T.ObservationNorm, 0.3, 1.7, in_keys=["observation"]),
        partial(T.RewardScaling, 0.5, 2.0),
    ],
    "frames": [partial(T.CatFrames, 2, -1, in_keys=["observation"], out_keys=["frames"])],
    "VecNorm": [partial(T.VecNorm, in_keys=["observation"])],
    "Unknown": [Unknown],
}


def transformed(env: EnvBase, name: str) -> EnvBase:
    return TransformedEnv(env, T.Compose(*[make() for make in TRANSFORMS[name]]))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_give_the_batches_of_in_step_and_the_rows(name: str, pairs: list[Pair]) -> None:
    """A transform that mixes rows, or may, has all slots stepped together, which is said."""

    def script(collector: Any) -> Iterator[Any]:
        yield collector.collect(frames=25, seed=3)
        yield collector.collect(episodes=5, seed=4)

    found, expected = (observed(transformed(env, name), script) for env in pairs[3])
    assert_same_record(found, expected)
    ready, in_step = (transformed(env, name) for env in pairs[3])
    if name in ("VecNorm", "Unknown"):
        with pytest.raises((TypeError, ValueError), match=name):
            collector_of(ready, by_arrival=True)
        collector = collector_of(transformed(pairs[3][0], name))
        (part,) = (part for part in collector.explain() if part.name == "slots")
        assert part.how.startswith(f"in step: {name} may depend")
    else:
        collector = collector_of(ready, by_arrival=True)
        rows = [collector.collect(frames=21, seed=3), collector.collect(frames=9)]
        check_rows(rows, first_steps(in_step, 30))
    collector.shutdown(close_env=False)
