"""TorchRL's ``GymEnv`` and ``SerialEnv``, put right where some arguments go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torchrl.envs import GymEnv as TorchRLGymEnv
from torchrl.envs import SerialEnv as SerialEnv  # is right as it is
from torchrl.envs import default_info_dict_reader
from torchrl.envs.gym_like import BaseInfoDictReader

from tdcollect._upstream.batched_envs import GymEnvMeta


class InfoReader(default_info_dict_reader):
    """TorchRL's default reader of infos, for infos that are Python numbers, too."""

    def __call__(self, info_dict: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        if isinstance(info_dict, Mapping):
            info_dict = {
                key: np.asarray(value) if isinstance(value, Number) else value
                for key, value in info_dict.items()
            }
        return super().__call__(info_dict, tensordict)


class _Meta(GymEnvMeta):
    """Gives an env of several slots for ``num_workers`` and ``num_envs``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        num_workers = kwargs.pop("num_workers", None) or 1
        if num_workers > 1:
            from tdcollect.envs.parallel import ParallelEnv

            env = ParallelEnv(num_workers, partial(cls, *args, **kwargs))
            env.start()  # as TorchRL's has
            return env
        num_envs = kwargs.pop("num_envs", 0)
        if num_envs:
            from tdcollect.envs.parallel_slots import vector_env

            return vector_env(num_envs, partial(cls, *args, **kwargs))
        return super().__call__(*args, **kwargs)


class GymEnv(TorchRLGymEnv, metaclass=_Meta):
    """TorchRL's ``GymEnv``.

    It is TorchRL's class in all but three points:

    - ``num_workers=n`` gives a :class:`tdcollect.envs.ParallelEnv`;
    - ``num_envs=n`` gives a :class:`tdcollect.envs.GymnasiumEnv` on worker processes, with true
      final observations and without rows that join two episodes. Slot i is seeded with
      ``seed + i``, as the vector env in TorchRL's is;
    - infos may be Python numbers.

    Args:
        env_name: a gymnasium id.
        **kwargs: those of TorchRL's ``GymEnv``, and of ``gymnasium.make``.
    """

    def set_info_dict_reader(
        self, info_dict_reader: BaseInfoDictReader | None = None, ignore_private: bool = True
    ) -> GymEnv:
        """Add a reader of infos; TorchRL's default reader takes Python numbers from here on."""
        if info_dict_reader is None:
            info_dict_reader = InfoReader(ignore_private=ignore_private)
        elif type(info_dict_reader) is default_info_dict_reader:
            info_dict_reader.__class__ = InfoReader
        super().set_info_dict_reader(info_dict_reader, ignore_private)
        return self
