"""Samplers of continuous distributions: normal ones, plain and squashed, and squashed points."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict.nn.probabilistic import InteractionType
from torch import Tensor, distributions
from torchrl.modules import IndependentNormal, TanhDelta, TanhNormal

from tdcollect.collect.fast.sampling import Draw, Sampler

_HALF_LOG_TAU = math.log(math.sqrt(2 * math.pi))
_DETERMINISTIC = InteractionType.DETERMINISTIC


def continuous_sampler(draw: Draw) -> Sampler | None:
    """The sampler of a continuous distribution, or None where there is none."""
    options = _OPTIONS.get(draw.kind)
    if options is None or not options.issuperset(draw.kwargs):
        return None
    random = draw.interaction is InteractionType.RANDOM
    if draw.kind is TanhDelta:
        known = random or draw.interaction in (_DETERMINISTIC, InteractionType.MODE)
        return _TanhDelta(draw) if draw.names == ("param",) and known and not draw.scored else None
    if draw.names != (("loc",) if "scale" in draw.kwargs else ("loc", "scale")):
        return None
    if draw.kind is TanhNormal:
        # It has no mode, and estimates its mean from many draws.
        return _TanhNormal(draw) if random or draw.interaction is _DETERMINISTIC else None
    return _Normal(draw) if random else None


_OPTIONS: dict[Any, frozenset[str]] = {
    distributions.Normal: frozenset(),
    IndependentNormal: frozenset({"scale", "tanh_loc", "upscale", "event_dim"}),
    TanhNormal: frozenset(
        {"scale", "tanh_loc", "upscale", "low", "high", "event_dims", "safe_tanh"}
    ),
    TanhDelta: frozenset({"low", "high", "event_dims", "atol", "rtol", "safe"}),
}
"""The arguments that are known, beside the parameters."""


class _LocScale(Sampler):
    """The parameters of a normal distribution, as the classes read them.

    The first draw builds the distribution, which checks its arguments, and keeps what is the same
    at every draw.
    """

    def __init__(self, draw: Draw):
        self._draw = draw
        self._noise = draw.noise
        self._scale: Any = draw.kwargs.get("scale")
        self._built = False

    def _parameters(self, loc: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if scale is None:
            scale = self._scale
            if callable(scale) and not isinstance(scale, Tensor):
                scale = scale(loc)
            elif not isinstance(scale, Tensor):
                scale = torch.as_tensor(scale, device=loc.device, dtype=loc.dtype)
        if scale.device != loc.device:
            scale = scale.to(loc.device)
        if not self._built:
            kwargs = {key: value for key, value in self._draw.kwargs.items() if key != "scale"}
            self._build(self._draw.kind(loc, scale, **kwargs))
            self._built = True
        return loc, scale

    def _build(self, built: Any) -> None:
        self._event_dims = len(built.event_shape)


class _Normal(_LocScale):
    def __call__(  # type: ignore[override]
        self, loc: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        loc, scale = self._parameters(loc, scale)
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        drawn = loc + self._noise.standard_normal(loc) * scale
        if not self._draw.scored:
            return drawn, None
        return drawn, _normal_log_prob(drawn, loc, scale, self._event_dims)


class _Squash:
    """A tanh, and the affine map to the bounds where these are not -1 and 1.

    Args:
        transform: of the distribution.
        given: the shape of the parameters.
        wanted: their shape in the distribution, which bounds of more dimensions expand.
    """

    def __init__(self, transform: Any, given: torch.Size, wanted: torch.Size):
        parts = getattr(transform, "parts", [transform])
        self._transform = transform
        self._tanh = parts[0]
        self._safe = type(parts[0]) is _SafeTanh
        affine = parts[1] if len(parts) == 2 else None
        self._loc: Any = None if affine is None else affine.loc
        self._scale: Any = None if affine is None else affine.scale
        self._log_scale: Tensor | None = None
        self.shape = wanted if wanted != given else None

    def __call__(self, value: Tensor) -> Tensor:
        """The value in the bounds."""
        value = _safe_tanh(value) if self._safe else value.tanh()
        return value if self._scale is None else self._loc + self._scale * value

    def inverse(self, value: Tensor) -> Tensor:
        """The value before, as far as the bounds leave it."""
        if not self._safe:
            return self._transform.inv(value)
        if self._scale is not None:
            value = (value - self._loc) / self._scale
        bound = 1.0 - torch.finfo(value.dtype).resolution
        return value.clamp(-bound, bound).atanh()

    def log_jacobian(self, before: Tensor) -> Tensor:
        """The logarithm of the derivative."""
        found: Tensor = self._tanh.log_abs_det_jacobian(before, None)
        if self._scale is None:
            return found
        if self._log_scale is None:
            self._log_scale = torch.abs(self._scale).log()
        return found + self._log_scale


class _TanhNormal(_LocScale):
    def _build(self, built: Any) -> None:
        super()._build(built)
        self._tanh_loc: bool = built.tanh_loc
        self._upscale = built.upscale
        self._low = built.low
        moved = built.non_trivial_max or built.non_trivial_min
        self._half = (built.high - built.low) / 2 if moved else None
        normal = built.root_dist
        given = torch.broadcast_shapes(built.loc.shape, built.scale.shape)
        self._squash = _Squash(built.transforms[0], given, normal.loc.shape)

    def __call__(  # type: ignore[override]
        self, loc: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        loc, scale = self._parameters(loc, scale)
        draw, squash = self._draw, self._squash
        if self._tanh_loc:
            loc = (loc / self._upscale).tanh() * self._upscale
            if self._half is not None:
                loc = loc + self._half + self._low
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        if squash.shape is not None:
            loc, scale = loc.expand(squash.shape), scale.expand(squash.shape)
        before = loc
        if draw.interaction is InteractionType.RANDOM:
            before = loc + self._noise.standard_normal(loc) * scale
        drawn = squash(before)
        if not draw.scored:
            return drawn, None
        if draw.together:
            log_prob = _normal_log_prob(before, loc, scale, self._event_dims)
            return drawn, log_prob - _sum_rightmost(squash.log_jacobian(before), self._event_dims)
        before = squash.inverse(drawn)
        log_prob = 0.0 - _sum_rightmost(squash.log_jacobian(before), self._event_dims)
        return drawn, log_prob + _normal_log_prob(before, loc, scale, self._event_dims)


class _TanhDelta(Sampler):
    def __init__(self, draw: Draw):
        self._draw = draw
        self._squash: _Squash | None = None

    def __call__(self, param: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if self._squash is None:
            built = TanhDelta(param, **self._draw.kwargs)
            self._half = (built.high - built.low) / 2 if built.non_trivial else None
            self._low = built.low
            self._squash = _Squash(built.transforms[0], param.shape, built.base_dist.param.shape)
        if self._half is not None:
            param = param + self._half + self._low
        if self._squash.shape is not None:
            param = param.expand(self._squash.shape)
        return self._squash(param), None


_SafeTanh: type = type(TanhNormal(torch.zeros(1), torch.ones(1)).transforms[0])


def _safe_tanh(value: Tensor) -> Tensor:
    """TorchRL's SafeTanhTransform, without an autograd function around it."""
    bound = 1.0 - torch.finfo(value.dtype).resolution
    return value.tanh().clamp(-bound, bound)


def _normal_log_prob(value: Tensor, loc: Tensor, scale: Tensor, event_dims: int) -> Tensor:
    log_prob = -((value - loc) ** 2) / (2 * scale**2) - scale.log() - _HALF_LOG_TAU
    return _sum_rightmost(log_prob, event_dims)


def _sum_rightmost(value: Tensor, dims: int) -> Tensor:
    if dims == 0:
        return value
    if dims == 1:
        return value.sum(-1)
    return value.reshape(value.shape[:-dims] + (-1,)).sum(-1)
