"""The pipelines of the GPU benchmarks: envs of both libraries and a policy for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import networks
from gpu_setting import CORES, LeftOut, need
from gymnasium.vector import AutoresetMode
from hand_written import vector_env
from torch.distributions import Categorical
from torchrl.envs import EnvBase, GymEnv, GymWrapper, SerialEnv
from torchrl.modules import OneHotCategorical

import tdcollect

VECTOR, SERIAL = "GymWrapper", "SerialEnv"
INTEGERS = {"categorical_action_encoding": True}
ONE_HOTS = {"categorical_action_encoding": False}


class Pipeline(NamedTuple):
    """A pipeline.

    Attributes:
        title: its name in tables.
        ours: makes tdcollect's env of N slots; takes options of ``make_env``.
        theirs: makes TorchRL's env of N slots, of the given kind; both kinds keep final
            observations and have no rows for resets.
        policy: makes a policy with hidden layers of the given width.
        workers: True if ``ours`` takes ``backend="process"``.
    """

    title: str
    ours: Callable[..., EnvBase]
    theirs: Callable[[int, str], EnvBase]
    policy: Callable[[int], Any]
    workers: bool = True


def _ours(env: Any, slots: int, **options: Any) -> EnvBase:
    return tdcollect.make_env(env, slots, **{**INTEGERS, **options})


def _theirs(env_id: str, slots: int, kind: str, encoding: dict[str, bool] = INTEGERS) -> EnvBase:
    if kind == SERIAL:
        return SerialEnv(slots, partial(GymEnv, env_id, **encoding))
    return GymWrapper(vector_env(env_id, slots, AutoresetMode.DISABLED), **encoding)


def _discrete(width: int, distribution: type = Categorical) -> Any:
    return networks.discrete_actor(networks.mlp(4, 2, width), distribution)


def _continuous(width: int) -> Any:
    return networks.continuous_actor(networks.cheetah_net(width))


def _convolutional(width: int) -> Any:
    return networks.discrete_actor(networks.pong_net())


def _pong(slots: int, **options: Any) -> EnvBase:
    """Pong with 4 x 84 x 84 pixels, on as many threads as there are cores."""
    threads = min(CORES, slots)
    try:
        need("envpool")
    except LeftOut:
        need("ale_py")
        from ale_py.vector_env import AtariVectorEnv

        envs = AtariVectorEnv(
            "pong", slots, num_threads=threads, autoreset_mode=AutoresetMode.SAME_STEP
        )
        return tdcollect.make_env(envs, **INTEGERS, **options)
    kwargs = {"num_threads": threads}
    return _ours("Pong-v5", slots, backend="envpool", env_kwargs=kwargs, **options)


def _pong_of_torchrl(slots: int, kind: str) -> EnvBase:
    # TorchRL has no env over these libraries with every row a transition.
    return _pong(slots)


CARTPOLE = Pipeline(
    "CartPole-v1", partial(_ours, "CartPole-v1"), partial(_theirs, "CartPole-v1"), _discrete
)
ONE_HOT = Pipeline(
    "CartPole-v1, one-hot",
    partial(_ours, "CartPole-v1", **ONE_HOTS),
    partial(_theirs, "CartPole-v1", encoding=ONE_HOTS),
    partial(_discrete, distribution=OneHotCategorical),
)
CHEETAH = Pipeline(
    "HalfCheetah-v5",
    partial(_ours, "HalfCheetah-v5"),
    partial(_theirs, "HalfCheetah-v5"),
    _continuous,
)
PONG = Pipeline("Pong", _pong, _pong_of_torchrl, _convolutional, workers=False)
