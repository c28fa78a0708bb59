"""The private names of other packages that tdcollect leans on, all in one place.

Each has a test in ``tests/test_upstream.py`` that fails when upstream changes it.
"""

from __future__ import annotations

import inspect

from gymnasium.wrappers import TimeLimit
from tensordict.utils import _encode_key_for_filesystem as encode_key_for_filesystem
from torch.distributions import Distribution
from torchrl._comm.backends import _get_service_backend as service_backend
from torchrl.collectors import Collector
from torchrl.collectors._single import _CollectorMeta as CollectorMeta
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform as gym_space_to_spec
from torchrl.envs.utils import _make_compatible_policy as make_compatible_policy
from torchrl.modules.utils.utils import (
    _maybe_append_env_transforms_from_module as append_policy_transforms,
)

rollout_with_gradients = inspect.unwrap(Collector.rollout)
"""The rollout of TorchRL's collector without the ``no_grad`` that it is decorated with."""


def validates_arguments() -> bool:
    """Whether distributions validate their arguments by default; importing TorchRL turns it off."""
    return bool(Distribution._validate_args)


def steps_of_time_limit(wrapper: TimeLimit) -> int:
    """After how many steps the wrapper truncates."""
    return int(wrapper._max_episode_steps)


__all__ = [
    "CollectorMeta",
    "append_policy_transforms",
    "encode_key_for_filesystem",
    "gym_space_to_spec",
    "make_compatible_policy",
    "rollout_with_gradients",
    "service_backend",
    "steps_of_time_limit",
    "validates_arguments",
]
