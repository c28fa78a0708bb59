"""CatFrames, VecNorm and VecNormV2 on StepDicts: their own buffers, by plain tensor operations.

The stacks and statistics stay in the transform, so that its state dict, ``loc``, ``scale`` and
``freeze()`` mean the same as under TorchRL, whose loop can go on from there. The operations and
their order are TorchRL's, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream.torchrl import (
    VecNormSums,
    VecNormV2Statistics,
    call_of,
    casts_integers,
    restart_stacks,
    stack_buffer_name,
)
from tdcollect.collect.step_dict import StepDict
from tdcollect.collect.transforms import StepTransform
from tdcollect.envs.spaces import nested
from tdcollect.envs.traits import NotKnown
from tdcollect.keys import Key, under

Pairs = Sequence[tuple[Key, Key]]
"""The entries to normalize, each with the key of its result."""


class CatFrames(StepTransform):
    """A step gives out one new tensor, the stack; the transform's buffer holds a copy of it.

    So later transforms, policies and users may write into theirs. The rows of slots that go on lie
    in the buffer: a reset keeps them.
    """

    own_pace = True

    def __init__(self, transform: T.CatFrames, env: EnvBase):
        if transform.as_inverse or transform.future or transform.mask_key is not None:
            raise NotKnown("is made for replay buffers")
        if transform.reset_key != keys.RESET:
            raise NotKnown("has a reset entry of its own")
        if len(set(transform.out_keys)) < len(transform.out_keys):
            raise NotKnown("writes one entry twice")
        self._transform = transform
        self._dim = transform.dim
        self._padding = transform.padding_value if transform.padding == "constant" else None
        self._names = [
            (in_key, out_key, stack_buffer_name(in_key))
            for in_key, out_key in zip(transform.in_keys, transform.out_keys, strict=True)
        ]
        self._has_buffers = False

    def step(self, step: StepDict, following: StepDict) -> None:
        if not (self._has_buffers or self._find_buffers(following)):
            call_of(self._transform)(following)
            return
        dim = self._dim
        for in_key, out_key, name in self._names:
            frame, buffer = following[in_key], getattr(self._transform, name)
            length = frame.shape[dim]
            kept = buffer.narrow(dim, length, buffer.shape[dim] - length)
            following[out_key] = stack = torch.cat([kept, frame], dim)
            if self.rows is None:
                buffer.copy_(stack)
            else:  # the stacks of slots in flight stay as they are
                buffer[self.rows] = stack[self.rows]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        starting = marks[keys.RESET].squeeze(-1)
        if not (self._has_buffers or self._find_buffers(begun)):
            restart_stacks(self._transform, begun, starting)
            return
        for in_key, out_key, name in self._names:
            frame, buffer = begun[in_key], getattr(self._transform, name)
            mask = starting.reshape(starting.shape + (1,) * (buffer.ndim - starting.ndim))
            begun[out_key] = stack = torch.where(mask, self._padded(frame, buffer), buffer)
            buffer.copy_(stack)

    def _padded(self, frame: Tensor, buffer: Tensor) -> Tensor:
        """The stack that begins with a frame."""
        length, dim = frame.shape[self._dim], self._dim
        if self._padding is None:
            return torch.cat([frame] * (buffer.shape[dim] // length), dim)
        stack = torch.empty_like(buffer).fill_(self._padding)
        stack.narrow(dim, buffer.shape[dim] - length, length).copy_(frame)
        return stack

    def _find_buffers(self, entries: StepDict) -> bool:
        """Tell whether each entry has a buffer of its kind; TorchRL's code makes it."""
        pairs = [(entries[key], getattr(self._transform, name)) for key, _, name in self._names]
        self._has_buffers = all(
            type(buffer) is Tensor and (buffer.dtype, buffer.device) == (frame.dtype, frame.device)
            for frame, buffer in pairs
        )
        return self._has_buffers


# ------------------------------------------------------------------------------------ normalization


def vec_norm(transform: T.VecNorm | T.VecNormV2, env: EnvBase) -> StepTransform:
    in_keys = list(transform.in_keys)[: len(transform.out_keys)]
    pairs = list(zip(in_keys, transform.out_keys, strict=True))
    if len(set(transform.out_keys)) < len(pairs) or any(
        in_key != out_key and out_key in in_keys for in_key, out_key in pairs
    ):
        raise NotKnown("writes one entry twice, or over another of its own")
    if env.device is not None and env.device.type != "cpu":
        raise NotKnown("is not on the CPU")
    if transform.lock is None:
        raise NotKnown("has no lock")
    if isinstance(transform, T.VecNorm):
        kept = VecNormSums(transform).kept
        if kept is not None and type(kept) is not TensorDict:
            raise NotKnown("keeps its statistics in a TensorDict of another kind")
        return _VecNorm(transform, pairs, env.batch_size)
    if not transform.stateful:
        return _StatelessNorm(transform, pairs, env.batch_size)
    if not VecNormV2Statistics(transform).on_cpu(in_keys):
        raise NotKnown("has no statistics on the CPU yet")
    return _VecNormV2(transform, pairs, env.batch_size)


class _Norm(StepTransform):
    """Normalizes the entries of steps and of resets alike; a reset may lack the reward."""

    by_row = False

    def __init__(self, transform: T.VecNorm | T.VecNormV2, pairs: Pairs, batch_size: torch.Size):
        self._transform = transform
        self.own_pace = bool(transform.frozen)  # else its statistics are of all slots together
        self._pairs = pairs
        self._batch_size = batch_size

    def step(self, step: StepDict, following: StepDict) -> None:
        with self._transform.lock:
            self._normalize(self._pairs, step, following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        with self._transform.lock:
            self._normalize([pair for pair in self._pairs if pair[0] in begun], begun, begun)

    def _normalize(self, pairs: Pairs, source: StepDict, entries: StepDict) -> None:
        """Update the statistics, which may come with the data (``source``), then normalize."""
        raise NotImplementedError


class _VecNorm(_Norm):
    """VecNorm: discounted sums over all slots."""

    def step(self, step: StepDict, following: StepDict) -> None:
        self.reset(following, step, step)  # it skips entries that are missing in steps, too

    def _normalize(self, pairs: Pairs, source: StepDict, entries: StepDict) -> None:
        transform, rows = self._transform, self._batch_size.numel()
        sums = VecNormSums(transform)
        for in_key, out_key in pairs:
            value = entries[in_key]
            statistics = sums.of(in_key)
            if statistics is None:
                sums.begin(in_key, nested(entries.items(), self._batch_size))
                statistics = sums.of(in_key)
                assert statistics is not None
            total, squares, count = statistics
            if not transform.frozen:
                decay = transform.decay
                total.mul_(decay).add_(_summed(value, total))
                squares.mul_(decay).add_(_summed(value.pow(2), squares))
                count.mul_(decay).add_(rows)
            mean = total / count
            std = (squares / count - mean.pow(2)).clamp_min(transform.eps).sqrt()
            entries[out_key] = (value - mean) / std.clamp_min(transform.eps)


def _summed(value: Tensor, total: Tensor) -> Tensor:
    """The sum over leading dimensions that ``total`` lacks, one after the other."""
    while value.ndim > total.ndim:
        value = value.sum(0)
    return value


class _Averages(NamedTuple):
    """Moving averages of an entry and of its squares, and their count."""

    loc: Tensor
    var: Tensor
    steps: Tensor

    def normed(self, value: Tensor, decay: float, eps: float) -> Tensor:
        loc, variance = self.loc, self.var - self.loc.pow(2)
        if decay < 1.0:
            correction = (1 - (self.steps * math.log(decay)).exp()).to(value.dtype)
            loc = loc / correction
            variance = variance / correction
        return (value - loc) / variance.sqrt_().clamp_min_(eps)


class _VecNormV2(_Norm):
    """VecNormV2: moving averages, of each slot or of all."""

    _transform: T.VecNormV2

    def __init__(self, transform: T.VecNormV2, pairs: Pairs, batch_size: torch.Size):
        super().__init__(transform, pairs, batch_size)
        self._statistics = VecNormV2Statistics(transform)
        self._casts = casts_integers(transform)
        self._dims = tuple(range(len(batch_size))) if transform.reduce_batch_dims else ()
        self._rows = batch_size.numel() if self._dims else 1

    def _normalize(self, pairs: Pairs, source: StepDict, entries: StepDict) -> None:
        transform, results = self._transform, []
        for in_key, out_key in pairs:
            value = entries[in_key]
            averages = _Averages(*self._statistics.of(in_key))
            if not transform.frozen:
                self._update(value, averages)
            results.append((out_key, averages.normed(value, transform.decay, transform.eps)))
        entries.update(results)

    def _update(self, value: Tensor, averages: _Averages) -> None:
        if self._casts:
            value = _as_float(value)
        averages.steps.add_(self._rows)
        squares = value.pow(2)
        if self._dims:
            squares, value = squares.mean(dim=self._dims), value.mean(dim=self._dims)
        decay = self._transform.decay
        weight = averages.steps.reciprocal() * self._rows if decay == 1.0 else 1 - decay**self._rows
        averages.loc.lerp_(value, weight)
        averages.var.lerp_(squares, weight)


class _StatelessNorm(_Norm):
    """A stateless VecNormV2: moving averages of each row, which the data carry."""

    _transform: T.VecNormV2

    def __init__(self, transform: T.VecNormV2, pairs: Pairs, batch_size: torch.Size):
        super().__init__(transform, pairs, batch_size)
        self._casts = casts_integers(transform)
        self._entries = {
            in_key: [
                under(f"{transform.prefix}_{name}", in_key) for name in ("loc", "var", "count")
            ]
            for in_key, _ in pairs
        }
        self.keys = [key for kept in zip(*self._entries.values(), strict=True) for key in kept]

    def _normalize(self, pairs: Pairs, source: StepDict, entries: StepDict) -> None:
        transform = self._transform
        begins = not transform.initialized or self._entries[pairs[0][0]][0] not in source
        transform.initialized = True
        results: list[tuple[Key, Tensor]] = []
        for in_key, out_key in pairs:
            value, kept = entries[in_key], self._entries[in_key]
            if begins:
                zeros = torch.zeros_like(_as_float(value))
                source[kept[0]], source[kept[1]] = zeros, zeros.clone()
                source[kept[2]] = torch.zeros_like(value, dtype=torch.int64)
            averages = _Averages(*(source[key] for key in kept))
            if not transform.frozen:
                averages = self._updated(value, averages)
            results.append((out_key, averages.normed(value, transform.decay, transform.eps)))
            results.extend(zip(kept, averages, strict=True))
        entries.update(results)

    def _updated(self, value: Tensor, averages: _Averages) -> _Averages:
        if self._casts:
            value = _as_float(value)
        count = averages.steps + 1
        decay = self._transform.decay
        weight = count.reciprocal() if decay == 1.0 else 1 - decay
        loc, var = averages.loc.lerp(value, weight), averages.var.lerp(value.pow(2), weight)
        return _Averages(loc, var, count)


def _as_float(value: Tensor) -> Tensor:
    return value if value.dtype.is_floating_point else value.to(torch.get_default_dtype())
