"""Scripts on VMAS: many envs as one, several agents in each."""

from __future__ import annotations

from typing import Any

from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import EnvBase, RewardSum, TransformedEnv
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.modules import (
    AdditiveGaussianModule,
    EGreedyModule,
    MultiAgentMLP,
    ProbabilisticActor,
    QValueModule,
    SafeSequential,
    TanhDelta,
    TanhNormal,
)

from .classic import SOTA
from .pipeline import Envs, Pipeline, Size, script

MULTI = f"{SOTA}/multiagent"
FEWER = "8 envs in a batch for 600"
OBSERVATION, ACTION = ("agents", "observation"), ("agents", "action")


def _balance(size: Size, continuous: bool = True) -> EnvBase:
    env = VmasEnv(
        scenario="balance",
        num_envs=size.slots,
        continuous_actions=continuous,
        max_steps=size.limit(100),
        device="cpu",
        seed=0,
        n_agents=3,
    )
    total = RewardSum(in_keys=[env.reward_key], out_keys=[("agents", "episode_reward")])
    return TransformedEnv(env, total)


def _net(env: EnvBase, outputs: int) -> MultiAgentMLP:
    return MultiAgentMLP(
        n_agent_inputs=env.observation_spec[OBSERVATION].shape[-1],
        n_agent_outputs=outputs,
        n_agents=env.n_agents,
        centralised=False,
        share_params=True,
        depth=2,
        num_cells=256,
        activation_class=nn.Tanh,
    )


def _bounds(env: EnvBase) -> dict[str, Any]:
    space = env.full_action_spec_unbatched[ACTION].space
    return {"low": space.low, "high": space.high}


def _options(size: Size) -> dict[str, Any]:
    return size.options(60_000, device="cpu", storing_device="cpu")


@script(f"{MULTI}/mappo_ippo.py, sac.py, tutorials multiagent_ppo.py", "vmas", note=FEWER)
def mappo(envs: Envs, size: Size) -> Pipeline:
    env = _balance(size)
    actions = env.full_action_spec_unbatched[env.action_key].shape[-1]
    net = nn.Sequential(_net(env, 2 * actions), NormalParamExtractor())
    keys = [("agents", "loc"), ("agents", "scale")]
    policy = ProbabilisticActor(
        TensorDictModule(net, [OBSERVATION], keys),
        spec=env.full_action_spec_unbatched,
        in_keys=keys,
        out_keys=[env.action_key],
        distribution_class=TanhNormal,
        distribution_kwargs=_bounds(env),
        return_log_prob=True,
    )
    return Pipeline(env, policy, _options(size), seeded=True)


@script(f"{MULTI}/maddpg_iddpg.py", "vmas", note=FEWER)
def maddpg(envs: Envs, size: Size) -> Pipeline:
    env = _balance(size)
    spec = env.full_action_spec_unbatched
    actor = ProbabilisticActor(
        TensorDictModule(
            _net(env, spec[env.action_key].shape[-1]), [OBSERVATION], [("agents", "param")]
        ),
        spec=spec,
        in_keys=[("agents", "param")],
        out_keys=[env.action_key],
        distribution_class=TanhDelta,
        distribution_kwargs=_bounds(env),
        return_log_prob=False,
    )
    noise = AdditiveGaussianModule(
        spec=spec, annealing_num_steps=1_000_000, action_key=env.action_key, device="cpu"
    )
    return Pipeline(env, TensorDictSequential(actor, noise), _options(size), seeded=True)


@script(f"{MULTI}/qmix_vdn.py, iql.py", "vmas", note=FEWER)
def qmix(envs: Envs, size: Size) -> Pipeline:
    env = _balance(size, continuous=False)
    values = ("agents", "action_value")
    net = _net(env, env.full_action_spec[ACTION].space.n)
    best = QValueModule(
        action_value_key=values,
        out_keys=[env.action_key, values, ("agents", "chosen_action_value")],
        spec=env.full_action_spec_unbatched,
        action_space=None,
    )
    explore = EGreedyModule(
        eps_init=0.3,
        eps_end=0,
        annealing_num_steps=1_000_000,
        action_key=env.action_key,
        spec=env.full_action_spec_unbatched,
    )
    actor = SafeSequential(TensorDictModule(net, [OBSERVATION], [values]), best)
    return Pipeline(env, TensorDictSequential(actor, explore), _options(size), seeded=True)
