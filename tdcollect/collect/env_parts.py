"""The effect of an env's transforms on its reward, and on random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect import keys
from tdcollect._upstream.torchrl import call_of, replaced_methods
from tdcollect.collect.step_dict import StepDict
from tdcollect.envs.env_action import EnvAction
from tdcollect.envs.transforms import ELEMENTWISE, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv

_SCALAR = (
    T.BinarizeReward,
    T.ClipTransform,
    T.ObservationNorm,
    T.RewardClipping,
    T.RewardScaling,
    T.SignTransform,
)
"""Transforms that compute one number from another, in any float dtype."""

_LEAVE_REWARD = (
    *ELEMENTWISE,
    EnvAction,
    PolicyVersion,
    T.ActionDiscretizer,
    T.ActionMask,
    T.ActionScaling,
    T.CatFrames,
    T.DiscreteActionProjection,
    T.ExpandAs,
    T.FiniteTensorDictCheck,
    T.FlattenAction,
    T.Hash,
    T.InitTracker,
    T.RNDTransform,
    T.RandomTruncationTransform,
    T.RemoveEmptySpecs,
    T.RewardSum,
    T.StepCounter,
    T.TargetReturn,
    T.TensorDictPrimer,
    T.TimeMaxPool,
    T.Timer,
    T.TrajCounter,
    T.UnaryTransform,
    T.VecNorm,
    T.VecNormV2,
)
"""Transforms that leave the reward alone unless it is among their ``out_keys``."""


def leaves_random_numbers_alone(transform: T.Transform) -> bool:
    """Tell whether a transform is known to draw no random numbers."""
    if type(transform) is T.TensorDictPrimer:
        return not transform.random
    return type(transform) in _LEAVE_REWARD


class ExactReward:
    """The reward after the transforms, computed in float64.

    Args:
        transforms: those that change the reward, innermost first.
    """

    def __init__(self, transforms: Sequence[T.Transform]):
        self._calls = [call_of(transform) for transform in transforms]

    def __call__(self, reward: torch.Tensor) -> torch.Tensor:
        """Transform float64 rewards."""
        step = StepDict({keys.REWARD: reward})
        for call in self._calls:
            call(step)
        return step[keys.REWARD]


def _leaves_reward(transform: T.Transform) -> bool:
    kind = type(transform)
    if kind is T.RenameTransform:
        return keys.REWARD not in (*transform.in_keys, *transform.out_keys)
    if kind is T.ExcludeTransform:
        return keys.REWARD not in transform.excluded_keys
    return kind in _LEAVE_REWARD and keys.REWARD not in transform.out_keys


def exact_reward_of(env: EnvBase) -> ExactReward | None:
    """Carries the rewards of an env through its transforms in float64.

    None where a transform may cast or is not known, and where only the env itself knows what
    becomes of its rewards.
    """
    base = env.base_env if type(env) is TransformedEnv else env
    if type(base) is not GymnasiumEnv or replaced_methods(env) or replaced_methods(base):
        return None
    changing = []
    for transform in transforms_of(env):
        kind = type(transform)
        alone = list(transform.in_keys) == list(transform.out_keys) == [keys.REWARD]
        if kind in _SCALAR and alone:
            changing.append(transform)
        elif not _leaves_reward(transform):
            return None
    return ExactReward(changing)
