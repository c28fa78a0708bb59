"""Uses of TorchRL's collectors with workers that its own tests make: they work with these, too.

The other files of this folder test what is tdcollect's own around them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from tdcollect.collectors import MultiAsyncCollector, MultiSyncCollector

from ..collect.mocks import ENVS
from ..collect.oracle import UPSTREAM
from .made import batches, ending, two_slots

pytestmark = pytest.mark.filterwarnings(UPSTREAM)


class Pushing(nn.Module):
    """A policy that pushes to one side."""

    def __init__(self, side: int):
        super().__init__()
        self.side = side

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Push."""
        action = torch.zeros(*tensordict.shape, 2, dtype=torch.long)
        action[..., self.side] = 1
        tensordict["action"] = action
        return tensordict


def test_each_worker_may_have_a_policy_factory_of_its_own() -> None:
    factories = [partial(Pushing, side) for side in (0, 1)]
    made = MultiSyncCollector([two_slots] * 2, policy_factory=factories, frames_per_batch=16)
    with ending(made) as collector:
        (batch,) = batches(collector, 1)
    assert batch["action"].argmax(-1).flatten(1).tolist() == [[0] * 8, [1] * 8]


def test_workers_go_on_where_entries_are_no_plain_tensors() -> None:
    env = ENVS["HeterogeneousCountingEnv[2]"]
    with ending(MultiSyncCollector([env] * 2, None, frames_per_batch=8)) as collector:
        assert [batch.numel() for batch in batches(collector, 2)] == [8, 8]


def _texts(rows: Any) -> list[str]:
    return [rows] if isinstance(rows, str) else [text for row in rows for text in _texts(row)]


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_strings_are_those_of_each_batch(cls: Any) -> None:
    """TorchRL's parent shows those of the first batch again, unless use_buffers=False."""
    env = ENVS["CountingEnvWithString"]
    with ending(cls([env] * 2, None, frames_per_batch=8)) as collector:
        found = _texts([batch["string"] for batch in batches(collector, 4)])
    assert len(set(found)) > len(found) - 4  # each is drawn at random


def test_strings_are_refused_in_memory_that_is_shared() -> None:
    with pytest.raises(ValueError, match="pass use_buffers=False"):
        MultiSyncCollector([ENVS["CountingEnvWithString"]], frames_per_batch=8, use_buffers=True)
