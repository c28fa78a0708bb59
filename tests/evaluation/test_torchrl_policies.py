"""TorchRL's policies, as its scripts use them: the oracle is ``env.rollout`` on a batch of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl import modules as M
from torchrl.data import Bounded, OneHot, Unbounded
from torchrl.envs import (
    EnvBase,
    ExplorationType,
    GymWrapper,
    PendulumEnv,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.envs import transforms as T
from torchrl.envs.model_based import ModelBasedEnvBase
from torchrl.modules.models.exploration import LazygSDEModule, gSDEModule
from torchrl.modules.tensordict_module.actors import MultiStepActorWrapper
from torchrl.objectives.value import TDLambdaEstimator

import tdcollect
from tdcollect._upstream.torchrl import append_policy_transforms
from tdcollect.cli import main
from tdcollect.randomness import GlobalStream, NotReproducibleError, Outside
from tdcollect.seeding import env_seed, policy_seed

from . import policies
from .envs import Walk
from .ledger import RANDOM, digest, episodes_of
from .policies import net
from .torchrl_envs import Teams

push = partial(Walk, spaces.Box(-1, 1, (2,), np.float32))
SPEC = Bounded(-1, 1, (2,))
OBSERVATION, ACTION = "observation", "action"


def pushes() -> EnvBase:
    return GymWrapper(push())


def under(*transforms: Callable[[], Any]) -> Callable[[], EnvBase]:
    return lambda: TransformedEnv(pushes(), T.Compose(*[make() for make in transforms]))


def seeded(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return make(*args)

    return made


def on(network: nn.Module, read: Any = OBSERVATION, write: Any = ACTION) -> TensorDictModule:
    reads = [read] if isinstance(read, str) else read
    return TensorDictModule(network, reads, [write] if isinstance(write, str) else write)


class Joined(nn.Module):
    """A network of entries that are put one after the other; gives ``[..., *shape]``."""

    def __init__(self, ins: int, *shape: int):
        super().__init__()
        self.network, self.shape = net(ins, int(np.prod(shape))), shape

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return self.network(torch.cat(parts, -1)).unflatten(-1, self.shape).tanh()


class Imagined(ModelBasedEnvBase):
    """A model of the walk, which counts its steps."""

    def __init__(self) -> None:
        reward = on(net(3, 1), write="reward")
        model = M.WorldModelWrapper(on(Joined(5, 3), [OBSERVATION, ACTION], OBSERVATION), reward)
        super().__init__(model, device="cpu", batch_size=torch.Size([]))
        self.set_specs_from_env(pushes())
        self.steps = 0

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _step(self, tensordict: Any) -> Any:
        self.steps += 1
        return super()._step(tensordict)


def cem() -> Any:
    return M.CEMPlanner(Imagined(), 3, 2, num_candidates=4, top_k=2)


def mppi() -> Any:
    value = M.ValueOperator(net(3, 1), in_keys=[OBSERVATION])
    advantage = TDLambdaEstimator(gamma=0.99, lmbda=0.95, value_network=value)
    return M.MPPIPlanner(Imagined(), advantage, 1.0, 3, 2, num_candidates=4, top_k=2)


def gsde(lazy: bool = False) -> Any:
    noise = LazygSDEModule() if lazy else gSDEModule(2, 3)
    noise = on(noise, [ACTION, OBSERVATION, "_eps_gSDE"], ["loc", "scale", ACTION, "_eps_gSDE"])
    policy = TensorDictSequential(on(net(3, 2)), noise)
    if lazy:
        with set_exploration_type(ExplorationType.RANDOM):
            policy(pushes().reset().set("_eps_gSDE", torch.zeros(2, 3)))
    return policy


def noisy(lazy: bool = False) -> Any:
    last = M.NoisyLazyLinear(2) if lazy else M.NoisyLinear(8, 2)
    policy = on(nn.Sequential(M.NoisyLinear(3, 8), nn.Tanh(), last, nn.Tanh()))
    policy(pushes().reset())
    return policy


def dropout(shape: Any = (8,)) -> Any:
    masks = M.ConsistentDropoutModule(0.5, "hidden", input_shape=shape)
    return TensorDictSequential(on(net(3, 8), write="hidden"), masks, on(net(8, 2), "hidden"))


class History(nn.Module):
    """An actor of histories ``[..., T, size]``, in the place of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.last = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        joined = torch.cat(parts, -1)
        hidden, _ = self.memory(joined.reshape(-1, *joined.shape[-2:]))
        return self.last(hidden).reshape(*joined.shape[:-1], 2)


STACKED = [f"{name}_cat" for name in (OBSERVATION, ACTION, "return_to_go")]


def decision(transformer: bool = False) -> Any:
    network: nn.Module = History()
    if transformer:
        pytest.importorskip("transformers")
        config = M.DTActor.default_config()
        config.n_layer, config.n_embd, config.n_inner = 1, 16, 16
        network = M.DTActor(3, 2, transformer_config=config)
    actor = M.ProbabilisticActor(
        on(network, STACKED, "param"), ["param"], distribution_class=M.TanhDelta
    )
    policy = M.DecisionTransformerInferenceWrapper(actor, inference_context=3)
    observation, action, returns = STACKED
    policy.set_tensor_keys(observation=observation, action=action, return_to_go=returns)
    return policy


def with_history() -> EnvBase:
    """As TorchRL's script of the decision transformer has its env."""
    names = [OBSERVATION, ACTION, "return_to_go"]
    return under(
        lambda: T.TargetReturn(3.0, out_keys=["return_to_go"]),
        lambda: T.TensorDictPrimer(pushes().full_action_spec),
        lambda: T.UnsqueezeTransform(-2, in_keys=names, out_keys=STACKED),
        lambda: T.CatFrames(5, dim=-2, in_keys=STACKED, padding="constant"),
    )()


def chunks() -> Any:
    return MultiStepActorWrapper(on(Joined(3, 3, 2)), n_steps=3)


def distributional() -> Any:
    network = nn.Sequential(net(3, 10), nn.Unflatten(-1, (5, 2)), nn.LogSoftmax(-2))
    support = torch.linspace(-1, 1, 5)
    spec = OneHot(2)
    return M.DistributionalQValueActor(network, support, in_keys=[OBSERVATION], spec=spec)


def actor_value() -> Any:
    actor = M.ProbabilisticActor(
        on(nn.Sequential(net(8, 4), NormalParamExtractor()), "hidden", ["loc", "scale"]),
        ["loc", "scale"],
        distribution_class=M.TanhNormal,
    )
    value = M.ValueOperator(net(8, 1), in_keys=["hidden"])
    return M.ActorValueOperator(on(net(3, 8), write="hidden"), actor, value)


def actor_critic() -> Any:
    value = M.ValueOperator(Joined(10, 1), in_keys=["hidden", ACTION])
    actor = on(nn.Sequential(net(8, 2), nn.Tanh()), "hidden")
    return M.ActorCriticOperator(on(net(3, 8), write="hidden"), actor, value)


def for_groups() -> Any:
    def of(name: str, agents: int) -> TensorDictModule:
        network = M.MultiAgentMLP(2, 1, agents, centralized=True, share_params=False, depth=1)
        return TensorDictModule(network, [(name, OBSERVATION)], [(name, ACTION)])

    return TensorDictSequential(*[of(name, count) for name, count in Teams.groups.items()])


def diffusion() -> Any:
    return M.DiffusionActor(2, score_network=net(6, 2), num_steps=4)


GSDE = under(lambda: T.gSDENoise(state_dim=3, action_dim=2))
WALK: Callable[[], Any] = Walk
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "CEMPlanner": (cem, push),
    "CEMPlanner, the env itself": (
        partial(cem, PendulumEnv),
        lambda: TransformedEnv(PendulumEnv(), T.StepCounter(5)),
    ),
    "MPPIPlanner": (mppi, push),
    "DecisionTransformerInferenceWrapper": (decision, with_history),
    "DTActor": (partial(decision, True), with_history),
    "gSDEModule": (gsde, GSDE),
    "LazygSDEModule": (partial(gsde, True), GSDE),
    "NoisyLinear": (noisy, push),
    "NoisyLazyLinear": (partial(noisy, True), push),
    "ConsistentDropoutModule": (dropout, push),
    "ConsistentDropoutModule, off": (partial(dropout, None), push),
    "LSTMModule": (partial(policies.recurrent, M.LSTMModule), WALK),
    "GRUModule": (partial(policies.recurrent, M.GRUModule), WALK),
    "MultiStepActorWrapper": (chunks, push),
    "EGreedyModule": (policies.epsilon_greedy, WALK),
    "AdditiveGaussianModule": (
        partial(policies.gaussian_noise, 3, 2),
        push,
    ),
    "OrnsteinUhlenbeckProcessModule": (
        lambda: TensorDictSequential(on(net(3, 2)), M.OrnsteinUhlenbeckProcessModule(SPEC)),
        push,
    ),
    "TanhModule": (
        lambda: TensorDictSequential(on(net(3, 2)), M.TanhModule(in_keys=[ACTION], spec=SPEC)),
        push,
    ),
    "QValueActor": (lambda: M.QValueActor(net(3, 2), in_keys=[OBSERVATION], spec=OneHot(2)), WALK),
    "DistributionalQValueActor": (distributional, WALK),
    "ActorValueOperator": (actor_value, push),
    "ActorCriticOperator": (actor_critic, push),
    "VmapModule": (lambda: M.VmapModule(on(net(3, 2)), 0), push),
    "MultiAgentMLP": (for_groups, Teams),
    "DiffusionActor": (diffusion, push),
    "ProbabilisticActor": (policies.categorical, WALK),
}
SLOW = [
    *("CEMPlanner, the env itself", "MPPIPlanner", "DTActor", "LazygSDEModule", "NoisyLazyLinear"),
    *("ConsistentDropoutModule, off", "GRUModule"),
]


def rolled_out(env: EnvBase, policy: Any, index: int) -> Any:
    """An episode of ``env.rollout``; env and policy draw from the streams of the docs."""
    of_env, of_policy = GlobalStream(env_seed(0, index)), GlobalStream(0)
    of_policy._torch = [torch.Generator().manual_seed(policy_seed(0, index))]

    def act(tensordict: Any) -> Any:
        with Outside(), of_policy:
            return policy(tensordict.unsqueeze(0)).squeeze(0)

    seed = {"seed": env_seed(0, index)}
    with Outside(), of_env, set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        if not isinstance(env.base_env, GymWrapper):
            env.set_seed(**seed)
            seed = {}
        return env.rollout(100, act, auto_reset=False, tensordict=env.reset(**seed))


@pytest.mark.filterwarnings("ignore:Could not auto-wire")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_a_policy_of_torchrl_acts_as_in_its_rollout(name: str) -> None:
    make_policy, make_env = CASES[name]
    policy = seeded(make_policy)()
    how = {**RANDOM, "eval_mode": name != "ConsistentDropoutModule"}
    policy.train(not how["eval_mode"])
    found = episodes_of(make_env, policy, 4, num_envs=3, **how)
    assert digest(make_env, policy, 4, num_envs=1, **how) == digest(make_env, policy, 4, **how)
    env = make_env()
    own = TransformedEnv(env if isinstance(env, EnvBase) else GymWrapper(env))
    env = append_policy_transforms(TransformedEnv(own, auto_unwrap=True), policy)
    for index, episode in found.items():
        expected = rolled_out(env, policy, index)
        assert len(expected) == len(episode)
        for key in (*env.action_keys, *[("next", key) for key in env.reward_keys]):
            torch.testing.assert_close(
                episode[key].double(), expected[key].double(), rtol=1e-4, atol=1e-5
            )
    assert len({tuple(e[env.action_keys[0]].flatten().tolist()) for e in found.values()}) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_children")
@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_workers_evaluate_the_same(name: str) -> None:
    make_policy, make_env = CASES[name]
    policy = seeded(make_policy)()
    found = {
        tdcollect.evaluate(make_env, policy, 6, workers=n, progress=False, **RANDOM).digest
        for n in (None, 2)
    }
    assert len(found) == 1


SHAPE = r"gSDENoise\(state_dim=\.\.\."
REFUSED: dict[str, tuple[Callable[[], Any], Any, type[Exception], str]] = {
    "noise that no reset gives": (gsde, push, NotReproducibleError, rf"is zero, as .*{SHAPE}"),
    "noise of another shape": (gsde, under(T.gSDENoise), ValueError, rf"\[\[1\]\], got.*{SHAPE}"),
    "a mask that no reset gives": (
        partial(dropout, None),
        push,
        NotReproducibleError,
        "pass input_shape= to its module",
    ),
    "a mask in one env of several slots": (
        dropout,
        lambda: tdcollect.make_env(push, 2),
        ValueError,
        "expected a gymnasium id, or a function that makes one env, for consistent dropout",
    ),
    "a history that the env lacks": (decision, push, KeyError, "append the transforms that give"),
}


@pytest.mark.filterwarnings("ignore:Could not auto-wire")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_act_otherwise_is_refused_with_the_line_that_helps(name: str) -> None:
    make_policy, env, error, said = REFUSED[name]
    policy = seeded(make_policy)().train()
    with pytest.raises(error, match=said):
        digest(env, policy, 3, eval_mode=False, **RANDOM)


@pytest.mark.usefixtures("small_reports")
def test_what_is_kept_of_a_policy_that_masks_its_history_is_verified(tmp_path: Any) -> None:
    policy = seeded(decision)()
    keeping = {"output_dir": tmp_path / "a", "keep_trajectories": True, "progress": False}
    result = tdcollect.evaluate(with_history, policy, 2, **keeping)
    over = ["action_cat", "observation_cat", "return_to_go_cat"]
    assert result.manifest["entries"]["overwritten"] == over
    assert main(["verify", str(tmp_path / "a")]) == 0
    plain = tdcollect.evaluate(push, seeded(chunks)(), 2, progress=False)
    assert {*plain.manifest["entries"]} == {"observation", "action"}


class Refreshed(nn.Module):
    """Plans in the rows that begin, and keeps what it planned; a network of so many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(11, 64)

    def forward(self, observation: torch.Tensor, is_init: torch.Tensor, plan: Any) -> Any:
        starts = is_init[:, 0] | (observation[:, 0] > 0)
        plan = plan.clone()
        plan[starts] = self.network(observation[starts])
        return plan[:, :2].tanh(), plan


def test_rows_that_are_picked_do_not_round_by_how_many_there_are() -> None:
    def make() -> EnvBase:
        walk = GymWrapper(Walk(spaces.Box(-1, 1, (2,), np.float32), size=11))
        plans = T.TensorDictPrimer(plan=Unbounded((64,)))
        return TransformedEnv(walk, T.Compose(T.InitTracker(), plans))

    reads = [OBSERVATION, "is_init", "plan"]
    policy = TensorDictModule(seeded(Refreshed)(), reads, [ACTION, "plan"])
    assert len({digest(make, policy, 12, num_envs=slots) for slots in (1, 5, 16)}) == 1
