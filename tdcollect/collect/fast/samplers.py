"""Random actions and their log-probabilities, without a distribution object at every call.

Each sampler does the operations of its distribution's own class, in the same order and with the
same random numbers, so the results are the same to the bit. It leaves out building the object, and
the checks of ``torch.multinomial``, which :meth:`Sampler.check` makes up for once per batch. Where
torch is asked to validate the arguments of distributions, the classes themselves are used.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule
from tensordict.nn.probabilistic import InteractionType
from torch import Tensor, distributions
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal
from torchrl.modules.tensordict_module import SafeProbabilisticModule

from tdcollect._upstream.torch import validates_arguments
from tdcollect.collect.policies import Noise

_HALF_LOG_TAU = math.log(math.sqrt(2 * math.pi))
_FEW_SLOTS = 64


class GlobalNoise:
    """Random numbers of torch's global generator; a :class:`~tdcollect.collect.policies.Noise`."""

    def exponential(self, like: Tensor) -> Tensor:
        """Draws from the exponential distribution of rate 1, of the shape and dtype given."""
        return torch.empty_like(like).exponential_(1)

    def standard_normal(self, like: Tensor) -> Tensor:
        """Draws from the standard normal distribution, of the shape and dtype given."""
        return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_()


class Sampler(abc.ABC):
    """Draws for one distribution module, as it would.

    Args:
        module: the module; its parameters are those of ``dist_keys``, in that order.
        noise: the source of random numbers.
    """

    def __init__(self, module: ProbabilisticTensorDictModule, noise: Noise):
        self._scores = module.return_log_prob
        self._noise = noise

    @abc.abstractmethod
    def __call__(self, *parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        """A sample and, if the module gives one, its log-probability."""

    def check(self) -> None:  # noqa: B027
        """Raise if a draw since the last check had parameters that its class refuses."""


class _Categorical(Sampler):
    def __init__(self, module: ProbabilisticTensorDictModule, noise: Noise, one_hot: bool):
        super().__init__(module, noise)
        self._one_hot = one_hot
        self._normalizers: list[Tensor] = []

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        normalizer = logits.logsumexp(dim=-1, keepdim=True)
        self._normalizers.append(normalizer)
        logits = logits - normalizer
        probs = torch.softmax(logits, dim=-1)
        # As torch.multinomial draws one sample per row, without its checks.
        index = (probs / self._noise.exponential(probs)).argmax(dim=-1, keepdim=True)
        log_prob = logits.gather(-1, index).squeeze(-1) if self._scores else None
        if self._one_hot:
            return torch.zeros_like(logits, dtype=torch.long).scatter_(-1, index, 1), log_prob
        return index.squeeze(-1), log_prob

    def check(self) -> None:
        normalizers, self._normalizers = self._normalizers, []
        if normalizers and not torch.stack(normalizers).isfinite().all():
            raise RuntimeError(
                "probability tensor contains either `inf`, `nan` or element < 0: the policy gave "
                "logits that are not numbers, or -inf for every action, in this batch"
            )


class _CategoricalMode(Sampler):
    def __init__(self, module: ProbabilisticTensorDictModule, noise: Noise, one_hot: bool):
        super().__init__(module, noise)
        self._one_hot = one_hot

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        largest = None if self._scores else _clearly_largest(logits)
        if largest is not None:
            if self._one_hot:
                return torch.zeros_like(logits, dtype=torch.long).scatter_(-1, largest, 1), None
            return largest.squeeze(-1), None
        logits = logits - logits.logsumexp(dim=-1, keepdim=True)
        if self._one_hot:
            mode = (logits == logits.max(-1, True)[0]).to(torch.long)
            index = mode.argmax(dim=-1, keepdim=True) if self._scores else mode
        else:
            index = torch.softmax(logits, dim=-1).argmax(dim=-1, keepdim=True)
            mode = index.squeeze(-1)
        return mode, logits.gather(-1, index).squeeze(-1) if self._scores else None


def _clearly_largest(logits: Tensor) -> Tensor | None:
    """The index ``[N, 1]`` of each row's largest logit; None where rounding may make it a tie.

    Normalized by ``logsumexp``, as the classes do, logits that differ by less than the rounding of
    the difference come out equal: by ``eps`` times their own size and that of the normalizer, which
    is at most ``log(K)`` above the largest. The normalizer takes most of a mode's time; it is not
    needed where the two largest are further apart in every row.
    """
    if logits.ndim != 2 or logits.shape[1] < 2 or len(logits) > _FEW_SLOTS or logits.is_cuda:
        return None
    values, index = logits.topk(2)
    apart = 64 * torch.finfo(logits.dtype).eps
    if all(first - second > apart * (abs(first) + 1) for first, second in values.tolist()):
        return index[:, :1]
    return None


class _Normal(Sampler):
    def __init__(self, module: ProbabilisticTensorDictModule, noise: Noise, event_dims: int):
        super().__init__(module, noise)
        self._event_dims = event_dims

    def __call__(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        drawn = loc + self._noise.standard_normal(loc) * scale
        if not self._scores:
            return drawn, None
        return drawn, _normal_log_prob(drawn, loc, scale, self._event_dims)


class _TanhNormal(Sampler):
    def __init__(self, module: ProbabilisticTensorDictModule, noise: Noise):
        super().__init__(module, noise)
        self._kwargs = module.distribution_kwargs
        self._template: tuple[Any, int] | None = None

    def __call__(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        if self._template is None:
            built = TanhNormal(loc, scale, **self._kwargs)
            self._template = (built.transforms[0], len(built.event_shape))
        transform, event_dims = self._template
        preimage = loc + self._noise.standard_normal(loc) * scale
        drawn = _safe_tanh(preimage) if type(transform) is _SafeTanh else transform(preimage)
        log_prob = _normal_log_prob(preimage, loc, scale, event_dims)
        jacobian = transform.log_abs_det_jacobian(preimage, drawn)
        return drawn, log_prob - _sum_rightmost(jacobian, event_dims)


def sampler(
    module: ProbabilisticTensorDictModule, noise: Noise, interaction: InteractionType
) -> Sampler | None:
    """A sampler that equals the module's under an interaction, or None where there is none."""
    names, kwargs = tuple(module.dist_keys), module.distribution_kwargs
    kind = module.distribution_class
    if validates_arguments():
        return None
    categorical = kind in (distributions.Categorical, OneHotCategorical)
    if categorical and names == ("logits",) and not kwargs:
        one_hot = kind is OneHotCategorical
        if interaction is InteractionType.RANDOM:
            return _Categorical(module, noise, one_hot)
        if interaction in (InteractionType.DETERMINISTIC, InteractionType.MODE):
            return _CategoricalMode(module, noise, one_hot)
    if interaction is not InteractionType.RANDOM:
        return None
    if names != ("loc", "scale"):
        return None
    if not kwargs and kind in (distributions.Normal, IndependentNormal):
        return _Normal(module, noise, event_dims=int(kind is IndependentNormal))
    # Without a log-probability, and outside TorchRL's own module, TanhNormal inverts its tanh:
    # other operations, which the general path does.
    scored = isinstance(module, SafeProbabilisticModule) and module.return_log_prob
    if scored and kind is TanhNormal and set(kwargs) <= _TANH_OPTIONS:
        return _TanhNormal(module, noise)
    return None


_TANH_OPTIONS = {"low", "high", "safe_tanh", "event_dims"}
_SafeTanh = type(TanhNormal(torch.zeros(1), torch.ones(1)).transforms[0])


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
    return value.reshape(value.shape[:-dims] + (-1,)).sum(-1)
