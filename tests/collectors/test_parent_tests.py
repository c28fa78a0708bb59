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
from .made import batches, two_slots

pytestmark = [
    pytest.mark.filterwarnings(UPSTREAM),
    pytest.mark.usefixtures("forked_workers"),
]


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
    collector = MultiSyncCollector(
        [two_slots] * 2, policy_factory=factories, frames_per_batch=16, total_frames=-1
    )
    (batch,) = batches(collector, 1)
    collector.shutdown()
    assert batch["action"].argmax(-1).flatten(1).tolist() == [[0] * 8, [1] * 8]


@pytest.mark.parametrize("env", ["CountingEnvWithString", "HeterogeneousCountingEnv[2]"])
def test_workers_go_on_where_entries_are_no_plain_tensors(env: str) -> None:
    collector = MultiSyncCollector([ENVS[env]] * 2, None, frames_per_batch=8, total_frames=-1)
    for batch, _ in zip(collector, range(2), strict=False):
        assert batch.numel() == 8
    collector.shutdown()


def _texts(rows: Any) -> list[str]:
    return [rows] if isinstance(rows, str) else [text for row in rows for text in _texts(row)]


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_strings_are_those_of_each_batch(cls: Any) -> None:
    """TorchRL's parent shows those of the first batch again, unless use_buffers=False."""
    collector = cls([ENVS["CountingEnvWithString"]] * 2, None, frames_per_batch=8, total_frames=-1)
    found = []
    for batch, _ in zip(collector, range(4), strict=False):
        found += _texts(batch["string"])
    collector.shutdown()
    assert len(set(found)) > len(found) - 4  # each is drawn at random


def test_strings_are_refused_in_memory_that_is_shared() -> None:
    with pytest.raises(ValueError, match="pass use_buffers=False"):
        MultiSyncCollector([ENVS["CountingEnvWithString"]], frames_per_batch=8, use_buffers=True)
