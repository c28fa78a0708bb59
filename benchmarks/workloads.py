"""The cells of the table: one workload each, and the programs that run it.

All programs of a cell share one network. Discrete actions are integers unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import ale_py
import envpool
import gymnasium as gym
import hand_written
import numpy as np
import others
import torch
from bench import Program, collecting
from gymnasium.vector import AutoresetMode
from networks import cheetah_net, continuous_actor, discrete_actor, mlp, pong_net
from numpy_cartpole import NumPyCartPole
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import OneHotCategorical

import tdcollect

OURS = "tdcollect"
HAND = "hand-written"
HAND_DEFAULT = "hand-written, default autoreset"
HAND_SINGLY = "hand-written, slots reset singly"
TORCHRL = "TorchRL Collector"
PARALLEL = "TorchRL Collector, ParallelEnv"
SB3 = "Stable-Baselines3"
TIANSHOU = "Tianshou 2"
ENVS = "envs alone"
POLICY = "policy alone"
LIMIT = "envs and policy alone"
TURNS = "envs and policy in turns"

POOL_THREADS = 1


class Cell(NamedTuple):
    """A workload. ``programs`` makes its programs for T steps; ``targets`` are ratios to reach.

    ``on_arrays`` is True if tdcollect's collector runs it on arrays.
    """

    name: str
    title: str
    programs: Callable[[int], dict[str, Program]]
    targets: dict[str, float]
    on_arrays: bool = True


def ours(env: EnvBase, policy: Any, steps: int) -> Program:
    """Batches of tdcollect's collector."""
    return collecting(tdcollect.Collector, env, policy, steps)


def torchrl(env: EnvBase, policy: Any, steps: int) -> Program:
    """Batches of TorchRL's collector."""
    return collecting(TorchRLCollector, env, policy, steps)


def torchrl_env(env_id: str, num_envs: int) -> EnvBase:
    """TorchRL's fastest env that keeps final observations and has no rows for resets."""
    if num_envs == 1:
        return GymEnv(env_id, categorical_action_encoding=True)
    envs = hand_written.vector_env(env_id, num_envs, AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True)


def stack() -> Compose:
    """The transforms of a typical pipeline."""
    norm = ObservationNorm(loc=0.0, scale=1.0, in_keys=["observation"])
    return Compose(norm, RewardSum(), StepCounter(), InitTracker())


def _gymnasium(
    env_id: str,
    num_envs: int,
    make_net: Callable[[], nn.Module],
    steps: int,
    continuous: bool = False,
    parallel: bool = False,
) -> dict[str, Program]:
    torch.manual_seed(0)
    net = make_net()
    policy = continuous_actor(net) if continuous else discrete_actor(net)
    sample = (hand_written.tanh_normal if continuous else hand_written.categorical)(net)
    env = tdcollect.make_env(
        env_id, None if num_envs == 1 else num_envs, categorical_action_encoding=True
    )
    same = hand_written.vector_env(env_id, num_envs, AutoresetMode.SAME_STEP)
    following = hand_written.vector_env(env_id, num_envs, AutoresetMode.NEXT_STEP)
    spaces = following.single_observation_space, following.single_action_space
    frames = num_envs * steps
    programs = {
        OURS: ours(env, policy, steps),
        HAND: _loop(hand_written.every_row_real(same, sample, steps), frames, same),
        HAND_DEFAULT: _loop(
            hand_written.default_autoreset(following, *spaces, sample, steps), frames, following
        ),
        TORCHRL: torchrl(torchrl_env(env_id, num_envs), policy, steps),
        SB3: others.stable_baselines3(env_id, num_envs, net, steps),
        TIANSHOU: others.tianshou(env_id, num_envs, net, steps),
        ENVS: envs_alone(env_id, num_envs, steps, sample),
        TURNS: in_turns(env_id, num_envs, steps, sample),
    }
    if parallel:
        make = partial(GymEnv, env_id, categorical_action_encoding=True)
        workers = ParallelEnv(num_envs, make, mp_start_method="fork")
        programs[PARALLEL] = torchrl(workers, policy, steps)
    observation = torch.as_tensor(np.stack([spaces[0].sample()] * num_envs)).clamp(-1, 1)
    programs[POLICY] = policy_alone(sample, observation, steps)
    return {name: program for name, program in programs.items() if program is not None}


def _pool(
    env_id: str, num_envs: int, make_net: Callable[[], nn.Module], steps: int
) -> dict[str, Program]:
    torch.manual_seed(0)
    net = make_net()
    policy, sample = discrete_actor(net), hand_written.categorical(net)
    options = {"num_threads": POOL_THREADS}
    env = tdcollect.make_env(
        env_id, num_envs, backend="envpool", env_kwargs=options, categorical_action_encoding=True
    )
    stock_env = tdcollect.make_env(
        env_id, num_envs, backend="envpool", env_kwargs=options, categorical_action_encoding=True
    )
    pool, singly, alone = (make_pool(env_id, num_envs) for _ in range(3))
    spaces = pool.observation_space, pool.action_space
    frames = num_envs * steps
    observation = torch.as_tensor(env.reset()["observation"])
    return {
        OURS: ours(env, policy, steps),
        HAND: _loop(hand_written.default_autoreset(pool, *spaces, sample, steps), frames, pool),
        HAND_SINGLY: _loop(
            hand_written.slots_reset_singly(singly, *spaces, sample, steps), frames, singly
        ),
        TORCHRL: torchrl(stock_env, policy, steps),
        ENVS: _pool_alone(alone, alone.action_space, steps),
        POLICY: policy_alone(sample, observation, steps),
    }


def make_pool(env_id: str, num_envs: int) -> Any:
    """A plain EnvPool, with as many threads as tdcollect's."""
    return envpool.make_gymnasium(env_id, num_envs=num_envs, seed=0, num_threads=POOL_THREADS)


def _numpy(num_envs: int, steps: int) -> dict[str, Program]:
    torch.manual_seed(0)
    net = _cartpole_net()
    policy, sample = discrete_actor(net), hand_written.multinomial(net)
    env = tdcollect.make_env(NumPyCartPole(num_envs), categorical_action_encoding=True)
    stock = GymWrapper(NumPyCartPole(num_envs), categorical_action_encoding=True)
    singly, alone = NumPyCartPole(num_envs), NumPyCartPole(num_envs)
    spaces = singly.single_observation_space, singly.single_action_space
    loop = hand_written.slots_reset_singly(
        singly, *spaces, sample, steps, hand_written.restarted_by_mask, keeps_next=True
    )
    observation = torch.as_tensor(env.reset()["observation"])
    return {
        OURS: ours(env, policy, steps),
        HAND_SINGLY: _loop(loop, num_envs * steps, singly),
        TORCHRL: torchrl(stock, policy, steps),
        ENVS: _pool_alone(alone, alone.single_action_space, steps),
        POLICY: policy_alone(sample, observation, steps),
    }


def _atari(num_envs: int, steps: int) -> dict[str, Program]:
    torch.manual_seed(0)
    net = pong_net()
    policy, sample = discrete_actor(net), hand_written.categorical(net)
    mode = AutoresetMode.SAME_STEP
    env, same, alone = (
        ale_py.AtariVectorEnv("pong", num_envs, autoreset_mode=mode, num_threads=POOL_THREADS)
        for _ in range(3)
    )
    observation = torch.as_tensor(alone.reset(seed=0)[0])
    return {
        OURS: ours(tdcollect.make_env(env, categorical_action_encoding=True), policy, steps),
        HAND: _loop(hand_written.every_row_real(same, sample, steps), num_envs * steps, same),
        ENVS: _pool_alone(alone, alone.single_action_space, steps),
        POLICY: policy_alone(sample, observation, steps),
    }


def _transformed(steps: int) -> dict[str, Program]:
    torch.manual_seed(0)
    policy = discrete_actor(mlp(4, 2))
    env = tdcollect.make_env("CartPole-v1", 8, categorical_action_encoding=True)
    stock = torchrl_env("CartPole-v1", 8)
    return {
        OURS: ours(TransformedEnv(env, stack()), policy, steps),
        TORCHRL: torchrl(TransformedEnv(stock, stack()), policy, steps),
    }


def _one_hot(steps: int) -> dict[str, Program]:
    torch.manual_seed(0)
    policy = discrete_actor(mlp(4, 2), OneHotCategorical)
    stock = GymWrapper(hand_written.vector_env("CartPole-v1", 8, AutoresetMode.DISABLED))
    return {
        OURS: ours(tdcollect.make_env("CartPole-v1", 8), policy, steps),
        TORCHRL: torchrl(stock, policy, steps),
    }


def _fall_back(steps: int) -> dict[str, Program]:
    torch.manual_seed(0)
    policy = discrete_actor(mlp(4, 2))
    make = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    return {
        OURS: ours(SerialEnv(4, make), policy, steps),
        TORCHRL: torchrl(SerialEnv(4, make), policy, steps),
    }


def _loop(batches: Iterator[Any], frames: int, envs: Any) -> Program:
    return Program(partial(next, batches), frames, envs.close)


def envs_alone(env_id: str, num_envs: int, steps: int, sample: hand_written.Sample) -> Program:
    """The envs, stepped in a plain loop with actions that the policy gave beforehand.

    A simulator's time depends on what it is told to do: HalfCheetah takes a fifth longer for the
    actions of an untrained policy than for uniform ones.
    """
    envs, actions = _acting(env_id, num_envs, sample)
    actions = list(islice(actions, steps))

    def run() -> None:
        for row in actions:
            for env, action in zip(envs, row, strict=True):
                _step(env, action)

    return Program(run, num_envs * steps, lambda: [env.close() for env in envs])


def in_turns(env_id: str, num_envs: int, steps: int, sample: hand_written.Sample) -> Program:
    """The envs and the policy in turns, in a loop that keeps nothing."""
    envs, actions = _acting(env_id, num_envs, sample)

    def run() -> None:
        for _ in range(steps):
            next(actions)

    return Program(run, num_envs * steps, lambda: [env.close() for env in envs])


def _acting(
    env_id: str, num_envs: int, sample: hand_written.Sample
) -> tuple[list[gym.Env], Iterator[Any]]:
    """Envs, and the actions ``[N, ...]`` with which a policy steps them."""
    envs = [gym.make(env_id) for _ in range(num_envs)]

    def act() -> Iterator[Any]:
        observations = [env.reset()[0] for env in envs]
        while True:
            with torch.no_grad():
                row = sample(torch.as_tensor(np.array(observations)).float())[0].numpy()
            observations = [_step(env, action) for env, action in zip(envs, row, strict=True)]
            yield row

    return envs, act()


def _step(env: gym.Env, action: Any) -> Any:
    observation, _, terminated, truncated, _ = env.step(action)
    return env.reset()[0] if terminated or truncated else observation


def _pool_alone(pool: Any, space: gym.spaces.Discrete, steps: int) -> Program:
    pool.reset()
    actions = np.random.default_rng(0).integers(space.n, size=(steps, pool.num_envs))

    def run() -> None:
        for action in actions:
            pool.step(action)

    return Program(run, pool.num_envs * steps, pool.close)


def policy_alone(sample: hand_written.Sample, observation: torch.Tensor, steps: int) -> Program:
    """A policy, called on one observation."""
    if observation.dtype != torch.uint8:
        observation = observation.float()
    frames = len(observation) * steps
    return Program(partial(_repeat, partial(sample, observation), steps), frames)


@torch.no_grad()
def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


_cartpole_net = partial(mlp, 4, 2)

CELLS = [
    Cell(
        "cartpole-1",
        "CartPole-v1, N=1",
        partial(_gymnasium, "CartPole-v1", 1, _cartpole_net),
        {HAND: 1.6, TORCHRL: 4.0, SB3: 1.0, TIANSHOU: 1.0, LIMIT: 0.85},
    ),
    Cell(
        "cartpole-8",
        "CartPole-v1, N=8",
        partial(_gymnasium, "CartPole-v1", 8, _cartpole_net, parallel=True),
        {HAND: 1.45, TORCHRL: 4.0, SB3: 1.0, TIANSHOU: 1.0, LIMIT: 0.85},
    ),
    Cell(
        "cartpole-64",
        "CartPole-v1, N=64",
        partial(_gymnasium, "CartPole-v1", 64, _cartpole_net),
        {HAND: 1.25, TORCHRL: 2.5, SB3: 1.0, TIANSHOU: 1.0, LIMIT: 0.85},
    ),
    Cell(
        "cheetah-8",
        "HalfCheetah-v5, N=8, TanhNormal",
        partial(_gymnasium, "HalfCheetah-v5", 8, cheetah_net, continuous=True),
        {HAND: 1.6, TORCHRL: 2.3, SB3: 1.0, TIANSHOU: 1.0, LIMIT: 0.85},
    ),
    Cell(
        "envpool-64",
        "CartPole-v1 on EnvPool, N=64",
        partial(_pool, "CartPole-v1", 64, _cartpole_net),
        {HAND: 1.0, HAND_SINGLY: 1.1},
    ),
    Cell(
        "pong-16",
        "Pong-v5 on EnvPool, 4x84x84, N=16",
        partial(_pool, "Pong-v5", 16, pong_net),
        {HAND: 1.0},
    ),
    Cell("atari-32", "Pong, ale-py's AtariVectorEnv, N=32", partial(_atari, 32), {HAND: 1.05}),
    *(
        Cell(
            f"numpy-{num_envs}",
            f"CartPole-v1 in NumPy, N={num_envs:,}",
            partial(_numpy, num_envs),
            {HAND_SINGLY: target},
        )
        for num_envs, target in ((8, 1.05), (64, 0.95), (512, 1.0), (2048, 1.0))
    ),
    Cell("transforms-8", "CartPole-v1, N=8, four transforms", _transformed, {TORCHRL: 2.5}),
    Cell("one-hot-8", "CartPole-v1, N=8, one-hot actions", _one_hot, {}),
    Cell(
        "fall-back-4",
        "SerialEnv of GymEnv, CartPole-v1, N=4",
        _fall_back,
        {TORCHRL: 1.0},
        on_arrays=False,
    ),
]
