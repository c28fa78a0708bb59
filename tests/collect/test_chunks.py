"""Large rows are moved into the batch in chunks: the batch is the same for any size of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import tdcollect

from . import policies, transforms
from .oracle import check_same
from .test_parent_behaviours import PAIRS

CASES = {**PAIRS, "pixels": (partial(transforms.make, "to-tensor-image"), policies.actor)}


@pytest.mark.parametrize(
    ("case", "chunk_bytes"), [*((case, 1) for case in CASES), ("books", 200), ("toy", 200)]
)
def test_chunked_batches_are_the_parents(
    case: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.collect.step_dict._CHUNK_BYTES", chunk_bytes)
    check_same(*CASES[case])


def test_a_policy_may_keep_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a step are not written again, also not by the next chunk."""
    monkeypatch.setattr("tdcollect.collect.step_dict._CHUNK_BYTES", 1)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Keeper(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            kept.append((observation, observation.clone()))
            return torch.tensor([[1, 0]] * 2)

    env = tdcollect.make_env("CartPole-v1", 2)
    policy = TensorDictModule(Keeper(), in_keys=["observation"], out_keys=["action"])
    iterator = iter(tdcollect.Collector(env, policy, frames_per_batch=60))
    next(iterator), next(iterator)
    assert len(kept) >= 60
    assert all(torch.equal(given, then) for given, then in kept)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_batch_shares_memory_with_nothing(steps: int, slots: int) -> None:
    """Neither with another batch, nor with the collector, nor one entry with another."""
    env = tdcollect.make_env("CartPole-v1", slots, is_init=True)
    collector = tdcollect.Collector(env, policies.actor(env), frames_per_batch=slots * steps)
    iterator = iter(collector)
    tensors = [
        tensor
        for part in (next(iterator), next(iterator), collector._carrier)
        for tensor in part.values(True, True)
    ]
    batches = tensors[: -len(list(collector._carrier.values(True, True)))]
    for tensor in batches:
        others = [other for other in tensors if other is not tensor]
        memory = tensor.untyped_storage().data_ptr()
        assert all(memory != other.untyped_storage().data_ptr() for other in others)
