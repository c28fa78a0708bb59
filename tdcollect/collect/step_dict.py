"""StepDict: one step of all slots as a flat dict of tensors.

Keys are a name, or a tuple of names for a nested entry; values have the env's batch size in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from tdcollect.envs.spaces import TextLeaf
from tdcollect.keys import Key, as_path

_NONE: Mapping[Any, Any] = MappingProxyType({})


class StepDict(dict[Key, torch.Tensor]):
    """A flat dict with the few TensorDict methods that TorchRL's own code needs here.

    Attributes:
        shape: the batch size, where a method asks for it; set by whoever runs that code.
        device: the device that a TensorDict would name, if any, likewise.
        shapes: the batch sizes of nested TensorDicts, by their paths, where they were noted.
    """

    shape: torch.Size
    device: torch.device | None = None
    shapes: Mapping[tuple[str, ...], torch.Size] = MappingProxyType({})

    @property
    def batch_size(self) -> torch.Size:
        """The batch size."""
        return self.shape

    @property
    def ndim(self) -> int:
        """The number of batch dimensions."""
        return len(self.shape)

    batch_dims = ndim

    def keys(self, *nested: Any, **options: Any) -> Any:
        """All keys: those of leaves, nested ones included."""
        return dict.keys(self)

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry, or ``default``; a keyword here, as TensorDict has it."""
        return dict.get(self, key, default)

    def set(self, key: Key, value: torch.Tensor) -> StepDict:
        """Store an entry."""
        self[key] = value
        return self

    def exclude(self, *excluded: Key, inplace: bool = False) -> StepDict:
        """Drop entries: from this step, or from a copy."""
        step = self if inplace else StepDict(self)
        for key in excluded:
            step.pop(key, None)
        return step

    def reshape(self, *shape: Any) -> StepDict:
        """The same entries under another batch size."""
        wanted = torch.Size(shape[0] if isinstance(shape[0], torch.Size) else shape)
        if wanted == (-1,):
            wanted = torch.Size([self.shape.numel()])
        reshaped = StepDict(
            (key, value.reshape(wanted + value.shape[len(self.shape) :]))
            for key, value in self.items()
        )
        reshaped.shape = wanted
        return reshaped

    def unsqueeze(self, dim: int) -> StepDict:
        """The same entries with one more batch dimension, the last."""
        assert dim == -1
        return self.reshape(self.shape + (1,))


class NotTensors(TypeError):
    """A policy writes entries that are no dense tensors: strings, nested or lazily stacked ones."""

    def __init__(self, message: str, entries: list[Key]):
        super().__init__(message)
        self.entries = entries


class NotReset(ValueError):
    """Steps give entries of the env that its resets do not."""


def check_tensors(step: StepDict) -> None:
    """Raise NotTensors for entries that cannot be stacked into a batch."""
    odd = {key: type(value).__name__ for key, value in step.items() if not is_plain(value)}
    if odd:
        raise NotTensors(
            "expected the policy to write dense tensors, got "
            + ", ".join(f"{name} in {key!r}" for key, name in odd.items())
            + "; leave it out of what the policy writes (select_out_keys of a TensorDictModule)",
            list(odd),
        )


def is_plain(value: Any) -> bool:
    """Return whether an entry is a dense tensor."""
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return dense and not value.is_nested


def flat(tensordict: TensorDictBase, texts: Mapping[Key, TextLeaf] = _NONE) -> StepDict:
    """The leaves of a TensorDict, sharing their memory; of texts, the numbers."""
    step = StepDict(tensordict.items(True, True))
    for key, leaf in texts.items():
        if (value := tensordict.get(key, None)) is not None:
            step[key] = leaf.numbers(value)
    return step


def nested_shapes(tensordict: TensorDictBase) -> dict[tuple[str, ...], torch.Size]:
    """The batch sizes of the TensorDicts nested in one, by their paths."""
    shapes: dict[tuple[str, ...], torch.Size] = {}
    for name, part in tensordict.items():
        if isinstance(part, TensorDictBase) and not is_non_tensor(part):
            shapes[(name,)] = part.batch_size
            shapes.update(((name, *path), size) for path, size in nested_shapes(part).items())
    return shapes


def leaves(tensordict: TensorDictBase) -> list[tuple[Key, Any]]:
    """Return the entries of a TensorDict, and of those within it; what else it holds stays whole.

    (``items`` with ``is_leaf`` also gives what is within the others, from tensordict 0.15 on.)
    """
    entries: list[tuple[Key, Any]] = []
    for key, value in tensordict.items(False, False):
        if type(value) is TensorDict:
            entries += [((key, *as_path(name)), leaf) for name, leaf in leaves(value)]
        else:
            entries.append((key, value))
    return entries


def stacked_lazily(tensordict: TensorDictBase) -> bool:
    """Return whether some entries are not stacked yet, and perhaps cannot be."""
    if is_non_tensor(tensordict):
        return False  # strings and the like are entries of their own
    return isinstance(tensordict, LazyStackedTensorDict) or any(
        stacked_lazily(part) for part in tensordict.values() if is_tensor_collection(part)
    )


def by_slot(value: torch.Tensor, batch_size: torch.Size) -> torch.Tensor:
    """An entry ``[*batch, ...]`` as ``[N, ...]``, sharing its memory where that is contiguous."""
    return value.flatten(0, len(batch_size) - 1) if batch_size else value.unsqueeze(0)


def with_index(device: torch.device) -> torch.device:
    """The device that tensors name which are made on it: ``cuda:0`` for ``cuda``."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def sent(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on another device; the host does not wait for a copy to a GPU."""
    if device.type != "cuda" or value.device.type != "cpu":
        return value.to(device)
    return (value if value.is_pinned() else value.pin_memory()).to(device, non_blocking=True)


def like_rows(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A mask of slots ``[*batch, 1]`` where the value is, in a shape that goes with it."""
    shape = mask.shape[:-1] + (1,) * (value.ndim - mask.ndim + 1)
    return mask.reshape(shape).to(value.device)


def zero_rows(
    step: StepDict, entries: Sequence[Key], batch_size: torch.Size, slots: Sequence[int]
) -> None:
    """Zero the rows of some slots, in copies of the entries."""
    if not (entries and slots):
        return
    index = torch.tensor(slots)
    for key in entries:
        value = step[key] = step[key].clone(memory_format=torch.contiguous_format)
        index = sent(index, value.device)
        by_slot(value, batch_size).index_fill_(0, index, 0)


def numbered(numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Trajectory ids, with the first of ``ids`` for -1, the second for -2, and so on."""
    if not len(ids):
        return numbers
    ids = ids.to(numbers.device)
    return torch.where(numbers < 0, ids[(-1 - numbers).clamp(min=0)], numbers)


def next_step(
    step: StepDict, source: StepDict, carried: list[Key], next_keys: list[Key]
) -> StepDict:
    """The next step: entries of the env (in ``source``), and of the policy and the collector.

    The step's own flags stay as they are: no step starts in an episode that has ended.
    """
    following = StepDict(step)
    for key in next_keys:
        del following[key]
    for key in carried:
        if key in source:
            following[key] = source[key]
    return following


def shaped_like(
    template: TensorDictBase, batch: TensorDictBase, cast: bool, fill: bool = False
) -> None:
    """Give a batch the parts of TorchRL's that are no entries.

    Args:
        template: has the nested TensorDicts, empty ones too, and their devices.
        batch: is changed in place.
        cast: give entries the template's dtypes (where a policy runs under autocast, say).
        fill: write zeros for entries that the batch lacks.
    """
    if isinstance(template, LazyStackedTensorDict):
        return  # slots unlike each other are stacked as they are
    for name, part in template.items():
        own = inner = batch.get(name, None)
        if is_non_tensor(part):
            continue
        if isinstance(part, TensorDictBase):
            if inner is None:
                inner = TensorDict({}, batch_size=batch.batch_size)
            device = batch.device or part.device
            if inner.device != device:
                inner = inner.clear_device_() if device is None else inner.to(device)
            deeper = part.batch_size[template.ndim :]
            if deeper:
                inner.batch_size = (*batch.batch_size, *deeper)
            shaped_like(part, inner, cast, fill)
            if inner is not own:
                batch.set(name, inner)
        elif inner is None:
            if fill:
                shape = (*batch.batch_size, *part.shape[template.ndim :])
                batch.set(name, torch.zeros(shape, dtype=part.dtype, device=batch.device))
        elif cast and inner.dtype != part.dtype:
            batch.set(name, inner.to(part.dtype))


_CHUNK_BYTES = 2**20
"""Steps are moved into the batch in chunks of about so many bytes of observations."""

_GPU_CHUNK_BYTES = 2**26
"""The same where they are on a GPU: a chunk costs some launches, and has no cache to fit into."""

_CHUNK_STEPS = 128
"""The most steps of a chunk."""


def chunk_steps(step_bytes: int, on_cpu: bool = True) -> int:
    """The steps of a chunk, if the observations of each take so many bytes."""
    size = _CHUNK_BYTES if on_cpu else _GPU_CHUNK_BYTES
    return max(1, min(_CHUNK_STEPS, size // max(1, step_bytes)))
