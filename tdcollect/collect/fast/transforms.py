"""Env transforms on StepDicts.

A known transform computes on StepDicts instead of TensorDicts. Any other is an island: it alone
gets a TensorDict, and all around it stays on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.utils import expand_as_right
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect import keys
from tdcollect._upstream.modules import has_forward_hooks
from tdcollect._upstream.torchrl import inverse_call_of
from tdcollect._upstream.transforms import lives_of, replaced_calls
from tdcollect.collect.fast.entries import (
    Changed,
    check,
    device_cast,
    exclude,
    nothing,
    rename,
    select,
)
from tdcollect.collect.fast.frames import FrameSkip, cat_frames
from tdcollect.collect.fast.islands import (
    InResets,
    NotOnArrays,
    OwnCode,
    OwnSteps,
    StepTransform,
    island,
)
from tdcollect.collect.fast.normalization import vec_norm
from tdcollect.collect.step_dict import Key, StepDict
from tdcollect.envs.env_action import EnvAction
from tdcollect.envs.transforms import ELEMENTWISE, transforms_of


class _StepCounter(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.StepCounter):
        self._ends = transform.update_done
        self.follows_specs = self.by_row = self._ends or transform.max_steps is None
        self._key: Key = transform.step_count_key
        self.keys = [self._key]
        self._max_steps = transform.max_steps
        self._truncated: Key = transform.truncated_key

    def step(self, step: StepDict, following: StepDict) -> None:
        following[self._key] = count = step[self._key] + 1
        if self._max_steps is not None:
            # An env that never truncates may have no such entry.
            truncated = (count >= self._max_steps) | following.get(self._truncated, False)
            if self._ends:
                following[keys.DONE] = following[keys.DONE] | truncated
            following[self._truncated] = truncated

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        begun[self._key] = self._initial(marks, 0, before[self._key])
        if self._max_steps is not None and self._truncated not in begun:
            begun[self._truncated] = self._initial(marks, False, before[self._truncated])


class _RewardSum(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.RewardSum):
        self._transform = transform
        self._keys: list[tuple[Key, Key]] = list(
            zip(transform.in_keys, transform.out_keys, strict=True)
        )
        self.keys = [out_key for _, out_key in self._keys]

    def step(self, step: StepDict, following: StepDict) -> None:
        for in_key, out_key in self._keys:
            following[out_key] = step.get(out_key, 0.0) + following[in_key]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        for in_key, out_key in self._keys:
            if out_key in before:
                begun[out_key] = self._initial(marks, 0, before[out_key])
            else:  # another transform has renamed or dropped it
                begun[out_key] = self._transform.parent.full_reward_spec[in_key].zero()


class _InitTracker(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.InitTracker):
        self._key: Key = transform.init_key
        self.keys = [self._key]

    def step(self, step: StepDict, following: StepDict) -> None:
        following[self._key] = torch.zeros_like(following[keys.TERMINATED])

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        begun[self._key] = marks[keys.RESET].clone()


class _Primer(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.TensorDictPrimer):
        self._defaults: list[tuple[Key, Any]] = [
            (key, transform.default_value[key]) for key in transform.primers.keys(True, True)
        ]
        self.keys = [key for key, _ in self._defaults]

    def step(self, step: StepDict, following: StepDict) -> None:
        for key, _ in self._defaults:
            if key not in following:
                following[key] = step[key]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        for key, default in self._defaults:
            begun[key] = self._initial(marks, default, before[key])


class _EnvAction(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: EnvAction):
        self._pairs = transform.pairs
        self.keys = [kept for _, kept in self._pairs]

    def step(self, step: StepDict, following: StepDict) -> None:
        for key, kept in self._pairs:
            following[kept] = step[key]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        for kept in self.keys:
            begun[kept] = self._initial(marks, 0, before[kept])


class _ActionScaling(StepTransform):
    own_pace = True

    def __init__(self, transform: T.ActionScaling):
        self._inverse_call = inverse_call_of(transform)

    def inv(self, step: StepDict) -> None:
        self._inverse_call(step)

    def step(self, step: StepDict, following: StepDict) -> None:
        pass  # it looks for actions, which no step gives

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        pass


class _PolicyVersion(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: PolicyVersion):
        self._transform = transform
        self.keys = [keys.POLICY_VERSION]

    def step(self, step: StepDict, following: StepDict) -> None:
        following[keys.POLICY_VERSION] = self._now(following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        begun[keys.POLICY_VERSION] = self._now(begun)

    def _now(self, step: StepDict) -> torch.Tensor:
        shape = step[keys.TERMINATED].shape[:-1]
        version = int(self._transform.version)
        return torch.full(shape, version, dtype=torch.int64, device=step[keys.TERMINATED].device)


class _EndOfLife(StepTransform):
    anywhere = True

    def __init__(self, transform: T.EndOfLifeTransform, env: EnvBase):
        self._transform = transform
        self._eol: Key = transform.eol_key
        self._lives: Key = transform.lives_key
        self._done: Key = transform.done_key
        self.keys = [self._eol, self._lives]
        # A reset reads the lives of all slots, and marks no end in any.
        self.by_row = env.batch_size.numel() == 1

    def step(self, step: StepDict, following: StepDict) -> None:
        done = following[self._done]
        lives = torch.as_tensor(lives_of(self._transform), device=done.device)
        following[self._eol] = expand_as_right(step[self._lives] > lives, done) | done
        following[self._lives] = lives

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        begun[self._eol] = torch.zeros_like(before[self._done])
        begun[self._lives] = torch.as_tensor(
            lives_of(self._transform), device=before[self._done].device
        )


_BY_OWN_CODE = {
    T.ActionDiscretizer: True,
    T.ActionMask: False,
    T.DiscreteActionProjection: True,
    T.ExpandAs: False,
    T.FlattenAction: True,
    T.Hash: False,
    T.RNDTransform: False,
    T.RandomTruncationTransform: True,
    T.Stack: False,
    T.TargetReturn: False,
    T.TimeMaxPool: False,
    T.Timer: False,
    T.TrajCounter: False,
    T.UnaryTransform: False,
    T.gSDENoise: False,
}
"""Transforms whose own code runs on StepDicts, and whether it treats each row by itself."""

_WITHOUT_STATE = (T.ActionDiscretizer, T.DiscreteActionProjection, T.FlattenAction)
"""Those of them that give the same for the same rows, whenever these come."""


def lower_transforms(transforms: Sequence[T.Transform], env: EnvBase) -> list[StepTransform]:
    """Transforms on StepDicts.

    Args:
        transforms: innermost first.
        env: the env with these transforms.

    Raises:
        NotOnArrays: for a transform that changes how the env's loop itself runs.
    """
    lowered: list[StepTransform] = []
    reasons: list[str] = []
    carried: set[Key] = set()
    for transform in transforms:
        try:
            made = _lower(transform, env)
            if isinstance(made, str):
                made = island(transform, env, made)
        except NotOnArrays as refused:
            reasons += refused.reasons
            continue
        if isinstance(made, OwnCode | Changed) and carried.intersection(transform.in_keys):
            made.by_row = False  # the rows of slots that go on hold its result already
            carried.update(transform.out_keys)
        carried.update(made.keys)
        made.label = type(transform).__name__
        lowered.append(made)
    if reasons:
        raise NotOnArrays(*reasons)
    return lowered


def _lower_all(env: EnvBase) -> list[StepTransform]:
    return lower_transforms(transforms_of(env), env)


def _lower(transform: T.Transform, env: EnvBase) -> StepTransform | str:
    """A transform on StepDicts, or the reason why its class is not known."""
    kind = type(transform)
    if replaced := replaced_calls(transform):
        return f"has a {replaced[0]} of its own"
    if has_forward_hooks(transform):
        return "has hooks"
    if kind in ELEMENTWISE:
        return OwnCode(transform, by_row=True)
    if kind in _BY_OWN_CODE:
        return _own_steps(transform, env)
    if kind is T.FrameSkipTransform:
        return FrameSkip(transform, lambda: _lower_all(transform.parent))
    if kind is T.RenameTransform:
        return rename(transform)
    if kind is T.ExcludeTransform:
        return exclude(transform)
    if kind is T.SelectTransform:
        return select(transform)
    if kind is T.DeviceCastTransform:
        return device_cast(transform, env)
    if kind is T.FiniteTensorDictCheck:
        return check(transform)
    if kind is T.RemoveEmptySpecs:
        return nothing()
    if kind is T.CatFrames:
        return cat_frames(transform)
    if kind in (T.VecNorm, T.VecNormV2):
        return vec_norm(transform, env)
    if kind is T.StepCounter:
        if transform.max_steps is None or transform.truncated_key == keys.TRUNCATED:
            return _StepCounter(transform)
        return "marks an entry of its own as truncated"
    if kind is T.RewardSum:
        return "writes to the reward spec" if transform.reward_spec else _RewardSum(transform)
    if kind is T.InitTracker:
        return _InitTracker(transform)
    if kind is EnvAction:
        return _EnvAction(transform)
    if kind is T.ActionScaling:
        return _ActionScaling(transform)
    if kind is PolicyVersion:
        if transform.version_type not in (int, "int"):
            return "writes strings"
        return _PolicyVersion(transform)
    if kind is T.TensorDictPrimer:
        if transform.single_default_value or transform.call_before_env_reset:
            return "has a function that writes its values"
        if transform.random or any(map(callable, dict(transform.default_value.items()).values())):
            return OwnSteps(transform, env, by_row=False)
        return _Primer(transform)
    if kind is T.EndOfLifeTransform:
        return _EndOfLife(transform, env)
    if kind is T.NoopResetEnv:
        return InResets(transform, env)
    return "is not known to run on arrays"


def _own_steps(transform: T.Transform, env: EnvBase) -> StepTransform | str:
    kind = type(transform)
    renames = transform.in_keys_inv != transform.out_keys_inv
    if kind is T.ActionDiscretizer and renames and env.transform is transform:
        raise NotOnArrays(
            "the transform ActionDiscretizer, where it is alone, writes to the step that the batch "
            "holds; put it into a Compose"
        )
    entries = (*transform.in_keys, *transform.out_keys)
    if kind in (T.Stack, T.Timer) and any(isinstance(key, tuple) for key in entries):
        return "has nested entries"
    made = OwnSteps(transform, env, by_row=_BY_OWN_CODE[kind])
    made.own_pace = kind in _WITHOUT_STATE
    return made
