"""Networks and policies that several scripts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import (
    AddStateIndependentNormalScale,
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    ConvNet,
    EGreedyModule,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)


def bounds(env: EnvBase) -> dict[str, torch.Tensor]:
    """The least and the greatest action of an env, as a distribution's arguments."""
    space = env.action_spec_unbatched.space
    return {"low": space.low, "high": space.high}


def sac_actor(env: EnvBase, net: nn.Module | None = None, **distribution: Any) -> Any:
    """An actor without log-probabilities, as in SAC and its kin; its scale has a bias."""
    spec = env.action_spec_unbatched
    if net is None:
        net = MLP(num_cells=[256, 256], out_features=2 * spec.shape[-1], activation_class=nn.ReLU)
    extractor = NormalParamExtractor(scale_mapping="biased_softplus_1.0", scale_lb=0.1)
    return ProbabilisticActor(
        TensorDictModule(nn.Sequential(net, extractor), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={**bounds(env), "tanh_loc": False, **distribution},
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=False,
    )


def ppo_actor(env: EnvBase, scale_lb: float | None = None, **distribution: Any) -> Any:
    """An actor with log-probabilities, as in PPO and A2C; its scale is the same in every state."""
    spec = env.action_spec_unbatched
    inputs = env.observation_spec["observation"].shape[-1]
    net = MLP(inputs, spec.shape[-1], num_cells=[64, 64], activation_class=nn.Tanh)
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 1.0)
            layer.bias.data.zero_()
    options = {} if scale_lb is None else {"scale_lb": scale_lb}
    net = nn.Sequential(net, AddStateIndependentNormalScale(spec.shape[-1], **options))
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.full_action_spec_unbatched,
        distribution_class=TanhNormal,
        distribution_kwargs={**bounds(env), "tanh_loc": False, **distribution},
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )


def tutorial_actor(env: EnvBase) -> Any:
    """An actor of four lazy layers with log-probabilities, as in the PPO tutorial."""
    spec = env.action_spec_unbatched
    layers = [layer for _ in range(3) for layer in (nn.LazyLinear(256), nn.Tanh())]
    net = nn.Sequential(*layers, nn.LazyLinear(2 * spec.shape[-1]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs=bounds(env),
        return_log_prob=True,
    )


def q_actor(env: EnvBase, net: nn.Module, key: str = "observation") -> QValueActor:
    """An actor that takes the best of its values."""
    return QValueActor(net, in_keys=[key], spec=Composite(action=env.action_spec))


def greedy(actor: Any, env: EnvBase, **options: Any) -> TensorDictSequential:
    """An actor with random actions in between."""
    return TensorDictSequential(actor, EGreedyModule(spec=env.action_spec, **options))


def atari_cnn(num_frames: int = 4) -> nn.Sequential:
    """The network of Mnih et al. (2015), up to its flat output ``[3136]``."""
    return ConvNet(
        in_features=num_frames,
        num_cells=[32, 64, 64],
        kernel_sizes=[8, 4, 3],
        strides=[4, 2, 1],
        activation_class=nn.ReLU,
    )


def atari_actor(env: EnvBase, distribution: Any, actions: int) -> Any:
    """The policy's half of an actor-critic that shares its convolutions."""
    trunk = nn.Sequential(
        atari_cnn(),
        MLP(3136, 512, num_cells=[], activation_class=nn.ReLU, activate_last_layer=True),
    )
    common = TensorDictModule(trunk, ["pixels"], ["common_features"])
    policy = ProbabilisticActor(
        TensorDictModule(MLP(512, actions, num_cells=[]), ["common_features"], ["logits"]),
        in_keys=["logits"],
        spec=env.full_action_spec_unbatched,
        distribution_class=distribution,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )
    value = ValueOperator(MLP(512, 1, num_cells=[]), in_keys=["common_features"])
    return ActorValueOperator(common, policy, value).get_policy_operator()


def relu_mlp(outputs: int, cells: Sequence[int] = (256, 256), inputs: int | None = None) -> MLP:
    """A ReLU network; lazy unless ``inputs`` is given."""
    return MLP(inputs, outputs, num_cells=list(cells), activation_class=nn.ReLU)
