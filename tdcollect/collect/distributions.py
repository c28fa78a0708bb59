"""Random actions and their log-probabilities, without the validation of every call.

Each sampler does the operations of its distribution's own class, in the same order and with the
same random numbers, so the results are the same to the bit. What is left out is the building of
the distribution object and the validation of its parameters, which the loop makes up for once a
batch, with the class itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, distributions
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal
from torchrl.modules.tensordict_module import SafeProbabilisticModule

Sampler = Callable[..., tuple[Tensor, Tensor | None]]
"""Parameters, in the order of the module's in_keys, to a sample and, if asked, its log-prob."""

_HALF_LOG_TAU = math.log(math.sqrt(2 * math.pi))


def sampler(module: ProbabilisticTensorDictModule) -> Sampler | None:
    """A sampler for random interaction that equals the module's, or None where there is none."""
    make = _MAKERS.get(module.distribution_class)
    return None if make is None else make(module)


def _categorical(module: ProbabilisticTensorDictModule, one_hot: bool) -> Sampler | None:
    if tuple(module.dist_keys) != ("logits",) or module.distribution_kwargs:
        return None
    log_prob_wanted = module.return_log_prob

    def sample(logits: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = logits - logits.logsumexp(dim=-1, keepdim=True)
        probs = torch.softmax(logits, dim=-1)
        # What torch.multinomial does for one draw a row, without its checks.
        index = (probs / torch.empty_like(probs).exponential_(1)).argmax(dim=-1, keepdim=True)
        log_prob = logits.gather(-1, index).squeeze(-1) if log_prob_wanted else None
        if one_hot:
            return torch.zeros_like(logits, dtype=torch.long).scatter_(-1, index, 1), log_prob
        return index.squeeze(-1), log_prob

    return sample


def _normal(module: ProbabilisticTensorDictModule, event_dims: int) -> Sampler | None:
    if tuple(module.dist_keys) != ("loc", "scale") or module.distribution_kwargs:
        return None
    log_prob_wanted = module.return_log_prob

    def sample(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        drawn = loc + _standard_normal(loc) * scale
        return drawn, _normal_log_prob(drawn, loc, scale, event_dims) if log_prob_wanted else None

    return sample


def _tanh_normal(module: ProbabilisticTensorDictModule) -> Sampler | None:
    # Without a log-probability, and outside TorchRL's own module, TanhNormal inverts its tanh:
    # other operations, which the general path does.
    kwargs = module.distribution_kwargs
    wanted = isinstance(module, SafeProbabilisticModule) and module.return_log_prob
    if (
        not wanted
        or tuple(module.dist_keys) != ("loc", "scale")
        or not set(kwargs) <= {"low", "high", "safe_tanh", "event_dims"}
    ):
        return None
    template: list[tuple[Any, int]] = []

    def sample(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        if not template:
            built = TanhNormal(loc, scale, **kwargs)
            template.append((built.transforms[0], len(built.event_shape)))
        transform, event_dims = template[0]
        preimage = loc + _standard_normal(loc) * scale
        drawn = transform(preimage)
        log_prob = _normal_log_prob(preimage, loc, scale, event_dims)
        jacobian = transform.log_abs_det_jacobian(preimage, drawn)
        return drawn, log_prob - _sum_rightmost(jacobian, event_dims)

    return sample


def _standard_normal(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_()


def _normal_log_prob(value: Tensor, loc: Tensor, scale: Tensor, event_dims: int) -> Tensor:
    log_prob = -((value - loc) ** 2) / (2 * scale**2) - scale.log() - _HALF_LOG_TAU
    return _sum_rightmost(log_prob, event_dims)


def _sum_rightmost(value: Tensor, dims: int) -> Tensor:
    if dims == 0:
        return value
    return value.reshape(value.shape[:-dims] + (-1,)).sum(-1)


_MAKERS: dict[Any, Callable[[ProbabilisticTensorDictModule], Sampler | None]] = {
    distributions.Categorical: lambda module: _categorical(module, one_hot=False),
    OneHotCategorical: lambda module: _categorical(module, one_hot=True),
    distributions.Normal: lambda module: _normal(module, event_dims=0),
    IndependentNormal: lambda module: _normal(module, event_dims=1),
    TanhNormal: _tanh_normal,
}
