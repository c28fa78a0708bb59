"""Envs that fail: the errors, and the data of a collection that continues."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, GymWrapper, RewardSum, SerialEnv, StepCounter, TransformedEnv

from tdcollect import Collector, EvaluationCollector, Hooks, evaluate, make_env, split_trajectories
from tdcollect.envs.slots import RestartsExhausted, SlotError
from tdcollect.envs.spaces import Bookkeeping
from tdcollect.seeding import restart_seed, slot_seed, slot_seeds
from tdcollect.testing import check_env, diagnose

from ..collect.policies import actor
from ..counting import StatelessCountingPolicy, check_counting_batch
from ..testing.faulty_envs import IN_STEP, IN_WORKERS, RULES, faulty_env
from ..zoo.process_envs import Odd

FAULTS = [
    *(("serial", what) for what in IN_STEP),
    *(("serial", f"{what} at reset") for what in ("raise", "shape", "nan")),
    *(("process", what) for what in ("raise", *IN_WORKERS, "kill at reset")),
]
MARK = ("next", "env_error")
SEED = 65
"""Of the envs: episode 0 of slots 0, 1 and 2 has 6, 8 and 5 steps, as these seeds choose."""
TELLS = {
    "raise": "ZeroDivisionError: the pole fell through the cart",
    "shape": r"ValueError: expected an observation of shape \(3,\), as the env's space says, got",
    "dtype": "ValueError: expected an observation of dtype float32, as .* says, got <U",
    "nan": r"ValueError: expected finite .* as check_finite=.* got nan at \[0\] of 'observation'",
    "infinite reward": r"ValueError: expected finite numbers, .* got inf at \[0\] of 'reward'",
    "four": "ValueError: not enough values to unpack",
    "kill": "WorkerLost: the worker of slot 1 was killed by SIGKILL",
    "hang": r"WorkerLost: the worker of slot 1 was ended, as .* took more than 0.4 s",
}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes envs of faulty slots, closed at the end; each with faults of its own."""
    made: list[Any] = []

    def build(faults: Any, *args: Any, **options: Any) -> Any:
        made.append(faulty_env(tmp_path / str(len(made)), faults, *args, **options))
        return made[-1]

    yield build
    for env in made:
        env.close()


def collected(env: EnvBase, steps: int = 40, policy: Any = None, of: Any = Collector) -> Any:
    """One batch ``[N, steps]`` from ``SEED``, and its collector."""
    torch.manual_seed(0)
    frames = steps * env.batch_size.numel()
    collector = of(env, policy or actor(env), frames_per_batch=frames)
    env.set_seed(SEED)
    collector.reset()
    torch.manual_seed(1)
    return next(iter(collector)), collector


def assert_same(one: TensorDictBase, other: TensorDictBase) -> None:
    for key in other.keys(True, True):
        assert (one[key] == other[key]).all(), key


# ------------------------------------------------------------------------------------- by default


@pytest.mark.behaviour(30)
@pytest.mark.parametrize(("backend", "what"), FAULTS)
def test_a_failure_is_told_with_slot_episode_step_and_seed(
    make: Any, backend: str, what: str
) -> None:
    """Slot 1 has episodes of 8, 6 and 5 steps; its seventh step is the seventh of its first."""
    fault, _, at_reset = what.partition(" at ")
    env = make({1: what}, backend=backend, max_restarts=None, at=1 if at_reset else 7)
    env.set_seed(SEED)
    with pytest.raises(SlotError) as info:
        env.rollout(40, break_when_any_done=False)
    told = rf"step\(\) of slot 1, episode 0, step \d, seed {slot_seed(SEED, 1)}: "
    if at_reset:
        told = rf"reset\(\) of slot 1, episode 1, seed {slot_seed(SEED, 1)} at episode 0: "
    assert re.search(f"^the env failed in {told}.*{TELLS[fault]}", str(info.value)), info.value
    cause = info.value.__cause__
    assert info.value.causes == {1: cause}
    # The env's own traceback is kept.
    assert ("in fail\n" in "".join(format_exception(cause))) == (fault == "raise")


def test_the_error_survives_a_pipe() -> None:
    """As worker processes of others send it."""
    error = SlotError("step", {1: ValueError("x")}, {1: ", episode 2, step 3"})
    again = pickle.loads(pickle.dumps(error))
    assert (
        str(again)
        == str(error)
        == ("the env failed in step() of slot 1, episode 2, step 3: ValueError: x")
    )


# ------------------------------------------------------------------------------------- on request


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> TensorDictBase:
    """A batch of slots that do not fail."""
    return collected(faulty_env(tmp_path_factory.mktemp("sound"), {}))[0]


@pytest.mark.behaviour(30)
@pytest.mark.parametrize(("backend", "what"), FAULTS)
def test_collection_goes_on_and_no_other_row_changes(
    make: Any, sound: TensorDictBase, backend: str, what: str
) -> None:
    """Each kind of failure in both collectors: TorchRL's takes those of the serial backend."""
    collector_class = TorchRLCollector if backend == "serial" else Collector
    batch, _ = collected(make({1: what}, backend=backend), of=collector_class)
    others = [0, 2]
    assert_same(batch[others].exclude("collector"), sound[others].exclude("collector"))
    marks = batch[MARK][1, :, 0].nonzero().reshape(-1).tolist()
    assert not batch[MARK][others].any()
    if what.endswith("at reset"):
        assert marks == []
    else:
        assert marks == [6]  # the seventh step
        assert_same(batch[1, :6], sound[1, :6])
    # After a failed reset nothing tells that the env counts its episodes from anew.
    checked = others if what.endswith("at reset") else [0, 1, 2]
    given = {"slots": checked, "predicted": False, "require": [("collector", "traj_ids")]}
    check_counting_batch(batch[checked], RULES, **given)
    assert (batch["observation"][1, 1:, 0] - batch["next", "observation"][1, :-1, 0])[
        ~batch["next", "done"][1, :-1, 0]
    ].count_nonzero() == 0


def test_the_marked_row_repeats_the_last_true_observation(make: Any) -> None:
    batch, _ = collected(make({1: "nan"}))
    row, following = batch[1, 6], batch[1, 7]
    assert row[MARK].all()
    assert (row["next", "observation"] == row["observation"]).all()
    assert row["next", "reward"] == 0
    assert row["next", "truncated"].all()
    assert row["next", "done"].all()
    assert not row["next", "terminated"].any()
    assert not following["env_error"].any()
    broken = [part for part in split_trajectories(batch, layout="list") if part[MARK].any()]
    assert len(broken) == 1
    assert broken[0][MARK].reshape(-1).nonzero().reshape(-1).tolist() == [len(broken[0]) - 1]
    # The env built anew is seeded, so that runs repeat: the counting env shows the seed.
    assert following["observation"].tolist() == [0, restart_seed(slot_seed(SEED, 1)) % 2**20, 1]


def test_a_seed_that_was_asked_for_is_kept(make: Any) -> None:
    env = make({1: "raise at reset"}, at=0)
    shown = [seed % 2**20 for seed in slot_seeds(50, range(3))]
    assert env.reset(seed=50)["observation"][:, 1].tolist() == shown


def test_rollouts_go_on_too_but_an_env_built_anew_must_be_reset(make: Any) -> None:
    env = make({1: "raise"})
    batch = env.rollout(30, StatelessCountingPolicy(), break_when_any_done=False)
    assert batch[MARK].sum() == 1
    check_counting_batch(batch, RULES)
    env = make({1: "raise"}, at=1)
    state = env.rand_action(env.reset())
    following = env.step(state)["next"]
    assert following["done"].reshape(-1).tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match=r"expected reset\(\) before the first step"):
        env.step(env.rand_action(following.clone()))


# ------------------------------------------------------------------------- workers of several slots


def test_the_slots_of_a_lost_worker_break_off_together_and_the_others_go_on(make: Any) -> None:
    """With two workers of two slots, a killed one takes its slots' episodes with it."""
    sound, _ = collected(make({}, 4))
    batch, collector = collected(make({1: "kill"}, 4, backend="process", num_workers=2))
    assert batch[MARK][:, 6, 0].tolist() == [True, True, False, False]
    assert batch[MARK].sum() == 2
    assert_same(batch[2:].exclude("collector"), sound[2:].exclude("collector"))
    check_counting_batch(batch, RULES, predicted=False)
    assert collector.stats.latest.restarts == 2


def test_a_worker_lost_in_a_reset_breaks_off_its_other_slots_at_their_next_step(make: Any) -> None:
    batch, _ = collected(make({1: "kill at reset"}, 3, backend="process", num_workers=1, at=6))
    reset_at = int(batch["next", "done"][1, :, 0].nonzero()[0]) + 1
    marks = batch[MARK][..., 0].nonzero().tolist()
    assert [0, reset_at] in marks or [2, reset_at] in marks
    assert all(slot != 1 and column == reset_at for slot, column in marks)
    check_counting_batch(batch[[0, 2]], RULES, slots=[0, 2], predicted=False)


def test_slots_that_wait_fall_with_their_worker(make: Any) -> None:
    """Slot 0 waits, by TorchRL's mask, while slot 1 takes the worker along."""
    env = make({1: "kill"}, 2, backend="process", num_workers=1, at=2)
    row = env.rand_action(env.reset())
    row = env.rand_action(env.step(row)["next"].clone())
    row["_step"] = torch.tensor([[False], [True]])
    following = env.step(row)["next"]
    assert following["env_error"].reshape(-1).tolist() == [False, True]
    following = env.rand_action(env.maybe_reset(following.clone()))
    following = env.step(following)["next"]
    assert following["env_error"].reshape(-1).tolist() == [True, False]
    assert following["observation"][:, 0].tolist() == [1, 1]


# ---------------------------------------------------------------------------------------- a bound


@pytest.mark.behaviour(30)
def test_the_bound_on_restarts_is_kept(make: Any) -> None:
    env = make({0: "raise", 1: "shape", 2: "nan"}, max_restarts=2)
    told = (
        r"^the env failed in step\(\) of slot 0, episode .*; slot 1, .*; slot 2, .*; 0 envs were "
        "built anew already and max_restarts=2: correct the env, or pass a larger max_restarts"
    )
    with pytest.raises(RestartsExhausted, match=told) as info:
        env.rollout(40, break_when_any_done=False)
    assert type(info.value.__cause__) is SlotError


def test_an_env_that_cannot_be_built_at_first_is_tried_again(tmp_path: Path) -> None:
    tries: list[int] = []

    def build() -> gym.Env[Any, Any]:
        tries.append(0)
        if len(tries) in (3, 4):
            raise OSError("no licence left")
        env = gym.make("CartPole-v1")
        if len(tries) == 2:
            env.step = None  # type: ignore[method-assign, assignment]  # it cannot be called
        return env

    env = make_env(build, 2, on_env_error="restart", max_restarts=3)
    assert env.rollout(5, break_when_any_done=False)[MARK].sum() == 1
    assert env.restarts == 3
    tries.clear()
    env = make_env(build, 2, on_env_error="restart", max_restarts=2)
    with pytest.raises(RestartsExhausted, match=r"failed in rebuild\(\) of slot 1: .*no licence"):
        env.rollout(5)


def test_an_env_that_always_fails_ends_in_an_error() -> None:
    env = make_env(partial(Odd, "raise at reset"), 2, on_env_error="restart")
    with pytest.raises(RestartsExhausted, match="today; 100 envs were built anew already"):
        env.reset()


# ------------------------------------------------------------------------------------- what follows


def test_bookkeeping_is_that_of_torchrls_transforms(make: Any) -> None:
    counted = Bookkeeping(step_count=True, episode_reward=True)
    native, _ = collected(make({1: "raise"}, bookkeeping=counted))
    env = TransformedEnv(make({1: "raise"}), StepCounter())
    env.append_transform(RewardSum())
    other, _ = collected(env, of=TorchRLCollector)
    assert native[MARK].any()
    assert_same(native, other)


@pytest.mark.behaviour(30)
@pytest.mark.parametrize(("stock_loop", "timers"), [(False, True), (True, False)])
def test_statistics_count_restarts_and_leave_broken_episodes_out(
    make: Any, monkeypatch: pytest.MonkeyPatch, stock_loop: bool, timers: bool
) -> None:
    monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", not stock_loop)
    told: list[float] = []

    class Told(Hooks):
        def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> None:
            told.extend(returns.tolist())

    env = make({1: "raise", 2: "raise at reset"})
    policy = StatelessCountingPolicy()
    collector = Collector(env, policy, frames_per_batch=30, hooks=Told(), timers=timers)
    batch = torch.cat([collector.rollout().clone() for _ in range(4)], 1)
    whole = [
        part["next", "reward"].sum().item()
        for part in split_trajectories(batch, layout="list")
        if part["next", "done"].any() and not part[MARK].any()
    ]
    life = collector.stats.lifetime
    assert life.restarts == 2
    assert collector.stats.latest.restarts == 0
    assert "restarts  2" in str(life)
    assert life.episodes == len(whole) < int(batch["next", "done"].sum())
    assert sorted(told) == sorted(whole)
    assert np.isclose(life.return_stats.mean, np.mean(whole))
    assert life.steps == batch.numel()


@pytest.mark.behaviour(30)
@pytest.mark.parametrize("stock_loop", [False, True])
def test_whole_episodes_take_the_place_of_broken_ones(
    make: Any, monkeypatch: pytest.MonkeyPatch, stock_loop: bool
) -> None:
    monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", not stock_loop)
    env = make({1: "raise", 2: "nan at reset"})
    collector = Collector(env, StatelessCountingPolicy(), frames_per_batch=30)
    batch = collector.collect(episodes=9)
    assert not batch[MARK].any()
    parts = split_trajectories(batch, layout="list")
    assert len(parts) == 9 == collector.stats.latest.episodes
    for part in parts:
        step, episode, slot = part["observation"].long().unbind(-1)
        assert step.tolist() == list(range(RULES.length(int(slot[0]), int(episode[0]))))
    assert collector.stats.latest.restarts == 2


def test_test_episodes_start_again_where_their_env_was_built_anew(make: Any) -> None:
    """As they do where it raises: on their own seed, with a retry in the record."""
    env = make({0: "raise"}, 1, at=60)
    running = EvaluationCollector(env, StatelessCountingPolicy(), 12, seed=0)
    records = {e.record.index: e.record for e in running.run()}
    env = make({}, 1)
    sound = EvaluationCollector(env, StatelessCountingPolicy(), 12, seed=0)
    for finished in sound.run():
        assert records[finished.record.index].digest == finished.record.digest
    assert sum(record.restarts for record in records.values()) == 1


# --------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_honoured_is_refused_before_anything_is_made() -> None:
    vector = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    restart = {"on_env_error": "restart"}
    for env, options, told in [
        ("CartPole-v1", {"on_env_error": "ignore"}, "expected on_env_error to be 'raise' or"),
        ("CartPole-v1", {"max_restarts": 3}, "max_restarts=3 is for on_env_error='restart'"),
        (
            "CartPole-v1",
            {**restart, "max_restarts": 0},
            "expected max_restarts to be a positive int or None, got 0",
        ),
        (vector, restart, "builds single slots anew, which 'gymnasium' does not allow; pass an id"),
        (
            "CartPole-v1",
            {**restart, "backend": "envpool", "num_envs": 2},
            "which 'envpool' does not allow; pass an id or a callable with backend='serial' or 'p",
        ),
        (gym.make("CartPole-v1"), restart, "which an env that is made already does not allow"),
    ]:
        with pytest.raises((TypeError, ValueError), match=re.escape(told)):
            make_env(env, **options)  # type: ignore[arg-type]


def test_a_step_without_restarts_raises_and_spends_none(make: Any) -> None:
    env = make({0: "raise", 1: "raise"}, 2, at=1)
    (buffers,) = env.allocate(1)
    env.stepper.reset(None, buffers)
    actions = env.stepper.backend.action.of_step(env.rand_action(), env.batch_size)
    with pytest.raises(SlotError, match="slot 0, episode 0, step 0: ZeroDivisionError: the pole"):
        env.stepper.step(actions, None, buffers, restart=False)
    assert env.restarts == 0
    env = make({0: "raise", 1: "raise"}, 2, at=1)
    env.stepper.reset(None, buffers)
    env.stepper.step(actions, None, buffers)
    assert env.restarts == 2
    assert sorted(env.broken_episodes) == [0, 1]


def test_slots_of_torchrls_envs_are_in_their_first_episode() -> None:
    env = SerialEnv(2, lambda: GymWrapper(Odd("raise_")))
    collector = Collector(env, None, frames_per_batch=20)
    with pytest.raises(SlotError, match=r"slot 0, episode 0, step 1: .*slot 1, episode 0, step 1"):
        collector.rollout()


class Leaves(gym.Wrapper[Any, Any, Any, Any]):
    """Ends the program where it should close."""

    left = False

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def close(self) -> None:
        if not self.left:  # else it is deleted
            self.left = True
            raise SystemExit(0)


class LeavesTogether(gym.vector.SyncVectorEnv):
    close = Leaves.close
    left = False


def collected_and_closed(env: EnvBase) -> None:
    for _ in Collector(env, None, frames_per_batch=8, total_frames=16):
        pass


@pytest.mark.parametrize(
    "run",
    [
        lambda: collected_and_closed(make_env(Leaves)),
        lambda: collected_and_closed(make_env(Leaves, 2, backend="process")),
        lambda: collected_and_closed(make_env(LeavesTogether([partial(gym.make, "CartPole-v1")]))),
        lambda: collected_and_closed(GymWrapper(Leaves())),
        lambda: evaluate(Leaves, None, 2, progress=False),
        lambda: evaluate(Leaves, None, 2, progress=False, workers=1),
        lambda: evaluate(lambda: GymWrapper(Leaves()), None, 2, progress=False),
    ],
)
def test_an_env_that_ends_the_program_as_it_closes_is_an_error(run: Callable[[], None]) -> None:
    with pytest.raises(
        RuntimeError, match=r"close\(\) of .* ended .* sys.exit\(0\); take the call"
    ):
        run()


def test_checks_tell_of_an_env_that_ends_the_program() -> None:
    assert "close() of Leaves ended" in check_env(Leaves).failures[0].evidence
    with pytest.warns(UserWarning, match=r"closing the env raised .*close\(\) of Leaves"):
        assert diagnose(Leaves)["runs"].evidence.startswith("SystemExit: 0 (")
