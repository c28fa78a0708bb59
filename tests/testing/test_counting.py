"""The counting env, its policies and the check of its batches can fail; sound batches pass.

A slot's rows tell where they come from, so ``check_counting_batch`` sees each that is lost,
doubled, shifted or swapped; the recurrent policy acts by its hidden state alone, so that each
hidden state that is lost, carried over or swapped raises in the env.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

from tdcollect import Collector, keys, slot_seed
from tdcollect.envs.slots import SlotError

from ..counting import (
    HIDDEN,
    CountingEnv,
    CountingPolicy,
    CountingRules,
    StatelessCountingPolicy,
    TorchCountingEnv,
    check_counting_batch,
    counting_env,
    first_episode,
)

# --- the env ---------------------------------------------------------------------------------


def test_wrong_actions_and_steps_after_the_end() -> None:
    env = CountingEnv(slot=1, rules=CountingRules(1))
    env.reset(seed=3)
    with pytest.raises(AssertionError, match="slot 1, episode 3, step 0: expected 0, got 2"):
        env.step(np.int64(2))
    env.reset()
    env.step(np.int64(0))
    with pytest.raises(RuntimeError, match="expected a reset after the end of episode 4"):
        env.step(np.int64(1))
    env = CountingEnv(wrong_action="record")
    env.reset()
    assert [env.step(np.int64(a))[4]["wrong_actions"] for a in (0, 0, 2)] == [0, 1, 1]


def test_torch_env_is_as_strict() -> None:
    env = TorchCountingEnv([2], CountingRules(1))
    root = StatelessCountingPolicy()(env.reset())
    with pytest.raises(RuntimeError, match=r"slots \[0, 1\]: expected a reset after the end"):
        env.step(StatelessCountingPolicy()(env.step(root)[keys.NEXT]))
    wrong = env.reset().set(keys.ACTION, torch.eye(5, dtype=torch.int64)[[0, 3]])
    with pytest.raises(AssertionError, match="slot 1, episode 1, step 0: expected 0, got 3"):
        env.step(wrong)


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

    rules = CountingRules(4)
    env = counting_env(3, rules=rules)
    with pytest.raises(SlotError, match="slot 0, episode 1, step 0: expected 0, got 4") as caught:
        env.rollout(10, Forgetful(rules), break_when_any_done=False)
    assert isinstance(caught.value.causes[0], AssertionError)


# --- the check of a batch --------------------------------------------------------------------

FOUR = CountingRules(lengths=4)  # every episode ends at step 3, 7, 11, ...
OBSERVATION, NEXT_OBSERVATION = keys.OBSERVATION, (keys.NEXT, keys.OBSERVATION)
NEXT_TERMINATED, NEXT_TRUNCATED = (keys.NEXT, keys.TERMINATED), (keys.NEXT, keys.TRUNCATED)
NEXT_TOTAL, REWARD = (keys.NEXT, keys.EPISODE_REWARD), (keys.NEXT, keys.REWARD)
TRAJ_IDS = keys.TRAJ_IDS
BOOKKEEPING = (keys.IS_INIT, keys.STEP_COUNT, HIDDEN, keys.EPISODE_REWARD)
ALL = slice(None)


@pytest.fixture(scope="module")
def collected() -> list[TensorDictBase]:
    """Two batches [3, 10] in a row, with all that a batch can hold. They are not changed."""
    env = counting_env(3, rules=FOUR, is_init=True, step_count=True, episode_reward=True)
    env = env.append_transform(CountingPolicy(FOUR).make_tensordict_primer())
    collector = Collector(
        env,
        CountingPolicy(FOUR),
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
        check_counting_batch(batch, FOUR, **kwargs)


def test_a_sound_batch_passes(batch: TensorDictBase, second: TensorDictBase) -> None:
    check_counting_batch(batch, FOUR, require=[TRAJ_IDS, *BOOKKEEPING])
    check_counting_batch(second, FOUR, previous=batch)
    check_counting_batch(second.reshape(-1), FOUR, num_envs=3, previous=batch.reshape(-1))
    check_counting_batch(batch[1:], FOUR, slots=[1, 2])
    check_counting_batch(batch[1], FOUR, slots=[1])
    fails(batch[1:], "slot 0, step 0, entry 'observation'", slots=[0, 2])


Change = Callable[[TensorDictBase], TensorDictBase]


def put(key: Any, at: Any, value: Any) -> Change:
    """Set the rows ``at`` of an entry to a value, or to what a function of the batch returns."""

    def change(batch: TensorDictBase) -> TensorDictBase:
        batch[key][at] = value(batch).clone() if callable(value) else value
        return batch

    return change


def rows(*spans: slice) -> Change:
    return lambda batch: torch.cat([batch[:, span] for span in spans], 1)


def with_a_row_for_a_reset(batch: TensorDictBase) -> TensorDictBase:
    junk = batch[:, 3:4].clone()
    junk[OBSERVATION] = junk[NEXT_OBSERVATION]
    junk[NEXT_OBSERVATION] = batch[OBSERVATION][:, 4:5]
    for key in (REWARD, *((keys.NEXT, flag) for flag in keys.FLAGS)):
        junk[key].zero_()
    return torch.cat([batch[:, :4], junk, batch[:, 4:]], 1)


def with_swapped_slots(batch: TensorDictBase) -> TensorDictBase:
    batch[:, 5] = batch[[1, 0, 2], 5].clone()
    return batch


SECOND = first_episode(slot_seed(0, 1))
FAULTS: dict[str, tuple[Change, str]] = {
    "the next episode's first observation for a final one": (
        put(NEXT_OBSERVATION, (1, 3), lambda b: b[OBSERVATION][1, 4]),
        "slot 1, step 3, entry ('next', 'observation'): expected "
        f"[4.0, {SECOND}.0, 1.0], got [0.0, {SECOND + 1}.0, 1.0]",
    ),
    "zeros for a final observation": (put(NEXT_OBSERVATION, (ALL, [3, 7]), 0), "slot 0, step 3"),
    "a row for a reset": (with_a_row_for_a_reset, "slot 0, step 4, entry 'observation'"),
    "an episode is lost": (rows(slice(4), slice(8, None)), "slot 0, step 4, entry 'observation'"),
    "a row is lost": (rows(slice(2), slice(3, None)), "slot 0, step 2, entry 'observation'"),
    "no step": (put(NEXT_OBSERVATION, (2, 5), lambda b: b[OBSERVATION][2, 5]), "slot 2, step 5"),
    "swapped slots": (with_swapped_slots, "slot 0, step 5, entry 'observation'"),
    "shifted": (put(REWARD, ALL, lambda b: b[REWARD].roll(1, dims=1)), "slot 0, step 0, entry ('n"),
    "ended": (put(NEXT_TERMINATED, ALL, lambda b: b[keys.NEXT, keys.DONE]), "'terminated'): exp"),
    "no limit": (put(NEXT_TRUNCATED, ALL, False), "entry ('next', 'truncated'): expected [True]"),
    "not done": (put((keys.NEXT, keys.DONE), (2, 7), False), "slot 2, step 7, entry ('next', 'd"),
    "done": (put(keys.DONE, (0, 4), True), "slot 0, step 4, entry 'done': expected [False]"),
    "action": (put(keys.ACTION, (1, 6), lambda b: b[keys.ACTION][1, 5]), "step 6, entry 'action'"),
    "late ids": (put(TRAJ_IDS, (ALL, slice(1, None)), lambda b: b[TRAJ_IDS][:, :-1]), "step 5, e"),
    "one id": (put(TRAJ_IDS, ALL, lambda b: b[TRAJ_IDS][:, :1]), "slot 0, step 4, entry ('coll"),
    "an id twice": (put(TRAJ_IDS, 2, lambda b: b[TRAJ_IDS][0]), "slot 0, step 0, entry ('coll"),
    "no first row": (put(keys.IS_INIT, (0, 4), False), "slot 0, step 4, entry 'is_init'"),
    "count": (put(keys.STEP_COUNT, (0, 4), 3), "slot 0, step 4, entry 'step_count': expected [0]"),
    "hidden": (put(HIDDEN, (0, 4), 3), f"slot 0, step 4, entry '{HIDDEN}': expected [0.0], got [3"),
    "total": (put(keys.EPISODE_REWARD, (0, 4), 3), "slot 0, step 4, entry 'episode_reward': expec"),
    "next is first": (put((keys.NEXT, keys.IS_INIT), ALL, True), "entry ('next', 'is_init')"),
    "next count": (
        put((keys.NEXT, keys.STEP_COUNT), ALL, lambda b: b[keys.STEP_COUNT]),
        "entry ('next', 'step_count'): expected [1], got [0]",
    ),
    "next hidden": (put((keys.NEXT, HIDDEN), ALL, lambda b: b[HIDDEN]), f"('next', '{HIDDEN}')"),
    "next total": (put(NEXT_TOTAL, ALL, lambda b: b[keys.EPISODE_REWARD]), "'episode_reward': exp"),
    "last total": (put(NEXT_TOTAL, (ALL, -1), 0), "step 9, entry ('next', 'episode_reward')"),
    "dtype": (lambda b: b.set(REWARD, b[REWARD].double()), "('next', 'reward'): expected torch.Si"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(batch: TensorDictBase, fault: str) -> None:
    change, message = FAULTS[fault]
    fails(change(batch), message)


def test_what_a_batch_is_held_against(batch: TensorDictBase, second: TensorDictBase) -> None:
    check_counting_batch(put(keys.ACTION, ALL, 0)(batch.clone()), FOUR, predicted=False)
    fails(batch, "slot 0, step 0, entry 'observation'", previous=batch)
    fails(second[:, 1:], "slot 0, step 0, entry 'observation'", previous=batch)
    ids = second[TRAJ_IDS]
    second[TRAJ_IDS] = ids - ids.min() + 100
    fails(second, "slot 0, step 0, entry ('collector', 'traj_ids')", previous=batch)
    second[TRAJ_IDS] = ids.where(ids != ids[0, 2], batch[TRAJ_IDS][1, 0])
    fails(second, "slot 0, step 2, entry ('collector', 'traj_ids')", previous=batch)
    del batch[TRAJ_IDS]
    check_counting_batch(batch, FOUR)
    fails(batch, "the batch lacks {('collector', 'traj_ids')}", require=[TRAJ_IDS])
