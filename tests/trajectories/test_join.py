"""Joining is the inverse of splitting, unpad of padding, unflatten_time of flatten_time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdcollect import keys
from tdcollect.trajectories import (
    TrajectoryIndex,
    flatten_time,
    join_trajectories,
    split_trajectories,
    unflatten_time,
    unpad,
)

from .batches import MASK, check_same, done_flags, make

LAYOUTS = ("padded", "jagged", "flat", "list")
DONE = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)


@given(done_flags(), st.sampled_from(LAYOUTS), st.booleans(), st.booleans())
def test_split_then_join_is_the_identity(
    done: torch.Tensor, layout: Any, ids: bool, names: bool
) -> None:
    batch = make(done, ids=ids, names=names, words=True)
    index = TrajectoryIndex.of(batch)
    check_same(join_trajectories(split_trajectories(batch, layout=layout), index), batch)


@given(done_flags(), st.sampled_from(LAYOUTS))
def test_the_identity_on_padded_batches(done: torch.Tensor, layout: Any) -> None:
    padded = split_trajectories(make(done, words=True))
    index = TrajectoryIndex.of(padded)
    check_same(join_trajectories(split_trajectories(padded, layout=layout), index), padded)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_added_after_the_split_come_along(layout: Any) -> None:
    batch = make(DONE)
    split = split_trajectories(batch, layout=layout)
    for part in split if isinstance(split, list) else [split]:
        part["twice"] = part["observation"] * 2
    joined = join_trajectories(split, TrajectoryIndex.of(batch))
    assert joined["twice"].tolist() == (batch["observation"] * 2).tolist()


def test_time_dim_first() -> None:
    batch = make(DONE).permute(1, 0).contiguous()
    batch.names = ["time", None]
    index = TrajectoryIndex.of(batch)
    for layout in LAYOUTS:
        check_same(join_trajectories(split_trajectories(batch, layout=layout), index), batch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_pass(layout: Any) -> None:
    batch = make(DONE)
    batch["x"] = x = torch.rand(2, 4, 3, requires_grad=True)
    joined = join_trajectories(split_trajectories(batch, layout=layout), TrajectoryIndex.of(batch))
    weight = torch.rand(2, 4, 3)
    (joined["x"] * weight).sum().backward()
    torch.testing.assert_close(x.grad, weight)


def test_unpad_takes_what_the_mask_takes() -> None:
    padded = split_trajectories(make(DONE))
    padded[MASK] = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 1]], dtype=torch.bool)
    assert unpad(padded)["observation"][:, 0].tolist() == [1, 3, 5, 7, 8]
    assert MASK not in unpad(padded).keys(True)


@pytest.mark.behaviour(20)
@given(done_flags())
def test_flatten_time_and_back(done: torch.Tensor) -> None:
    batch = make(done, words=True)
    flat = flatten_time(batch)
    assert flat.batch_size == (done.numel(),)
    assert flat["observation"][:, 0].tolist() == list(range(1, done.numel() + 1))
    check_same(unflatten_time(flat, done.shape[:-1]), batch)


def test_flatten_time_keeps_slots_contiguous_with_time_first() -> None:
    batch = make(DONE).permute(1, 0).contiguous()
    batch.names = ["time", None]
    flat = flatten_time(batch)
    assert flat["observation"][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    check_same(unflatten_time(flat, 2), make(DONE))


def test_ids_added_by_the_split_are_kept_in_a_flat_join() -> None:
    padded = split_trajectories(make(DONE, ids=False))
    assert join_trajectories(padded)[keys.TRAJ_IDS].tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
