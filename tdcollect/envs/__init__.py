"""Environments: gymnasium and EnvPool slots on arrays, and the TorchRL env over them."""

from tdcollect.envs.make import make_env
from tdcollect.envs.wrapper import GymnasiumEnv

__all__ = ["GymnasiumEnv", "make_env"]
