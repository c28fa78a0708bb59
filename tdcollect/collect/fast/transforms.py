"""Env transforms on rows.

A known transform runs its own code on rows instead of TensorDicts, once an observation. All of a
stack must be known; otherwise the env, transforms included, is stepped as TorchRL does.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect import keys
from tdcollect._upstream.torch import has_forward_hooks
from tdcollect._upstream.torchrl import call_of, inverse_call_of
from tdcollect.collect.step_dict import Key, StepDict
from tdcollect.envs.env_action import EnvAction


class RowTransform(abc.ABC):
    """A transform on rows, in the three places where TorchRL calls it.

    Attributes:
        keys: the entries that it counts on from row to row; none for a stateless one.
    """

    keys: Sequence[Key] = ()

    def inv(self, rows: StepDict) -> None:  # noqa: B027
        """Change what the env is given, in place."""

    @abc.abstractmethod
    def step(self, rows: StepDict, following: StepDict) -> None:
        """Change the following step's entries, in place.

        Args:
            rows: the step that was taken, as the env was given it.
            following: what the env made of it.
        """

    @abc.abstractmethod
    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        """Change the entries of a step that begins an episode in some slots, in place.

        Args:
            rows: in the slots that ended, what the env's reset gave; elsewhere, what :meth:`step`
                made of the step before.
            first: bool ``[N, 1]`` (``[1]`` unbatched), the slots that begin.
        """


class _Elementwise(RowTransform):
    """A stateless transform, each row on its own: TorchRL's code on rows."""

    def __init__(self, transform: T.Transform):
        self._transform = transform
        self._call, self._inverse_call = call_of(transform), inverse_call_of(transform)
        self._inverts = bool(transform.in_keys_inv)

    def inv(self, rows: StepDict) -> None:
        if self._inverts:
            self._inverse_call(rows)

    def step(self, rows: StepDict, following: StepDict) -> None:
        self._call(following)

    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        tolerance = self._transform.missing_tolerance
        self._transform.set_missing_tolerance(True)  # a reset gives no reward
        try:
            self._call(rows)
        finally:
            self._transform.set_missing_tolerance(tolerance)


class _StepCounter(RowTransform):
    def __init__(self, transform: T.StepCounter):
        self._key: Key = transform.step_count_key
        self.keys = [self._key]
        self._max_steps = transform.max_steps
        self._truncated: Key = transform.truncated_key

    def step(self, rows: StepDict, following: StepDict) -> None:
        following[self._key] = count = rows[self._key] + 1
        if self._max_steps is not None:
            truncated = (count >= self._max_steps) | following[self._truncated]
            following[keys.DONE] = following[keys.DONE] | truncated
            following[self._truncated] = truncated

    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        rows[self._key] = _where(first, 0, rows[self._key])


class _RewardSum(RowTransform):
    def __init__(self, transform: T.RewardSum):
        self._keys: list[tuple[Key, Key]] = list(
            zip(transform.in_keys, transform.out_keys, strict=True)
        )
        self.keys = [out_key for _, out_key in self._keys]

    def step(self, rows: StepDict, following: StepDict) -> None:
        for in_key, out_key in self._keys:
            following[out_key] = rows[out_key] + following[in_key]

    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        for _, out_key in self._keys:
            rows[out_key] = _where(first, 0, rows[out_key])


class _InitTracker(RowTransform):
    def __init__(self, transform: T.InitTracker):
        self._key: Key = transform.init_key
        self.keys = [self._key]

    def step(self, rows: StepDict, following: StepDict) -> None:
        following[self._key] = torch.zeros_like(following[keys.TERMINATED])

    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        rows[self._key] = first.clone()


class _Primer(RowTransform):
    def __init__(self, transform: T.TensorDictPrimer):
        self._defaults: list[tuple[Key, Any]] = [
            (key, transform.default_value[key]) for key in transform.primers.keys(True, True)
        ]
        self.keys = [key for key, _ in self._defaults]

    def step(self, rows: StepDict, following: StepDict) -> None:
        for key, _ in self._defaults:
            if key not in following:
                following[key] = rows[key]

    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        for key, default in self._defaults:
            rows[key] = _where(first, default, rows[key])


class _EnvAction(RowTransform):
    def __init__(self, transform: EnvAction):
        self._pairs = transform.pairs
        self.keys = [kept for _, kept in self._pairs]

    def step(self, rows: StepDict, following: StepDict) -> None:
        for key, kept in self._pairs:
            following[kept] = rows[key]

    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        for kept in self.keys:
            rows[kept] = _where(first, 0, rows[kept])


class _ActionScaling(RowTransform):
    def __init__(self, transform: T.ActionScaling):
        self._inverse_call = inverse_call_of(transform)

    def inv(self, rows: StepDict) -> None:
        self._inverse_call(rows)

    def step(self, rows: StepDict, following: StepDict) -> None:
        pass  # it looks for actions, which no step gives

    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        pass


class _PolicyVersion(RowTransform):
    def __init__(self, transform: PolicyVersion):
        self._transform = transform
        self.keys = [keys.POLICY_VERSION]

    def step(self, rows: StepDict, following: StepDict) -> None:
        following[keys.POLICY_VERSION] = self._now(following)

    def reset(self, rows: StepDict, first: torch.Tensor) -> None:
        rows[keys.POLICY_VERSION] = self._now(rows)

    def _now(self, rows: StepDict) -> torch.Tensor:
        shape = rows[keys.TERMINATED].shape[:-1]
        return torch.full(shape, int(self._transform.version), dtype=torch.int64)


def _where(first: torch.Tensor, start: Any, value: torch.Tensor) -> torch.Tensor:
    """``start`` in the slots that begin an episode, ``value`` elsewhere."""
    mask = first.reshape(first.shape[:-1] + (1,) * (value.ndim - first.ndim + 1))
    return value.masked_fill(mask.to(value.device), start)


_ELEMENTWISE = (
    T.BinarizeReward,
    T.CatTensors,
    T.CenterCrop,
    T.ClipTransform,
    T.DTypeCastTransform,
    T.DoubleToFloat,
    T.FlattenObservation,
    T.GrayScale,
    T.ObservationNorm,
    T.PermuteTransform,
    T.Resize,
    T.RewardClipping,
    T.RewardScaling,
    T.SignTransform,
    T.SqueezeTransform,
    T.ToTensorImage,
    T.UnsqueezeTransform,
)


def transforms_of(env: EnvBase) -> list[T.Transform]:
    """The transforms of an env, innermost first; a ``Compose`` is taken apart."""
    return _parts(env.transform) if type(env) is TransformedEnv else []


def base_of(env: EnvBase) -> EnvBase:
    """The env itself, without its transforms."""
    return env.base_env if isinstance(env, TransformedEnv) else env


def _parts(transform: T.Transform) -> list[T.Transform]:
    if type(transform) is T.Compose:
        return [part for child in transform for part in _parts(child)]
    return [transform]


_OF_REWARDS = (
    T.BinarizeReward,
    T.ClipTransform,
    T.ObservationNorm,
    T.RewardClipping,
    T.RewardScaling,
    T.SignTransform,
)
"""Transforms that compute one number from another, in any float dtype."""

_SPARE_REWARDS = (
    *_ELEMENTWISE,
    EnvAction,
    PolicyVersion,
    T.ActionDiscretizer,
    T.ActionMask,
    T.ActionScaling,
    T.CatFrames,
    T.InitTracker,
    T.RewardSum,
    T.StepCounter,
    T.TargetReturn,
    T.TensorDictPrimer,
    T.TimeMaxPool,
    T.VecNorm,
    T.VecNormV2,
)
"""Transforms that leave the reward alone unless it is among what they write."""


class ExactReward:
    """The reward after the transforms, in float64 all the way.

    Args:
        transforms: those that change it, innermost first.
    """

    def __init__(self, transforms: Sequence[T.Transform]):
        self._calls = [call_of(transform) for transform in transforms]

    def __call__(self, reward: torch.Tensor) -> torch.Tensor:
        """The float64 rewards after the transforms."""
        rows = StepDict({keys.REWARD: reward})
        for call in self._calls:
            call(rows)
        return rows[keys.REWARD]


def exact_reward(transforms: Sequence[T.Transform]) -> ExactReward | None:
    """Carries rewards through transforms in float64; None where these may cast or are not known."""
    changing = []
    for transform in transforms:
        kind = type(transform)
        alone = list(transform.in_keys) == list(transform.out_keys) == [keys.REWARD]
        if kind in _OF_REWARDS and alone:
            changing.append(transform)
        elif kind not in _SPARE_REWARDS or keys.REWARD in transform.out_keys:
            return None
    return ExactReward(changing)


def lower_transforms(transforms: Sequence[T.Transform]) -> tuple[list[RowTransform], str | None]:
    """Transforms on rows, or the reason why these cannot be."""
    lowered: list[RowTransform] = []
    kept: set[Key] = set()  # entries that a transform counts on from row to row
    for transform in transforms:
        made = _lower(transform)
        if isinstance(made, _Elementwise) and kept.intersection(transform.in_keys):
            made = "changes an entry of another transform"
        if isinstance(made, str):
            return [], f"the transform {type(transform).__name__} {made}"
        if not isinstance(made, _Elementwise):
            kept.update(made.keys)
        lowered.append(made)
    return lowered, None


def _lower(transform: T.Transform) -> RowTransform | str:
    kind = type(transform)
    if has_forward_hooks(transform):
        return "has hooks"
    if kind in _ELEMENTWISE:
        return _Elementwise(transform)
    if kind is T.StepCounter:
        supported = transform.max_steps is None or (
            transform.truncated_key == keys.TRUNCATED and transform.update_done
        )
        return _StepCounter(transform) if supported else "has options that are not known here"
    if kind is T.RewardSum:
        return "writes to the reward spec" if transform.reward_spec else _RewardSum(transform)
    if kind is T.InitTracker:
        return _InitTracker(transform)
    if kind is EnvAction:
        return _EnvAction(transform)
    if kind is T.ActionScaling:
        return _ActionScaling(transform)
    if kind is PolicyVersion:
        number = transform.version_type in (int, "int")
        return _PolicyVersion(transform) if number else "writes strings"
    if kind is T.TensorDictPrimer:
        plain = (
            not transform.random
            and not transform.single_default_value
            and not transform.call_before_env_reset
            and not any(callable(v) for v in dict(transform.default_value.items()).values())
        )
        return _Primer(transform) if plain else "draws or computes its values"
    return "is not known to run on rows"
