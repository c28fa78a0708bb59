"""Comparison with torchrl.collectors.utils.split_trajectories: equal where that is right."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from hypothesis import strategies as st
from torchrl.collectors.utils import split_trajectories as upstream

import tdcollect
from tdcollect import keys, split_trajectories

from .batches import MASK, check_same, done_flags, given, make

NAMES = tuple(map(int, metadata.version("tensordict").split(".")[:2])) < (0, 15)
"""Since then, upstream's result has names where no trajectory is padded, and none elsewhere."""


@given(done_flags().filter(lambda done: done.ndim < 3), st.booleans(), st.booleans())
def test_same_to_the_bit(done: torch.Tensor, ids: bool, names: bool) -> None:
    """Keys, values, padding, mask, dtypes, names, non-tensor entries with a value per step.

    A prefix says where ids and mask stand; nested tensors are upstream's too.
    """
    batch = make(done, ids=ids, names=names, words=True).exclude("shared")
    check_same(split_trajectories(batch), upstream(batch, prefix=keys.COLLECTOR), names=NAMES)
    batch = batch.exclude("word")
    ours = split_trajectories(batch, as_nested=True)
    theirs = upstream(batch, prefix=keys.COLLECTOR, as_nested=True)
    assert ours.batch_size == theirs.batch_size
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key, value in theirs.items(True, True):
        assert ours[key].layout == value.layout == torch.strided
        pairs = zip(ours[key].unbind(), value.unbind(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), key
    if ids:
        batch.set(("agents", "traj_ids"), batch["collector", "traj_ids"].clone())
    batch = batch.exclude("collector")
    ours, theirs = split_trajectories(batch, prefix="agents"), upstream(batch, prefix="agents")
    check_same(ours, theirs, names=NAMES)


def test_same_on_a_collected_batch_and_in_three_dims() -> None:
    env = tdcollect.make_env("CartPole-v1", 3)
    collector = tdcollect.Collector(env, frames_per_batch=3 * 64)
    batch = next(iter(collector))
    assert len(split_trajectories(batch)) > 3
    check_same(split_trajectories(batch), upstream(batch, prefix=keys.COLLECTOR))
    collector.shutdown()
    # Slots hold several trajectories each.
    batch = make(torch.tensor([[[0, 1, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 1]]], dtype=torch.bool))
    check_same(split_trajectories(batch), upstream(batch, prefix=keys.COLLECTOR))


# Where upstream is wrong, both sides:


def test_ids_that_recur_in_a_slot_or_its_neighbour_are_told_apart() -> None:
    batch = make(torch.zeros(6, dtype=torch.bool), ids=torch.tensor([1, 1, 2, 1, 1, 1]))
    assert split_trajectories(batch)[MASK].sum(-1).tolist() == [2, 1, 3]
    with pytest.raises(RuntimeError, match="split"):
        upstream(batch, prefix=keys.COLLECTOR)  # counts 5 steps of id 1, twice
    ids = torch.tensor([[0, 0, 1], [1, 2, 2]])
    batch = make(torch.zeros(2, 3, dtype=torch.bool), ids=ids)
    found = split_trajectories(batch)["observation"][..., 0].tolist()
    assert found == [[1, 2], [3, 0], [4, 0], [5, 6]]
    merged = upstream(batch, prefix=keys.COLLECTOR)
    assert merged["observation"][1, :, 0].tolist() == [3, 4]  # slot 0's last, slot 1's first


def test_three_dims_give_one_shape_and_each_slot_its_own_trajectories() -> None:
    batch = make(torch.zeros(2, 3, 4, dtype=torch.bool))
    assert split_trajectories(batch).batch_size == (6, 4)
    assert upstream(batch, prefix=keys.COLLECTOR).batch_size == (2, 3, 4)
    batch = make(torch.tensor([[[False, True, False]] * 2]), ids=False)
    ours = split_trajectories(batch)
    assert ours[MASK].sum(-1).tolist() == [2, 1, 2, 1]
    with pytest.raises(RuntimeError, match="split"):
        upstream(batch, prefix=keys.COLLECTOR)  # ids start anew in the second slot


def test_a_value_for_the_whole_batch_stays_one() -> None:
    batch = make(torch.tensor([True, False, False]), words=True)
    assert split_trajectories(batch).get("shared").data == {"a": 1}
    assert upstream(batch, prefix=keys.COLLECTOR).get("shared").tolist()[0][1] is None
