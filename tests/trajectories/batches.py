"""Random ragged batches, and the trajectories of a batch found one step at a time."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from tdcollect import keys

NEXT_DONE = (keys.NEXT, keys.DONE)
MASK = (keys.COLLECTOR, "mask")
REWARD = (keys.NEXT, keys.REWARD)


def given(*strategies: Any) -> Any:
    """Hypothesis' decorator, with as many examples as find what a hundred do."""
    return lambda test: hypothesis.settings(max_examples=25)(hypothesis.given(*strategies)(test))


def make(
    done: torch.Tensor,
    *,
    ids: torch.Tensor | bool = True,
    names: bool = True,
    words: bool = False,
    dtype: torch.dtype = torch.float32,
) -> TensorDict:
    """A batch with done flags ``[*N, T]``, entries that count its rows, and ids."""
    shape = done.shape
    rows = torch.arange(1, done.numel() + 1).reshape(shape)
    batch = TensorDict(
        {
            "observation": torch.stack([rows, -rows, rows * 2], -1).to(dtype),
            "image": rows.reshape(*shape, 1, 1).expand(*shape, 2, 2).to(torch.uint8),
            "agents": TensorDict({"id": torch.stack([rows, rows], -1)}, batch_size=shape),
            keys.NEXT: {
                keys.DONE: done.unsqueeze(-1),
                keys.REWARD: rows.unsqueeze(-1) / 7,
                "nested": {"deep": rows % 2 == 0},
            },
        },
        batch_size=shape,
    )
    if isinstance(ids, torch.Tensor):
        batch.set(keys.TRAJ_IDS, ids)
    elif ids:
        starts = done.roll(1, -1)
        starts[..., :1] = True
        batch.set(keys.TRAJ_IDS, starts.flatten().cumsum(0).reshape(shape) + 4)
    if words:
        batch.set("shared", NonTensorData({"a": 1}, batch_size=shape))
        batch.set("word", non_tensor(rows))
    if names:
        batch.names = [None] * (len(shape) - 1) + [keys.TIME]
    return batch


def non_tensor(rows: torch.Tensor) -> Any:
    if rows.ndim == 1:
        return NonTensorStack(*(NonTensorData(f"w{int(row)}") for row in rows))
    return NonTensorStack(*(non_tensor(part) for part in rows))


@st.composite
def done_flags(draw: st.DrawFn, *, slots: int = 4, steps: int = 9) -> torch.Tensor:
    """Bools ``[T]``, ``[N, T]`` or ``[M, N, T]``."""
    dims = [draw(st.integers(1, slots)) for _ in range(draw(st.integers(0, 2)))]
    shape = (*dims, draw(st.integers(1, steps)))
    flat = draw(st.lists(st.booleans(), min_size=(n := int(torch.Size(shape).numel())), max_size=n))
    return torch.tensor(flat).reshape(shape)


def naive(batch: TensorDictBase) -> list[TensorDictBase]:
    """Trajectories of a batch ``[*N, T]`` with time last, by a loop over its steps."""
    found = []
    for at in itertools.product(*map(range, batch.shape[:-1])):
        slot = batch[at] if at else batch
        ids, done = slot.get(keys.TRAJ_IDS, None), slot.get(NEXT_DONE)
        start = 0
        for t in range(1, len(slot) + 1):
            if t < len(slot):
                ends = done[t - 1].item() if ids is None else ids[t] != ids[t - 1]
                if not ends:
                    continue
            found.append(slot[start:t])
            start = t
    return found


def check_same(one: Any, other: Any, *, names: bool = True) -> None:
    """Two TensorDicts have the same sizes, keys, dtypes, values bit for bit, and names."""
    assert one.batch_size == other.batch_size
    assert not names or one.names == other.names
    assert set(one.keys(True)) == set(other.keys(True))
    for key in one.keys(True):
        a, b = one.get(key), other.get(key)
        if is_non_tensor(a):
            same = a.batch_size == b.batch_size and a.tolist() == b.tolist()
        elif is_tensor_collection(a):
            same = a.batch_size == b.batch_size and (not names or a.names == b.names)
        elif a.is_nested:
            same = torch.equal(a.values(), b.values())
        else:
            same = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
            same = same and (not a.numel() or torch.equal(bits(a), bits(b)))
        assert same, f"{key}: {a} and {b}"


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
