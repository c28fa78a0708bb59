"""Samplers: actions and log-probabilities of known distributions, without distribution objects.

Each sampler does the operations of its distribution's own class, in the same order and with the
same random numbers, so the results are the same to the bit. What its class checks at every call
(``torch.multinomial`` and the like), :meth:`Sampler.check` makes up for once per batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.nn.probabilistic import InteractionType
from torch import Tensor, distributions
from torch.nn.functional import cross_entropy, softplus
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhDelta,
    TanhNormal,
)

_RANDOM, _DETERMINISTIC = InteractionType.RANDOM, InteractionType.DETERMINISTIC
_MODES = (_DETERMINISTIC, InteractionType.MODE)
_HALF_LOG_TAU = math.log(math.sqrt(2 * math.pi))
_FEW_LOGITS = 1024
_FEW_PAIRS = 2**16  # logits of two choices each
_MANY = 512  # numbers from which on a way with more calls, but less work, is quicker
_APART = 1e-4
_STEPS, _NUMBERS = 256, 2**17  # the most steps and numbers that are scored at once


class Noise(Protocol):
    """A source of random numbers, of the shape and dtype of a tensor."""

    def exponential(self, like: Tensor) -> Tensor: ...

    def standard_normal(self, like: Tensor) -> Tensor: ...


class GlobalNoise:
    """Random numbers of torch's global generator; a :class:`Noise`."""

    _memory = torch.empty(0)

    def exponential(self, like: Tensor) -> Tensor:
        memory = self._memory
        alike = memory.shape == like.shape and memory.dtype == like.dtype
        if not alike or memory.device != like.device or memory.stride() != like.stride():
            self._memory = memory = torch.empty_like(like)
        return memory.exponential_(1)

    def standard_normal(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_()


class Draw(NamedTuple):
    """A draw of a distribution module, whose distribution is of class ``kind``."""

    kind: Any
    names: tuple[str, ...]
    """Its parameters, in the order of the alphabet, in which samplers take them."""
    kwargs: dict[str, Any]
    interaction: InteractionType
    scored: bool
    """True if the log-probability is wanted."""
    together: bool
    """True if the very draw is scored, and not the result."""
    noise: Noise


Each = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Applies a function to the tensors of one step, or of several, ``[T, ...]``."""


class Sampler:
    """Draws for one distribution module, as it would.

    Draws can be scored late: nothing in the loop reads a log-probability, and one call for all
    steps of a batch costs far less than a call for each. Its bits must be those of the single
    calls. A vectorised function rounds the last few numbers of an array otherwise than the others,
    and so :func:`_by_step` gives each step a row that ends where it would alone. Whether that is
    enough depends on the machine: at the first batch of a kind, shape and dtype, numbers with noise
    are scored in both ways. Where these differ, each step is scored by itself from then on.

    Attributes:
        late: whether draws can be scored later, all steps of a batch at once.
    """

    late = False
    _agreeing: ClassVar[dict[Any, bool]] = {}  # whether both ways agree, by kind, shapes, dtypes
    _event_dims: int | None = None
    _folded: Tensor | None = None  # zero, or NaN where a normalizer was not finite

    def __init__(self, draw: Draw):
        self._draw = draw
        self.restart()

    def restart(self) -> None:
        """Forget draws that were neither checked nor scored."""
        self._kept: list[tuple[Tensor, ...]] = []  # what scores are made of, or the score
        self._scores: list[Tensor] = []
        self._normalizers: list[Tensor] = []  # to be checked
        self._logits: list[Tensor] = []  # whose normalizers were not needed
        if self._folded is not None:
            self._folded.zero_()

    def __call__(self, *parameters: Any) -> tuple[Tensor, Tensor | None]:
        """A sample and, if it is wanted, its log-probability."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise if a draw since the last check had parameters that its class refuses."""

    def fold(self) -> list[Tensor]:
        """Fold what is to be checked into tensors that stay, as a CUDA graph can; those tensors."""
        return []

    def unscored(self, *parameters: Any) -> Tensor:
        """A sample, of which :meth:`scores` gives the log-probability."""
        sample, parts = self._sample(*parameters)
        if not (parts[0].is_contiguous() and parts[-1].is_contiguous()):
            parts = (self._score(_at_once, *parts),)
        self._kept.append(parts)
        if len(self._kept) == max(1, min(_STEPS, _NUMBERS // parts[0].numel())):
            self._scores.append(self._kept_scores())
        return sample

    def scores(self) -> Tensor | None:
        """The log-probabilities of the samples, ``[T, ...]``, to the bit those of each alone."""
        chunks, self._scores = self._scores, []
        if self._kept:
            chunks.append(self._kept_scores())
        self.check()
        return torch.cat(chunks) if chunks else None

    def _kept_scores(self) -> Tensor:
        draws, self._kept = self._kept, []
        if any(len(one) == 1 for one in draws):
            return self._scored_singly(draws)
        steps = [*map(torch.stack, zip(*draws, strict=True))]
        shapes = *((part.shape, part.dtype) for part in steps), torch.get_num_threads()
        case = self._draw.kind, self._event_dims, shapes
        if case not in self._agreeing:
            self._agreeing[case] = self._scores_alike(steps)
        return self._score(_by_step, *steps) if self._agreeing[case] else self._scored_singly(draws)

    def _scores_alike(self, steps: Sequence[Tensor]) -> bool:
        """Return whether both ways of scoring agree to the bit, for numbers like these."""
        noise = torch.Generator().manual_seed(0)
        varied = [
            part * (0.5 + torch.rand(part.shape, generator=noise)).to(part)
            if part.is_floating_point()
            else part
            for part in steps
        ]
        singly = self._scored_singly([*zip(*varied, strict=True)])
        return torch.equal(self._score(_by_step, *varied), singly)

    def _scored_singly(self, draws: Sequence[tuple[Tensor, ...]]) -> Tensor:
        scores = (one[0] if len(one) == 1 else self._score(_at_once, *one) for one in draws)
        return torch.stack([*scores])

    def _sample(self, *parameters: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A sample, and the tensors that its score is made of."""
        raise NotImplementedError

    def _score(self, each: Each, *parts: Tensor) -> Tensor:
        raise NotImplementedError


def _at_once(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    return function(value)


def _by_step(function: Callable[[Tensor], Tensor], steps: Tensor) -> Tensor:
    """A function of each step by itself: what is left over by vectors rounds otherwise."""
    count, size = len(steps), steps[0].numel()
    rows = steps.new_empty(count, size + 1)[:, :size]  # apart, so that none runs into the next
    return function(rows.copy_(steps.reshape(count, size))).view(steps.shape)


def sampler(draw: Draw) -> Sampler | None:
    """The sampler of a distribution, or None where there is none."""
    kind, random, mode = draw.kind, draw.interaction is _RANDOM, draw.interaction in _MODES
    options = _OPTIONS.get(kind)
    if options is None or not options.issuperset(draw.kwargs):
        return None
    if kind in _CATEGORICAL:
        wanted = ("logits", "mask") if kind in _MASKED else ("logits",)
        known = draw.names == wanted and (random or mode)
        return (_Categorical if random else _CategoricalMode)(draw) if known else None
    if kind is TanhDelta:
        known = draw.names == ("param",) and (random or mode) and not draw.scored
        return _TanhDelta(draw) if known else None
    if draw.names != (("loc",) if "scale" in draw.kwargs else ("loc", "scale")):
        return None
    if kind is TanhNormal:
        # It has no mode, and estimates its mean from many draws.
        return _TanhNormal(draw) if random or draw.interaction is _DETERMINISTIC else None
    return _Normal(draw) if random else None


_MASKED = (MaskedCategorical, MaskedOneHotCategorical)
_ONE_HOT = (OneHotCategorical, MaskedOneHotCategorical)
_CATEGORICAL = {distributions.Categorical, *_MASKED, *_ONE_HOT}
_OPTIONS: dict[Any, frozenset[str]] = {
    **{kind: frozenset() for kind in _CATEGORICAL},
    distributions.Normal: frozenset(),
    IndependentNormal: frozenset({"scale", "tanh_loc", "upscale", "event_dim"}),
    TanhNormal: frozenset(
        {"scale", "tanh_loc", "upscale", "low", "high", "event_dims", "safe_tanh"}
    ),
    TanhDelta: frozenset({"low", "high", "event_dims", "atol", "rtol", "safe"}),
}
"""The arguments that are known, beside the parameters."""


# ------------------------------------------------------------------------------------- categorical


class _Categorical(Sampler):
    """Random draws of integers or one-hot, with a mask or without."""

    def __init__(self, draw: Draw):
        super().__init__(draw)
        self._one_hot = draw.kind in _ONE_HOT
        self._masked = draw.kind in _MASKED
        self.late = not self._masked and draw.interaction is _RANDOM

    def __call__(self, logits: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        elif not self._draw.scored and _are_few(logits):
            self._logits.append(logits)
            return self._sample(logits)[0], None
        logits, normalizer, index = self._indexed(logits)
        self._normalizers.append(normalizer)
        return self._drawn(logits, index), self._log_prob(logits, index)

    def _indexed(self, logits: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        """The normalized logits, their normalizer, and the index drawn, ``[..., 1]``."""
        normalizer = logits.logsumexp(dim=-1, keepdim=True)
        logits = logits - normalizer
        probs = torch.softmax(logits, dim=-1)
        # As torch.multinomial draws one sample per row, without its checks.
        noise = self._draw.noise.exponential(probs) if noise is None else noise
        return logits, normalizer, probs.div_(noise).argmax(dim=-1, keepdim=True)

    def _sample(self, logits: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Few logits are not normalized, where the sample is the same.

        The index drawn has the largest ratio of softmax and noise, and so of their logarithms,
        whose rounding is a tenth of what the largest must be apart from the next.
        """
        noise = None
        if _are_few(logits):
            nearly, exact = _exponential(self._draw.noise, logits)
            if (largest := _largest(logits.numpy(), nearly)) is not None:
                return self._picked(largest, logits), (logits, torch.from_numpy(largest))
            noise = exact()
        index = self._indexed(logits, noise)[-1]
        return self._drawn(logits, index), (logits, index)

    def _score(self, each: Each, *parts: Tensor) -> Tensor:
        logits, index = parts
        if each is _by_step and logits.shape[-1] == 2:
            one, other = logits[..., :1], logits[..., 1:]
            most = torch.maximum(one, other)
            normalizer = (one - most).exp_().add_((other - most).exp_()).log_().add_(most)
            if normalizer.isfinite().all():
                return torch.where(index == 1, other, one).sub_(normalizer).squeeze(-1)
        normalizer = logits.logsumexp(dim=-1, keepdim=True)
        if each is _at_once:
            self._normalizers.append(normalizer)  # a look at each would wait for a GPU
        else:
            _check_finite(normalizer)
        return (logits - normalizer).gather(-1, index).squeeze(-1)

    def _drawn(self, logits: Tensor, index: Tensor) -> Tensor:
        if self._one_hot:
            return torch.zeros_like(logits, dtype=torch.long).scatter_(-1, index, 1)
        return index.squeeze(-1)

    def _picked(self, index: NDArray[np.int64], logits: Tensor) -> Tensor:
        """The sample for an index ``[..., 1]`` of few logits, in NumPy."""
        if not self._one_hot:
            return torch.from_numpy(index).squeeze(-1)
        return torch.from_numpy(_one_hot_rows(logits.shape[-1]).take(index[..., 0], axis=0))

    def _log_prob(self, logits: Tensor, index: Tensor) -> Tensor | None:
        """The log-probability of an index ``[..., 1]``, if it is wanted; logits are normalized."""
        if not self._draw.scored:
            return None
        if not self._masked:
            return logits.gather(-1, index).squeeze(-1)
        # The masked classes' own formula, which normalizes once more.
        if logits.ndim > 2:
            logits = logits.movedim(-1, 1)
        log_prob = -cross_entropy(logits, index.squeeze(-1), reduction="none")
        return torch.where(log_prob.isfinite(), log_prob, -torch.inf)

    def fold(self) -> list[Tensor]:
        for normalizer in self._normalizers:
            odd = normalizer - normalizer
            self._folded = odd if self._folded is None else self._folded.add_(odd)
        self._normalizers = []
        return [] if self._folded is None else [self._folded]

    def check(self) -> None:
        if self._folded is not None:
            self.fold()
            _check_finite(self._folded)
        if self._normalizers:
            _check_finite(torch.stack(self._normalizers))
        if self._logits:
            _check_finite(torch.stack(self._logits).logsumexp(-1))
        self._normalizers, self._logits = [], []


def _are_few(logits: Tensor) -> bool:
    """Return whether logits are so few that NumPy is quicker, and can take them."""
    plain = logits.dtype in (torch.float32, torch.float64) and logits.is_contiguous()
    most = _FEW_PAIRS if logits.shape[-1] == 2 else _FEW_LOGITS
    few = plain and logits.numel() <= most and logits.shape[-1] > 1
    return few and logits.is_cpu and not logits.requires_grad


def _exponential(noise: Noise, like: Tensor) -> tuple[NDArray[Any], Callable[[], Tensor]]:
    """Exponential numbers, nearly; a function that gives them to the bit.

    torch makes them of uniform numbers, one by one. It is asked for these alone, and for the others
    where they are needed: by a generator in the state of the global one before.
    """
    if like.numel() < _MANY or type(noise) is not GlobalNoise or not _made_of_uniform():
        drawn = noise.exponential(like)
        return drawn.numpy(), lambda: drawn
    state = torch.get_rng_state()
    uniform = torch.empty_like(like, dtype=torch.float64).uniform_()

    def exact() -> Tensor:
        return torch.empty_like(like).exponential_(1, generator=torch.Generator().set_state(state))

    return -np.log1p(-uniform.numpy()), exact


@cache
def _made_of_uniform() -> bool:
    """Return whether torch's exponential numbers are made of as many uniform ones in float64.

    Its build and the processor decide that.
    """
    for dtype in (torch.float32, torch.float64):
        one, other = (torch.Generator().manual_seed(0) for _ in range(2))
        drawn = torch.empty(1003, dtype=dtype, device="cpu").exponential_(1, generator=one)
        uniform = torch.empty_like(drawn, dtype=torch.float64).uniform_(generator=other)
        near = torch.allclose(drawn.double(), -torch.log1p(-uniform), rtol=1e-6, atol=0)
        if not near or not torch.equal(one.get_state(), other.get_state()):
            return False
    return True


@lru_cache(maxsize=8)
def _one_hot_rows(choices: int) -> NDArray[np.int64]:
    return np.eye(choices, dtype=np.int64)


def _largest(
    logits: NDArray[np.floating], noise: NDArray[np.floating] | None = None
) -> NDArray[np.int64] | None:
    """The index ``[..., 1]`` of the largest logit of each row, less the logarithm of its noise.

    None if one is not far enough from the next.
    """
    if logits.shape[-1] == 2:
        with np.errstate(all="ignore"):  # infinite numbers are not clear
            ahead = np.subtract(logits[..., 1], logits[..., 0], dtype=np.float64)
            if noise is not None:
                ahead -= np.log(noise[..., 1] / noise[..., 0])
            distance = np.abs(ahead)
        clear = (distance > _APART) & (distance < np.inf)
        return None if b"\0" in clear.tobytes() else (ahead > 0).astype(np.int64)[..., None]
    if noise is not None:
        logits = np.subtract(logits, np.log(noise), dtype=np.float64)
    last = np.partition(logits, -2)
    clear = (last[..., -1] - _APART > last[..., -2]) & (last[..., -1] < np.inf)
    return None if b"\0" in clear.tobytes() else logits.argmax(-1, keepdims=True)


def _check_finite(normalizer: Tensor) -> None:
    if not normalizer.isfinite().all():
        raise RuntimeError(
            "probability tensor contains either `inf`, `nan` or element < 0: the policy gave "
            "logits that are not numbers, or -inf for every action, in this batch"
        )


class _CategoricalMode(_Categorical):
    """The most likely action."""

    def __call__(self, logits: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        scored = self._draw.scored
        # Normalized, as the classes do, logits that hardly differ come out equal.
        largest = None if scored or not _are_few(logits) else _largest(logits.numpy())
        if largest is not None:
            return self._picked(largest, logits), None
        logits = logits - logits.logsumexp(dim=-1, keepdim=True)
        if self._one_hot:
            mode = (logits == logits.max(-1, True)[0]).to(torch.long)
            index = mode.argmax(dim=-1, keepdim=True) if scored else mode
        else:
            index = torch.softmax(logits, dim=-1).argmax(dim=-1, keepdim=True)
            mode = index.squeeze(-1)
        return mode, self._log_prob(logits, index)


# -------------------------------------------------------------------------------------- continuous


class _Normal(Sampler):
    """Normal distributions: the first draw builds one, which checks its arguments."""

    late = True
    _dtype: torch.dtype | None = None

    def __call__(self, loc: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        drawn, parts = self._sample(loc, scale)
        return drawn, self._score(_at_once, *parts) if self._draw.scored else None

    def _sample(
        self, loc: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        loc, scale = self._parameters(loc, scale)
        drawn = loc + self._draw.noise.standard_normal(loc) * scale
        return drawn, (drawn, loc, scale)

    def _parameters(self, loc: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The parameters as the distribution has them, of the same shape."""
        if scale is None:
            scale = self._draw.kwargs["scale"]
            if callable(scale) and not isinstance(scale, Tensor):
                scale = scale(loc)
            elif not isinstance(scale, Tensor):
                scale = torch.as_tensor(scale, device=loc.device, dtype=loc.dtype)
        assert scale is not None
        if scale.device != loc.device:
            scale = scale.to(loc.device)
        if loc.dtype is not self._dtype:  # at first
            self._dtype = loc.dtype
            kwargs = {key: value for key, value in self._draw.kwargs.items() if key != "scale"}
            self._build(self._draw.kind(loc, scale, **kwargs))
        loc = self._moved(loc)
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        return loc, scale

    def _build(self, built: Any) -> None:
        self._event_dims = len(built.event_shape)

    def _moved(self, loc: Tensor) -> Tensor:
        return loc

    def _score(self, each: Each, *parts: Tensor) -> Tensor:
        value, loc, scale = parts
        squares = -((value - loc) ** 2) / (2 * scale**2)
        return self._sum(squares - each(torch.log, scale) - _HALF_LOG_TAU)

    def _sum(self, value: Tensor) -> Tensor:
        dims = self._event_dims
        if not dims:
            return value
        if dims == 1:
            return value.sum(-1)
        return value.reshape(value.shape[:-dims] + (-1,)).sum(-1)


class _TanhNormal(_Normal):
    def __init__(self, draw: Draw):
        super().__init__(draw)
        self.late = draw.together  # else scores begin with an inverse, which rounds as it lies

    def _build(self, built: Any) -> None:
        super()._build(built)
        self._tanh_loc: bool = built.tanh_loc
        self._upscale = built.upscale
        self._low = built.low
        moved = built.non_trivial_max or built.non_trivial_min
        self._half = (built.high - built.low) / 2 if moved else None
        unbounded = torch.broadcast_shapes(built.loc.shape, built.scale.shape)
        wanted = built.root_dist.loc.shape
        self._shape = wanted if wanted != unbounded else None  # that of bounds of more dimensions
        self._squash = _Squash(built.transforms[0])

    def _moved(self, loc: Tensor) -> Tensor:
        if self._tanh_loc:
            loc = (loc / self._upscale).tanh() * self._upscale
            if self._half is not None:
                loc = loc + self._half + self._low
        return loc

    def _sample(
        self, loc: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        loc, scale = self._parameters(loc, scale)
        draw = self._draw
        if self._shape is not None:
            loc, scale = loc.expand(self._shape), scale.expand(self._shape)
        before = loc
        if draw.interaction is _RANDOM:
            before = loc + draw.noise.standard_normal(loc) * scale
        drawn = self._squash(before)
        return drawn, (before if draw.together else drawn, loc, scale)

    def _score(self, each: Each, *parts: Tensor) -> Tensor:
        value, loc, scale = parts
        squash = self._squash
        if self._draw.together:
            log_prob = super()._score(each, value, loc, scale)
            return log_prob - self._sum(squash.log_jacobian(each, value))
        before = squash.inverse(value)
        log_prob = 0.0 - self._sum(squash.log_jacobian(each, before))
        return log_prob + super()._score(each, before, loc, scale)


class _TanhDelta(Sampler):
    _dtype: torch.dtype | None = None

    def __call__(self, param: Tensor) -> tuple[Tensor, None]:
        if param.dtype is not self._dtype:  # at first
            self._dtype = param.dtype
            built = TanhDelta(param, **self._draw.kwargs)
            self._half = (built.high - built.low) / 2 if built.non_trivial else None
            self._low = built.low
            self._squash = _Squash(built.transforms[0])
        if self._half is not None:
            param = param + self._half + self._low
        return self._squash(param), None


class _Squash:
    """A tanh, and the affine map to the bounds where these are not -1 and 1."""

    def __init__(self, transform: Any):
        self._transform = transform
        self._tanh, *affine = getattr(transform, "parts", [transform])
        self._safe = type(self._tanh) is _SafeTanh
        self._loc: Any = affine[0].loc if affine else None
        self._scale: Any = affine[0].scale if affine else None
        self._log_scale: Tensor | None = None

    def __call__(self, value: Tensor) -> Tensor:
        value = value.tanh()
        if self._safe:  # SafeTanhTransform, without an autograd function around it
            bound = 1.0 - torch.finfo(value.dtype).resolution
            value = value.clamp(-bound, bound)
        return value if self._scale is None else self._loc + self._scale * value

    def inverse(self, value: Tensor) -> Tensor:
        """The value before, as far as the bounds leave it."""
        if not self._safe:
            return self._transform.inv(value)
        if self._scale is not None:
            value = (value - self._loc) / self._scale
        bound = 1.0 - torch.finfo(value.dtype).resolution
        return value.clamp(-bound, bound).atanh()

    def log_jacobian(self, each: Each, before: Tensor) -> Tensor:
        """As ``TanhTransform.log_abs_det_jacobian`` has it, and that of the bounds."""
        log_slope = 2.0 * (math.log(2.0) - before - each(softplus, -2.0 * before))
        if self._scale is None:
            return log_slope
        if self._log_scale is None:
            self._log_scale = torch.abs(self._scale).log()
        return log_slope + self._log_scale


_SafeTanh: type = type(TanhNormal(torch.zeros(1), torch.ones(1)).transforms[0])
