"""Policies for tests of evaluation, with fixed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn import functional
from torchrl.data import Bounded, OneHot
from torchrl.modules import (
    AdditiveGaussianModule,
    EGreedyModule,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
)

from tdcollect.evaluation.episodes.inference import DrawByRow, stream

OBSERVATION, ACTION, LOGITS = "observation", "action", "logits"


def net(ins: int, outs: int, seed: int = 0) -> nn.Sequential:
    """A network with two layers of 32; its weights do not depend on earlier random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(ins, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, outs)
        )


class OneHotOfBest(nn.Module):
    """The greatest output as a one-hot action."""

    def __init__(self, network: nn.Module, actions: int):
        super().__init__()
        self.network, self.actions = network, actions

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return functional.one_hot(self.network(observation).argmax(-1), self.actions)


def deterministic(ins: int = 3, actions: int = 2) -> TensorDictModule:
    return TensorDictModule(OneHotOfBest(net(ins, actions), actions), [OBSERVATION], [ACTION])


def categorical(
    ins: int = 3, actions: int = 2, kind: Any = OneHotCategorical, network: Any = None
) -> ProbabilisticActor:
    logits = TensorDictModule(network or net(ins, actions), [OBSERVATION], [LOGITS])
    return ProbabilisticActor(
        logits, [LOGITS], [ACTION], distribution_class=kind, return_log_prob=True
    )


def tanh_normal(ins: int = 3, actions: int = 1) -> ProbabilisticActor:
    network = nn.Sequential(net(ins, 2 * actions), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, [OBSERVATION], ["loc", "scale"]),
        ["loc", "scale"],
        [ACTION],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def recurrent(kind: type, ins: int = 3, actions: int = 2) -> TensorDictSequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        memory = kind(
            input_size=ins, hidden_size=8, in_key=OBSERVATION, out_key="features", device="cpu"
        )
    logits = TensorDictModule(net(8, actions), ["features"], [LOGITS])
    actor = ProbabilisticActor(logits, [LOGITS], [ACTION], distribution_class=OneHotCategorical)
    return TensorDictSequential(memory, actor)


class Attention(nn.Module):
    """Attention over the numbers of an observation."""

    def __init__(self, ins: int, outs: int):
        super().__init__()
        self.put, self.out = net(1, 24), net(8 * ins, outs)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        parts = self.put(observation.unsqueeze(-1)).unsqueeze(-3).chunk(3, -1)  # one head
        return self.out(functional.scaled_dot_product_attention(*parts).flatten(-3))


def attention(ins: int = 3, actions: int = 2) -> ProbabilisticActor:
    return categorical(ins, actions, network=Attention(ins, actions))


def convolutional() -> ProbabilisticActor:
    """Of pixels ``[..., 8, 8, 3]``, channels last."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 3)
        )
    logits = TensorDictModule(
        lambda pixels: layers(pixels.permute(0, 3, 1, 2) / 255), ["pixels"], [LOGITS]
    )
    return ProbabilisticActor(logits, [LOGITS], [ACTION], distribution_class=OneHotCategorical)


def epsilon_greedy(ins: int = 3, actions: int = 2) -> TensorDictSequential:
    spec = OneHot(actions)
    greedy = QValueActor(net(ins, actions), in_keys=[OBSERVATION], spec=spec)
    return TensorDictSequential(greedy, EGreedyModule(spec, eps_init=0.5, eps_end=0.5))


def gaussian_noise(ins: int = 3, actions: int = 1) -> TensorDictSequential:
    spec = Bounded(-1, 1, (actions,))
    loc = TensorDictModule(nn.Sequential(net(ins, actions), nn.Tanh()), [OBSERVATION], [ACTION])
    return TensorDictSequential(loc, AdditiveGaussianModule(spec, sigma_init=0.3, sigma_end=0.3))


def ornstein_uhlenbeck(slots: int = 2) -> TensorDictSequential:
    """Its spec is that of a training env, with slots of its own."""
    loc = TensorDictModule(nn.Sequential(net(3, 1), nn.Tanh()), [OBSERVATION], [ACTION])
    spec = Bounded(-0.5, 0.5, (slots, 1))
    return TensorDictSequential(loc, OrnsteinUhlenbeckProcessModule(spec, sigma=2.0))


def soft_actor() -> ProbabilisticActor:
    """Not scored, and within the spec of a training env."""
    network = nn.Sequential(net(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, [OBSERVATION], ["loc", "scale"]),
        ["loc", "scale"],
        [ACTION],
        spec=Bounded(-0.25, 0.25, (2, 1)),
        safe=True,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -0.5, "high": 0.5, "tanh_loc": False},
    )


class Plain(nn.Module):
    """A plain module, not a TensorDict module; its argument is named after the observation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OneHotOfBest(net(3, 2), 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.inner(observation)


def on_tensordicts() -> Callable[[TensorDictBase], TensorDictBase]:
    inner = OneHotOfBest(net(3, 2), 2)

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set(ACTION, inner(tensordict[OBSERVATION]))

    return policy


class Drawing(nn.Module):
    """Actions of logits that an operation has made random."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.network, self.draw = net(3, 2), draw

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return functional.one_hot(self.draw(self.network(observation)).argmax(-1), 2)


def drawing(draw: Callable[[torch.Tensor], torch.Tensor]) -> TensorDictModule:
    return TensorDictModule(Drawing(draw), [OBSERVATION], [ACTION])


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand": lambda x: x + torch.rand(len(x), 2, device=x.device),
    "rand-out": lambda x: x + torch.rand(len(x), 2, out=torch.empty_like(x)),
    "randint": lambda x: x + torch.randint(0, 3, (len(x), 2), device=x.device),
    "bernoulli": lambda x: x + torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: functional.one_hot(torch.multinomial(x.softmax(-1), 1)[:, 0], 2),
    "in-place": lambda x: x + torch.zeros_like(x).uniform_(),
    "normal": lambda x: torch.normal(x, torch.ones_like(x[0])),
    "flattened": lambda x: x + torch.rand(len(x) * 2, device=x.device).view(-1, 2),
    "gamma": lambda x: torch.distributions.Gamma(x.exp(), 1.0).sample(),
    "beta": lambda x: torch.distributions.Beta(x.exp(), 1.0).sample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.exp()).sample(),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "dropout": lambda x: functional.dropout(x.exp(), 0.5),
    "generator": lambda x: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)),
}


def drawn_by_row(name: str, logits: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The result of an operation on rows ``[N, 2]``, each with its own stream from ``first``."""
    by_row = DrawByRow(len(logits))
    by_row.streams = [stream(first + row) for row in range(len(logits))]
    with by_row:
        return DRAWS[name](logits)
