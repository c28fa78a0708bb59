"""Bad input: errors say what was expected, what came, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdcollect import keys
from tdcollect.trajectories import (
    TrajectoryAssembler,
    TrajectoryIndex,
    discounted_returns,
    flatten_time,
    join_trajectories,
    returns,
    segment_sum,
    split_trajectories,
    unflatten_time,
    unpad,
)

from .batches import MASK, NEXT_DONE, REWARD, make

DONE = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("function", [split_trajectories, flatten_time, returns])
def test_no_time_dim(function: Any) -> None:
    step = make(DONE)[0, 0]
    with pytest.raises(ValueError, match=r"time dimension, \[\*N, T\], got batch_size \[\].*unsq"):
        function(step)


def test_neither_ids_nor_done() -> None:
    batch = make(DONE, ids=False).exclude(NEXT_DONE)
    with pytest.raises(KeyError, match=r"ids in .*'traj_ids'.* or done flags in .*'done'.*observ"):
        split_trajectories(batch)


def test_entries_asked_for_that_are_missing() -> None:
    with pytest.raises(KeyError, match="expected an entry 'mine' with trajectory ids, got"):
        split_trajectories(make(DONE), trajectory_key="mine")
    with pytest.raises(KeyError, match="expected an entry 'mine' with done flags, got"):
        split_trajectories(make(DONE), done_key="mine")
    with pytest.raises(KeyError, match=r"expected rewards in \('next', 'mine'\).*name the entry"):
        returns(make(DONE), key=(keys.NEXT, "mine"))


def test_shapes_that_do_not_match() -> None:
    batch = make(DONE)
    batch[keys.COLLECTOR] = TensorDict({"traj_ids": torch.zeros(2, 4, 2, dtype=int)}, [2, 4])
    with pytest.raises(
        ValueError, match=r"'traj_ids'\) of shape \[2, 4\] or \[2, 4, 1\].*\[2, 4, 2"
    ):
        split_trajectories(batch)
    batch = make(DONE, ids=False)
    batch[NEXT_DONE] = torch.zeros(2, 4, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"'done'\) of shape.*got \[2, 4, 3\]: name another"):
        split_trajectories(batch)


def test_dtypes() -> None:
    batch = make(DONE, ids=torch.rand(2, 4))
    with pytest.raises(TypeError, match=r"integer ids in .*, got torch\.float32"):
        split_trajectories(batch)
    batch = make(DONE, ids=False)
    batch[NEXT_DONE] = batch[NEXT_DONE].float()
    with pytest.raises(TypeError, match=r"done flags of dtype torch\.bool, got torch\.float32"):
        split_trajectories(batch)


def test_layout() -> None:
    with pytest.raises(ValueError, match="'padded', 'jagged', 'flat' or 'list', got 'nested'"):
        split_trajectories(make(DONE), layout="nested")  # type: ignore[call-overload]


def test_no_tensordict() -> None:
    with pytest.raises(TypeError, match=r"expected a TensorDict .* got dict"):
        split_trajectories({})  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="a TensorDict or a list of TensorDicts, got dict"):
        join_trajectories({})  # type: ignore[arg-type]


def test_index_of_another_batch() -> None:
    index = TrajectoryIndex.of(make(DONE))
    other = make(DONE[:, :3])
    with pytest.raises(
        ValueError, match=r"batch of size \[2, 4\], as the index has it, got \[2, 3"
    ):
        split_trajectories(other, index=index)
    with pytest.raises(
        ValueError, match="expected index= or trajectory_key= and done_key=, got both"
    ):
        split_trajectories(make(DONE), index=index, done_key=NEXT_DONE)
    with pytest.raises(ValueError, match=r"values of shape \[2, 4, '...'\].*got \[2, 3\]"):
        segment_sum(torch.zeros(2, 3), index)


def test_join_of_no_layout() -> None:
    with pytest.raises(ValueError, match=r"got batch_size \[2, 4\].*flatten_time\(batch\)"):
        join_trajectories(make(DONE))
    with pytest.raises(ValueError, match="at least one trajectory, got an empty list"):
        join_trajectories([])
    with pytest.raises(ValueError, match=r"of batch size \[length\], got \[2, 4\] at 0"):
        join_trajectories([make(DONE)])


def test_join_with_the_index_of_another_batch() -> None:
    index = TrajectoryIndex.of(make(DONE))
    other = make(~DONE)
    for layout in ("padded", "jagged", "list"):
        with pytest.raises(ValueError, match="expected the 4 trajectories of the index, 8 steps"):
            join_trajectories(split_trajectories(other, layout=layout), index)
    flat = split_trajectories(other, layout="flat")[:5]
    with pytest.raises(ValueError, match="expected the 8 steps of the index, got 5"):
        join_trajectories(flat, index)


def test_sums_of_jagged_batches() -> None:
    jagged = split_trajectories(make(DONE), layout="jagged")
    with pytest.raises(ValueError, match="got a nested tensor: make the batch flat first"):
        returns(jagged)


def test_unpad_without_a_mask() -> None:
    with pytest.raises(KeyError, match=r"expected a mask in .*'mask'.*name it with mask_key="):
        unpad(make(DONE))
    batch = make(DONE)
    batch[MASK] = torch.ones(2, 4)
    with pytest.raises(TypeError, match=r"mask of dtype torch\.bool, got torch\.float32"):
        unpad(batch)


@pytest.mark.parametrize("slots", [3, 0, (2, 3)])
def test_unflatten_time_of_other_slots(slots: Any) -> None:
    with pytest.raises(ValueError, match="expected slots to divide the 8 steps"):
        unflatten_time(flatten_time(make(DONE)), slots)


def test_unflatten_time_of_what_is_not_flat() -> None:
    with pytest.raises(ValueError, match=r"flat batch \[N \* T\], got batch_size \[2, 4\]"):
        unflatten_time(make(DONE), 2)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_gamma(gamma: float) -> None:
    with pytest.raises(ValueError, match="expected gamma between 0 and 1, got"):
        discounted_returns(make(DONE), gamma)


def test_rewards_of_another_shape() -> None:
    index = TrajectoryIndex.of(make(DONE))
    with pytest.raises(ValueError, match="batch size of the index"):
        segment_sum(make(DONE[:1])[REWARD], index)


def test_assembler_arguments() -> None:
    with pytest.raises(ValueError, match="match to be 'slot' or 'id', got 'name'"):
        TrajectoryAssembler(match="name")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lookback to be None or at least 0, got -1"):
        TrajectoryAssembler(lookback=-1)


def test_assembler_batches() -> None:
    with pytest.raises(KeyError, match=r"done flags in .*'done'.*got .*done_key="):
        TrajectoryAssembler().feed(make(DONE).exclude(NEXT_DONE))
    with pytest.raises(KeyError, match="for match='id', got none"):
        TrajectoryAssembler(match="id").feed(make(DONE, ids=False))
    assembler = TrajectoryAssembler()
    assembler.feed(make(DONE))
    with pytest.raises(ValueError, match="expected 2 slots, as in the batch before, got 1"):
        assembler.feed(make(DONE[:1]))
