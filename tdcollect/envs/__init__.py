"""Environments: gymnasium and EnvPool slots on arrays, and the TorchRL env over them."""

from tdcollect.envs.env_action import EnvAction
from tdcollect.envs.make import make_env
from tdcollect.envs.wrapper import GymnasiumEnv

__all__ = ["EnvAction", "GymnasiumEnv", "make_env"]
