"""Collection resumes in another process, bit for bit."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl.checkpoint import Checkpoint, StateDictCheckpointAdapter
from torchrl.collectors import Collector as ParentCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)

from tdcollect import Collector, load_checkpoint, make_env, save_checkpoint
from tdcollect.envs.traits import base_of

from ..forkserver import run as forked
from .oracle import UPSTREAM, assert_same, seed_everything
from .policies import actor, recurrent

pytestmark = [pytest.mark.filterwarnings(UPSTREAM), pytest.mark.behaviour(29)]

SAVED_AFTER, MORE = 3, 4


class Dice(gym.Env[Any, Any]):
    """Draws from a generator of its own, which only its snapshot knows."""

    observation_space = gym.spaces.Box(-10, 10, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self._own = np.random.default_rng(random.randrange(2**32))
        self._sum = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._sum = 0.0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self._sum += self._own.normal() + float(self.np_random.random())
        return self._look(), self._sum, abs(self._sum) > 4, False, {}

    def _look(self) -> Any:
        return np.array([self._sum, self._own.normal()], np.float32)

    def snapshot(self) -> Any:
        return {"own": self._own.bit_generator.state, "sum": self._sum}

    def restore(self, snapshot: Any) -> None:
        self._own.bit_generator.state = snapshot["own"]
        self._sum = snapshot["sum"]


def limited_dice() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(Dice(), 9)


class NoSnapshot(Dice):
    """The same without a snapshot: it cannot be restored."""

    snapshot = None  # type: ignore[assignment]
    restore = None  # type: ignore[assignment]


class Frail(gym.Wrapper[Any, Any, Any, Any]):
    """Raises at random, determined by its seed."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.05:
            raise ValueError("the pole broke")
        return super().step(action)


def collector(
    env: Any,
    *transforms: Callable[[], Any],
    num_envs: int | None = 3,
    policy: Callable[[EnvBase], Any] = actor,
    **options: Any,
) -> Collector:
    made: EnvBase = make_env(env, num_envs, **{"resumable": True, **options})
    if transforms:
        made = TransformedEnv(made, Compose(*(transform() for transform in transforms)))
    return Collector(made, policy(made), frames_per_batch=30)


normed = partial(VecNormV2, in_keys=["observation"])
stacked = partial(CatFrames, N=3, dim=-1, in_keys=["observation"])
frail = {"seed": 5, "on_env_error": "restart", "max_restarts": 10_000}
books = {"step_count": True, "episode_reward": True, "is_init": True}

workers = {"backend": "process", "start_method": "fork"}

CASES: dict[str, Callable[[], Collector]] = {
    "seeded": partial(collector, "CartPole-v1", seed=3),
    "unbatched": partial(collector, "CartPole-v1", num_envs=None),
    "bookkeeping in workers": partial(
        collector, "CartPole-v1", max_episode_steps=7, num_workers=2, **workers, **books
    ),
    "mujoco": partial(
        collector,
        "HalfCheetah-v5",
        DoubleToFloat,
        num_envs=2,
        max_episode_steps=25,
    ),
    "leaks in workers": partial(
        collector,
        "BipedalWalker-v3",
        **{"resumable": "history", "max_episode_steps": 13, **workers},
    ),
    "recurrent": partial(collector, "CartPole-v1", policy=partial(recurrent, "gru")),
    "transforms": partial(
        collector, "CartPole-v1", StepCounter, RewardSum, InitTracker, normed, stacked
    ),
    "restarts": partial(collector, Frail, **frail),
    "snapshots in workers": partial(collector, limited_dice, **workers),
}


def make(case: str) -> tuple[Collector, TensorDictReplayBuffer]:
    return CASES[case](), TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=5)


def collected(made: Collector, buffer: TensorDictReplayBuffer, count: int) -> dict[str, Any]:
    """Batches, samples of the buffer, statistics, and the next random numbers."""
    batches, samples = [], []
    iterator = iter(made)
    for _ in range(count):
        batch = next(iterator)
        batches.append(batch.to_dict())
        buffer.extend(batch.reshape(-1).clone())
        samples.append(buffer.sample().to_dict())
    life, window = made.stats.lifetime, made.stats.window
    said = {
        "counters": made.stats(),
        "restarts": base_of(made.env).restarts,
        "returns": torch.tensor(window.returns),
        "lengths": torch.tensor(window.lengths),
        "life": [life.collections, life.steps, life.episodes, str(life.return_stats)],
        "drawn": [torch.rand(3), torch.tensor(np.random.rand(3)), random.random()],  # noqa: NPY002
    }
    return {"batches": batches, "samples": samples, "said": said}


def first_half(case: str, folder: Path) -> dict[str, Any]:
    """Collect and save, then continue: the data that the other process should see."""
    seed_everything(1)
    made, buffer = make(case)
    try:
        collected(made, buffer, SAVED_AFTER)
        save_checkpoint(folder / f"{case}.pt", collector=made, buffer=buffer)
        return collected(made, buffer, MORE)
    finally:
        made.shutdown()


def second_halves(folder: Path) -> None:
    """Resume all cases from their checkpoints, where all else differs; write what follows."""
    torch.set_num_threads(1)
    for case in CASES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seed_everything(2)
            made, buffer = make(case)
            load_checkpoint(folder / f"{case}.pt", collector=made, buffer=buffer)
            result = collected(made, buffer, MORE)
            made.shutdown()
        result["lost"] = [str(w.message) for w in caught if "resumed" in str(w.message)]
        torch.save(result, folder / f"{case}.after.pt")


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """The data of each collection, uninterrupted and resumed in a second process."""
    folder = tmp_path_factory.mktemp("halves")
    expected = {case: first_half(case, folder) for case in CASES}
    done = forked(second_halves, folder, cwd=folder)
    assert not done.returncode, done.stderr[-3000:]
    return {case: (expected[case], torch.load(folder / f"{case}.after.pt")) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_another_process_goes_on_with_the_same_data(
    halves: dict[str, tuple[Any, Any]], case: str
) -> None:
    """Batches, samples of a replay buffer beside, counters, statistics and random numbers."""
    expected, found = halves[case]
    assert found.pop("lost") == []
    assert_same(found, expected)


def test_a_run_that_is_saved_is_the_run_that_is_not(halves: dict[str, tuple[Any, Any]]) -> None:
    seed_everything(1)
    made, buffer = make("seeded")
    collected(made, buffer, SAVED_AFTER)
    assert_same(collected(made, buffer, MORE), halves["seeded"][0])


def test_the_same_collector_goes_back_and_another_between_collections_by_episodes() -> None:
    seed_everything(0)
    made, other = (collector("CartPole-v1", seed=1) for _ in range(2))

    def run(one: Collector) -> Any:
        return [one.collect(episodes=3), next(iter(one)), next(iter(one))]

    run(made)
    state = made.state_dict()
    expected = run(made)
    for one in (made, other):
        one.load_state_dict(state)
        assert_same(run(one), expected)


# ----------------------------------------------------------------- envs that cannot be brought back


gym_cartpole = partial(GymEnv, "CartPole-v1")
LOST = {
    "not asked for": (
        partial(collector, "CartPole-v1", resumable=False),
        r"slots \[0, 1, 2\]: it was made without make_env\(resumable=True\)",
    ),
    "own generator in workers": (
        partial(collector, NoSnapshot, max_episode_steps=50, num_workers=2, **workers),
        r"slots \[0, 1, 2\]: its episode came out differently as it was",
    ),
    "vector env": (
        lambda: collector(
            gym.make_vec("CartPole-v1", 3, vectorization_mode="sync"),
            num_envs=None,
            resumable=False,
        ),
        "the backend 'gymnasium' cannot save its envs",
    ),
    "torchrl": (
        lambda: Collector(SerialEnv(3, gym_cartpole), frames_per_batch=30),
        "the env is a SerialEnv, not one of tdcollect",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_an_env_that_cannot_be_brought_back_starts_a_new_episode_and_says_so(case: str) -> None:
    make_collector, reason = LOST[case]
    seed_everything(0)
    made, other = make_collector(), make_collector()
    stream = iter(made)
    next(stream)
    before = next(stream)
    with pytest.warns(UserWarning, match=reason):
        other.load_state_dict(made.state_dict())
    made.shutdown()
    after = next(iter(other))
    ids = after["collector", "traj_ids"]
    assert not np.isin(ids, before["collector", "traj_ids"]).any()
    assert other.stats.lifetime.collections == 3
    assert other._parent.frames == 90
    # The episodes that were lost count nowhere; those that end now count whole.
    done = after["next", "done"].squeeze(-1)
    ended = done.nonzero()
    lengths = other.stats.latest.lengths
    assert len(lengths) == len(ended)
    first = {int(slot): int(step) + 1 for slot, step in reversed(ended.tolist())}
    assert set(first.values()) <= set(lengths.tolist())
    other.shutdown()


def test_other_slots_go_on_where_one_is_lost() -> None:
    kinds = itertools.cycle([Dice, NoSnapshot, Dice])
    seed_everything(0)
    made, other = (collector(lambda: gym.wrappers.TimeLimit(next(kinds)(), 50)) for _ in range(2))
    stream = iter(made)
    next(stream)
    state = made.state_dict()
    expected = next(stream)
    with pytest.warns(UserWarning, match=r"\(slots \[1\]: its episode came out differently"):
        other.load_state_dict(state)
    found = next(iter(other))
    first = found[:, 0]["collector", "traj_ids"]
    assert first[[0, 2]].tolist() == expected[[0, 2], 0]["collector", "traj_ids"].tolist()
    assert first[1] > expected[:, 0]["collector", "traj_ids"].max()
    # The actions of all slots come from one stream of random numbers: up to the first that
    # differs, which is in the second step, all that the others show is the same.
    for entry in ("observation", "action", ("next", "observation")):
        assert_same(found[[0, 2], 0][entry], expected[[0, 2], 0][entry])


def test_trajectories_per_batch_start_anew_and_say_so() -> None:
    def build() -> Collector:
        env = make_env("CartPole-v1", 3, resumable=True)
        return Collector(env, actor(env), frames_per_batch=30, trajs_per_batch=2, traj_format="cat")

    seed_everything(0)
    made, other = build(), build()
    next(iter(made))
    with pytest.warns(UserWarning, match="the rows of unfinished episodes are not saved"):
        other.load_state_dict(made.state_dict())
    batch = next(iter(other))
    assert batch["next", "done"].sum() == 2
    assert batch["collector", "traj_ids"][0] > made._carrier["collector", "traj_ids"].max()


def test_the_state_of_torchrls_own_collector_is_loaded_as_that_one_does() -> None:
    seed_everything(0)
    env = make_env("CartPole-v1", 3, seed=0)
    theirs = ParentCollector(env, actor(env), frames_per_batch=30)
    next(iter(theirs))
    state = theirs.state_dict()
    theirs.shutdown()
    ours = collector("CartPole-v1", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours.load_state_dict(state)
    assert ours._frames == 30
    assert_same(dict(ours.policy.state_dict()), dict(state["policy_state_dict"]))
    assert ours._carrier["collector", "traj_ids"].min() >= 3


def test_the_state_of_another_env_is_refused_and_so_is_a_closed_env() -> None:
    made, other, closed = (collector("CartPole-v1", num_envs=slots) for slots in (3, 2, 3))
    closed.env.close()
    slots = ValueError, "expected the state of an env with 2 slots .* got one with 3 slots"
    refused = slots, (RuntimeError, "cannot load .*: the env is closed; make a new one")
    for one, (error, message) in zip((other, closed), refused, strict=True):
        before = {name: value.clone() for name, value in one.policy.state_dict().items()}
        with pytest.raises(error, match=message):
            one.load_state_dict(made.state_dict())
        assert_same(dict(one.policy.state_dict()), before)  # nothing was loaded


# ----------------------------------------------------------------------------------- components


def test_each_component_is_saved_and_loaded_by_name() -> None:
    seed_everything(0)
    made, other = (collector("CartPole-v1", normed) for _ in range(2))
    next(iter(made))
    since_0_15 = {"collector_progress"} & ParentCollector.state_dict(made).keys()
    kept = {
        "policy": {"policy_state_dict"},
        "transforms": {"env_state_dict"},
        "counters": {"frames", "iter", "traj_pool"} | since_0_15,
        "statistics": {"statistics"},
        "random": {"random"},
        "envs": {"envs"},
    }
    parts = {component: made.state_dict(components=[component]) for component in kept}
    assert {component: set(part) for component, part in parts.items()} == kept
    state, before = made.state_dict(), other.state_dict()
    assert set(state) == set().union(*kept.values())
    with pytest.raises(KeyError, match=r"to load a part, name it: components=\['counters'\]"):
        other.load_state_dict(parts["counters"])
    other.load_state_dict(state, components=["policy", "transforms"])
    after = other.state_dict()
    for entry in ("policy_state_dict", "env_state_dict"):
        assert_same(dict(after[entry]), dict(state[entry]))
    for entry in kept["counters"]:
        assert_same(after[entry], before[entry])
    other.load_state_dict(parts["counters"], components=["counters"])
    assert_same(other.state_dict()["frames"], state["frames"])


def test_statistics_alone_count_no_episode_that_they_did_not_see_begin() -> None:
    seed_everything(0)
    made, other, third = (collector("CartPole-v1", seed=0) for _ in range(3))
    next(iter(made))
    next(iter(other))
    other.load_state_dict(made.state_dict(), components=["statistics"])
    episodes = other.stats.lifetime.episodes
    batch = next(iter(other))
    ended = batch["next", "done"].sum(1).reshape(-1)
    assert other.stats.lifetime.episodes - episodes == sum(max(0, int(e) - 1) for e in ended)
    # Slots without the counters get new trajectory ids.
    third.load_state_dict(made.state_dict(), components=["envs"])
    assert_same(third._carrier["observation"], made._carrier["observation"])
    assert third._carrier["collector", "traj_ids"].tolist() == [3, 4, 5]


def versioned(version: int | None) -> Collector:
    env = make_env("CartPole-v1", 3)
    policy, tracks = actor(env), version is not None
    made = Collector(env, policy, frames_per_batch=30, track_policy_version=tracks)
    if tracks:
        made.policy_version_tracker.version = version
    return made


@pytest.mark.parametrize(
    ("there", "here", "if_newer"), [(5, 4, True), (4, 4, True), (3, 4, True), (3, 4, False)]
)
def test_weights_are_applied_only_if_newer_where_that_is_asked_for(
    there: int, here: int, if_newer: bool
) -> None:
    learner, worker = versioned(there), versioned(here)
    before = {name: weight.clone() for name, weight in worker.policy.state_dict().items()}
    state = learner.state_dict(components=["policy"])
    worker.load_state_dict(state, components=["policy"], if_newer=if_newer)
    applied = there > here or not if_newer
    assert_same(
        dict(worker.policy.state_dict()), dict(learner.policy.state_dict()) if applied else before
    )
    assert worker.policy_version == (there if applied else here)
    with pytest.raises(ValueError, match="expected weights with a version that is an int, there"):
        versioned(None).load_state_dict(state, components=["policy"], if_newer=True)


# ------------------------------------------------------------------------------------ other tools


def test_torchrls_checkpoint_saves_and_loads_collectors(tmp_path: Path) -> None:
    def checkpoint(made: Collector) -> Checkpoint:
        adapter = StateDictCheckpointAdapter(payload_format="directory")
        return Checkpoint().register("collector", made, adapter=adapter)

    seed_everything(0)
    made, other = (collector("CartPole-v1", normed) for _ in range(2))
    stream = iter(made)
    next(stream)
    checkpoint(made).save(tmp_path / "run")
    expected = next(stream)
    checkpoint(other).load(tmp_path / "run")
    assert_same(next(iter(other)), expected)


class Closes(Dice):
    """Gives no snapshot once it is closed."""

    is_open = True

    def snapshot(self) -> Any:
        assert self.is_open
        return super().snapshot()

    def close(self) -> None:
        self.is_open = False


LAST = {
    "process": ("CartPole-v1", workers, {}),
    "by-arrival": (
        "CartPole-v1",
        {**workers, "num_workers": 2, "wait_num": 1},
        {"by_arrival": True},
    ),
    "snapshots": (Closes, {}, {}),
}


@pytest.mark.parametrize("case", LAST)
def test_a_collector_is_saved_after_its_last_batch(case: str) -> None:
    env, options, more = LAST[case]

    def made(total: int) -> Collector:
        seed_everything(0)
        slots = make_env(env, 4, resumable=True, **options)
        found = Collector(slots, frames_per_batch=40, total_frames=total, **more)
        found.set_seed(0)
        return found

    ended = made(80)
    list(ended)
    state = ended.state_dict()
    other = made(160)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other.load_state_dict(state)  # warns of slots that do not come back
    rest = list(other)
    assert [len(batch.flatten()) for batch in rest] == [40, 40]
    if case != "by-arrival":
        uninterrupted = list(made(160))
        assert_same(rest, uninterrupted[2:])


def test_an_env_that_was_closed_before_it_was_saved_starts_new_episodes() -> None:
    env = make_env("CartPole-v1", 2, resumable=True, **workers)
    ended = Collector(env, frames_per_batch=40)
    ended.rollout()
    env.close()
    state = ended.state_dict()
    other = make_env("CartPole-v1", 2, resumable=True)
    with pytest.warns(UserWarning, match="the env was closed before it was saved"):
        Collector(other, frames_per_batch=40).load_state_dict(state)
    with pytest.raises(RuntimeError, match="cannot render: the env is closed; make a new one"):
        env.render()


def normed_gym() -> TransformedEnv:
    return TransformedEnv(gym_cartpole(), VecNorm(["observation"]))


def test_the_statistics_inside_of_a_serial_env_are_saved_after_the_last_batch() -> None:
    env = SerialEnv(2, normed_gym)
    ended = Collector(env, frames_per_batch=40, total_frames=40)
    list(ended)
    counts = [
        worker["_extra_state"]["observation_count"].item()
        for worker in ended.state_dict()["env_state_dict"].values()
    ]
    assert all(count > 10 for count in counts)
    assert env.is_closed
