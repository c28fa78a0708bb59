"""No Python loop over trajectories: hundreds of them need as many operations as ten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tdcollect.trajectories import (
    TrajectoryAssembler,
    TrajectoryIndex,
    discounted_returns,
    flatten_time,
    join_trajectories,
    last,
    returns,
    split_trajectories,
)

from .batches import make


class Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **kwargs or {})


def assemble(batch: Any) -> None:
    assembler = TrajectoryAssembler(lookback=2)
    for part in batch.split(50, dim=1):
        assembler.feed(part)


CALLS: dict[str, Callable[[Any], Any]] = {
    "padded": split_trajectories,
    "jagged": lambda batch: split_trajectories(batch, layout="jagged"),
    "flat": lambda batch: split_trajectories(batch, layout="flat"),
    "join": lambda batch: join_trajectories(split_trajectories(batch), TrajectoryIndex.of(batch)),
    "flatten": flatten_time,
    "returns": returns,
    "discounted": lambda batch: discounted_returns(batch, 0.9),
    "last": last,
    "assemble": assemble,
}


@pytest.mark.parametrize("name", CALLS)
def test_operations_do_not_grow_with_trajectories(name: str) -> None:
    found = []
    for period in (100, 7):
        done = torch.zeros(4, 200, dtype=torch.bool)
        done[:, ::period] = True
        done[:, 60] = True
        with Count() as count:
            CALLS[name](make(done))
        found.append(count.operations)
    few, many = found
    assert many <= few + 4  # whatever the number of entries and of trajectories
