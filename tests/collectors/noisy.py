"""A policy whose noise is one of its weights: they say whether its actions are drawn."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn


class Noisy(nn.Module):
    """Prefers one of two actions by the sign of CartPole's pole angle, with noise."""

    def __init__(self, noise: float = 0.0):
        super().__init__()
        self.noise = nn.Parameter(torch.tensor(noise))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(observation.shape[:-1]) - 0.5
        right = observation[..., 2] + self.noise * drawn > 0
        return nn.functional.one_hot(right.long(), 2)


def noisy(noise: float = 0.0) -> TensorDictModule:
    """The policy as TorchRL calls it."""
    return TensorDictModule(Noisy(noise), ["observation"], ["action"])
