"""Environments: gymnasium and EnvPool slots on arrays, and the TorchRL env over them."""

from tdcollect.envs.env_action import EnvAction
from tdcollect.envs.errors import RestartsExhausted, SlotError
from tdcollect.envs.gym_env import GymEnv, SerialEnv
from tdcollect.envs.make import make_env
from tdcollect.envs.parallel import ParallelEnv
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.workers.launch import WorkerLost

__all__ = [
    "EnvAction",
    "GymEnv",
    "GymnasiumEnv",
    "ParallelEnv",
    "RestartsExhausted",
    "SerialEnv",
    "SlotError",
    "WorkerLost",
    "make_env",
]
