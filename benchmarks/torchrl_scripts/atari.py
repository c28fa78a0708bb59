"""Scripts on Atari games: pixels, skipped frames, stacks of transforms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import (
    CatFrames,
    DoubleToFloat,
    EndOfLifeTransform,
    EnvBase,
    EnvCreator,
    GrayScale,
    NoopResetEnv,
    RenameTransform,
    Resize,
    RewardSum,
    SignTransform,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    VecNorm,
)
from torchrl.modules import MLP, OneHotCategorical

from .classic import SOTA
from .modules import atari_actor, atari_cnn, greedy, q_actor
from .pipeline import SEED, Envs, Pipeline, Size, initialized, script

PONG = "ALE/Pong-v5"
NEEDS = ("ale_py",)


def _game(
    gym_env: Any,
    size: Size,
    seed: int | None,
    *transforms: Any,
    alone: bool = False,
    **kwargs: Any,
) -> EnvBase:
    """One game; ``alone`` in its process, whose torch it seeds, too: NoopResetEnv draws from it."""
    env = gym_env(
        PONG,
        frame_skip=4,
        from_pixels=True,
        pixels_only=False,
        device="cpu",
        **kwargs,
        **size.gym(),
    )
    noops = 30 if size.steps is None else size.steps // 3
    env = TransformedEnv(env)
    for transform in (NoopResetEnv(noops=noops, random=True), EndOfLifeTransform(), *transforms):
        env.append_transform(transform)
    if seed is not None:
        if alone:
            torch.manual_seed(seed)
        env.set_seed(seed)
    return env


def _games(envs: Envs, size: Size, slots: int, batched: str, **kwargs: Any) -> EnvBase:
    """Several games. The scripts do not seed them; here each is seeded as it is made."""
    slots = min(slots, size.slots)
    kind = getattr(envs, batched)
    make = partial(_game, envs.GymEnv, size, alone=kind is envs.ParallelEnv, **kwargs)
    options = {"serial_for_single": True} if kind is envs.ParallelEnv else {}
    seeds = [{"seed": SEED + slot} for slot in range(slots)]
    return kind(
        slots, EnvCreator(make, {"seed": SEED}), create_env_kwargs=seeds, device="cpu", **options
    )


def _ppo(envs: Envs, size: Size, batched: str, slots: int) -> Pipeline:
    env = TransformedEnv(_games(envs, size, slots, batched, categorical_action_encoding=True))
    for transform in (
        RenameTransform(in_keys=["pixels"], out_keys=["pixels_int"]),
        ToTensorImage(in_keys=["pixels_int"], out_keys=["pixels"]),
        GrayScale(),
        Resize(84, 84),
        CatFrames(N=4, dim=-3),
        RewardSum(),
        StepCounter(max_steps=size.limit(4500)),
        SignTransform(in_keys=["reward"]),
        DoubleToFloat(),
        VecNorm(in_keys=["pixels"]),
    ):
        env.append_transform(transform)
    options = size.options(4096, pixels=True, device="cpu", max_frames_per_traj=-1)
    return Pipeline(env, atari_actor(env, Categorical, 6), options, seeded=True)


@script(f"{SOTA}/ppo/ppo_atari.py", *NEEDS, note="each env seeded as it is made")
def ppo_atari(envs: Envs, size: Size) -> Pipeline:
    return _ppo(envs, size, "ParallelEnv", 8)


@script(f"{SOTA}/ppo/ppo_atari.py", *NEEDS, note="SerialEnv(4) for ParallelEnv(8)")
def ppo_atari_serial(envs: Envs, size: Size) -> Pipeline:
    return _ppo(envs, size, "SerialEnv", 4)


@script(f"{SOTA}/a2c/a2c_atari.py", *NEEDS, note="8 envs for 16; each seeded as it is made")
def a2c_atari(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(_games(envs, size, 16, "ParallelEnv"))
    for transform in (
        DoubleToFloat(),
        ToTensorImage(),
        GrayScale(),
        Resize(84, 84),
        CatFrames(N=4, dim=-3),
        RewardSum(),
        StepCounter(max_steps=size.limit(4500)),
        SignTransform(in_keys=["reward"]),
        VecNorm(in_keys=["pixels"]),
    ):
        env.append_transform(transform)
    options = size.options(
        800, pixels=True, device="cpu", storing_device="cpu", policy_device="cpu"
    )
    return Pipeline(env, atari_actor(env, OneHotCategorical, 6), options, seeded=True)


def _beside(size: Size, image: ToTensorImage) -> list[Any]:
    """The transforms beside one game, as in DQN and IMPALA."""
    return [
        SignTransform(in_keys=["reward"]),
        image,
        GrayScale(),
        Resize(84, 84),
        CatFrames(N=4, dim=-3),
        RewardSum(),
        StepCounter(max_steps=size.limit(4500)),
        DoubleToFloat(),
        VecNorm(in_keys=["pixels"]),
    ]


@script(f"{SOTA}/dqn/dqn_atari.py", *NEEDS)
def dqn_atari(envs: Envs, size: Size) -> Pipeline:
    env = _game(
        envs.GymEnv, size, None, *_beside(size, ToTensorImage()), categorical_action_encoding=True
    )
    head = MLP(3136, 6, num_cells=[512], activation_class=nn.ReLU)
    actor = initialized(q_actor(env, nn.Sequential(atari_cnn(), head), "pixels"), env)
    policy = greedy(actor, env, annealing_num_steps=4_000_000, eps_init=1.0, eps_end=0.01)
    options = size.options(
        1600, 200_000, pixels=True, device="cpu", storing_device="cpu", max_frames_per_traj=-1
    )
    return Pipeline(env, policy, options)


@script(
    f"{SOTA}/impala/impala_single_node.py, impala_multi_node_*.py",
    *NEEDS,
    note="one of the single node's 12 collectors",
)
def impala(envs: Envs, size: Size) -> Pipeline:
    env = _game(envs.GymEnv, size, None, *_beside(size, ToTensorImage(from_int=False)))
    options = size.options(
        80, pixels=True, device="cpu", storing_device="cpu", max_frames_per_traj=-1
    )
    return Pipeline(env, atari_actor(env, OneHotCategorical, 6), options)
