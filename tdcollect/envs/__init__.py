"""Environments: gymnasium and EnvPool slots on arrays, and the TorchRL env over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from tdcollect.envs.adopted import GymEnv as GymEnv
    from tdcollect.envs.adopted import ParallelEnv as ParallelEnv
    from tdcollect.envs.adopted import SerialEnv as SerialEnv
    from tdcollect.envs.make import make_env as make_env
    from tdcollect.envs.process.agents import Agents as Agents
    from tdcollect.envs.process.backend import WorkerLost as WorkerLost
    from tdcollect.envs.slots import RestartsExhausted as RestartsExhausted
    from tdcollect.envs.slots import SlotError as SlotError
    from tdcollect.envs.traits import EnvAction as EnvAction
    from tdcollect.envs.wrapper import GymnasiumEnv as GymnasiumEnv

__getattr__, __dir__, __all__ = lazy(__name__, inner="GymnasiumEnv make_env")
