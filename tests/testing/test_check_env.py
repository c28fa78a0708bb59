"""The fixtures catch bugs: each check fails, with its sentence, on what it is there to catch."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, GymEnv, SerialEnv

import tdcollect
from tdcollect import Collector, keys
from tdcollect.envs.slots import SlotError
from tdcollect.testing import (
    CountingEnv,
    CountingPolicy,
    CountingRules,
    Finding,
    Report,
    StatelessCountingPolicy,
    TorchCountingEnv,
    check_counting_batch,
    check_env,
    counting_env,
    make_counting_envs,
)
from tdcollect.testing.counting import HIDDEN

RULES = CountingRules(lengths=4)  # every episode ends at step 3, 7, 11, ...
NEXT_OBSERVATION = (keys.NEXT, keys.OBSERVATION)


def play(env: gym.Env[Any, Any], steps: int, **kwargs: Any) -> list[list[float]]:
    """The outcomes of steps, ``[step, episode, slot, reward, terminated, truncated]`` each."""
    observation, _ = env.reset(**kwargs)
    shown = [[*observation.tolist(), 0, False, False]]
    for step in range(steps):
        observation, reward, terminated, truncated, _ = env.step(np.int64(step))
        shown.append([*observation.tolist(), reward, terminated, truncated])
    return shown


# --- the counting env ------------------------------------------------------------------------


def test_observation_is_step_episode_slot() -> None:
    env = CountingEnv(slot=2, rules=CountingRules(lengths=3))
    assert play(env, 3) == [
        # step, episode, slot, reward, terminated, truncated
        [0, 0, 2, 0, False, False],
        [1, 0, 2, 20_001, False, False],
        [2, 0, 2, 20_002, False, False],
        [3, 0, 2, 20_003, True, False],
    ]
    assert play(env, 3)[-1] == [3, 1, 2, 20_103, False, True]


@pytest.mark.parametrize(
    ("lengths", "slot", "expected"),
    [
        (2, 0, [2, 2, 2, 2]),
        ((1, 2, 3), 0, [1, 2, 3, 1]),
        ((1, 2, 3), 1, [2, 3, 1, 2]),  # a slot enters the sequence at its own number
        (lambda episode: episode + 1, 5, [1, 2, 3, 4]),
    ],
)
def test_lengths(lengths: Any, slot: int, expected: list[int]) -> None:
    rules = CountingRules(lengths)
    assert [rules.length(slot, episode) for episode in range(4)] == expected
    episodes = torch.arange(4)
    assert rules.length_of(torch.full((4,), slot), episodes).tolist() == expected


@pytest.mark.parametrize(
    ("ends", "terminates"),
    [
        ("terminated", [True, True, True]),
        ("truncated", [False, False, False]),
        ("alternate", [True, False, True]),
    ],
)
def test_ends(ends: str, terminates: list[bool]) -> None:
    rules = CountingRules(ends=ends)
    assert [rules.terminates(episode) for episode in range(3)] == terminates
    assert rules.terminates(torch.arange(3)).tolist() == terminates


def test_seed_is_the_first_episode_and_later_ones_follow() -> None:
    env = CountingEnv()
    assert [env.reset(seed=s)[0][1] for s in (7, None, 7)] == [7, 8, 7]
    assert env.reset(seed=2**20 + 5)[0][1] == 5  # float32 shows each number exactly


def test_wrong_action_raises() -> None:
    env = CountingEnv(slot=1)
    env.reset(seed=3)
    with pytest.raises(AssertionError, match="slot 1, episode 3, step 0: expected 0, got 2"):
        env.step(np.int64(2))


def test_wrong_action_is_recorded() -> None:
    env = CountingEnv(wrong_action="record")
    env.reset()
    assert [env.step(np.int64(a))[4]["wrong_actions"] for a in (0, 0, 2)] == [0, 1, 1]


def test_step_after_the_end_raises() -> None:
    env = CountingEnv(rules=CountingRules(1))
    play(env, 1)
    with pytest.raises(RuntimeError, match="expected a reset after the end of episode 0"):
        env.step(np.int64(1))


def test_torch_env_is_as_strict() -> None:
    env = TorchCountingEnv([2], CountingRules(1))
    root = StatelessCountingPolicy()(env.reset())
    with pytest.raises(RuntimeError, match=r"slots \[0, 1\]: expected a reset after the end"):
        env.step(StatelessCountingPolicy()(env.step(root)[keys.NEXT]))
    wrong = env.reset().set(keys.ACTION, torch.eye(5, dtype=torch.int64)[[0, 3]])
    with pytest.raises(AssertionError, match="slot 1, episode 1, step 0: expected 0, got 3"):
        env.step(wrong)


def test_gymnasium_finds_the_env_sound() -> None:
    gymnasium_check_env(CountingEnv(wrong_action="record"), skip_render_check=True)


def test_factories_pickle() -> None:
    envs = [factory() for factory in pickle.loads(pickle.dumps(make_counting_envs(3, RULES)))]
    assert [env.slot for env in envs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CountingRules(0), "expected lengths of at least one step, got 0"),
        (lambda: CountingRules([]), "expected lengths of at least one step"),
        (lambda: CountingRules(ends="never"), "expected ends to be 'terminated', 'truncated'"),
        (lambda: CountingRules(num_actions=1), "expected at least 2 actions"),
        (lambda: CountingEnv(wrong_action="ignore"), "'raise' or 'record', got 'ignore'"),  # type: ignore[arg-type]
        (lambda: counting_env(2, backend="ray"), "serial, sync, async, got 'ray'"),
        (lambda: counting_env(backend="sync"), "expected num_envs to be a number"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_hidden_state_that_is_not_reset_shows_in_the_env() -> None:
    class Forgetful(CountingPolicy):
        """Takes no notice of where episodes start."""

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            kept = self.__dict__.setdefault("kept", torch.zeros(3, 1))
            tensordict[HIDDEN] = kept
            tensordict[keys.IS_INIT] = torch.zeros(3, 1, dtype=torch.bool)
            super().forward(tensordict)
            kept += 1
            return tensordict

    env = counting_env(3, rules=RULES)
    with pytest.raises(SlotError, match="slot 0, episode 1, step 0: expected 0, got 4") as caught:
        env.rollout(10, Forgetful(RULES), break_when_any_done=False)
    assert isinstance(caught.value.causes[0], AssertionError)


# --- the check of a batch --------------------------------------------------------------------


@pytest.fixture(scope="module")
def collected() -> list[TensorDictBase]:
    """Two batches [3, 10] in a row, with all that a batch can hold. They are not changed."""
    env = counting_env(3, rules=RULES, is_init=True, step_count=True, episode_reward=True)
    env = env.append_transform(CountingPolicy(RULES).make_tensordict_primer())
    collector = Collector(
        env,
        CountingPolicy(RULES),
        frames_per_batch=30,
        total_frames=60,
        auto_register_policy_transforms=True,
    )
    collector.set_seed(0)
    return [batch.clone() for batch in collector]


@pytest.fixture
def batch(collected: list[TensorDictBase]) -> TensorDictBase:
    return collected[0].clone()


@pytest.fixture
def second(collected: list[TensorDictBase]) -> TensorDictBase:
    return collected[1].clone()


def fails(batch: TensorDictBase, message: str, **kwargs: Any) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_counting_batch(batch, RULES, **kwargs)


def test_a_sound_batch_passes(batch: TensorDictBase, second: TensorDictBase) -> None:
    require = [keys.TRAJ_IDS, keys.IS_INIT, keys.STEP_COUNT, keys.EPISODE_REWARD, HIDDEN]
    check_counting_batch(batch, RULES, require=require)
    check_counting_batch(second, RULES, previous=batch)


def test_a_flat_batch_passes(batch: TensorDictBase, second: TensorDictBase) -> None:
    check_counting_batch(second.reshape(-1), RULES, num_envs=3, previous=batch.reshape(-1))


def test_some_slots_of_a_batch_pass(batch: TensorDictBase) -> None:
    check_counting_batch(batch[1:], RULES, slots=[1, 2])
    check_counting_batch(batch[1], RULES, slots=[1])
    fails(batch[1:], "a slot keeps to its own place: slot 0, step 0", slots=[0, 2])


def test_swapped_final_observation(batch: TensorDictBase) -> None:
    batch[NEXT_OBSERVATION][1, 3] = batch[keys.OBSERVATION][1, 4]
    fails(
        batch,
        "the final observation of an episode is the true one: slot 1, step 3, entry "
        "('next', 'observation'): expected [4, 1, 1], got [0, 2, 1]",
    )


def test_final_observation_of_zeros(batch: TensorDictBase) -> None:
    batch[NEXT_OBSERVATION][batch[keys.NEXT, keys.DONE].squeeze(-1)] = 0
    fails(batch, "true one: slot 0, step 3, entry ('next', 'observation'): expected [4, 0, 0]")
    fails(batch, "got [0, 0, 0] (and 5 more rows)")


def test_row_for_a_reset(batch: TensorDictBase) -> None:
    junk = batch[:, 3:4].clone()
    junk[keys.OBSERVATION] = junk[NEXT_OBSERVATION]
    junk[NEXT_OBSERVATION] = batch[keys.OBSERVATION][:, 4:5]
    junk[keys.NEXT, keys.REWARD].zero_()
    for flag in (keys.DONE, keys.TERMINATED, keys.TRUNCATED):
        junk[keys.NEXT, flag].zero_()
    with_junk = torch.cat([batch[:, :4], junk, batch[:, 4:]], 1)
    fails(
        with_junk,
        "there is no row for a reset: no action follows the observation that ends an episode: "
        "slot 0, step 4, entry 'observation'",
    )


def test_lost_row(batch: TensorDictBase) -> None:
    lost = torch.cat([batch[:, :2], batch[:, 3:]], 1)
    fails(
        lost,
        "a row begins where the row before it ended: slot 0, step 2, entry 'observation': "
        "expected [2, 0, 0], got [3, 0, 0]",
    )


def test_lost_episode(batch: TensorDictBase) -> None:
    lost = torch.cat([batch[:, :4], batch[:, 8:]], 1)
    fails(
        lost,
        "an episode starts at step 0, with the number after the one that ended: slot 0, step 4, "
        "entry 'observation': expected [0, 1, 0], got [0, 2, 0]",
    )


def test_doubled_row(batch: TensorDictBase) -> None:
    doubled = torch.cat([batch[:, :3], batch[:, 2:]], 1)
    fails(doubled, "a row begins where the row before it ended: slot 0, step 3")


def test_next_observation_one_late(batch: TensorDictBase) -> None:
    batch[NEXT_OBSERVATION][2, 5] = batch[keys.OBSERVATION][2, 5]
    fails(batch, "the next observation is the one that follows: slot 2, step 5")


def test_swapped_slots(batch: TensorDictBase) -> None:
    batch[:, 5] = batch[[1, 0, 2], 5].clone()
    fails(batch, "a slot keeps to its own place: slot 0, step 5, entry 'observation': expected 0")


def test_shifted_reward(batch: TensorDictBase) -> None:
    reward = batch[keys.NEXT, keys.REWARD]
    batch[keys.NEXT, keys.REWARD] = reward.roll(1, dims=1)
    fails(batch, "a reward is that of its step: slot 0, step 0, entry ('next', 'reward')")


def test_truncation_told_as_termination(batch: TensorDictBase) -> None:
    batch[keys.NEXT, keys.TERMINATED] = batch[keys.NEXT, keys.DONE].clone()
    batch[keys.NEXT, keys.TRUNCATED].zero_()
    fails(batch, "terminated is what the env said: slot 1, step 3")


def test_end_that_is_not_told(batch: TensorDictBase) -> None:
    batch[keys.NEXT, keys.TRUNCATED].zero_()
    fails(batch, "truncated is what the env said, or a time limit: slot 1, step 3")


def test_done_that_is_not_the_union(batch: TensorDictBase) -> None:
    batch[keys.NEXT, keys.DONE][2, 7] = False
    fails(batch, "done is terminated or truncated: slot 2, step 7")


def test_step_from_an_ended_episode(batch: TensorDictBase) -> None:
    batch[keys.DONE][0, 4] = True
    fails(batch, "no step starts from an ended episode: slot 0, step 4, entry 'done'")


def test_wrong_action_in_the_batch(batch: TensorDictBase) -> None:
    batch[keys.ACTION][1, 6] = batch[keys.ACTION][1, 5]
    fails(
        batch,
        "an action is the one that the state asks for: slot 1, step 6, entry 'action': "
        "expected 2, got 1",
    )
    check_counting_batch(batch, RULES, predicted=False)


def test_traj_ids_one_late(batch: TensorDictBase) -> None:
    batch[keys.TRAJ_IDS] = torch.cat([batch[keys.TRAJ_IDS][:, :1], batch[keys.TRAJ_IDS][:, :-1]], 1)
    fails(batch, "traj_ids stay the same within an episode: slot 0, step 5")


def test_traj_ids_that_never_change(batch: TensorDictBase) -> None:
    batch[keys.TRAJ_IDS] = batch[keys.TRAJ_IDS][:, :1].expand(3, 10).clone()
    fails(batch, "traj_ids change where an episode starts: slot 0, step 4")


def test_traj_ids_that_slots_share(batch: TensorDictBase) -> None:
    batch[keys.TRAJ_IDS][2] = batch[keys.TRAJ_IDS][0]
    fails(batch, "no two episodes share a traj_id: slot 0, step 0")


def test_traj_ids_that_start_over(batch: TensorDictBase, second: TensorDictBase) -> None:
    ids = second[keys.TRAJ_IDS]
    second[keys.TRAJ_IDS] = ids - ids.min() + 100
    fails(second, "traj_ids stay the same within an episode: slot 0, step 0", previous=batch)
    second[keys.TRAJ_IDS] = ids.where(ids != ids[0, 2], batch[keys.TRAJ_IDS][1, 0])
    fails(second, "no two episodes share a traj_id: slot 0, step 2", previous=batch)


def test_batch_that_does_not_go_on(batch: TensorDictBase, second: TensorDictBase) -> None:
    rule = "a batch goes on where the previous one ended: slot 0, step 0, entry 'observation'"
    fails(batch, rule, previous=batch)
    fails(second[:, 1:], rule, previous=batch)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        (keys.IS_INIT, "is_init marks an episode's first row, and no other: slot 0, step 4"),
        (keys.STEP_COUNT, "step_count counts the steps before the row: slot 0, step 4"),
        (HIDDEN, "the hidden state is the one before the step, zero at a start: slot 0, step 4"),
        (keys.EPISODE_REWARD, "episode_reward is zero where an episode starts: slot 0, step 4"),
    ],
)
def test_bookkeeping_that_is_not_reset(batch: TensorDictBase, key: str, rule: str) -> None:
    batch[key][0, 4] = batch[key][0, 3]
    fails(batch, rule)


@pytest.mark.parametrize("key", [keys.IS_INIT, keys.STEP_COUNT, HIDDEN, keys.EPISODE_REWARD])
def test_next_bookkeeping_of_another_row(batch: TensorDictBase, key: str) -> None:
    value = batch[keys.NEXT, key]
    batch[keys.NEXT, key] = ~value if value.dtype == torch.bool else value + 1
    fails(batch, f"slot 0, step {1 if key == keys.EPISODE_REWARD else 0}, entry")


def test_missing_entry(batch: TensorDictBase) -> None:
    del batch[keys.TRAJ_IDS]
    check_counting_batch(batch, RULES)
    fails(batch, "the batch has the entry ('collector', 'traj_ids')", require=[keys.TRAJ_IDS])


def test_wrong_shape_or_dtype(batch: TensorDictBase) -> None:
    rewards = batch[keys.NEXT, keys.REWARD]
    batch[keys.NEXT, keys.REWARD] = rewards.double()
    fails(batch, "entries have their shape and dtype: entry ('next', 'reward'): expected ((3, 10,")


# --- the check of an env ---------------------------------------------------------------------


class Sound(CountingEnv):
    """A counting env that takes any action; the broken ones below change one thing each."""

    def __init__(self) -> None:
        super().__init__(wrong_action="record")


class OutsideItsSpace(Sound):
    def _observation(self) -> Any:
        return super()._observation() - 5


class ShowsNaN(Sound):
    def _observation(self) -> Any:
        return super()._observation() * (np.nan if self._count == 2 else 1)


class OtherShape(Sound):
    def _observation(self) -> Any:
        return super()._observation()[:2]


class OtherDtype(Sound):
    def _observation(self) -> Any:
        return super()._observation().astype(np.float64)


class ListObservation(Sound):
    def _observation(self) -> Any:
        return super()._observation().tolist()


class ChangesSteps(Sound):
    """Its steps pass through ``change``."""

    def step(self, action: Any) -> Any:
        return self.change(*super().step(action))

    def change(self, *step: Any) -> Any:
        raise NotImplementedError


class NaNReward(ChangesSteps):
    def change(self, observation: Any, reward: Any, *rest: Any) -> Any:
        return observation, float("nan"), *rest


class ArrayReward(ChangesSteps):
    def change(self, observation: Any, reward: Any, *rest: Any) -> Any:
        return observation, np.array([reward]), *rest


class IntegerFlags(ChangesSteps):
    def change(self, observation: Any, reward: Any, terminated: Any, *rest: Any) -> Any:
        return observation, reward, int(terminated), *rest


class FourValues(ChangesSteps):
    def change(self, *step: Any) -> Any:
        return step[:4]


class ResetsItself(ChangesSteps):
    def change(self, observation: Any, reward: Any, terminated: Any, truncated: Any, _: Any) -> Any:
        if terminated or truncated:
            observation, _ = self.reset()
        return observation, reward, terminated, truncated, {}


class IgnoresItsSeed(Sound):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset()


class DrawsUnseeded(Sound):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode = int(np.random.default_rng().integers(2**20))
        return self._observation(), {}


class LeaksOverEpisodes(Sound):
    """Something of the last episode shows in the next."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        carried = self._count
        super().reset(seed=seed)
        self._count = carried % 3
        return self._observation(), {}


class SharesState(Sound):
    shared = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        SharesState.shared = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        SharesState.shared += 1
        observation, *rest = super().step(action)
        return observation + np.float32([0, SharesState.shared, 0]), *rest


class ReusesItsBuffer(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(3, np.float32)

    def _observation(self) -> Any:
        self.buffer[:] = super()._observation()
        return self.buffer


class ChangesItsAction(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-1, 1, (2,))  # type: ignore[assignment]

    def step(self, action: Any) -> Any:
        action *= 0
        return super().step(np.int64(0))


class ClosesOnce(Sound):
    closed = False

    def close(self) -> None:
        assert not self.closed, "closed already"
        self.closed = True


SAME, OTHER = "the same seed gives the same episode", "another seed gives another episode"
FRESH = "reset(seed) does not depend on what went before"
ALIASING = "entries given out do not change later (no aliasing)"
FINAL = "the final observation is not the next episode's first"
INSIDE, DTYPE = "observations lie in the space", "the dtype is the space's"
RUN = "episodes run: reset gives two values, step gives five"
APART = "envs do not share state"


@pytest.mark.parametrize(
    ("env", "broken"),
    [
        (OutsideItsSpace, {INSIDE: "seed 0, step 0: -5.0 at [0] is not in [0.0, 16777216.0]"}),
        (ShowsNaN, {INSIDE: "seed 0, step 2: nan at [0] is not in"}),
        (OtherShape, {INSIDE: "seed 0, step 0: expected shape (3,), got (2,)"}),
        (OtherDtype, {DTYPE: "seed 0, step 0: expected float32, got float64"}),
        (ListObservation, {DTYPE: "expected an array of float32, got list"}),
        (NaNReward, {"rewards are finite numbers": "seed 0, step 1: nan"}),
        (ArrayReward, {"rewards are finite numbers": "seed 0, step 1: ndarray array([1.])"}),
        (IntegerFlags, {"terminated and truncated are bools": "terminated is int 0"}),
        (FourValues, {RUN: "step gave 4 values, expected (observation, reward, terminated"}),
        (ResetsItself, {FINAL: "ended the episode of seed 0 and began the one after it"}),
        (
            IgnoresItsSeed,
            {OTHER: "seeds 0 to 2", FRESH: "step 0: observation[1] is 0 and 2 (2 apart)"},
        ),
        (DrawsUnseeded, {SAME: "step 0: observation[", FRESH: ""}),
        (LeaksOverEpisodes, {FRESH: "step 0: observation["}),
        (SharesState, {APART: "step 2: observation["}),
        (ReusesItsBuffer, {ALIASING: "seed 0, step 0: the observation was changed after it was"}),
        (ChangesItsAction, {"a step leaves its action as it was": "step 0: "}),
        (ClosesOnce, {"close can be called twice": "AssertionError: closed already"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_gymnasium_env(env: type[Sound], broken: dict[str, str]) -> None:
    report = check_env(env)
    assert {finding.rule for finding in report.failures} == set(broken), report
    for finding in report.failures:
        assert broken[finding.rule] in finding.evidence


class LeavesNothingToChance(Sound):
    """Its observations follow from the actions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.total = 0
        return super().reset(seed=0)

    def step(self, action: Any) -> Any:
        self.total += int(action)
        observation, *rest = super().step(action)
        return observation + np.float32(self.total), *rest


def test_env_without_chance() -> None:
    (failure,) = check_env(LeavesNothingToChance).failures
    assert failure.rule == OTHER
    assert "if the env leaves nothing to chance, skip this rule" in failure.evidence
    assert check_env(LeavesNothingToChance, skip=[OTHER]).passed
    (failure,) = check_env(lambda: tdcollect.make_env(LeavesNothingToChance, 2)).failures
    assert failure.rule == OTHER


class SoundBatch(TorchCountingEnv):
    """A batched counting env that takes any action; those below change one thing each."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__([3], wrong_action="record", **kwargs)


class BatchOfOtherDtype(SoundBatch):
    def _pack(self, source: Any) -> TensorDictBase:
        packed = super()._pack(source)
        return packed.set(keys.OBSERVATION, packed[keys.OBSERVATION].double())


class BatchOutsideItsSpace(SoundBatch):
    def _pack(self, source: Any) -> TensorDictBase:
        packed = super()._pack(source)
        return packed.set(keys.OBSERVATION, packed[keys.OBSERVATION] - 5)


class BatchWithoutUnion(SoundBatch):
    def _pack(self, source: Any) -> TensorDictBase:
        packed = super()._pack(source)
        return packed.set(keys.DONE, packed[keys.DONE] | (self.count == 2).unsqueeze(-1))


class BatchOfNaNRewards(SoundBatch):
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = super()._step(tensordict)
        return step.set(keys.REWARD, step[keys.REWARD] * float("nan"))


class BatchWithoutSeed(SoundBatch):
    def _set_seed(self, seed: int | None) -> None:
        pass


class BatchOfZeroFinals(SoundBatch):
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = super()._step(tensordict)
        return step.set(keys.OBSERVATION, step[keys.OBSERVATION] * ~step[keys.DONE])


class BatchOfFirstForFinals(SoundBatch):
    """A vector env in SAME_STEP mode, taken as it comes."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = super()._step(tensordict)
        first = torch.stack([torch.zeros(3), self.episode + 1.0, self.slot.float()], -1)
        return step.set(keys.OBSERVATION, first.where(step[keys.DONE], step[keys.OBSERVATION]))


class BatchResetTogether(SoundBatch):
    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDictBase:
        return super()._reset(None, **kwargs)


class BatchInOneBuffer(SoundBatch):
    def _pack(self, source: Any) -> TensorDictBase:
        packed = super()._pack(source)
        buffer = self.__dict__.setdefault("buffer", packed[keys.OBSERVATION])
        return packed.set(keys.OBSERVATION, buffer.copy_(packed[keys.OBSERVATION]))


class BatchThatChangesActions(SoundBatch):
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = super()._step(tensordict)
        tensordict[keys.ACTION].zero_()
        return step


class BatchThatClosesOnce(SoundBatch):
    def close(self) -> None:  # type: ignore[override]
        assert not self.is_closed, "closed already"
        super().close()


SPECS = "entries match the specs (torchrl.envs.check_env_specs)"
ZEROS = "the final observation is not filled in with zeros"
PARTIAL = "a partial reset leaves other slots alone"


@pytest.mark.parametrize(
    ("env", "broken"),
    [
        (BatchOfOtherDtype, {SPECS: "AssertionError", DTYPE: "expected torch.float32, got torch"}),
        (BatchOutsideItsSpace, {SPECS: "AssertionError", INSIDE: "'observation' is not in"}),
        (
            BatchWithoutUnion,
            {"done is terminated or truncated": "done is True, terminated or truncated"},
        ),
        (BatchOfNaNRewards, {"rewards are finite numbers": "'reward' is [[nan]"}),
        (BatchWithoutSeed, {OTHER: "", FRESH: "step 0: observation[1][1] is 0 and 5 (5 apart)"}),
        (BatchOfZeroFinals, {ZEROS: "episodes ended in zeros: their true last observation is"}),
        (BatchOfFirstForFinals, {FINAL: "ended an episode and began the one after it"}),
        (BatchResetTogether, {PARTIAL: "'observation' of slots that go on differs in the step"}),
        (BatchInOneBuffer, {ALIASING: "'observation' was changed after it was given", FINAL: ""}),
        (
            BatchThatChangesActions,
            {"a step leaves its action as it was": "'action'[0][4] is 1 and 0"},
        ),
        (BatchThatClosesOnce, {"close can be called twice": "AssertionError: closed already"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_torchrl_env(env: type[SoundBatch], broken: dict[str, str]) -> None:
    report = check_env(env)
    assert {finding.rule for finding in report.failures} == set(broken), report
    for finding in report.failures:
        assert broken[finding.rule] in finding.evidence


class NestedSpaces(gym.Env[Any, Any]):
    """Dict, Tuple, Discrete and MultiBinary in one observation, and an info of any kind."""

    observation_space = spaces.Dict(
        {
            "pair": spaces.Tuple([spaces.Discrete(5, start=1), spaces.MultiBinary(3)]),
            "box": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._observation(), {"of": object()}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._observation(), action.sum(), False, np.bool_(self.count > 5), {"of": object()}

    def _observation(self) -> Any:
        draw = self.np_random
        pair = int(draw.integers(1, 6)), draw.integers(0, 2, 3, np.int8)
        return {"pair": pair, "box": draw.normal(size=(2, 2))}


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        "Pendulum-v1",
        "Blackjack-v1",
        NestedSpaces,
        Sound,
        Sound(),
        SoundBatch,
        lambda: tdcollect.make_env("CartPole-v1"),
        lambda: tdcollect.make_env("CartPole-v1", 3, is_init=True, step_count=True),
        lambda: tdcollect.make_env(NestedSpaces, 2),
        lambda: SyncVectorEnv(make_counting_envs(3, wrong_action="record")),
        lambda: GymEnv("CartPole-v1"),
        lambda: SerialEnv(2, lambda: TorchCountingEnv(wrong_action="record")),
    ],
)
def test_sound_env_passes(env: Any) -> None:
    report = check_env(env, max_episode_steps=200)
    assert report.passed, report


def test_strict_env_is_checked_under_its_policy() -> None:
    rules = CountingRules()
    report = check_env(CountingEnv, policy=lambda o: np.int64(rules.action(int(o[0]))))
    assert report.passed, report
    report = check_env(TorchCountingEnv([3], rules), policy=StatelessCountingPolicy(rules))
    assert report.passed, report


def test_env_that_cannot_run_fails_once() -> None:
    def fail() -> Any:
        raise RuntimeError("no display")

    env = Sound()
    env.reset = fail  # type: ignore[method-assign, assignment]
    report = check_env(lambda: env)
    assert [finding.status for finding in report.findings[:2]] == ["failed", "skipped"]
    assert len(report.failures) == 1


def test_checking_leaves_torch_randomness_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    check_env(SoundBatch)
    check_env(Sound)
    assert torch.equal(torch.rand(3), expected)


class SometimesOutsideItsSpace(SoundBatch):
    """Leaves its space at one action, which a few random steps may or may not take."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = super()._step(tensordict)
        hit = (tensordict[keys.ACTION][0].argmax() == 0).item()
        return step.set(keys.OBSERVATION, step[keys.OBSERVATION] - 100 * hit)


def test_the_result_does_not_depend_on_torch_randomness() -> None:
    reports = []
    for seed in range(4):
        torch.manual_seed(seed)
        reports.append(check_env(SometimesOutsideItsSpace, max_episode_steps=9))
    assert len({report[SPECS].status for report in reports}) == 1


def test_the_env_is_closed_in_the_end() -> None:
    env = tdcollect.make_env("CartPole-v1", 2)
    check_env(env)
    assert env.is_closed


def test_report_prints_a_line_for_each_rule() -> None:
    rules = "rewards are finite numbers", "close can be called twice", "envs do not share state"
    statuses = "passed", "failed", "skipped"
    evidence = "from 1 to 1", "RuntimeError: gone", "skipped as asked"
    findings = tuple(map(Finding, rules, rules, statuses, evidence))
    report = Report("Maze-v0", findings)
    assert str(report).splitlines() == [
        "Maze-v0: failed (1 passed, 1 failed, 1 skipped)",
        "",
        "  passed   rewards are finite numbers  from 1 to 1",
        "  failed   close can be called twice   RuntimeError: gone",
        "  skipped  envs do not share state     skipped as asked",
    ]
    with pytest.raises(AssertionError) as error:
        report.raise_if_failed()
    assert str(error.value).splitlines() == [
        "Maze-v0: failed (1 passed, 1 failed, 1 skipped)",
        "  failed   close can be called twice  RuntimeError: gone",
    ]
    Report("Maze-v0", findings[:1]).raise_if_failed()


def test_bad_input_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a gymnasium id, an env or a callable that makes"):
        check_env(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a gymnasium env or an EnvBase, got TensorDict"):
        check_env(lambda: TensorDict())  # type: ignore[arg-type, return-value]
    with pytest.raises(
        ValueError, match=r"expected the checks to skip to be of .* got \['seeds'\]"
    ):
        check_env(Sound, skip=["seeds"])
    with pytest.raises(ValueError, match="expected max_episode_steps to be a positive int, got 0"):
        check_env(Sound, max_episode_steps=0)


def test_batch_dims_of_the_env_are_kept() -> None:
    env: EnvBase = TorchCountingEnv([2, 2], RULES)
    rollout = env.rollout(9, StatelessCountingPolicy(RULES), break_when_any_done=False)
    assert rollout.shape == (2, 2, 9)
    check_counting_batch(rollout, RULES)


@pytest.mark.skipif(
    "CliffWalking-v1" not in gym.registry, reason="this gymnasium has CliffWalking-v0"
)
def test_page_shows_what_its_code_prints() -> None:
    """The blocks of code in docs/conformance.md run, and print the blocks of text after them."""
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page, re.DOTALL)
    assert len(blocks) > 4
    names: dict[str, Any] = {}
    for code, text in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == text
