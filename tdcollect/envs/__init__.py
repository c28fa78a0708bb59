"""Environments: gymnasium and EnvPool slots on arrays, and the TorchRL env over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.lazy import lazy

if TYPE_CHECKING:
    from tdcollect.envs.make import make_env as make_env
    from tdcollect.envs.parallel import GymEnv, ParallelEnv, SerialEnv
    from tdcollect.envs.process.pool import WorkerLost
    from tdcollect.envs.slots import RestartsExhausted, SlotError
    from tdcollect.envs.traits import EnvAction
    from tdcollect.envs.wrapper import GymnasiumEnv as GymnasiumEnv

__all__ = [
    "EnvAction",
    "GymEnv",
    "ParallelEnv",
    "RestartsExhausted",
    "SerialEnv",
    "SlotError",
    "WorkerLost",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "make": "make_env",
        "parallel": "GymEnv ParallelEnv SerialEnv",
        "process.pool": "WorkerLost",
        "slots": "RestartsExhausted SlotError",
        "traits": "EnvAction",
        "wrapper": "GymnasiumEnv",
    },
)
