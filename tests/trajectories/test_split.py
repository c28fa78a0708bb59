"""split_trajectories: layouts, and the handling of entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    tensorclass,
)

import tdcollect
from tdcollect import keys
from tdcollect.trajectories import TrajectoryIndex, join_trajectories, split_trajectories, unpad

from .batches import MASK, NEXT_DONE, check_same, done_flags, make, naive

LAYOUTS = ("padded", "jagged", "flat", "list")
DONE = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)


def test_exported_at_the_top() -> None:
    assert tdcollect.split_trajectories is split_trajectories


def test_padded_golden() -> None:
    split = split_trajectories(make(DONE))
    assert split["observation"][..., 0].tolist() == [[1, 2, 3], [4, 0, 0], [5, 0, 0], [6, 7, 8]]
    assert split[MASK].int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 1, 1]]
    assert split[keys.TRAJ_IDS].tolist() == [[5, 5, 5], [6, 0, 0], [7, 0, 0], [8, 8, 8]]


def test_jagged_golden() -> None:
    split = split_trajectories(make(DONE), layout="jagged")
    nested = split["observation"]
    assert split.batch_size == (4,)
    assert nested.layout is torch.jagged
    assert [one[:, 0].tolist() for one in nested.unbind()] == [[1, 2, 3], [4], [5], [6, 7, 8]]
    # One size for all entries, so that they can be combined.
    assert (nested * split["next", "reward"]).shape == nested.shape


def test_flat_golden() -> None:
    split = split_trajectories(make(DONE, ids=False), layout="flat")
    assert split["observation"][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert split[keys.TRAJ_IDS].tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
    assert split.names == ["time"]


@given(done_flags(), st.booleans())
def test_agrees_with_a_loop_over_steps(done: torch.Tensor, ids: bool) -> None:
    batch = make(done, ids=ids, words=True)
    ours = split_trajectories(batch, layout="list")
    theirs = naive(batch)
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not ids:
            other = other.copy()
            other.set(keys.TRAJ_IDS, torch.full(other.shape, number))
        check_same(one, other, names=False)


@given(done_flags())
def test_layouts_agree(done: torch.Tensor) -> None:
    batch = make(done, words=True)
    padded, jagged, flat, pieces = (split_trajectories(batch, layout=one) for one in LAYOUTS)
    check_same(unpad(padded), flat, names=False)
    check_same(join_trajectories(jagged), flat, names=False)
    check_same(join_trajectories(pieces), flat)
    for i, piece in enumerate(pieces):
        check_same(padded[i, : len(piece)].exclude(MASK), piece, names=False)


def test_time_dim_is_the_one_named_time() -> None:
    batch = make(DONE)
    turned = TensorDict(
        {key: batch[key].transpose(0, 1) for key in ("observation", NEXT_DONE, keys.TRAJ_IDS)},
        batch_size=[4, 2],
        names=["time", "slot"],
    )
    expected = split_trajectories(batch.select("observation", NEXT_DONE, keys.TRAJ_IDS))
    check_same(split_trajectories(turned), expected)


def test_ids_go_before_done_flags() -> None:
    batch = make(DONE, ids=torch.tensor([[1, 1, 1, 1], [2, 2, 3, 3]]))
    assert TrajectoryIndex.of(batch).lengths.tolist() == [4, 2, 2]


def test_done_key_alone_goes_before_ids() -> None:
    batch = make(DONE, ids=torch.tensor([[1, 1, 1, 1], [2, 2, 3, 3]]))
    split = split_trajectories(batch, done_key=NEXT_DONE)
    assert split[MASK].sum(-1).tolist() == [3, 1, 1, 3]
    assert split[keys.TRAJ_IDS][3].tolist() == [2, 3, 3]


def test_keys_of_ones_own() -> None:
    batch = make(DONE, ids=False)
    batch["mine", "episode"] = torch.tensor([[1, 1, 1, 2], [3, 3, 3, 3]])
    split = split_trajectories(batch, trajectory_key=("mine", "episode"))
    assert split["mine", "mask"].sum(-1).tolist() == [3, 1, 4]
    assert keys.COLLECTOR not in split


def test_padded_batch_is_split_again() -> None:
    batch = make(DONE, words=True)
    padded = split_trajectories(batch)
    check_same(split_trajectories(padded), padded)
    flat = split_trajectories(padded, layout="flat")
    check_same(flat, split_trajectories(batch, layout="flat"), names=False)


@pytest.mark.parametrize("names", [True, False])
def test_entry_of_another_view_is_the_same(names: bool) -> None:
    batch = make(DONE, names=names)
    batch["observation"] = batch["observation"].expand(2, 4, 3)[..., :2]
    split = split_trajectories(batch)
    assert split["observation"][0, :3].tolist() == batch["observation"][0, :3].tolist()


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("feature", [(), (1,), (2,), (3,), (2, 4), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_shape(dtype: torch.dtype, feature: tuple[int, ...]) -> None:
    batch = make(DONE)
    value = torch.arange(8 * torch.Size(feature).numel()).reshape(2, 4, *feature)
    batch["x"] = value.to(dtype)
    padded = split_trajectories(batch)
    index = TrajectoryIndex.of(batch)
    assert padded["x"].dtype is dtype
    zeros = padded["x"].to(torch.complex128)[~padded[MASK]]
    assert not zeros.abs().any()
    for layout in LAYOUTS:
        check_same(join_trajectories(split_trajectories(batch, layout=layout), index), batch)


def test_extreme_bits_are_kept() -> None:
    batch = make(DONE)
    patterns = torch.tensor([0x7FA00001, -1, 0x7F800000, -0x80000000], dtype=torch.int32)
    batch["x"] = patterns.view(torch.float32).repeat(2, 1)
    flat = split_trajectories(split_trajectories(batch), layout="flat")
    assert flat["x"].view(torch.int32).tolist() == patterns.tolist() * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("feature", [(), (3,)], ids=str)
def test_gradients_pass(layout: Any, feature: tuple[int, ...]) -> None:
    batch = make(DONE)
    x = torch.rand(2, 4, *feature, requires_grad=True)
    weight = torch.rand(2, 4, *feature)
    batch["x"], batch["weight"] = x, weight
    split = split_trajectories(batch, layout=layout)
    parts = split if isinstance(split, list) else [split]
    for part in parts:
        product = part["x"] * part["weight"]
        (product.values() if product.is_nested else product).sum().backward()
    torch.testing.assert_close(x.grad, weight)


def test_meta_device() -> None:
    """The flat layout of a given index asks for no values."""
    index = TrajectoryIndex.of(make(DONE))
    flat = split_trajectories(make(DONE).to("meta"), layout="flat", index=index)
    assert flat["observation"].device.type == "meta"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0,)], ids=str)
def test_no_steps(layout: Any, shape: tuple[int, ...]) -> None:
    batch = make(torch.zeros(shape, dtype=torch.bool))
    split = split_trajectories(batch, layout=layout)
    assert len(split) == 0
    if layout != "list":
        check_same(join_trajectories(split, TrajectoryIndex.of(batch)), batch)


@tensorclass
class Pair:
    left: torch.Tensor
    label: str


def test_tensorclass_and_lazy_entries() -> None:
    batch = make(DONE)
    batch["pair"] = Pair(left=torch.arange(8).reshape(2, 4), label="x", batch_size=[2, 4])
    rows = [TensorDict({"a": torch.full((4,), i)}, [4]) for i in range(2)]
    batch["lazy"] = LazyStackedTensorDict(*rows)
    split = split_trajectories(batch)
    assert isinstance(split["pair"], Pair)
    assert split["pair"].label == "x"
    assert split["pair"].left[3].tolist() == [5, 6, 7]
    assert split["lazy", "a"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]]


def test_lazy_batch() -> None:
    batch = make(DONE)
    lazy = LazyStackedTensorDict(batch[0], batch[1])
    check_same(split_trajectories(lazy), split_trajectories(batch))


def test_nested_batch_dims_are_kept() -> None:
    batch = make(DONE)
    batch["agents"].batch_size = [2, 4, 2]
    index = TrajectoryIndex.of(batch)
    assert split_trajectories(batch)["agents"].batch_size == (4, 3, 2)
    for layout in ("padded", "flat", "list"):
        check_same(join_trajectories(split_trajectories(batch, layout=layout), index), batch)
    # A nested tensor's ragged dim fits no batch size: the jagged layout ends before it.
    assert split_trajectories(batch, layout="jagged")["agents"].batch_size == (4,)


def test_values_that_are_sequences_stay_whole() -> None:
    batch = make(DONE[0])
    word = [["a"], ["b", "c"], [], ["d"]]
    batch.set("word", NonTensorStack(*map(NonTensorData, word)))
    split = split_trajectories(batch)
    assert split.get("word").tolist() == [[["a"], ["b", "c"], []], [["d"], None, None]]


def test_the_batch_is_not_changed() -> None:
    batch = make(DONE, ids=False, words=True).lock_()
    before = batch.clone()
    for layout in LAYOUTS:
        split_trajectories(batch, layout=layout)
    check_same(batch, before)


def test_index_is_printable_and_countable() -> None:
    index = TrajectoryIndex.of(make(DONE))
    assert repr(index) == (
        "TrajectoryIndex(4 trajectories, 2 complete, 8 steps in a batch [2, 4], from ids)"
    )
    assert (len(index), index.frames, index.longest) == (4, 8, 3)
    assert index.slot.tolist() == [0, 0, 1, 1]
    assert index.starts.tolist() == [0, 3, 4, 5]
    assert index.complete.tolist() == [True, False, True, False]


def test_without_done_flags_the_followed_are_complete() -> None:
    batch = make(DONE).exclude(NEXT_DONE)
    assert TrajectoryIndex.of(batch).complete.tolist() == [True, False, True, False]
