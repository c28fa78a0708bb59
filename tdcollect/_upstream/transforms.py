"""Private names of single transforms of TorchRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl._utils import _append_last
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T


class VecNormSums:
    """The statistics of a ``VecNorm``: discounted sums, in a TensorDict or not begun yet.

    Args:
        transform: the transform, which keeps them.
    """

    def __init__(self, transform: T.VecNorm):
        self._transform = transform

    @property
    def kept(self) -> TensorDictBase | None:
        """The TensorDict; None before the first entry."""
        return self._transform._td

    def begin(self, key: str | tuple[str, ...], entries: TensorDictBase) -> None:
        """Make the statistics of an entry, all zero."""
        self._transform._init(entries, key)

    def of(
        self, key: str | tuple[str, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """An entry's sum, sum of squares and count, to be changed in place; None before it came."""
        kept = self._transform._td
        if kept is None or (total := kept.get(_append_last(key, "_sum"), None)) is None:
            return None
        return total, kept.get(_append_last(key, "_ssq")), kept.get(_append_last(key, "_count"))


class VecNormV2Statistics:
    """The statistics of a stateful ``VecNormV2``: moving averages.

    Args:
        transform: the transform, which keeps them.
    """

    def __init__(self, transform: T.VecNormV2):
        self._transform = transform

    def of(self, key: str | tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """An entry's averages, those of its squares, and their count; to be changed in place."""
        transform = self._transform
        return transform._loc.get(key), transform._var.get(key), transform._count.get(key)

    def on_cpu(self, entries: Sequence[str | tuple[str, ...]]) -> bool:
        """Tell whether they are there for all of these entries, as tensors on the CPU."""
        transform = self._transform
        return bool(transform.initialized) and all(
            isinstance(value := part.get(key, None), torch.Tensor) and value.device.type == "cpu"
            for part in (transform._loc, transform._var, transform._count)
            for key in entries
        )


def casts_integers(transform: T.VecNormV2) -> bool:
    """Tell whether a ``VecNormV2`` averages integers as floats."""
    return bool(transform._cast_int_to_float)


def stack_buffer_name(key: str | tuple[str, ...]) -> str:
    """The name under which a ``CatFrames`` keeps the latest stack of an entry."""
    return f"_cat_buffers_{key}"


def restart_stacks(transform: T.CatFrames, entries: Any, starting: torch.Tensor) -> None:
    """Begin the stacks of a ``CatFrames`` anew in some slots, and give out all of them.

    Args:
        transform: makes its buffers at its first call.
        entries: have the frames, and are given the stacks.
        starting: bool ``[N]``.
    """
    transform._call(entries, _reset=starting)


def skipped_step(env: EnvBase, given: TensorDictBase) -> TensorDictBase:
    """The entries that follow a step that an env skips."""
    return env._skip_tensordict(given)


_CALLS = ("_call", "_step", "_reset", "_inv_call", "_apply_transform", "_inv_apply_transform")


def replaced_calls(transform: T.Transform) -> list[str]:
    """The methods called by an env that a user has replaced on this transform object."""
    return [name for name in _CALLS if name in vars(transform)]


def lives_of(transform: T.EndOfLifeTransform) -> Any:
    """The lives that are left in the env: a number, or one per env."""
    return transform._get_lives()


__all__ = [
    "VecNormSums",
    "VecNormV2Statistics",
    "casts_integers",
    "lives_of",
    "replaced_calls",
    "restart_stacks",
    "skipped_step",
    "stack_buffer_name",
]
