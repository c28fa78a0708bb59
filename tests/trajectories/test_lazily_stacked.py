"""Entries of agents unlike each other, which TensorDict stacks lazily, are split like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from tdcollect import keys, split_trajectories
from tdcollect.trajectories import first, flatten_time, join_trajectories, last, unflatten_time

from .batches import check_same

SIZES = (2, 3)


def agent(size: int) -> TensorDict:
    values = torch.arange(2.0 * 5 * size).view(2, 5, size)
    return TensorDict({"observation": values, "alive": torch.ones(2, 5, dtype=torch.bool)}, [2, 5])


def batch_of(agents: Any) -> TensorDict:
    done = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 1, 0]], dtype=torch.bool).unsqueeze(-1)
    batch = TensorDict({"agents": agents, "done": torch.zeros_like(done)}, [2, 5])
    return batch.set(keys.NEXT, TensorDict({"agents": agents.clone(), "done": done}, [2, 5]))


def together() -> TensorDict:
    return batch_of(LazyStackedTensorDict(*map(agent, SIZES), stack_dim=2))


OPERATIONS: dict[str, Callable[[TensorDict], Any]] = {
    "padded": split_trajectories,
    "flat": lambda batch: split_trajectories(batch, layout="flat"),
    "list": lambda batch: split_trajectories(batch, layout="list")[1],
    "joined": lambda batch: join_trajectories(split_trajectories(batch)),
    "flattened": flatten_time,
    "and back": lambda batch: unflatten_time(flatten_time(batch), 2),
    "first": first,
    "last": last,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_agent_is_as_it_would_be_alone(name: str) -> None:
    result = OPERATIONS[name](together())
    for i, size in enumerate(SIZES):
        alone = OPERATIONS[name](batch_of(agent(size)))
        assert isinstance(result["agents"], LazyStackedTensorDict)
        for part, expected in ((result, alone), (result[keys.NEXT], alone[keys.NEXT])):
            check_same(part["agents"].tensordicts[i], expected["agents"])


def test_steps_of_unlike_shapes_are_refused() -> None:
    steps = [
        TensorDict({"observation": torch.zeros(size), "done": torch.ones(1)}) for size in (1, 2)
    ]
    batch = LazyStackedTensorDict(*steps, stack_dim=0)
    with pytest.raises(ValueError, match=r"expected entries of one shape .* lazily.*batch.exclude"):
        flatten_time(batch)
