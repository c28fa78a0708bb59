"""Checks that a policy treats the rows of a batch independently, and alike at every place in it.

A matrix product may round a row differently at another place: if a row's length is no multiple of
16 bytes, for example, rows begin at different alignments. (Measured: on float32
``[16, 11] @ [11, 4]``, and on most float64 products of odd lengths.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tdcollect import keys
from tdcollect._upstream.modules import TorchDispatchMode, schema_of
from tdcollect.collect.step_dict import Key, StepDict
from tdcollect.evaluation.episodes.isolation import NotReproducibleError

_EMPTY = "empty"  # in the names of operations that return memory as it is


class LikeRows(TorchDispatchMode):
    """Watches a policy on a batch of equal rows: all that it computes must have equal rows.

    Args:
        rows: the size of the batch.

    Attributes:
        unlike: True if some operation returned rows that differ.
    """

    def __init__(self, rows: int):
        super().__init__()
        self.unlike = False
        self._rows = rows
        self._kept: list[torch.Tensor] = []  # alive, so that no other tensor takes over the storage
        self._of_batch: set[int] = set()

    def follow(self, values: Iterable[torch.Tensor]) -> None:
        """Watch all that is computed from these."""
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
                if _EMPTY not in schema_of(func).name and _has_rows(value, self._rows):
                    apart = value.contiguous().view(self._rows, -1).view(torch.uint8)
                    self.unlike |= not torch.equal(apart, apart[:1].expand_as(apart))
        return result


def example(key: Key, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return values for an entry, of the given shape and dtype; the same in every evaluation."""
    generator = torch.Generator().manual_seed(seed)
    if like.dtype == torch.bool:
        # In the middle of an episode, with nothing masked.
        drawn = torch.full(like.shape, float(_name(key) not in (*keys.FLAGS, keys.IS_INIT)))
    elif like.is_floating_point():
        drawn = torch.randn(like.shape, generator=generator)
    else:
        most = 256 if like.dtype == torch.uint8 else 2
        drawn = torch.randint(0, most, like.shape, generator=generator)
    return drawn.to(dtype=like.dtype, device=like.device)


@contextmanager
def unchanged_buffers(policy: Any) -> Iterator[None]:
    """Refuse a policy that changes its buffers meanwhile, and set them back."""
    buffers = dict(policy.named_buffers()) if isinstance(policy, nn.Module) else {}
    before = {name: value.clone() for name, value in buffers.items()}
    changed = []
    try:
        yield
    finally:
        for name, value in buffers.items():
            if _bits(value) != _bits(before[name]):
                changed.append(name)
                value.copy_(before[name])
    if changed:
        raise NotReproducibleError(
            f"the policy changes its own buffers {changed} as it runs, so that an episode would "
            "depend on those before it (batch norm in training mode, say); run it in eval mode "
            "(eval_mode=True), or freeze what it keeps"
        )


def unlike(key: Key, value: torch.Tensor) -> torch.Tensor:
    """Return an entry that differs in every element, with values that a policy may find there.

    The flags stay: a policy sees no row whose episode has ended.
    """
    if _name(key) in keys.FLAGS:
        return value.clone()
    if value.dtype == torch.bool:
        return ~value
    if value.is_floating_point():
        return value * 0.5 + 0.25
    return torch.where(value > 0, value - 1, value + 1)


def _name(key: Key) -> str:
    return key if isinstance(key, str) else key[-1]


def check_same(
    first: StepDict, other: StepDict, rows: Sequence[int], others: Sequence[int], why: str
) -> None:
    """Refuse a policy whose outputs differ in a pair of rows that should be equal."""
    differing = []
    for key in first:
        value, compared = first[key].cpu(), other[key].cpu()  # once, rather than row by row
        if any(_bits(value[i]) != _bits(compared[j]) for i, j in zip(rows, others, strict=True)):
            differing.append(key)
    if differing:
        raise NotReproducibleError("the policy " + why.format(differing))


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


def _bits(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
