"""A tdcollect env and its transforms, stepped on arrays."""

from __future__ import annotations

import math
from typing import Any

import torch
from torchrl.envs import EnvBase, TransformedEnv

from tdcollect import keys
from tdcollect._upstream.torchrl import carried_entries
from tdcollect.collect.env_parts import ExactReward, replaced_methods, transforms_of
from tdcollect.collect.fast.transforms import NotOnArrays, StepTransform, lower_transforms
from tdcollect.collect.step_dict import Key, StepDict, from_next
from tdcollect.collect.tensordict_env import SteppedEnv
from tdcollect.envs.buffers import StepBuffers
from tdcollect.envs.errors import SlotError
from tdcollect.envs.spaces import key_of
from tdcollect.envs.wrapper import GymnasiumEnv

_SPARE_BYTES = 2**16
"""Buffers for resets are allocated in advance where an observation takes no more than this."""


class ArrayEnv(SteppedEnv):
    """A tdcollect env, its transforms included, stepped on arrays.

    Args:
        env: the env itself.
        transforms: its transforms, innermost first.
        transformed: the env with its transforms.
        exact: carries float64 rewards through the transforms; they are added to each step under
            ``"_exact_reward"``. None to leave them out.
    """

    base: GymnasiumEnv

    def __init__(
        self,
        env: GymnasiumEnv,
        transforms: list[StepTransform],
        transformed: EnvBase,
        exact: ExactReward | None = None,
    ):
        entries = env.stepper.entries
        self.transformed = transformed
        self.carried = carried_entries(transformed)
        self.batch_size = env.batch_size
        self.step_bytes = env.num_envs * sum(e.dtype.itemsize * math.prod(e.shape) for e in entries)
        self.base = env
        self.waits = env.steps_singly
        self.transforms = transforms
        self._exact = exact
        self._inverse = list(reversed(transforms))
        self._entries: list[Key] = [key_of(entry.path) for entry in entries]
        self._written = [*self._entries, keys.REWARD, keys.TERMINATED, keys.TRUNCATED, keys.DONE]
        self._spare: list[StepBuffers] = []

    def allocate(self, count: int, pinned: bool = False) -> list[StepBuffers]:
        """Buffers for ``count`` steps; see :meth:`GymnasiumEnv.allocate`."""
        return self.base.allocate(count, pinned, self._exact is not None)

    def advance(
        self,
        step: StepDict,
        next_keys: list[Key],
        buffers: StepBuffers,
        slots: list[int] | None = None,
    ) -> tuple[StepDict, SlotError | None]:
        """Step ``slots`` (None for all); see :meth:`SteppedEnv.advance`."""
        given = step
        if self.transforms:
            given = StepDict(step)
            for transform in self._inverse:
                transform.inv(given)
        error = None
        try:
            self.base.stepper.step(self.base.read_actions(given), slots, buffers)
        except SlotError as raised:
            error = raised
        following = StepDict(zip(self._written, buffers.tensors, strict=True))
        for key in next_keys:
            following.setdefault(from_next(key), step[key])  # the env's own entry wins
        for transform in self.transforms:
            transform.step(given, following)
        if self._exact is not None:
            following[keys.EXACT_REWARD] = self._exact(self.base.exact_reward(buffers))
        return following, error

    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int],
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        """Start an episode in ``slots``; see :meth:`SteppedEnv.begin`."""
        if not self._spare:
            # Several at once cost little more than one; large ones would take memory for nothing.
            self._spare = self.allocate(1 if self.step_bytes > _SPARE_BYTES else 32)
        buffers = self._spare.pop()
        self.base.stepper.reset(slots, buffers, seeds, options)
        begun = StepDict(zip(self._entries, buffers.tensors, strict=False))
        if self.transforms:
            begun = StepDict({**following, **begun})
            del begun[keys.REWARD]
            for transform in self.transforms:
                transform.reset(begun, starting)
        return begun


def array_env(env: EnvBase, exact: ExactReward | None = None) -> ArrayEnv:
    """The env on arrays; see :class:`ArrayEnv`.

    Raises:
        NotOnArrays: for an env that must be stepped through TensorDicts.
    """
    base, transforms = env, []
    if type(env) is TransformedEnv:
        base, transforms = env.base_env, lower_transforms(transforms_of(env))
    if replaced := replaced_methods(env, base):
        raise NotOnArrays(f"the env has a {replaced[0]} of its own")
    if type(base) is not GymnasiumEnv:
        raise NotOnArrays(
            f"the env is a {type(base).__name__}; those of tdcollect.make_env run on arrays"
        )
    return ArrayEnv(base, transforms, env, exact)
