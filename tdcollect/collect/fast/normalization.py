"""VecNorm and VecNormV2 on StepDicts: TorchRL's own statistics, updated by plain tensor operations.

The statistics stay in the transform, so that its state dict, ``loc``, ``scale`` and ``freeze()``
mean the same as under TorchRL. The operations and their order are TorchRL's, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T

from tdcollect._upstream.transforms import VecNormSums, VecNormV2Statistics, casts_integers
from tdcollect.collect.fast.islands import StepTransform
from tdcollect.collect.step_dict import Key, StepDict
from tdcollect.envs.spaces import nested

Pairs = Sequence[tuple[Key, Key]]
"""The entries to normalize, each with the key of its result."""


class _Norm(StepTransform):
    """Normalizes the entries of steps and of resets alike; a reset may lack the reward."""

    by_row = False

    def __init__(self, transform: T.VecNorm | T.VecNormV2, pairs: Pairs, batch_size: torch.Size):
        self._transform = transform
        self.own_pace = bool(transform.frozen)  # else its statistics are of all slots together
        self._pairs = pairs
        self._batch_size = batch_size

    def step(self, step: StepDict, following: StepDict) -> None:
        self._normalize(self._pairs, step, following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        self._normalize([pair for pair in self._pairs if pair[0] in begun], begun, begun)

    def _normalize(self, pairs: Pairs, source: StepDict, entries: StepDict) -> None:
        """Update the statistics, then normalize.

        Args:
            pairs: of the entries that are there.
            source: has the statistics that come with the data.
            entries: are changed in place.
        """
        raise NotImplementedError


class _VecNorm(_Norm):
    """VecNorm: discounted sums over all slots."""

    def __init__(self, transform: T.VecNorm, pairs: Pairs, batch_size: torch.Size):
        super().__init__(transform, pairs, batch_size)
        self._sums = VecNormSums(transform)

    def step(self, step: StepDict, following: StepDict) -> None:
        self.reset(following, step, step)  # it skips entries that are missing in steps, too

    def _normalize(self, pairs: Pairs, source: StepDict, entries: StepDict) -> None:
        transform, sums, rows = self._transform, self._sums, self._batch_size.numel()
        with transform.lock:
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


def _summed(value: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The sum over leading dimensions that ``total`` lacks, one after the other."""
    while value.ndim > total.ndim:
        value = value.sum(0)
    return value


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
        transform = self._transform
        with transform.lock:
            results = []
            for in_key, out_key in pairs:
                value = entries[in_key]
                loc, var, count = self._statistics.of(in_key)
                if not transform.frozen:
                    self._update(value, loc, var, count)
                results.append((out_key, _normed(value, loc, var, count, transform)))
            entries.update(results)

    def _update(
        self, value: torch.Tensor, loc: torch.Tensor, var: torch.Tensor, count: torch.Tensor
    ) -> None:
        if self._casts:
            value = _as_float(value)
        count.add_(self._rows)
        squares = value.pow(2)
        if self._dims:
            squares, value = squares.mean(dim=self._dims), value.mean(dim=self._dims)
        decay = self._transform.decay
        weight = count.reciprocal() * self._rows if decay == 1.0 else 1 - decay**self._rows
        loc.lerp_(value, weight)
        var.lerp_(squares, weight)


class _StatelessNorm(_Norm):
    """A stateless VecNormV2: moving averages of each row, which the data carry."""

    _transform: T.VecNormV2

    def __init__(self, transform: T.VecNormV2, pairs: Pairs, batch_size: torch.Size):
        super().__init__(transform, pairs, batch_size)
        self._casts = casts_integers(transform)
        self._loc, self._var, self._count = (
            {in_key: _under(f"{transform.prefix}_{name}", in_key) for in_key, _ in pairs}
            for name in ("loc", "var", "count")
        )
        self.keys = [*self._loc.values(), *self._var.values(), *self._count.values()]

    def _normalize(self, pairs: Pairs, source: StepDict, entries: StepDict) -> None:
        transform = self._transform
        with transform.lock:
            begins = not transform.initialized or self._loc[pairs[0][0]] not in source
            transform.initialized = True
            results: list[tuple[Key, torch.Tensor]] = []
            for in_key, out_key in pairs:
                value = entries[in_key]
                statistics = self._loc[in_key], self._var[in_key], self._count[in_key]
                if begins:
                    zeros = torch.zeros_like(_as_float(value))
                    source[statistics[0]], source[statistics[1]] = zeros, zeros.clone()
                    source[statistics[2]] = torch.zeros_like(value, dtype=torch.int64)
                loc, var, count = (source[key] for key in statistics)
                if not transform.frozen:
                    loc, var, count = self._updated(value, loc, var, count)
                results.append((out_key, _normed(value, loc, var, count, transform)))
                results.extend(zip(statistics, (loc, var, count), strict=True))
            entries.update(results)

    def _updated(
        self, value: torch.Tensor, loc: torch.Tensor, var: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._casts:
            value = _as_float(value)
        count = count + 1
        decay = self._transform.decay
        weight = count.reciprocal() if decay == 1.0 else 1 - decay
        return loc.lerp(value, weight), var.lerp(value.pow(2), weight), count


def _normed(
    value: torch.Tensor,
    loc: torch.Tensor,
    var: torch.Tensor,
    count: torch.Tensor,
    transform: T.VecNormV2,
) -> torch.Tensor:
    variance = var - loc.pow(2)
    if transform.decay < 1.0:
        correction = (1 - (count * math.log(transform.decay)).exp()).to(value.dtype)
        loc = loc / correction
        variance = variance / correction
    return (value - loc) / variance.sqrt_().clamp_min_(transform.eps)


def _as_float(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype.is_floating_point else value.to(torch.get_default_dtype())


def _under(name: str, key: Key) -> Key:
    return (name, key) if isinstance(key, str) else (name, *key)


def vec_norm(transform: T.VecNorm | T.VecNormV2, env: EnvBase) -> StepTransform | str:
    """A VecNorm or VecNormV2 on StepDicts, or the reason why its own code must run."""
    in_keys = list(transform.in_keys)[: len(transform.out_keys)]
    pairs = list(zip(in_keys, transform.out_keys, strict=True))
    if len(set(transform.out_keys)) < len(pairs) or any(
        in_key != out_key and out_key in in_keys for in_key, out_key in pairs
    ):
        return "writes one entry twice, or over another of its own"
    if env.device is not None and env.device.type != "cpu":
        return "is not on the CPU"
    if transform.lock is None:
        return "has no lock"
    if isinstance(transform, T.VecNorm):
        kept = VecNormSums(transform).kept
        if kept is not None and type(kept) is not TensorDict:
            return "keeps its statistics in a TensorDict of another kind"
        return _VecNorm(transform, pairs, env.batch_size)
    if not transform.stateful:
        return _StatelessNorm(transform, pairs, env.batch_size)
    if not VecNormV2Statistics(transform).on_cpu(in_keys):
        return "has no statistics on the CPU yet"
    return _VecNormV2(transform, pairs, env.batch_size)
