"""Whether the rows of a batch come out alike at every place in it, to the bit.

A matrix product may round a row otherwise at another place: where the row's length is no multiple
of 16 bytes, say, rows begin at unlike alignments, and the kernel starts elsewhere. (Measured: on
float32 ``[16, 11] @ [11, 4]``, and on most float64 products of odd lengths.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tdcollect import keys
from tdcollect.collect.step_dict import Key

_EMPTY = "empty"  # in the names of operations that give memory as it is


class LikeRows(TorchDispatchMode):
    """Watches a policy on a batch of like rows: all that it computes must have like rows.

    Args:
        rows: the size of the batch.

    Attributes:
        unlike: whether some operation gave rows that differ.
    """

    def __init__(self, rows: int):
        super().__init__()
        self.unlike = False
        self._rows = rows
        self._kept: list[torch.Tensor] = []  # alive, so that no other tensor takes over the storage
        self._of_batch: set[int] = set()

    def follow(self, values: Iterable[torch.Tensor]) -> None:
        """Watch what is computed from these."""
        for value in values:
            self._kept.append(value)
            self._of_batch.add(_storage(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(_storage(value) in self._of_batch for value in _tensors((args, kwargs))):
            self.follow(_tensors(result))
            for value in _tensors(result):
                if _EMPTY not in func._schema.name and _has_rows(value, self._rows):
                    apart = value.contiguous().view(self._rows, -1).view(torch.uint8)
                    self.unlike |= not torch.equal(apart, apart[:1].expand_as(apart))
        return result


def example(key: Key, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Values for an entry, of the shape and dtype given; the same whatever is evaluated."""
    generator = torch.Generator().manual_seed(seed)
    name = key if isinstance(key, str) else key[-1]
    if like.dtype == torch.bool:
        # In the middle of an episode, with nothing masked.
        drawn = torch.full(like.shape, float(name not in (*keys.FLAGS, keys.IS_INIT)))
    elif like.is_floating_point():
        drawn = torch.randn(like.shape, generator=generator)
    else:
        most = 256 if like.dtype == torch.uint8 else 2
        drawn = torch.randint(0, most, like.shape, generator=generator)
    return drawn.to(dtype=like.dtype, device=like.device)


def _has_rows(value: torch.Tensor, rows: int) -> bool:
    return value.ndim > 0 and value.numel() > 0 and len(value) % rows == 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
