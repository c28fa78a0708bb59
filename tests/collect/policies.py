"""Named makers of policies, each with the env it acts in. They take no seed: the caller seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import distributions as D
from torch import nn
from torchrl.data import Categorical, Composite, OneHot
from torchrl.envs import EnvBase, ExplorationType
from torchrl.envs.utils import exploration_type
from torchrl.modules import (
    ActorValueOperator,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    MultiStepActorWrapper,
    NoisyLinear,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    TanhDelta,
    TanhNormal,
    ValueOperator,
)
from torchrl.modules.tensordict_module import SafeProbabilisticModule

from ..counting import CountingRules, StatelessCountingPolicy
from .envs import ENVS

NUMBERS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)


class Features(nn.Module):
    """Maps any observation entries to ``size`` numbers, one row per element of the batch size."""

    def __init__(self, dims: int, ins: int, size: int):
        super().__init__()
        self.dims = dims
        self.net = nn.Sequential(nn.Linear(ins, 8), nn.Tanh(), nn.Linear(8, size))

    def forward(self, *observations: torch.Tensor) -> torch.Tensor:
        rows = [o.reshape(*o.shape[: self.dims], -1).float() for o in observations]
        return self.net(torch.cat(rows, -1))


def observation_keys(env: EnvBase) -> list[Any]:
    entries = env.observation_spec.items(True, True)
    return [key for key, spec in entries if spec.dtype in NUMBERS or key == "observation"]


def network(env: EnvBase, size: int, out_keys: list[Any]) -> TensorDictModule:
    """A small network from all of the env's observations to ``out_keys[0]``."""
    keys, dims = observation_keys(env), len(env.batch_size)
    ins = sum(int(np.prod(env.observation_spec[key].shape[dims:])) for key in keys)
    return TensorDictModule(Features(dims, ins, size), in_keys=keys, out_keys=out_keys)


class Split(nn.Module):
    """Numbers to a location and a positive scale."""

    def forward(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc, scale = both.chunk(2, -1)
        return loc, scale.exp()


def normal_parameters(env: EnvBase) -> TensorDictSequential:
    return TensorDictSequential(
        network(env, 2 * env.action_spec.shape[-1], ["hidden"]),
        TensorDictModule(Split(), in_keys=["hidden"], out_keys=["loc", "scale"]),
    )


# ---------------------------------------------------------------------------- policies for any env


def random_policy(env: EnvBase) -> None:
    return None


def ones(env: EnvBase) -> Callable[[TensorDictBase], TensorDictBase]:
    """A plain function that writes ones, whatever the action's keys."""

    def policy(td: TensorDictBase) -> TensorDictBase:
        for key, spec in env.full_action_spec.items(True, True):
            td.set(key, spec.one())
        return td

    return policy


def actor(env: EnvBase, **options: Any) -> Any:
    """A sampling actor with log-probs for the env's action; ones for unusual actions."""
    if len(env.action_keys) != 1:
        return ones(env)
    spec = env.action_spec
    sizes = [size for key in observation_keys(env) for size in env.observation_spec[key].shape]
    if min([*spec.shape, *sizes], default=1) < 1:
        return ones(env)
    options = {"return_log_prob": True, **options}
    if isinstance(spec, OneHot):
        module, keys = network(env, spec.shape[-1], ["logits"]), ["logits"]
        options = {"distribution_class": OneHotCategorical, **options}
    elif type(spec) is Categorical:
        module, keys = network(env, spec.n, ["logits"]), ["logits"]
        options = {"distribution_class": D.Categorical, **options}
    elif spec.dtype is not None and spec.dtype.is_floating_point and spec.shape:
        module, keys = normal_parameters(env), ["loc", "scale"]
        options = {"distribution_class": TanhNormal, **options}
    else:
        return ones(env)
    return ProbabilisticActor(module, in_keys=keys, out_keys=[env.action_key], spec=spec, **options)


# -------------------------------------------------------------------------- policies for Pendulum


def deterministic(env: EnvBase) -> TensorDictModule:
    return network(env, 1, ["action"])


def deterministic_with_spec(env: EnvBase) -> TensorDictSequential:
    """Its spec tells all out-keys, so the parent does not call it at construction."""
    spec = Composite(action=env.action_spec, shape=env.batch_size)
    policy = TensorDictSequential(deterministic(env))
    policy.spec = spec
    return policy


def delta(env: EnvBase, **options: Any) -> ProbabilisticActor:
    """A TanhDelta actor, as DDPG's and TD3's."""
    return ProbabilisticActor(
        network(env, 1, ["param"]),
        in_keys=["param"],
        spec=env.action_spec,
        distribution_class=TanhDelta,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        **options,
    )


def additive_gaussian(env: EnvBase) -> TensorDictSequential:
    noise = AdditiveGaussianModule(env.action_spec, annealing_num_steps=50)
    return TensorDictSequential(deterministic(env), noise)


def ornstein_uhlenbeck(env: EnvBase) -> TensorDictSequential:
    noise = OrnsteinUhlenbeckProcessModule(env.action_spec, annealing_num_steps=50)
    return TensorDictSequential(deterministic(env), noise)


def soft_actor(env: EnvBase, cls: Any = SafeProbabilisticModule, **options: Any) -> Any:
    """As SAC's; with tensordict's own module and scored, as Dreamer's."""
    space = env.action_spec_unbatched.space
    sample = cls(
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high, "tanh_loc": False},
        default_interaction_type=InteractionType.RANDOM,
        **options,
    )
    return TensorDictSequential(normal_parameters(env), sample)


def two_actions(env: EnvBase) -> TensorDictSequential:
    """A composite distribution, for an env with two actions."""

    def split(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, loc, scale = hidden.split([3, 2, 2], -1)
        return logits, loc, scale.exp()

    names = [("params", "turn", "logits"), ("params", "push", "loc"), ("params", "push", "scale")]
    sample = SafeProbabilisticModule(
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"turn": OneHotCategorical, "push": TanhNormal},
        },
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )
    parts = TensorDictModule(split, in_keys=["hidden"], out_keys=names)
    return TensorDictSequential(network(env, 7, ["hidden"]), parts, sample)


def alternates(env: EnvBase) -> Callable[[TensorDictBase], TensorDictBase]:
    """Alternates between two one-hot actions, and returns what it found in the carrier."""

    def policy(td: TensorDictBase) -> TensorDictBase:
        found = td.get("action", torch.zeros(env.action_spec.shape, dtype=torch.int64))
        td.set("found", found.clone())
        return td.set("action", one_hot(found[..., 0]))

    return policy


def carries_a_memory(env: EnvBase) -> TensorDictSequential:
    """A memory beside the observation, from step to step; upstream defines the effect of resets."""

    class Memory(TensorDictModuleBase):
        in_keys = ("observation",)
        out_keys = ("memory", "logits")

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            total = tensordict["observation"].sum(-1, keepdim=True)
            memory = tensordict.get("memory", torch.ones_like(total)) * 0.9 + total
            return tensordict.set("memory", memory).set("logits", torch.cat([memory, -memory], -1))

    sample = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical
    )
    return TensorDictSequential(Memory(), sample)


# -------------------------------------------------------------------------- policies for CartPole


def one_hot_actor(env: EnvBase, module: Any, cls: Any = ProbabilisticActor) -> Any:
    """A sampling actor with log-probs on a module that writes ``"logits"``."""
    return cls(
        module,
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def actor_value(env: EnvBase) -> ActorValueOperator:
    """Shared trunk, action head with log-probs, value head."""
    head = TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["logits"])
    value = ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
    return ActorValueOperator(network(env, 8, ["hidden"]), one_hot_actor(env, head), value)


def actor_then_value(env: EnvBase) -> TensorDictSequential:
    return TensorDictSequential(actor(env), network(env, 1, [("critic", "value")]))


def hidden_outputs(env: EnvBase) -> TensorDictSequential:
    """Outputs under private names, which batches leave out, and under nested ones."""
    return TensorDictSequential(
        network(env, 8, ["_trunk"]),
        TensorDictModule(nn.Linear(8, 2), in_keys=["_trunk"], out_keys=[("head", "_private")]),
        TensorDictModule(
            lambda x: (x, x.softmax(-1)),
            in_keys=[("head", "_private")],
            out_keys=["logits", ("head", "probs")],
        ),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical
        ),
    )


def q_values(env: EnvBase) -> QValueActor:
    return QValueActor(network(env, 2, ["action_value"]), spec=env.action_spec)


def several_steps(env: EnvBase) -> MultiStepActorWrapper:
    """Decides on three actions at once; the env needs ``is_init``."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Unflatten(-1, (3, 1)))
    actor = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    return MultiStepActorWrapper(actor, n_steps=3)


def epsilon_greedy(env: EnvBase) -> TensorDictSequential:
    return TensorDictSequential(q_values(env), EGreedyModule(env.action_spec, 0.5, 0.1, 100))


def recurrent(kind: str, env: EnvBase, **more: Any) -> TensorDictSequential:
    """Network, memory, sampling head. The env needs ``is_init`` and a primer for the memory."""
    options = {"input_size": 8, "hidden_size": 4, "in_key": "features", "out_key": "memory"}
    options |= more
    memory = LSTMModule(**options) if kind == "lstm" else GRUModule(**options)
    head = TensorDictModule(nn.Linear(4, 2), in_keys=["memory"], out_keys=["logits"])
    actor = one_hot_actor(env, head)
    net = TensorDictModule(nn.Linear(4, 8), in_keys=["observation"], out_keys=["features"])
    return TensorDictSequential(net, memory, actor)


def one_hot(choice: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot(choice, 2)


class PlainNet(nn.Module):
    """Knows nothing of TensorDict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return one_hot(self.linear(observation).argmax(-1))


def with_net(act: Callable[..., TensorDictBase]) -> Callable[[EnvBase], Any]:
    """Makes functions ``act(net, tensordict)`` policies, each with a net of its own."""
    return lambda env: partial(act, PlainNet())


@with_net
def fresh_tensordict(net: PlainNet, td: TensorDictBase) -> TensorDictBase:
    """Returns another TensorDict than it was given."""
    return TensorDict({"action": net(td["observation"]), "extra": td["observation"].sum(-1)})


class Overridden(TensorDictModule):
    """Does more in ``forward`` than its class says."""

    def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        out = super().forward(tensordict)
        out["action"] = out["action"].flip(-1)
        return out.set("drawn", torch.rand(out.batch_size))


def overridden(env: EnvBase) -> Overridden:
    return Overridden(PlainNet(), in_keys=["observation"], out_keys=["action"])


class OverriddenActor(ProbabilisticActor):
    """A sampling actor whose ``forward`` is its own."""

    def forward(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        out = super().forward(*args, **kwargs)
        return out.set("doubled", 2 * out["action_log_prob"])


def overridden_actor(env: EnvBase) -> OverriddenActor:
    return one_hot_actor(env, network(env, 2, ["logits"]), OverriddenActor)


def hooks(env: EnvBase) -> TensorDictModuleBase:
    """Hooks on the policy, on a TensorDictModule inside it, and on a plain module inside it."""
    policy = actor(env)
    policy.register_forward_hook(lambda module, args, out: out.set("seen", out["logits"] + 1))
    policy.module[0].register_forward_hook(
        lambda module, args, out: out.set("logits", out["logits"] * 2)
    )
    linear = next(module for module in policy.modules() if isinstance(module, nn.Linear))
    linear.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    return policy


def with_body(layers: Callable[[], list[nn.Module]]) -> Callable[[EnvBase], Any]:
    """Makes actors on layers of their own."""

    def make(env: EnvBase) -> Any:
        body = nn.Sequential(*layers())
        module = TensorDictModule(body, in_keys=["observation"], out_keys=["logits"])
        return one_hot_actor(env, module)

    return make


class CallCounter(nn.Module):
    """Counts its calls in a buffer; the count decides the action."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        count = self.calls.expand(observation.shape[:-1]).clone()
        return one_hot(count // 2 % 2), count


def call_counter(env: EnvBase) -> TensorDictModule:
    return TensorDictModule(CallCounter(), in_keys=["observation"], out_keys=["action", "count"])


@with_net
def reports_its_context(net: PlainNet, td: TensorDictBase) -> TensorDictBase:
    """Records the modes under which it is called."""
    modes = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        [None, *ExplorationType].index(exploration_type()),
    ]
    td["action"] = net(td["observation"])
    return td.set("modes", torch.tensor(modes).expand(*td.batch_size, 3))


def odd_outputs(env: EnvBase) -> TensorDictModule:
    """Outputs of many dtypes, without a feature dimension, expanded and transposed."""

    def module(observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = observation.sum(-1)
        return (
            one_hot((total > 0).long()),
            total,
            total.double()[..., None].expand(*total.shape, 3),
            observation[..., None].expand(*observation.shape, 2).transpose(-1, -2),
            total > 0,
            observation.bfloat16(),
            observation.to(torch.int16),
        )

    names = ["action", "flat", "expanded", "transposed", "bool", "bfloat", "short"]
    return TensorDictModule(module, in_keys=["observation"], out_keys=names)


def overwrites_observation(env: EnvBase) -> TensorDictSequential:
    """Normalizes the observation under its own name."""
    return TensorDictSequential(
        TensorDictModule(lambda x: x / 2 + 1, in_keys=["observation"], out_keys=["observation"]),
        actor(env),
    )


def writes_next(env: EnvBase) -> TensorDictSequential:
    """Writes below ``"next"``, as recurrent modules do, an entry that the env does not know."""
    return TensorDictSequential(network(env, 2, [("next", "plan")]), actor(env))


@with_net
def changes_observation_in_place(net: PlainNet, td: TensorDictBase) -> TensorDictBase:
    td["observation"].add_(1)
    return td.set("action", net(td["observation"]))


@with_net
def reads_everything(net: PlainNet, td: TensorDictBase) -> TensorDictBase:
    """Acts on trajectory ids and flags, and counts the entries that it receives."""
    given = set(map(str, td.keys(True, True))) - {"entries"}
    shift = td["collector", "traj_ids"] % 2 + td["done"].squeeze(-1)
    action = net(td["observation"])
    td["entries"] = torch.full(td.batch_size, len(given))
    return td.set("action", action.roll(1, -1) if shift.any() else action)


@with_net
def drops_entries(net: PlainNet, td: TensorDictBase) -> TensorDictBase:
    """Returns the carrier without its observation."""
    action = net(td["observation"])
    return td.exclude("observation").set("action", action)


def keyword_inputs(env: EnvBase) -> TensorDictModule:
    def module(state: torch.Tensor, *, finished: torch.Tensor) -> torch.Tensor:
        return one_hot(((state.sum(-1) > 0) | finished.squeeze(-1)).long())

    keys = {"state": "observation", "finished": "done"}
    return TensorDictModule(module, in_keys=keys, out_keys=["action"])


def tiring(
    at: int, error: Any = ValueError("tired"), rules: CountingRules = CountingRules()
) -> Callable[[TensorDictBase], TensorDictBase]:
    """Predicts the counting env's actions, and raises at one call."""
    calls, right = itertools.count(1), StatelessCountingPolicy(rules)

    def policy(td: TensorDictBase) -> TensorDictBase:
        if next(calls) == at:
            raise error
        return right(td)

    return policy


# ------------------------------------------------------------------------------------- the table


POLICIES: dict[str, tuple[str, Callable[[EnvBase], Any]]] = {
    "deterministic": ("pendulum", deterministic),
    "deterministic-spec": ("pendulum", deterministic_with_spec),
    "one-hot": ("cartpole", actor),
    "one-hot-unbatched": ("cartpole-unbatched", actor),
    "one-hot-one-slot": ("cartpole-one-slot", actor),
    "one-hot-mode": ("cartpole", partial(actor, default_interaction_type=InteractionType.MODE)),
    "categorical": ("cartpole-categorical", actor),
    "tanh-normal": ("pendulum", actor),
    "delta": ("pendulum", delta),
    "actor-value": ("cartpole", actor_value),
    "actor-then-value": ("cartpole", actor_then_value),
    "selected-out-keys": ("cartpole", lambda e: actor(e).select_out_keys("action")),
    "hidden-outputs": ("cartpole", hidden_outputs),
    "q-values": ("cartpole", q_values),
    "several-steps": ("pendulum-init", several_steps),
    "epsilon-greedy": ("cartpole", epsilon_greedy),
    "epsilon-greedy-unbatched": ("cartpole-unbatched", epsilon_greedy),
    "additive-gaussian": ("pendulum", additive_gaussian),
    "ornstein-uhlenbeck": ("pendulum-init", ornstein_uhlenbeck),
    "soft-actor": ("pendulum", soft_actor),
    "two-actions": ("toy-dict-action", two_actions),
    "alternates": ("toy", alternates),
    "alternates-unbatched": ("toy-unbatched", alternates),
    "alternates-one-step-episodes": ("toy-one-step-episodes", alternates),
    "carries-memory": ("toy", carries_a_memory),
    "carries-memory-unbatched": ("toy-unbatched", carries_a_memory),
    "plain-net": ("cartpole", lambda e: PlainNet()),
    "function": ("cartpole", ones),
    "fresh-tensordict": ("cartpole", fresh_tensordict),
    "overridden-forward": ("cartpole", overridden),
    "overridden-actor": ("cartpole", overridden_actor),
    "hooks": ("cartpole", hooks),
    "dropout": (
        "cartpole",
        with_body(lambda: [nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)]),
    ),
    "batch-norm": ("cartpole", with_body(lambda: [nn.BatchNorm1d(4), nn.Linear(4, 2)])),
    "noisy": ("cartpole", with_body(lambda: [NoisyLinear(4, 2)])),
    "call-counter": ("cartpole", call_counter),
    "context": ("cartpole", reports_its_context),
    "odd-outputs": ("cartpole", odd_outputs),
    "overwrites-observation": ("cartpole", overwrites_observation),
    "writes-next": ("cartpole", writes_next),
    "in-place": ("cartpole", changes_observation_in_place),
    "reads-everything": ("cartpole", reads_everything),
    "drops-entries": ("cartpole", drops_entries),
    "keyword-inputs": ("cartpole", keyword_inputs),
}


def case(name: str) -> tuple[Callable[[], EnvBase], Callable[[EnvBase], Any]]:
    """The makers of env and policy of a named policy."""
    env, policy = POLICIES[name]
    return ENVS[env], policy


def lean(tensordict: TensorDictBase) -> TensorDictBase:
    """Push the cart to the side on which it stands."""
    right = (tensordict["observation"][..., 0] > 0).long()
    return tensordict.set("action", nn.functional.one_hot(right, 2))
