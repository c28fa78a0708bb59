"""The networks and policies of the benchmarks."""

from __future__ import annotations

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, TanhNormal


class Float(nn.Module):
    """Casts to single precision; MuJoCo's observations are double."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The observation as float32."""
        return value.float()


class Pixels(nn.Module):
    """Converts pixels ``[*, 4, 84, 84]`` to numbers in [0, 1]."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The pixels as float32, divided by 255."""
        return value.float() / 255


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """A network with two hidden layers of ``width`` tanh units."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )


def cheetah_net(width: int = 64) -> nn.Sequential:
    """A network for location and scale of six actions."""
    return nn.Sequential(Float(), *mlp(17, 12, width), NormalParamExtractor())


def pong_net() -> nn.Sequential:
    """A network with two convolutions and a hidden layer."""
    return nn.Sequential(
        Pixels(),
        nn.Conv2d(4, 16, 8, 4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 9 * 9, 128),
        nn.ReLU(),
        nn.Linear(128, 6),
    )


def discrete_actor(net: nn.Module, distribution: type = Categorical) -> ProbabilisticActor:
    """A policy with integer or one-hot actions, and their log-probabilities."""
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=distribution,
        return_log_prob=True,
    )


def continuous_actor(net: nn.Module) -> ProbabilisticActor:
    """A policy with actions in [-1, 1], and their log-probabilities."""
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -1.0, "high": 1.0},
        return_log_prob=True,
    )
