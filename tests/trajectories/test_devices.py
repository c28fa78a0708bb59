"""Results lie where the batch lies, and are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tdcollect import keys
from tdcollect.trajectories import (
    TrajectoryAssembler,
    TrajectoryIndex,
    discounted_returns,
    join_trajectories,
    last,
    returns,
    split_trajectories,
)

from .batches import NEXT_DONE, check_same, make

pytestmark = pytest.mark.usefixtures("cuda")


def batch(device: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return make(torch.rand(6, 50, generator=generator) < 0.1, ids=False).to(device)


# Nested tensors have no simulated device.
JAGGED = pytest.param("jagged", marks=pytest.mark.kernels)


@pytest.mark.parametrize("layout", ["padded", JAGGED, "flat", "list"])
def test_split_and_join(layout: Any) -> None:
    there = batch("cuda")
    split = split_trajectories(there, layout=layout)
    check_same(join_trajectories(split, TrajectoryIndex.of(there)), there)
    if layout != "list":
        check_same(split.cpu(), split_trajectories(there.cpu(), layout=layout))


def test_sums() -> None:
    there = batch("cuda")
    assert torch.equal(returns(there).cpu(), returns(batch("cpu")))
    torch.testing.assert_close(
        discounted_returns(there, 0.9).cpu(), discounted_returns(batch("cpu"), 0.9)
    )
    assert last(there)["observation"].is_cuda


def test_entries_on_two_devices() -> None:
    mixed = batch("cpu").clear_device_()
    mixed["observation"] = mixed["observation"].cuda()
    split = split_trajectories(mixed)
    assert split["observation"].is_cuda
    assert not split[NEXT_DONE].is_cuda


def test_assembler() -> None:
    there, here = TrajectoryAssembler(lookback=2), TrajectoryAssembler(lookback=2)
    for part, other in zip(batch("cuda").split(17, 1), batch("cpu").split(17, 1), strict=True):
        out = there.feed(part)
        assert out[keys.TRAJ_IDS].is_cuda
        check_same(out.cpu(), here.feed(other))
        check_same(there.chunks.cpu(), here.chunks)
        check_same(there.unfinished.cpu(), here.unfinished)
