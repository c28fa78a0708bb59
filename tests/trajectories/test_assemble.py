"""TrajectoryAssembler: complete trajectories from batches that cut them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

import tdcollect
from tdcollect import keys
from tdcollect.trajectories import TrajectoryAssembler, TrajectoryIndex, split_trajectories

from .batches import NEXT_DONE, check_same, done_flags, given, make, naive


def cut(batch: TensorDict, steps: int) -> list[TensorDictBase]:
    """The batch, cut into batches of the given number of steps."""
    return list(batch.split(steps, dim=batch.ndim - 1))


def rows(batch: TensorDictBase) -> list[int]:
    """The rows of the batch of ``make``, from 1."""
    return batch["observation"][:, 0].int().tolist()


def whole(batch: TensorDict, steps: int) -> list[list[int]]:
    """The expected result of each feed, by a loop over trajectories."""
    order = []
    for number, one in enumerate(naive(batch)):
        found = rows(one)
        if not one[NEXT_DONE][-1]:
            continue
        time = [(row - 1) % batch.shape[-1] for row in found]
        order.append((time[-1] // steps, time[0] // steps, number, found))
    out: list[list[int]] = [[] for _ in range(-(-batch.shape[-1] // steps))]
    for ended, _, _, found in sorted(order):
        out[ended] += found
    return out


@given(done_flags(), st.booleans(), st.integers(1, 9), st.sampled_from(["slot", "id"]))
def test_agrees_with_a_loop(done: torch.Tensor, ids: bool, steps: int, match: str) -> None:
    """The same trajectories, in the order in which they started, however batches are cut."""
    if match == "id" and not ids:
        return
    batch = make(done, ids=ids, words=True)
    assembler = TrajectoryAssembler(match=match)
    given_out = [assembler.feed(part) for part in cut(batch, steps)]
    assert [rows(one) for one in given_out] == whole(batch, steps)
    assert assembler.dropped == 0
    held = [row for one in naive(batch) if not one[NEXT_DONE][-1] for row in rows(one)]
    assert sorted(rows(assembler.unfinished)) == held
    assert assembler.unfinished_frames == len(held)
    assert assembler.completed + assembler.num_unfinished == len(naive(batch))
    # Entry for entry, those of the batch.
    everything = torch.cat([*given_out, assembler.unfinished])
    expected = batch.reshape(-1).exclude("word")[torch.tensor(rows(everything), dtype=int) - 1]
    if not ids:
        expected[keys.TRAJ_IDS] = everything[keys.TRAJ_IDS]
    check_same(everything.exclude("word"), expected, names=False)
    assert everything.get("word").tolist() == [f"w{row}" for row in rows(everything)]


def test_lookback() -> None:
    """Pieces that continue carry up to two earlier steps, over several batches if need be."""
    done = torch.tensor([[0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 1, 0]], dtype=torch.bool)
    assembler = TrajectoryAssembler(lookback=2)
    assert repr(assembler) == (
        "TrajectoryAssembler(match='slot', lookback=2; "
        "0 completed, 0 dropped, 0 unfinished with 0 steps)"
    )
    assert assembler.unfinished.batch_size == (0,)
    seen = []
    for part in cut(make(done), 1):
        assembler.feed(part)
        earlier = assembler.chunks[keys.COLLECTOR, "lookback"].tolist()
        seen.append([-r if e else r for r, e in zip(rows(assembler.chunks), earlier, strict=True)])
    assert seen == [
        [1, 7],
        [-1, 2, -7, 8],
        [-1, -2, 3, 9],
        [-2, -3, 4, -9, 10],
        [5, -9, -10, 11],
        [-5, 6, 12],
    ]
    assert assembler.unfinished.names == ["time"]
    assert "3 completed, 0 dropped, 2 unfinished with 3 steps" in repr(assembler)


def test_a_trajectory_that_was_cut_off_is_dropped_and_counted() -> None:
    """A new id without a done flag: a reset from outside, as set_seed makes one."""
    done = torch.zeros(1, 6, dtype=torch.bool)
    done[0, 5] = True
    batch = make(done, ids=torch.tensor([[1, 1, 2, 3, 3, 3]]))
    assembler = TrajectoryAssembler()
    assert [rows(assembler.feed(part)) for part in cut(batch, 2)] == [[], [], [4, 5, 6]]
    assert (assembler.completed, assembler.dropped, assembler.num_unfinished) == (1, 2, 0)


def test_ids_that_recur_are_told_apart() -> None:
    done = torch.tensor([[0, 1, 0, 1, 0, 1]], dtype=torch.bool)
    batch = make(done, ids=torch.tensor([[1, 1, 2, 2, 1, 1]]))
    for match in ("slot", "id"):
        assembler = TrajectoryAssembler(match=match)
        assert [rows(assembler.feed(part)) for part in cut(batch, 3)] == [[1, 2], [3, 4, 5, 6]]
        assert assembler.completed == 3
        assert rows(assembler.feed(batch)) == [1, 2, 3, 4, 5, 6]
        assert assembler.completed == 6


def test_several_workers_by_id() -> None:
    """Batches of two workers in turn: the slots are others', the ids are unique."""
    one = make(torch.tensor([[0, 0, 0, 1]], dtype=torch.bool), ids=torch.full((1, 4), 1))
    two = make(torch.tensor([[0, 0, 1, 0]], dtype=torch.bool), ids=torch.tensor([[2, 2, 2, 3]]))
    assembler = TrajectoryAssembler(match="id")
    turns = [part for pair in zip(cut(one, 2), cut(two, 2), strict=True) for part in pair]
    out = [assembler.feed(part) for part in turns]
    assert [rows(part) for part in out] == [[], [], [1, 2, 3, 4], [1, 2, 3]]
    assert rows(assembler.unfinished) == [4]


def held(assembler: TrajectoryAssembler) -> int:
    """The rows in memory."""
    values = [source["observation"] for source in assembler._sources]
    return sum(v.untyped_storage().nbytes() // v[0].numel() // v.itemsize for v in values)


def test_memory_is_bounded_by_what_is_unfinished() -> None:
    """Episodes of 60 steps in batches of three: what is held never outgrows twice its rows."""
    done = torch.zeros(8, 270, dtype=torch.bool)
    for slot in range(8):
        done[slot, 7 * slot :: 60] = True
    assembler = TrajectoryAssembler()
    for part in cut(make(done), 3):
        assembler.feed(part)
        assert held(assembler) <= 2 * assembler.unfinished_frames
        assert len(assembler._sources) <= 8
    most_end = torch.zeros(8, 101, dtype=torch.bool)
    most_end[:5, 100] = True
    assembler = TrajectoryAssembler()
    for part in cut(make(most_end), 100):
        assembler.feed(part)
        assert held(assembler) <= 2 * assembler.unfinished_frames


def test_nothing_is_shared_with_the_batch_and_clear_forgets() -> None:
    first, second = cut(make(torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)), 2)
    assembler = TrajectoryAssembler()
    out = assembler.feed(first)
    first.zero_()
    assert rows(out) == [5, 6]
    assert rows(assembler.unfinished) == [1, 2]
    assembler.clear()
    assert rows(assembler.feed(second)) == [7, 8]
    assert rows(assembler.unfinished) == [3, 4]
    assert assembler.dropped == 0


def test_padded_batches_are_taken_and_gradients_pass() -> None:
    done = torch.tensor([[0, 1, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)
    padded = split_trajectories(make(done))
    assert rows(TrajectoryAssembler(match="id").feed(padded)) == [1, 2, 5, 6, 7]
    batch = make(torch.tensor([[False, False, True, False]]))
    batch["x"] = x = torch.rand(1, 4, 2, requires_grad=True)
    assembler = TrajectoryAssembler()
    out = [assembler.feed(part) for part in cut(batch, 2)]
    out[1]["x"].sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, 0].tolist() == [1, 1, 1, 0]


@pytest.mark.behaviour(21)
def test_a_collectors_batches_come_out_as_whole_trajectories() -> None:
    env = tdcollect.make_env("CartPole-v1", 4, episode_reward=True, step_count=True)
    collector = tdcollect.Collector(env, frames_per_batch=4 * 9, total_frames=4 * 9 * 12)
    collector.set_seed(0)
    assembler = TrajectoryAssembler()
    out = torch.cat([assembler.feed(batch) for batch in collector])
    collector.shutdown()
    index = TrajectoryIndex.of(out)
    ends = out[index.starts + index.lengths - 1]
    assert len(index) == assembler.completed > 8
    assert index.complete.all()
    assert ends["next", "step_count"].squeeze(-1).tolist() == index.lengths.tolist()
    assert out["step_count"][index.starts].sum() == 0
    assert out.shape[0] + assembler.unfinished_frames == 4 * 9 * 12
