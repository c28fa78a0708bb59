"""Sampler: draws an action and its log-probability without a distribution object.

Each sampler does the operations of its distribution's own class, in the same order and with the
same random numbers, so the results are the same to the bit.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from tensordict.nn.probabilistic import InteractionType
from torch import Tensor

from tdcollect.collect.policies import Noise


class Draw(NamedTuple):
    """A draw of a distribution module.

    Attributes:
        kind: the class of the distribution.
        names: its parameters, in the order in which they are given.
        kwargs: its other arguments.
        interaction: the way of drawing.
        scored: whether the log-probability is wanted.
        together: whether the very draw is scored, as TorchRL's module does; tensordict's scores
            the result, and recomputes what led to it.
        noise: the source of random numbers.
    """

    kind: Any
    names: tuple[str, ...]
    kwargs: dict[str, Any]
    interaction: InteractionType
    scored: bool
    together: bool
    noise: Noise


class Sampler(abc.ABC):
    """Draws for one distribution module, as it would."""

    @abc.abstractmethod
    def __call__(self, *parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        """A sample and, if it is wanted, its log-probability."""

    def check(self) -> None:  # noqa: B027
        """Raise if a draw since the last check had parameters that its class refuses."""


ORDERS = {frozenset(names): names for names in (("loc", "scale"), ("logits", "mask"))}
"""The orders in which samplers take parameters, by their names."""
