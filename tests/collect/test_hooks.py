"""Hooks: each event is reported once, in order, with the slots concerned."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvBase

from tdcollect import Collector, Hooks, LogStatistics, make_env
from tdcollect.collect.turns import Frames

from .envs import ENVS, cartpole, make_toy
from .oracle import UPSTREAM, assert_same, seed_everything
from .policies import lean
from .test_by_frames import broken

pytestmark = [pytest.mark.filterwarnings(UPSTREAM)]

both_ways = pytest.mark.usefixtures("arrays")


def toy(num_envs: int | None = 3) -> EnvBase:
    return make_env(partial(make_toy, 6), num_envs)


class Log(Hooks):
    """Records its calls."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.steps: list[TensorDictBase] = []
        self.first_rows: list[TensorDictBase] = []
        self.batches: list[TensorDictBase | None] = []

    def env_created(self, env: EnvBase) -> None:
        self.events.append(("env", env))

    def episodes_started(self, slots: Any, row: TensorDictBase) -> None:
        assert slots.dtype == np.int64
        self.events.append(("started", slots.tolist()))
        self.first_rows.append(row.clone())

    def stepped(self, slots: Any, step: TensorDictBase) -> None:
        assert slots.dtype == np.int64
        self.events.append(("stepped", slots.tolist()))
        self.steps.append(step.clone())

    def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> None:
        assert returns.dtype == np.float64
        assert slots.dtype == lengths.dtype == np.int64
        self.events.append(("ended", slots.tolist(), returns.tolist(), lengths.tolist()))

    def collection_ended(self, batch: TensorDictBase | None, stats: Any) -> None:
        self.events.append(("collection", stats.lifetime.collections if stats.on else None))
        self.batches.append(None if batch is None else batch.clone())

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] == name]


# ------------------------------------------------------------------------------------ what is told


@both_ways
@pytest.mark.behaviour(28)
def test_events_in_order() -> None:
    log = Log()
    env = cartpole(2, max_episode_steps=2)
    collector = Collector(env, lean, frames_per_batch=2 * 3, hooks=log)
    assert log.events == [("env", collector.env)]
    collector.set_seed(0)
    stream = iter(collector)
    next(stream)
    both, ended = [0, 1], ("ended", [0, 1], [2.0, 2.0], [2, 2])
    told = [("started", both), ("stepped", both), ("stepped", both), ended, ("started", both)]
    assert log.events[1:] == [*told, ("stepped", both), ("collection", 1)]
    log.events.clear()
    next(stream)
    taken, new = ("stepped", both), ("started", both)
    assert log.events == [taken, ended, new, taken, taken, ended, new, ("collection", 2)]


@both_ways
@pytest.mark.behaviour(28)
@pytest.mark.parametrize("name", ["toy-unbatched", "cartpole-books", "torchrl-vector"])
def test_steps_and_rows_are_those_of_the_batch(name: str) -> None:
    log = Log()
    seed_everything(0)
    env = ENVS[name]()
    slots = env.batch_size.numel()
    collector = Collector(env, frames_per_batch=slots * 20, hooks=log)
    batches = list(itertools.islice(collector, 2))
    for got, expected in zip(log.batches, batches, strict=True):
        assert (got == expected).all()
    batch = torch.cat(batches, -1)
    for t, step in enumerate(log.steps):
        assert step.batch_size == env.batch_size
        assert (step.select(*batch.keys(True, True)) == batch[..., t]).all()
    assert len(log.steps) == batch.shape[-1]
    # An episode starts at the first step, and after each done one.
    rows = batch.reshape(slots, -1)
    starting = torch.cat([torch.ones(slots, 1).bool(), rows["next", "done"][..., 0]], 1)
    told = iter(zip(log.of("started"), log.first_rows, strict=True))
    for t in starting.any(0).nonzero().flatten().tolist():
        (_, which), row = next(told)
        assert which == starting[:, t].nonzero().flatten().tolist()
        if t < rows.shape[1]:
            first = row["observation"].reshape(slots, -1)[which]
            assert (first == rows["observation"][which, t]).all()
    assert next(told, None) is None


@both_ways
@pytest.mark.behaviour(28)
def test_returns_and_lengths_are_those_of_the_statistics() -> None:
    log, found = Log(), []
    collector = Collector(toy(), lean, frames_per_batch=3 * 7, hooks=log, statistics=False)
    collector.set_seed(3)
    counted = Collector(toy(), lean, frames_per_batch=3 * 7)
    counted.set_seed(3)
    for _ in zip(range(6), collector, counted, strict=False):
        latest = counted.stats.latest
        found += zip(latest.slots, latest.returns, latest.lengths, strict=True)
    told = [episode for _, *arrays in log.of("ended") for episode in zip(*arrays, strict=True)]
    assert told == found
    assert len(told) > 10


@both_ways
def test_whole_episodes() -> None:
    log = Log()
    collector = Collector(toy(), lean, frames_per_batch=3 * 7, hooks=log)
    batch = collector.collect(episodes=7)
    told = [episode for _, *arrays in log.of("ended") for episode in zip(*arrays, strict=True)]
    latest = collector.stats.latest
    assert sorted(told) == sorted(
        zip(latest.slots.tolist(), latest.returns.tolist(), latest.lengths.tolist(), strict=True)
    )
    assert sum(len(slots) for _, slots in log.of("started")) == 7
    assert sum(len(slots) for _, slots in log.of("stepped")) == len(batch)
    assert (log.batches[-1] == batch).all()
    log.events.clear()
    collector.collect(frames=3)
    assert log.events[:2] == [("started", [0, 1, 2]), ("stepped", [0, 1, 2])]


@both_ways
@pytest.mark.parametrize("slots", [1, 2])
def test_an_episode_that_starts_again_does_not_count_the_steps_of_the_broken_one(
    slots: int,
) -> None:
    log = Log()
    batch = broken(slots, log, on_env_error="restart").collect(episodes=4)
    told = [episode for _, *arrays in log.of("ended") for episode in zip(*arrays, strict=True)]
    returns = batch["next", "reward"].reshape(4, 5).sum(1).tolist()
    assert sorted(episode[1:] for episode in told) == sorted(zip(returns, [5] * 4, strict=True))
    assert sum(len(slots) for _, slots in log.of("started")) == 5


@both_ways
def test_episodes_that_a_reset_cuts_short_have_no_end() -> None:
    log = Log()
    collector = Collector(cartpole(max_episode_steps=5), lean, frames_per_batch=3 * 4, hooks=log)
    collector.rollout()
    collector.reset()
    collector.reset(1)
    collector.rollout()
    assert log.of("started") == [("started", [0, 1, 2])] * 2
    assert log.of("ended") == []
    collector.reset(1)
    log.events.clear()
    collector.rollout()
    assert log.of("started") == [("started", [1]), ("started", [0, 2])]
    assert log.of("ended") == [("ended", [0, 2], [5.0, 5.0], [5, 5])]


# -------------------------------------------------------------------------------- numbers of hooks


class Numbers(Hooks):
    """Returns a number for each step, episode and batch."""

    def stepped(self, slots: Any, step: TensorDictBase) -> Any:
        return {"step": step["next", "reward"].sum()}

    def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> Any:
        return {"lengths": lengths} if self.bad else {"a/length": lengths}

    def collection_ended(self, batch: TensorDictBase | None, stats: Any) -> Any:
        return {"batch": torch.tensor(1.5)}

    bad = False


class Written:
    def __init__(self) -> None:
        self.numbers: dict[str, list[float]] = {}

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        self.numbers.setdefault(name, []).append(value)


@both_ways
def test_numbers_join_the_statistics() -> None:
    written = Written()
    hooks = [Numbers(), LogStatistics(written)]
    options = {"frames_per_batch": 3 * 20, "stats_window": 50}
    collector = Collector(toy(), lean, hooks=hooks, **options)
    lengths, steps = [], []
    for _ in range(4):
        batch = collector.rollout()
        latest = collector.stats.latest
        assert latest.logged.keys() == {"step", "a/length", "batch"}
        assert latest.logged["step"].tolist() == batch["next", "reward"].sum((0, 2)).tolist()
        assert latest.logged["a/length"].tolist() == latest.lengths.tolist()
        assert written.numbers["collect/a/length"][-1] == latest.length_stats.mean
        lengths += latest.lengths.tolist()
        steps += latest.logged["step"].tolist()
    window = collector.stats.window
    assert window.logged_stats["batch"] == (1.5, 0, 1.5, 1.5)
    assert [*window.logged["a/length"]] == lengths[-50:]
    assert [*window.logged["step"]] == steps[-50:]
    assert f"mean step {latest.logged_stats['step'].mean:.4g}" in repr(collector.stats)
    assert str(collector.stats).count("logged    a/length: mean") == 2
    other = Collector(toy(), lean, hooks=hooks, **options)
    other.load_state_dict(collector.state_dict(), components=["statistics"])
    assert str(other.stats) == str(collector.stats)


def test_numbers_of_a_collection_that_fails_are_dropped() -> None:
    hook = Numbers()
    collector = Collector(toy(), lean, frames_per_batch=3 * 20, hooks=hook)
    hook.bad = True
    told = r"the hook Numbers.episodes_ended raised ValueError: expected a hook to return .* choose"
    with pytest.raises(RuntimeError, match=told):
        collector.rollout()
    hook.bad = False
    collector.rollout()
    assert len(collector.stats.latest.logged["step"]) == 20
    off = Collector(toy(), lean, frames_per_batch=3, hooks=hook, statistics=False)
    with pytest.raises(RuntimeError, match="made with statistics=False"):
        off.rollout()


@pytest.mark.parametrize("told", [3.5, {1: 2.0}, {"steps": 1}, {"return_mean": 1}, {"episodes": 1}])
def test_what_is_no_number_by_name_is_refused(told: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected a hook to return None, or numbers by names"):
        Collector(toy(), frames_per_batch=3).stats.log(told)


def buffered(**options: Any) -> dict[str, Any]:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    return {"replay_buffer": buffer, **options}


@both_ways
@pytest.mark.parametrize(
    "options",
    [
        {"init_random_frames": 12},
        {"reset_at_each_iter": True, "track_traj_ids": False},
        {"return_same_td": True},
        buffered(),
        buffered(extend_buffer=False),
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any]) -> None:
    log = Log()
    env = cartpole(max_episode_steps=3)
    collector = Collector(env, lean, frames_per_batch=3 * 4, hooks=log, **options)
    for _ in itertools.islice(collector, 2):
        pass
    assert len(log.of("stepped")) == 8
    assert len(log.of("ended")) == 2
    assert len(log.of("collection")) == 2


# ----------------------------------------------------------------------------------- the collector


@both_ways
@pytest.mark.parametrize("name", ["toy", "mock-nested", "mock-unlike"])
def test_hooks_and_timers_change_no_batch(name: str) -> None:
    found = []
    for options in ({}, {"hooks": Log(), "timers": True}):
        seed_everything(0)
        env = ENVS[name]()
        env.set_seed(0)
        collector = Collector(env, frames_per_batch=8 * env.batch_size.numel(), **options)
        found.append([batch.clone() for batch in itertools.islice(collector, 2)])
        assert "step_and_maybe_reset" not in collector.env.__dict__
    assert_same(*found)


def test_what_is_not_overridden_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is prepared for it either: the loop gets no hook to call."""
    given = []

    class Spy(Frames):
        def __init__(self, *args: Any) -> None:
            given.append(args[8])
            super().__init__(*args)

    monkeypatch.setattr("tdcollect.collect.run.Frames", Spy)

    class AtTheEnd(Hooks):
        def collection_ended(self, batch: Any, stats: Any) -> None:
            pass

    for hooks in (None, [], Hooks(), AtTheEnd()):
        Collector(cartpole(), lean, frames_per_batch=3, hooks=hooks).rollout()
    assert given == [None] * 4
    Collector(cartpole(), lean, frames_per_batch=3, hooks=Log()).rollout()
    assert given[-1] is not None


# ------------------------------------------------------------------------------------------ errors


def fails(event: str) -> Hooks:
    """Hooks that raise in one event, the first time."""
    left = [ZeroDivisionError("no more")]

    def once(self: Any, *args: Any) -> None:
        if left:
            raise left.pop()

    return type("Fails", (Hooks,), {event: once})()


@both_ways
@pytest.mark.behaviour(28)
@pytest.mark.parametrize(
    "event", ["episodes_started", "stepped", "episodes_ended", "collection_ended"]
)
def test_an_error_names_its_hook_and_keeps_its_cause(event: str) -> None:
    log, env = Log(), cartpole(max_episode_steps=2)
    collector = Collector(env, lean, frames_per_batch=3 * 4, hooks=[log, fails(event)])
    message = rf"the hook Fails.{event} raised ZeroDivisionError: no more"
    with pytest.raises(RuntimeError, match=message) as raised:
        collector.rollout()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    log.events.clear()
    collector.rollout()  # and goes on
    if event == "episodes_ended":
        assert log.events[0] == ("started", [0, 1, 2])


def test_after_an_error_the_loop_goes_on_from_the_step_told_of() -> None:
    """On arrays: the step is taken, the batch is lost."""
    log = Log()
    collector = Collector(cartpole(), lean, frames_per_batch=3 * 4, hooks=[log, fails("stepped")])
    collector.set_seed(0)
    with pytest.raises(RuntimeError, match=r"Fails\.stepped"):
        collector.rollout()
    batch = collector.rollout()
    assert len(log.steps) == 5  # it was told of the lost one, before the hook that raised
    plain = Collector(cartpole(), lean, frames_per_batch=3 * 5)
    plain.set_seed(0)
    expected = plain.rollout()[:, 1:]
    assert_same(batch.exclude("collector"), expected.exclude("collector"))


def test_after_an_error_in_torchrls_loop_slots_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", False)
    env = cartpole(step_count=True)
    collector = Collector(env, lean, frames_per_batch=3 * 4, hooks=fails("stepped"))
    with pytest.raises(RuntimeError, match=r"Fails\.stepped"):
        collector.rollout()
    assert (collector.rollout()["step_count"][:, 0] == 0).all()


def test_an_error_at_the_start_closes_an_env_that_the_collector_made() -> None:
    made: list[EnvBase] = []

    def make() -> EnvBase:
        made.append(cartpole())
        return made[0]

    with pytest.raises(RuntimeError, match=r"Fails\.env_created raised ZeroDivisionError"):
        Collector(make, lean, frames_per_batch=30, hooks=fails("env_created"))
    assert made[0].is_closed
    own = cartpole()
    with pytest.raises(RuntimeError, match=r"Fails\.env_created"):
        Collector(own, lean, frames_per_batch=30, hooks=fails("env_created"))
    assert not own.is_closed


@pytest.mark.parametrize("hooks", [print, [print], "hooks", Hooks], ids=repr)
def test_what_is_no_hook_is_refused_before_the_env_is_made(hooks: Any) -> None:
    def make() -> EnvBase:
        raise AssertionError("made")

    with pytest.raises(TypeError, match=r"an instance of a subclass of tdcollect.Hooks.*got"):
        Collector(make, frames_per_batch=30, hooks=hooks)
