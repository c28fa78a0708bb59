"""split_trajectories, its inverses, and the handling of entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from tdcollect import keys
from tdcollect.trajectories import (
    TrajectoryIndex,
    first,
    flatten_time,
    join_trajectories,
    last,
    split_trajectories,
    unflatten_time,
    unpad,
)

from .batches import MASK, NEXT_DONE, check_same, done_flags, given, make, naive

LAYOUTS: tuple[Any, ...] = ("padded", "jagged", "flat", "list")
DONE = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)


def test_entries_of_the_jagged_layout_can_be_combined() -> None:
    split = split_trajectories(make(DONE), layout="jagged")
    nested = split["observation"]
    assert split.batch_size == (4,)
    assert nested.layout is torch.jagged
    assert [one[:, 0].tolist() for one in nested.unbind()] == [[1, 2, 3], [4], [5], [6, 7, 8]]
    assert (nested * split["next", "reward"]).shape == nested.shape  # one size for all entries


@given(done_flags(), st.booleans())
def test_layouts_agree_with_a_loop_over_steps(done: torch.Tensor, ids: bool) -> None:
    batch = make(done, ids=ids, words=True)
    ours = split_trajectories(batch, layout="list")
    theirs = naive(batch)
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not ids:
            other = other.copy()
            other.set(keys.TRAJ_IDS, torch.full(other.shape, number))
        check_same(one, other, names=False)
    padded, jagged, flat, pieces = (split_trajectories(batch, layout=one) for one in LAYOUTS)
    check_same(unpad(padded), flat, names=False)
    check_same(join_trajectories(jagged), flat, names=False)
    check_same(join_trajectories(pieces), flat)
    for i, piece in enumerate(pieces):
        check_same(padded[i, : len(piece)].exclude(MASK), piece, names=False)
    check_same(split_trajectories(padded), padded)


@given(done_flags(), st.sampled_from(LAYOUTS), st.booleans(), st.booleans(), st.booleans())
def test_split_then_join_is_the_identity(
    done: torch.Tensor, layout: Any, ids: bool, names: bool, padded: bool
) -> None:
    batch = make(done, ids=ids, names=names, words=True)
    batch = split_trajectories(batch) if padded else batch
    index = TrajectoryIndex.of(batch)
    check_same(join_trajectories(split_trajectories(batch, layout=layout), index), batch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_added_after_the_split_come_along_and_gradients_pass(layout: Any) -> None:
    batch = make(DONE)
    weight = torch.rand(2, 4, 3)
    batch["x"] = x = torch.rand(2, 4, 3, requires_grad=True)
    batch["single"] = single = torch.rand(2, 4, requires_grad=True)
    split = split_trajectories(batch, layout=layout)
    for part in split if isinstance(split, list) else [split]:
        part["twice"] = part["observation"] * 2
    joined = join_trajectories(split, TrajectoryIndex.of(batch))
    assert joined["twice"].tolist() == (batch["observation"] * 2).tolist()
    ((joined["x"] * weight).sum() + (joined["single"] * weight[..., 0]).sum()).backward()
    torch.testing.assert_close(x.grad, weight)
    torch.testing.assert_close(single.grad, weight[..., 0])


def test_time_dim_is_the_one_named_time() -> None:
    batch = make(DONE)
    turned = batch.permute(1, 0).contiguous()
    turned.names = ["time", None]
    check_same(split_trajectories(turned), split_trajectories(batch))
    index = TrajectoryIndex.of(turned)
    for layout in LAYOUTS:
        check_same(join_trajectories(split_trajectories(turned, layout=layout), index), turned)
    flat = flatten_time(turned)
    assert flat["observation"][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    check_same(unflatten_time(flat, 2), batch)
    padded = split_trajectories(batch).permute(1, 0).contiguous()
    padded.names = ["time", None]
    check_same(unpad(padded), unpad(split_trajectories(batch)), names=False)


@pytest.mark.behaviour(20)
@given(done_flags())
def test_flatten_time_and_back(done: torch.Tensor) -> None:
    batch = make(done, words=True)
    flat = flatten_time(batch)
    assert flat.batch_size == (done.numel(),)
    assert flat["observation"][:, 0].tolist() == list(range(1, done.numel() + 1))
    check_same(unflatten_time(flat, done.shape[:-1]), batch)


def test_keys_decide_where_boundaries_come_from() -> None:
    ids = torch.tensor([[1, 1, 1, 1], [2, 2, 3, 3]])
    batch = make(DONE, ids=ids)
    assert TrajectoryIndex.of(batch).lengths.tolist() == [4, 2, 2]
    split = split_trajectories(batch, done_key=NEXT_DONE)
    assert split[MASK].sum(-1).tolist() == [3, 1, 1, 3]
    assert split[keys.TRAJ_IDS][3].tolist() == [2, 3, 3]
    batch = make(DONE, ids=False)
    batch["mine", "episode"] = ids
    split = split_trajectories(batch, trajectory_key=("mine", "episode"))
    assert split["mine", "mask"].sum(-1).tolist() == [4, 2, 2]
    assert keys.COLLECTOR not in split


def test_unpad_takes_what_the_mask_takes() -> None:
    padded = split_trajectories(make(DONE, ids=False))
    assert join_trajectories(padded)[keys.TRAJ_IDS].tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
    padded[MASK] = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 1]], dtype=torch.bool)
    assert unpad(padded)["observation"][:, 0].tolist() == [1, 3, 5, 7, 8]
    assert TrajectoryIndex.of(padded).lengths.tolist() == [1, 1, 1, 2]
    assert MASK not in unpad(padded).keys(True)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("feature", [(), (2,), (3,), (0,)], ids=str)
def test_any_dtype_and_shape(feature: tuple[int, ...]) -> None:
    value = torch.arange(8 * torch.Size(feature).numel()).reshape(2, 4, *feature)
    entries = {str(dtype): value.to(dtype) for dtype in DTYPES}
    entries["a view"] = value.float().expand(3, *value.shape)[1]
    batch = make(DONE).update(entries)
    padded = split_trajectories(batch)
    for name, entry in entries.items():
        assert padded[name].dtype is entry.dtype
        assert not padded[name].to(torch.complex128)[~padded[MASK]].abs().any()
    index = TrajectoryIndex.of(batch)
    for layout in LAYOUTS:
        check_same(join_trajectories(split_trajectories(batch, layout=layout), index), batch)


def test_bits_are_kept_wherever_an_entry_begins_in_memory() -> None:
    batch = make(DONE)
    patterns = torch.tensor([0x7FA00001, -1, 0x7F800000, -0x80000000], dtype=torch.int32)
    batch["x"] = patterns.view(torch.float32).repeat(2, 1)
    batch["odd"] = torch.arange(17).to(torch.uint8)[1:].view(2, 4, 2)
    flat = split_trajectories(split_trajectories(batch), layout="flat")
    assert flat["x"].view(torch.int32).tolist() == patterns.tolist() * 2
    assert flat["odd"].flatten().tolist() == list(range(1, 17))


def test_a_split_leaves_its_batch_as_it_is_and_may_ask_for_no_values() -> None:
    batch = make(DONE, ids=False, words=True).lock_()
    before = batch.clone()
    for layout in LAYOUTS:
        split_trajectories(batch, layout=layout)
    check_same(batch, before)
    # The flat layout of a given index asks for no values.
    index = TrajectoryIndex.of(make(DONE))
    flat = split_trajectories(make(DONE).to("meta"), layout="flat", index=index)
    assert flat["observation"].device.type == "meta"


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0,)], ids=str)
def test_no_steps(shape: tuple[int, ...]) -> None:
    batch = make(torch.zeros(shape, dtype=torch.bool))
    for layout in LAYOUTS:
        split = split_trajectories(batch, layout=layout)
        assert len(split) == 0
        if layout != "list":
            check_same(join_trajectories(split, TrajectoryIndex.of(batch)), batch)


@tensorclass
class Pair:
    left: torch.Tensor
    label: str


def test_entries_that_are_no_plain_tensors() -> None:
    batch = make(DONE)
    batch["pair"] = Pair(left=torch.arange(8).reshape(2, 4), label="x", batch_size=[2, 4])
    rows = [TensorDict({"a": torch.full((4,), i)}, [4]) for i in range(2)]
    batch["lazy"] = LazyStackedTensorDict(*rows)
    split = split_trajectories(batch)
    assert isinstance(split["pair"], Pair)
    assert split["pair"].label == "x"
    assert split["pair"].left[3].tolist() == [5, 6, 7]
    assert split["lazy", "a"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]]
    batch = make(DONE)
    check_same(split_trajectories(LazyStackedTensorDict(*batch)), split_trajectories(batch))
    batch = make(DONE[0])  # values that are sequences stay whole
    word = [["a"], ["b", "c"], [], ["d"]]
    batch.set("word", NonTensorStack(*map(NonTensorData, word)))
    split = split_trajectories(batch)
    assert split.get("word").tolist() == [[["a"], ["b", "c"], []], [["d"], None, None]]


def test_nested_batch_dims_are_kept() -> None:
    batch = make(DONE)
    batch["agents"].batch_size = [2, 4, 2]
    index = TrajectoryIndex.of(batch)
    assert split_trajectories(batch)["agents"].batch_size == (4, 3, 2)
    for layout in ("padded", "flat", "list"):
        check_same(join_trajectories(split_trajectories(batch, layout=layout), index), batch)
    # A nested tensor's ragged dim fits no batch size: the jagged layout ends before it.
    assert split_trajectories(batch, layout="jagged")["agents"].batch_size == (4,)


SIZES = (2, 3)
OPERATIONS: dict[str, Callable[[TensorDict], Any]] = {
    "padded": split_trajectories,
    "list": lambda batch: split_trajectories(batch, layout="list")[1],
    "joined": lambda batch: join_trajectories(split_trajectories(batch)),
    "and back": lambda batch: unflatten_time(flatten_time(batch), 2),
    "first": first,
    "last": last,
}


def agent(size: int) -> TensorDict:
    values = torch.arange(2.0 * 4 * size).view(2, 4, size)
    return TensorDict({"observation": values, "alive": torch.ones(2, 4, dtype=torch.bool)}, [2, 4])


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_of_unlike_agents_is_as_it_would_be_alone(name: str) -> None:
    def result(agents: Any) -> Any:
        batch = make(DONE).set("agents", agents)
        batch[keys.NEXT, "agents"] = agents.clone()
        return OPERATIONS[name](batch)

    together = result(LazyStackedTensorDict(*map(agent, SIZES), stack_dim=2))
    assert isinstance(together["agents"], LazyStackedTensorDict)
    for i, size in enumerate(SIZES):
        alone = result(agent(size))
        for part, expected in ((together, alone), (together[keys.NEXT], alone[keys.NEXT])):
            check_same(part["agents"].tensordicts[i], expected["agents"])


def test_index() -> None:
    index = TrajectoryIndex.of(make(DONE))
    assert repr(index) == (
        "TrajectoryIndex(4 trajectories, 2 complete, 8 steps in a batch [2, 4], from ids)"
    )
    assert (len(index), index.frames, index.longest) == (4, 8, 3)
    assert index.slot.tolist() == [0, 0, 1, 1]
    assert index.starts.tolist() == [0, 3, 4, 5]
    assert index.complete.tolist() == [True, False, True, False]
    # Without done flags, those that another follows are complete.
    without = TrajectoryIndex.of(make(DONE[:, :3]).exclude(NEXT_DONE))
    assert without.complete.tolist() == [False, True, False]
