"""Samplers of categorical distributions: of integers or one-hot, with masks or without.

They leave out the checks of ``torch.multinomial``, which :meth:`Sampler.check` makes up for once
per batch.
"""

from __future__ import annotations

import torch
from tensordict.nn.probabilistic import InteractionType
from torch import Tensor, distributions
from torch.nn.functional import cross_entropy
from torchrl.modules import MaskedCategorical, MaskedOneHotCategorical, OneHotCategorical

from tdcollect.collect.fast.sampling import Draw, Sampler

_FEW_SLOTS = 64


def discrete_sampler(draw: Draw) -> Sampler | None:
    """The sampler of a categorical distribution, or None where there is none."""
    masked = draw.kind in (MaskedCategorical, MaskedOneHotCategorical)
    if not masked and draw.kind not in (distributions.Categorical, OneHotCategorical):
        return None
    if draw.kwargs or draw.names != (("logits", "mask") if masked else ("logits",)):
        return None
    if draw.interaction is InteractionType.RANDOM:
        return _Categorical(draw, masked)
    if draw.interaction in (InteractionType.DETERMINISTIC, InteractionType.MODE):
        return _CategoricalMode(draw, masked)
    return None


class _Base(Sampler):
    def __init__(self, draw: Draw, masked: bool):
        self._noise = draw.noise
        self._scored = draw.scored
        self._masked = masked
        self._one_hot = draw.kind in (OneHotCategorical, MaskedOneHotCategorical)

    def _drawn(self, logits: Tensor, index: Tensor) -> Tensor:
        """The sample for an index ``[..., 1]``."""
        if self._one_hot:
            return torch.zeros_like(logits, dtype=torch.long).scatter_(-1, index, 1)
        return index.squeeze(-1)

    def _log_prob(self, logits: Tensor, index: Tensor) -> Tensor | None:
        """The log-probability of an index ``[..., 1]``, if it is wanted; logits are normalized."""
        if not self._scored:
            return None
        if not self._masked:
            return logits.gather(-1, index).squeeze(-1)
        # The masked classes' own formula, which normalizes once more.
        if logits.ndim > 2:
            logits = logits.movedim(-1, 1)
        log_prob = -cross_entropy(logits, index.squeeze(-1), reduction="none")
        return torch.where(log_prob.isfinite(), log_prob, -torch.inf)


class _Categorical(_Base):
    def __init__(self, draw: Draw, masked: bool):
        super().__init__(draw, masked)
        self._normalizers: list[Tensor] = []

    def __call__(  # type: ignore[override]
        self, logits: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        normalizer = logits.logsumexp(dim=-1, keepdim=True)
        self._normalizers.append(normalizer)
        logits = logits - normalizer
        probs = torch.softmax(logits, dim=-1)
        # As torch.multinomial draws one sample per row, without its checks.
        index = (probs / self._noise.exponential(probs)).argmax(dim=-1, keepdim=True)
        return self._drawn(logits, index), self._log_prob(logits, index)

    def check(self) -> None:
        """Raise if a draw since the last check had logits that give no probabilities."""
        normalizers, self._normalizers = self._normalizers, []
        if normalizers and not torch.stack(normalizers).isfinite().all():
            raise RuntimeError(
                "probability tensor contains either `inf`, `nan` or element < 0: the policy gave "
                "logits that are not numbers, or -inf for every action, in this batch"
            )


class _CategoricalMode(_Base):
    def __call__(  # type: ignore[override]
        self, logits: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        largest = None if self._scored else _clearly_largest(logits)
        if largest is not None:
            return self._drawn(logits, largest), None
        logits = logits - logits.logsumexp(dim=-1, keepdim=True)
        if self._one_hot:
            mode = (logits == logits.max(-1, True)[0]).to(torch.long)
            index = mode.argmax(dim=-1, keepdim=True) if self._scored else mode
        else:
            index = torch.softmax(logits, dim=-1).argmax(dim=-1, keepdim=True)
            mode = index.squeeze(-1)
        return mode, self._log_prob(logits, index)


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
