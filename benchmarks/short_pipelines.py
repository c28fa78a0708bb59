"""Six short pipelines: TorchRL's envs, and transforms that need more than their own row.

They show what a changed import gains without the rest of a script, and the floor below it: the
env's own steps and the policy's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import hand_written
import torch
import workloads
from bench import Effort, Program, alternate, ratios, spread
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl_scripts import Envs, Pipeline, Size

import tdcollect

CARTPOLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
OBSERVATION = ["observation"]
FRAMES = 4


class Short(NamedTuple):
    """A pipeline: its title, parts, least ratio, and the figures that its floor is made of."""

    name: str
    title: str
    make: Callable[[Envs, Size], Pipeline]
    target: float
    env_id: str
    slots: int
    levels: tuple[int, ...] = (1, 2)
    inputs: int = 4


class Identity(ObservationNorm):
    """A user's transform: not known to anybody, whatever it does."""


def _cartpole(env: Any, size: Size, inputs: int = 4) -> Pipeline:
    policy = workloads.discrete_actor(workloads.mlp(inputs, 2))
    return Pipeline(env, policy, size.options(10_000))


def _cheetah(env: Any, size: Size) -> Pipeline:
    policy = workloads.continuous_actor(workloads.cheetah_net())
    return Pipeline(env, policy, size.options(10_000))


def _one(envs: Envs, size: Size) -> Pipeline:
    return _cartpole(envs.GymEnv(CARTPOLE, categorical_action_encoding=True), size)


def _transformed(envs: Envs, size: Size) -> Pipeline:
    norm = ObservationNorm(loc=0.0, scale=1.0, in_keys=OBSERVATION)
    stack = Compose(DoubleToFloat(), norm, RewardSum(), StepCounter())
    return _cheetah(TransformedEnv(envs.GymEnv(CHEETAH), stack), size)


def _serial(envs: Envs, size: Size) -> Pipeline:
    make = partial(envs.GymEnv, CARTPOLE, categorical_action_encoding=True)
    return _cartpole(envs.SerialEnv(4, make), size)


def _frames(envs: Envs, size: Size) -> Pipeline:
    env = tdcollect.make_env(CARTPOLE, 8, categorical_action_encoding=True)
    frames = CatFrames(N=FRAMES, dim=-1, in_keys=OBSERVATION)
    return _cartpole(TransformedEnv(env, frames), size, 4 * FRAMES)


def _vec_norm(envs: Envs, size: Size) -> Pipeline:
    env = tdcollect.make_env(CHEETAH, 8)
    return _cheetah(TransformedEnv(env, VecNormV2(in_keys=OBSERVATION)), size)


SHORT = [
    Short("gym", "GymEnv CartPole-v1", _one, 4.0, CARTPOLE, 1),
    Short(
        "gym-transforms",
        "TransformedEnv of GymEnv HalfCheetah-v5: DoubleToFloat, ObservationNorm, RewardSum, "
        "StepCounter",
        _transformed,
        2.5,
        CHEETAH,
        1,
        inputs=17,
    ),
    Short("serial", "SerialEnv(4) of GymEnv CartPole-v1", _serial, 4.0, CARTPOLE, 4),
    Short(
        "cat-frames",
        "make_env CartPole-v1, 8 slots, CatFrames",
        _frames,
        3.0,
        CARTPOLE,
        8,
        (1,),
        4 * FRAMES,
    ),
    Short(
        "vec-norm",
        "make_env HalfCheetah-v5, 8 slots, VecNormV2",
        _vec_norm,
        1.8,
        CHEETAH,
        8,
        (1,),
        17,
    ),
]


def identity(effort: Effort) -> dict[str, Any]:
    """The cost of a transform that is not known: time per frame over that without it."""
    torch.manual_seed(0)
    policy = workloads.discrete_actor(workloads.mlp(4, 2))
    norm = partial(Identity, loc=0.0, scale=1.0, in_keys=OBSERVATION)
    programs = {}
    for name, transform in (("without", None), ("with", norm)):
        env = tdcollect.make_env(CARTPOLE, 8, categorical_action_encoding=True)
        whole = env if transform is None else TransformedEnv(env, transform())
        programs[name] = workloads.ours(whole, policy, effort.steps)
    try:
        times = alternate(programs, effort)
    finally:
        for program in programs.values():
            program.close()
    return spread(ratios({"without": times["without"], **times}, "without")["with"])._asdict()


def floor(short: Short, steps: int) -> dict[str, Program]:
    """The env's steps alone and the policy's arithmetic alone."""
    torch.manual_seed(0)
    discrete = short.env_id == CARTPOLE
    net = workloads.mlp(short.inputs, 2) if discrete else workloads.cheetah_net()
    sample = (hand_written.categorical if discrete else hand_written.tanh_normal)(net)
    observation = torch.zeros(short.slots, short.inputs)

    def on_frames(own: torch.Tensor) -> Any:
        """As where an episode starts: all stacked frames are one."""
        return sample(own.repeat(1, short.inputs // own.shape[-1]))

    return {
        "env": workloads.envs_alone(short.env_id, short.slots, steps, on_frames),
        "policy": workloads.policy_alone(sample, observation, steps),
    }
