"""Env transforms on StepDicts.

A known transform runs its own code on StepDicts instead of TensorDicts, once per observation. All
of a stack must be known; otherwise the env, transforms included, is stepped as TorchRL does.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torchrl.envs import transforms as T
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect import keys
from tdcollect._upstream.torch import has_forward_hooks
from tdcollect._upstream.torchrl import call_of, inverse_call_of
from tdcollect.collect.env_parts import ELEMENTWISE
from tdcollect.collect.step_dict import Key, StepDict
from tdcollect.envs.env_action import EnvAction


class NotOnArrays(Exception):
    """An env, with its transforms, must be stepped as TorchRL does; the message says why."""


class StepTransform(abc.ABC):
    """A transform on StepDicts, in the three places where TorchRL calls it.

    Attributes:
        keys: the entries that it carries from step to step; none for a stateless one.
    """

    keys: Sequence[Key] = ()

    def inv(self, step: StepDict) -> None:  # noqa: B027
        """Change the step that the env is given, in place."""

    @abc.abstractmethod
    def step(self, step: StepDict, following: StepDict) -> None:
        """Change the following step's entries, in place.

        Args:
            step: the step that was taken, as the env was given it.
            following: the entries that the env made of it.
        """

    @abc.abstractmethod
    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        """Change the entries of a step that begins an episode in some slots, in place.

        Args:
            step: in the slots that ended, the entries of the env's reset; elsewhere, those that
                :meth:`step` made of the step before.
            starting: bool ``[N, 1]`` (``[1]`` unbatched), the slots that begin.
        """


class _Elementwise(StepTransform):
    """A stateless transform, each row by itself: TorchRL's code on StepDicts."""

    def __init__(self, transform: T.Transform):
        self._transform = transform
        self._call, self._inverse_call = call_of(transform), inverse_call_of(transform)
        self._inverts = bool(transform.in_keys_inv)

    def inv(self, step: StepDict) -> None:
        if self._inverts:
            self._inverse_call(step)

    def step(self, step: StepDict, following: StepDict) -> None:
        self._call(following)

    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        tolerance = self._transform.missing_tolerance
        self._transform.set_missing_tolerance(True)  # a reset gives no reward
        try:
            self._call(step)
        finally:
            self._transform.set_missing_tolerance(tolerance)


class _StepCounter(StepTransform):
    def __init__(self, transform: T.StepCounter):
        self._key: Key = transform.step_count_key
        self.keys = [self._key]
        self._max_steps = transform.max_steps
        self._truncated: Key = transform.truncated_key

    def step(self, step: StepDict, following: StepDict) -> None:
        following[self._key] = count = step[self._key] + 1
        if self._max_steps is not None:
            truncated = (count >= self._max_steps) | following[self._truncated]
            following[keys.DONE] = following[keys.DONE] | truncated
            following[self._truncated] = truncated

    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        step[self._key] = _where(starting, 0, step[self._key])


class _RewardSum(StepTransform):
    def __init__(self, transform: T.RewardSum):
        self._keys: list[tuple[Key, Key]] = list(
            zip(transform.in_keys, transform.out_keys, strict=True)
        )
        self.keys = [out_key for _, out_key in self._keys]

    def step(self, step: StepDict, following: StepDict) -> None:
        for in_key, out_key in self._keys:
            following[out_key] = step[out_key] + following[in_key]

    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        for _, out_key in self._keys:
            step[out_key] = _where(starting, 0, step[out_key])


class _InitTracker(StepTransform):
    def __init__(self, transform: T.InitTracker):
        self._key: Key = transform.init_key
        self.keys = [self._key]

    def step(self, step: StepDict, following: StepDict) -> None:
        following[self._key] = torch.zeros_like(following[keys.TERMINATED])

    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        step[self._key] = starting.clone()


class _Primer(StepTransform):
    def __init__(self, transform: T.TensorDictPrimer):
        self._defaults: list[tuple[Key, Any]] = [
            (key, transform.default_value[key]) for key in transform.primers.keys(True, True)
        ]
        self.keys = [key for key, _ in self._defaults]

    def step(self, step: StepDict, following: StepDict) -> None:
        for key, _ in self._defaults:
            if key not in following:
                following[key] = step[key]

    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        for key, default in self._defaults:
            step[key] = _where(starting, default, step[key])


class _EnvAction(StepTransform):
    def __init__(self, transform: EnvAction):
        self._pairs = transform.pairs
        self.keys = [kept for _, kept in self._pairs]

    def step(self, step: StepDict, following: StepDict) -> None:
        for key, kept in self._pairs:
            following[kept] = step[key]

    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        for kept in self.keys:
            step[kept] = _where(starting, 0, step[kept])


class _ActionScaling(StepTransform):
    def __init__(self, transform: T.ActionScaling):
        self._inverse_call = inverse_call_of(transform)

    def inv(self, step: StepDict) -> None:
        self._inverse_call(step)

    def step(self, step: StepDict, following: StepDict) -> None:
        pass  # it looks for actions, which no step gives

    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        pass


class _PolicyVersion(StepTransform):
    def __init__(self, transform: PolicyVersion):
        self._transform = transform
        self.keys = [keys.POLICY_VERSION]

    def step(self, step: StepDict, following: StepDict) -> None:
        following[keys.POLICY_VERSION] = self._now(following)

    def reset(self, step: StepDict, starting: torch.Tensor) -> None:
        step[keys.POLICY_VERSION] = self._now(step)

    def _now(self, step: StepDict) -> torch.Tensor:
        shape = step[keys.TERMINATED].shape[:-1]
        return torch.full(shape, int(self._transform.version), dtype=torch.int64)


def _where(starting: torch.Tensor, initial: Any, value: torch.Tensor) -> torch.Tensor:
    """``initial`` in the slots that begin an episode, ``value`` elsewhere."""
    mask = starting.reshape(starting.shape[:-1] + (1,) * (value.ndim - starting.ndim + 1))
    return value.masked_fill(mask.to(value.device), initial)


def lower_transforms(transforms: Sequence[T.Transform]) -> list[StepTransform]:
    """Transforms on StepDicts.

    Raises:
        NotOnArrays: for a transform that is not known to run so.
    """
    lowered: list[StepTransform] = []
    carried: set[Key] = set()
    for transform in transforms:
        made = _lower(transform)
        if not isinstance(made, _Elementwise):
            carried.update(made.keys)
        elif carried.intersection(transform.in_keys):
            raise _refusal(transform, "changes an entry of another transform")
        lowered.append(made)
    return lowered


def _refusal(transform: T.Transform, reason: str) -> NotOnArrays:
    return NotOnArrays(f"the transform {type(transform).__name__} {reason}")


def _lower(transform: T.Transform) -> StepTransform:
    kind = type(transform)
    if has_forward_hooks(transform):
        raise _refusal(transform, "has hooks")
    if kind in ELEMENTWISE:
        return _Elementwise(transform)
    if kind is T.StepCounter:
        if transform.max_steps is None or (
            transform.truncated_key == keys.TRUNCATED and transform.update_done
        ):
            return _StepCounter(transform)
        raise _refusal(transform, "has options that are not known here")
    if kind is T.RewardSum:
        if transform.reward_spec:
            raise _refusal(transform, "writes to the reward spec")
        return _RewardSum(transform)
    if kind is T.InitTracker:
        return _InitTracker(transform)
    if kind is EnvAction:
        return _EnvAction(transform)
    if kind is T.ActionScaling:
        return _ActionScaling(transform)
    if kind is PolicyVersion:
        if transform.version_type not in (int, "int"):
            raise _refusal(transform, "writes strings")
        return _PolicyVersion(transform)
    if kind is T.TensorDictPrimer:
        if (
            transform.random
            or transform.single_default_value
            or transform.call_before_env_reset
            or any(callable(value) for value in dict(transform.default_value.items()).values())
        ):
            raise _refusal(transform, "draws or computes its values")
        return _Primer(transform)
    raise _refusal(transform, "is not known to run on arrays")
