"""Scripts of ``examples/`` and ``tutorials/``."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Composite
from torchrl.envs import (
    CatFrames,
    CatTensors,
    Compose,
    DoubleToFloat,
    EnvBase,
    EnvCreator,
    GrayScale,
    InitTracker,
    ObservationNorm,
    Resize,
    RewardScaling,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
)
from torchrl.envs import RewardSum as EpisodeReward
from torchrl.envs.transforms.module import ModuleTransform
from torchrl.modules import (
    MLP,
    ConvNet,
    DdpgMlpActor,
    DuelingCnnDQNet,
    GRUModule,
    LSTMModule,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    QValueModule,
    RandomPolicy,
    TanhDelta,
)
from torchrl.modules.tensordict_module.actors import MultiStepActorWrapper

from .classic import CARTPOLE, PENDULUM
from .modules import greedy, tutorial_actor
from .pipeline import SEED, Envs, Pipeline, Size, initialized, script

EXAMPLES, TUTORIALS = "examples", "tutorials/sphinx-tutorials"
DOUBLE_PENDULUM = "InvertedDoublePendulum-v5"
OBSERVATION = ["observation"]


def _norm_steps(size: Size) -> int:
    """Steps for the statistics of ``ObservationNorm``; the tutorials take 1000."""
    return 100 if size.steps is not None else 1000


@script(f"{EXAMPLES}/collectors/collector_device.py")
def collector_device(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(envs.GymEnv(CARTPOLE), Compose(StepCounter(), EpisodeReward()))
    env.set_seed(0)
    net = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
    policy = greedy(QValueActor(net, spec=env.action_spec), env)
    return Pipeline(env, policy, size.options(128, 5120, device="cpu"), seeded=True)


@script(f"{EXAMPLES}/agents/multi-step.py", note="collected; the example calls env.rollout")
def multi_step(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(
        envs.SerialEnv(min(5, size.slots), partial(envs.GymEnv, CARTPOLE)),
        Compose(InitTracker(), CatFrames(N=6, in_keys=OBSERVATION, out_keys=["obs_cat"], dim=-1)),
    )
    actor = TensorDictSequential(
        TensorDictModule(_rows, ["obs_cat"], ["obs_cat_reshape"]),
        TensorDictModule(nn.Linear(4, 2), ["obs_cat_reshape"], ["action"]),
    )
    return Pipeline(env, MultiStepActorWrapper(actor, n_steps=6), size.options(500))


def _rows(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.unflatten(-1, (6, 4))


@script(f"{EXAMPLES}/replay-buffers/checkpoint.py")
def serial_rand_step(envs: Envs, size: Size) -> Pipeline:
    env = envs.SerialEnv(3, partial(envs.GymEnv, CARTPOLE, device=None))
    return Pipeline(env, env.rand_step, {**size.options(22), "frames_per_batch": 24})


@script(f"{EXAMPLES}/replay-buffers/recurrent_slice_sampler_pipeline.py")
def recurrent_slices(envs: Envs, size: Size) -> Pipeline:
    embed = TensorDictModule(nn.Linear(4, 32), OBSERVATION, ["embed"])
    gru = GRUModule(
        input_size=32,
        hidden_size=32,
        num_layers=1,
        in_keys=["embed", "recurrent_state", "is_init"],
        out_keys=["embed_out", ("next", "recurrent_state")],
    )
    head = TensorDictModule(
        MLP(in_features=32, out_features=2, num_cells=[]), ["embed_out"], ["action_value"]
    )
    parts = OrderedDict(embed=embed, gru=gru, mlp=head, qval=QValueModule("categorical"))
    policy = TensorDictSequential(parts)
    env = envs.GymEnv(CARTPOLE, categorical_action_encoding=True, policy=policy)
    return Pipeline(env, policy, size.options(200))


@script(
    f"{EXAMPLES}/collectors/multi_weight_updates.py", note="one of two collectors, without buffer"
)
def module_transform(envs: Envs, size: Size) -> Pipeline:
    def make() -> EnvBase:
        module = TensorDictModule(nn.Linear(3, 3), OBSERVATION, OBSERVATION)
        transform = ModuleTransform(module_factory=lambda: module, inverse=False, no_grad=True)
        return envs.GymEnv(PENDULUM).append_transform(transform)

    policy = TensorDictModule(nn.Linear(3, 1), OBSERVATION, ["action"])
    options = size.options(
        200, device="cpu", storing_device="cpu", max_frames_per_traj=50, init_random_frames=-1
    )
    return Pipeline(make, policy, options)


@script(f"{EXAMPLES}/collectors/mp_collector_mps.py", note="one of two collectors, on the CPU")
def linear_pendulum(envs: Envs, size: Size) -> Pipeline:
    policy = TensorDictModule(nn.Linear(3, 1), OBSERVATION, ["action"])
    options = size.options(200, device="cpu", storing_device="cpu", max_frames_per_traj=50)
    return Pipeline(partial(envs.GymEnv, PENDULUM, device="cpu"), policy, options)


@script(
    f"{EXAMPLES}/distributed/collectors/single_machine/generic.py",
    note="one of its nodes, CartPole for Pong; each env seeded as it is made",
)
def random_parallel(envs: Envs, size: Size) -> Pipeline:
    slots = min(8, size.slots)
    make = EnvCreator(partial(_seeded, envs.GymEnv), {"seed": SEED})
    seeds = [{"seed": SEED + slot} for slot in range(slots)]
    env = envs.ParallelEnv(slots, make, create_env_kwargs=seeds)
    policy = RandomPolicy(env.action_spec)
    return Pipeline(env, policy, size.options(800, device="cpu", storing_device="cpu"), seeded=True)


def _seeded(gym_env: Any, seed: int) -> EnvBase:
    env = gym_env(CARTPOLE)
    env.set_seed(seed)
    return env


@script(
    f"{TUTORIALS}/coding_ppo.py, {EXAMPLES}/distributed/collectors/multi_nodes/ray_train.py",
    "mujoco",
    note="InvertedDoublePendulum-v5 for v4; seeded before init_stats",
)
def coding_ppo(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(
        envs.GymEnv(DOUBLE_PENDULUM, device="cpu", **size.gym()),
        Compose(ObservationNorm(in_keys=OBSERVATION), DoubleToFloat(), StepCounter()),
    )
    env.set_seed(SEED)
    env.transform[0].init_stats(num_iter=_norm_steps(size), reduce_dim=0, cat_dim=0)
    options = size.options(1000, device="cpu", split_trajs=False)
    return Pipeline(env, initialized(tutorial_actor(env), env), options, seeded=True)


@script(
    f"{TUTORIALS}/coding_ddpg.py", "mujoco", note="HalfCheetah-v5 for v4; seeded before init_stats"
)
def coding_ddpg(envs: Envs, size: Size) -> Pipeline:
    def make() -> EnvBase:
        return envs.GymEnv("HalfCheetah-v5", device="cpu", frame_skip=1, **size.gym())

    env = TransformedEnv(envs.ParallelEnv(min(4, size.slots), EnvCreator(make)))
    for transform in (
        RewardScaling(loc=0.0, scale=5.0),
        CatTensors(in_keys=OBSERVATION, out_key="observation_vector"),
        ObservationNorm(in_keys=["observation_vector"], standard_normal=True),
        DoubleToFloat(),
        StepCounter(size.limit(500)),
        InitTracker(),
    ):
        env.append_transform(transform)
    env.set_seed(SEED)
    env.transform[2].init_stats(3, cat_dim=1, reduce_dim=[0, 1])
    actor = ProbabilisticActor(
        TensorDictModule(DdpgMlpActor(action_dim=6), ["observation_vector"], ["param"]),
        in_keys=["param"],
        distribution_class=TanhDelta,
        spec=Composite(action=env.action_spec_unbatched),
    )
    noise = OrnsteinUhlenbeckProcessModule(spec=actor.spec.clone(), annealing_num_steps=1_000_000)
    policy = TensorDictSequential(initialized(actor, env), noise)
    options = size.options(800, 5000, device="cpu", reset_at_each_iter=False, split_trajs=False)
    return Pipeline(env, policy, options, seeded=True)


@script(f"{TUTORIALS}/coding_dqn.py", "pygame", note="ObservationNorm(0, 1) for measured figures")
def coding_dqn(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(
        envs.GymEnv(CARTPOLE, from_pixels=True, pixels_only=True, device="cpu", **size.gym()),
        Compose(
            StepCounter(),
            ToTensorImage(),
            RewardScaling(loc=0.0, scale=0.1),
            GrayScale(),
            Resize(64, 64),
            CatFrames(4, in_keys=["pixels"], dim=-3),
            ObservationNorm(0.0, 1.0, in_keys=["pixels"], standard_normal=True),
        ),
    )
    convolutions = {
        "num_cells": [32, 64, 64],
        "kernel_sizes": [6, 4, 3],
        "strides": [2, 2, 1],
        "activation_class": nn.ELU,
    }
    layers = {"depth": 2, "num_cells": [64, 64], "activation_class": nn.ELU}
    net = DuelingCnnDQNet(2, 1, convolutions, layers)
    actor = initialized(QValueActor(net, in_keys=["pixels"], spec=env.action_spec), env)
    policy = greedy(actor, env, annealing_num_steps=5000, eps_init=0.1, eps_end=0.1)
    return Pipeline(env, policy, size.options(32, 100, device="cpu", split_trajs=False))


@script(
    f"{TUTORIALS}/dqn_with_rnn.py, {EXAMPLES}/agents/recurrent_actor.py",
    "pygame",
    note="100 steps of init_stats for 1000, seeded; without the replay buffer",
)
def dqn_with_rnn(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(
        envs.GymEnv(CARTPOLE, from_pixels=True, device="cpu", **size.gym()),
        Compose(
            ToTensorImage(),
            GrayScale(),
            Resize(84, 84),
            StepCounter(),
            InitTracker(),
            RewardScaling(loc=0.0, scale=0.1),
            ObservationNorm(standard_normal=True, in_keys=["pixels"]),
        ),
    )
    steps = 20 if size.steps is not None else 100
    env.set_seed(SEED)
    env.transform[-1].init_stats(steps, reduce_dim=[0, 1, 2], cat_dim=0, keep_dims=[0])
    convolutions = ConvNet(
        num_cells=[32, 32, 64],
        squeeze_output=True,
        aggregator_class=nn.AdaptiveAvgPool2d,
        aggregator_kwargs={"output_size": (1, 1)},
    )
    lstm = LSTMModule(input_size=64, hidden_size=128, in_key="embed", out_key="embed")
    env.append_transform(lstm.make_tensordict_primer())
    head = MLP(out_features=2, num_cells=[64])
    policy = TensorDictSequential(
        TensorDictModule(convolutions, ["pixels"], ["embed"]),
        lstm,
        TensorDictModule(head, ["embed"], ["action_value"]),
        QValueModule(action_space=None, spec=env.action_spec),
    )
    initialized(policy, env)
    head[-1].bias.data.fill_(0.0)
    explores = greedy(policy, env, annealing_num_steps=1_000_000, eps_init=0.2)
    return Pipeline(env, explores, size.options(50, storing_device="cpu"), seeded=True)


@script(f"{TUTORIALS}/recurrent_sequence_training.py")
def recurrent_sequences(envs: Envs, size: Size) -> Pipeline:
    lstm = LSTMModule(
        input_size=4,
        hidden_size=16,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["features", ("next", "rs_h"), ("next", "rs_c")],
        python_based=True,
    )
    policy = TensorDictSequential(
        lstm,
        TensorDictModule(nn.Linear(16, 2), ["features"], ["logits"]),
        TensorDictModule(_best, ["logits"], ["action"]),
    )
    options = size.options(
        64,
        device="cpu",
        storing_device="cpu",
        auto_register_policy_transforms=True,
        reset_at_each_iter=False,
    )
    env = envs.GymEnv(CARTPOLE, categorical_action_encoding=True, device="cpu")
    return Pipeline(env, policy.eval(), options)


def _best(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1, keepdim=False)


@script(f"{TUTORIALS}/getting-started-3.py, collector_trajectory_assembly.py")
def getting_started_3(envs: Envs, size: Size) -> Pipeline:
    env = envs.GymEnv(CARTPOLE)
    env.set_seed(0)
    return Pipeline(env, RandomPolicy(env.action_spec), size.options(200), seeded=True)


@script(f"{TUTORIALS}/getting-started-5.py")
def getting_started_5(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(envs.GymEnv(CARTPOLE), StepCounter())
    env.set_seed(0)
    net = MLP(out_features=2, num_cells=[64, 64])
    actor = TensorDictSequential(
        TensorDictModule(net, OBSERVATION, ["action_value"]), QValueModule(spec=env.action_spec)
    )
    policy = greedy(initialized(actor, env), env, annealing_num_steps=100_000, eps_init=0.5)
    return Pipeline(env, policy, size.options(100, 5000), seeded=True)


@script(f"{TUTORIALS}/memory_efficient_rl.py")
def compact_observations(envs: Envs, size: Size) -> Pipeline:
    return Pipeline(partial(envs.GymEnv, CARTPOLE), None, size.options(200, compact_obs=True))


@script(f"{TUTORIALS}/torchrl_demo.py")
def torchrl_demo(envs: Envs, size: Size) -> Pipeline:
    net = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
    module = TensorDictModule(net, OBSERVATION, ["action_value"])
    policy = QValueActor(module, in_keys=OBSERVATION, spec=envs.GymEnv(CARTPOLE).action_spec)
    return Pipeline(partial(envs.GymEnv, CARTPOLE), policy, size.options(100))
