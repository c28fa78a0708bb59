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


def differences(one: Any, other: Any, *, names: bool = True) -> list[str]:
    """The differences between two TensorDicts: sizes, keys, dtypes, values bit for bit, names."""
    if one.batch_size != other.batch_size:
        return [f"batch size {one.batch_size} and {other.batch_size}"]
    named = not names or one.names == other.names
    found = [] if named else [f"names {one.names} and {other.names}"]
    if set(one.keys()) != set(other.keys()):
        return [*found, f"keys {sorted(one.keys())} and {sorted(other.keys())}"]
    for key in sorted(one.keys()):
        a, b = one.get(key), other.get(key)
        if is_non_tensor(a):
            if a.batch_size != b.batch_size or a.tolist() != b.tolist():
                found.append(f"{key}: {a.tolist()} and {b.tolist()}")
        elif is_tensor_collection(a):
            found += [f"{key}: {what}" for what in differences(a, b, names=names)]
        elif a.is_nested:
            found += [] if torch.equal(a.values(), b.values()) else [key]
        elif a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            found.append(f"{key}: {a.dtype} {a.shape} and {b.dtype} {b.shape}")
        elif a.numel() and not torch.equal(bits(a), bits(b)):
            found.append(f"{key}: {a} and {b}")
    return found


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def check_same(one: Any, other: Any, *, names: bool = True) -> None:
    found = differences(one, other, names=names)
    if found:
        raise AssertionError("; ".join(found))
