"""Collect and evaluate for TorchRL.

backend (numpy, [N]) -> EnvBase wrapper -> Collector -> batch [N, T]
"""

from tdcollect.envs import GymnasiumEnv, make_env

__all__ = ["GymnasiumEnv", "make_env"]
