"""Scripts of ``sota-implementations/`` on classic control."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.data import Composite
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    EnvCreator,
    InitTracker,
    NoopResetEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import (
    MLP,
    EGreedyModule,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    SafeModule,
    TanhModule,
    TanhNormal,
)

from .modules import greedy, q_actor, relu_mlp, sac_actor
from .pipeline import SEED, Envs, Pipeline, Size, initialized, script

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
SOTA = "sota-implementations"


def _batched(envs: Envs, size: Size, env_id: str, seed: int = SEED, **kwargs: Any) -> EnvBase:
    """One env behind the interface of several, seeded, as the off-policy scripts make it."""
    make = partial(
        envs.GymEnv, env_id, device="cpu", from_pixels=False, pixels_only=False, **kwargs
    )
    env = envs.ParallelEnv(1, EnvCreator(partial(make, **size.gym())), serial_for_single=True)
    env.set_seed(seed)
    return env


@script(f"{SOTA}/dqn/dqn_cartpole.py")
def dqn_cartpole(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(envs.GymEnv(CARTPOLE, device="cpu", from_pixels=False, pixels_only=False))
    env.append_transform(RewardSum())
    env.append_transform(StepCounter())
    actor = q_actor(env, relu_mlp(2, [120, 84], inputs=4))
    policy = greedy(actor, env, annealing_num_steps=250_000, eps_init=1.0, eps_end=0.05)
    options = size.options(1000, 10_000, device="cpu", storing_device="cpu", max_frames_per_traj=-1)
    return Pipeline(env, policy, options)


@script(f"{SOTA}/discrete_sac/discrete_sac.py", sets_seed=True)
def discrete_sac(envs: Envs, size: Size) -> Pipeline:
    stack = Compose(
        StepCounter(max_steps=size.limit(500)), InitTracker(), DoubleToFloat(), RewardSum()
    )
    env = TransformedEnv(_batched(envs, size, CARTPOLE), stack)
    policy = ProbabilisticActor(
        SafeModule(relu_mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        spec=Composite(action=env.action_spec),
        distribution_class=OneHotCategorical,
        distribution_kwargs={},
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=False,
    )
    options = size.options(500, 1000, device="cpu", storing_device="cpu", reset_at_each_iter=False)
    return Pipeline(env, initialized(policy, env), options, seeded=True)


@script(
    f"{SOTA}/cql/discrete_cql_online.py",
    note="action spec of one env: torchrl 0.14.1 refuses the batch's, which the script passes",
    sets_seed=True,
)
def discrete_cql_online(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(_batched(envs, size, CARTPOLE, 0), Compose(DoubleToFloat(), RewardSum()))
    spec = env.action_spec_unbatched
    actor = QValueActor(relu_mlp(2), in_keys=["observation"], spec=Composite(action=spec))
    explore = EGreedyModule(spec=spec, annealing_num_steps=10_000, eps_init=1.0, eps_end=0.01)
    policy = TensorDictSequential(initialized(actor, env), explore)
    options = size.options(200, 1000, device="cpu", max_frames_per_traj=size.limit(200))
    return Pipeline(env, policy, options, seeded=True)


@script(f"{SOTA}/iql/discrete_iql.py", sets_seed=True)
def discrete_iql(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(
        _batched(envs, size, CARTPOLE, 0, categorical_action_encoding=True),
        Compose(InitTracker(), DoubleToFloat(), RewardSum()),
    )
    policy = ProbabilisticActor(
        SafeModule(relu_mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        spec=Composite(action=env.action_spec_unbatched),
        distribution_class=Categorical,
        distribution_kwargs={},
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=False,
    )
    options = size.options(200, 1000, device="cpu", max_frames_per_traj=size.limit(200))
    return Pipeline(env, initialized(policy, env), options, seeded=True)


@script(f"{SOTA}/cql/cql_online.py", sets_seed=True)
def cql_online(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(_batched(envs, size, PENDULUM, 0), Compose(DoubleToFloat(), RewardSum()))
    options = size.options(1000, 5000, device="cpu", max_frames_per_traj=size.limit(1000))
    return Pipeline(env, initialized(sac_actor(env), env), options, seeded=True)


@script(f"{SOTA}/iql/iql_online.py", sets_seed=True)
def iql_online(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(
        _batched(envs, size, PENDULUM, 0, categorical_action_encoding=True),
        Compose(InitTracker(), DoubleToFloat(), RewardSum()),
    )
    options = size.options(200, 5000, device="cpu", max_frames_per_traj=size.limit(200))
    return Pipeline(env, initialized(sac_actor(env), env), options, seeded=True)


def trainer_env(envs: Envs, size: Size, slots: int, env_id: str, *kinds: Any) -> EnvBase:
    """The env of the trainers' default configuration: transforms inside of a ``ParallelEnv``.

    The trainers seed it through their collector, which does not restart it; here each env is
    seeded as it is made.
    """
    slots = min(slots, size.slots)
    make = partial(_trainer_slot, envs.GymEnv, size.gym(), env_id, kinds)
    return envs.ParallelEnv(slots, [partial(make, SEED + slot) for slot in range(slots)])


def _trainer_slot(
    gym_env: Any, kwargs: dict[str, Any], env_id: str, kinds: tuple[Any, ...], seed: int
) -> EnvBase:
    env = TransformedEnv(gym_env(env_id, **kwargs), Compose(*(kind() for kind in kinds)))
    torch.manual_seed(seed)  # NoopResetEnv draws from it
    env.set_seed(seed)
    return env


TRAINER = "transforms and seed inside of each env; hydra's configuration written out"


@script(f"{SOTA}/dqn_trainer/train.py", note=TRAINER)
def dqn_trainer(envs: Envs, size: Size) -> Pipeline:
    steps = partial(StepCounter, max_steps=size.limit(500))
    env = trainer_env(
        envs, size, 1, CARTPOLE, steps, partial(RewardSum, ["reward"], ["reward_sum"])
    )
    policy = QValueActor(
        MLP(4, 2, num_cells=[120, 84]), in_keys=["observation"], action_space="one-hot"
    )
    return Pipeline(env, policy, size.options(1000, 10_000), seeded=True)


@script(f"{SOTA}/ddpg_trainer/train.py", note=TRAINER)
def ddpg_trainer(envs: Envs, size: Size) -> Pipeline:
    steps = partial(StepCounter, max_steps=size.limit(200))
    total = partial(RewardSum, ["reward"], ["reward_sum"])
    env = trainer_env(envs, size, 1, PENDULUM, steps, DoubleToFloat, total)
    policy = TensorDictSequential(
        TensorDictModule(MLP(3, 1, num_cells=[256, 256]), ["observation"], ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], low=-2.0, high=2.0),
    )
    return Pipeline(env, policy, size.options(1000, 5000), seeded=True)


@script(f"{SOTA}/ppo_trainer/train.py", note=f"{TRAINER}; one of its two collectors")
def ppo_trainer(envs: Envs, size: Size) -> Pipeline:
    steps = partial(StepCounter, max_steps=size.limit(200))
    total = partial(RewardSum, ["reward"], ["reward_sum"])
    noops = partial(NoopResetEnv, noops=30 if size.steps is None else size.steps // 2)
    env = trainer_env(envs, size, 1, PENDULUM, noops, steps, total)
    return Pipeline(env, trainer_actor(3, 1, 128), size.options(1024), seeded=True)


def trainer_actor(inputs: int, actions: int, cells: int) -> Any:
    """The trainers' normal distribution: within [-1, 1] whatever the env's bounds."""
    net = nn.Sequential(MLP(inputs, 2 * actions, num_cells=[cells, cells]), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            return_log_prob=True,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )
