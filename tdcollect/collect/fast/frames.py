"""CatFrames and FrameSkipTransform on StepDicts.

CatFrames: a step gives out one new tensor, the stack. TorchRL's buffer in the transform, one stack
in size, holds a copy of the latest: later transforms, policies and users may write into theirs,
and TorchRL's own loop can go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream.torchrl import call_of
from tdcollect._upstream.transforms import restart_stacks, stack_buffer_name
from tdcollect.collect.fast.islands import StepTransform
from tdcollect.collect.step_dict import Key, StepDict, from_next, is_next

if TYPE_CHECKING:
    from tdcollect.collect.fast.inner import InnerEnv


class CatFrames(StepTransform):
    """TorchRL's CatFrames. The rows of slots that go on lie in its buffer: a reset keeps them.

    Args:
        transform: keeps the latest stacks, in its own buffers.
    """

    own_pace = True

    def __init__(self, transform: T.CatFrames):
        self._transform = transform
        self._dim = transform.dim
        self._padding = transform.padding_value if transform.padding == "constant" else None
        self._names = [
            (in_key, out_key, stack_buffer_name(in_key))
            for in_key, out_key in zip(transform.in_keys, transform.out_keys, strict=True)
        ]
        self._has_buffers = False

    def step(self, step: StepDict, following: StepDict) -> None:
        if not (self._has_buffers or self._find_buffers(following)):
            call_of(self._transform)(following)
            return
        dim = self._dim
        for in_key, out_key, name in self._names:
            frame, buffer = following[in_key], getattr(self._transform, name)
            length = frame.shape[dim]
            kept = buffer.narrow(dim, length, buffer.shape[dim] - length)
            following[out_key] = stack = torch.cat([kept, frame], dim)
            if self.rows is None:
                buffer.copy_(stack)
            else:  # the stacks of slots in flight stay as they are
                buffer[self.rows] = stack[self.rows]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        starting = marks[keys.RESET].squeeze(-1)
        if not (self._has_buffers or self._find_buffers(begun)):
            restart_stacks(self._transform, begun, starting)
            return
        for in_key, out_key, name in self._names:
            frame, buffer = begun[in_key], getattr(self._transform, name)
            mask = starting.reshape(starting.shape + (1,) * (buffer.ndim - starting.ndim))
            begun[out_key] = stack = torch.where(mask, self._padded(frame, buffer), buffer)
            buffer.copy_(stack)

    def _padded(self, frame: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The stack that begins with a frame."""
        length, dim = frame.shape[self._dim], self._dim
        if self._padding is None:
            return torch.cat([frame] * (buffer.shape[dim] // length), dim)
        stack = torch.empty_like(buffer).fill_(self._padding)
        stack.narrow(dim, buffer.shape[dim] - length, length).copy_(frame)
        return stack

    def _find_buffers(self, entries: StepDict) -> bool:
        """Tell whether each entry has a buffer of its kind; TorchRL's code makes it."""
        pairs = [(entries[key], getattr(self._transform, name)) for key, _, name in self._names]
        self._has_buffers = all(
            type(buffer) is torch.Tensor
            and (buffer.dtype, buffer.device) == (frame.dtype, frame.device)
            for frame, buffer in pairs
        )
        return self._has_buffers


class FrameSkip(StepTransform):
    """TorchRL's FrameSkipTransform: the part of the env below it takes each step several times.

    Args:
        transform: has the number of steps.
        lower: gives the transforms of its parent env on StepDicts, innermost first. They are
            TorchRL's copies, made at the first step: some share the state of the originals.
    """

    steps_singly = False

    def __init__(self, transform: T.FrameSkipTransform, lower: Callable[[], list[StepTransform]]):
        self._transform = transform
        self._lower = lower
        self._below: list[StepTransform] | None = None

    def attach(self, inner: InnerEnv, further: Sequence[StepTransform]) -> None:
        self._inner, self._further = inner, further

    def step(self, step: StepDict, following: StepDict) -> None:
        if keys.STEP in step:
            raise NotImplementedError(
                "expected no transform that steps some slots alone around FrameSkipTransform; set "
                "tdcollect.collect.path.RUN_ON_ARRAYS to False"
            )
        key: Key = self._transform.parent.reward_key
        reward, latest = following[key], following
        for _ in range(self._transform.frame_skip - 1):
            latest = self._again(step)
            reward = reward + latest[key]
        if latest is not following:
            following.clear()
            following.update(latest)
        following[key] = reward

    def _again(self, step: StepDict) -> StepDict:
        """Step the part below. Its inverse transforms apply once more, as in TorchRL."""
        if self._below is None:
            self._below = [*self._further, *self._lower()]
            for transform in self._below:
                transform.attach(self._inner, self._further)
        given = StepDict(step)
        for transform in reversed(self._below):
            transform.inv(given)
        (buffers,) = self._inner.allocate(1, False, False)
        following, error = self._inner.step(given, None, buffers)
        if error is not None:
            raise error
        for key in step:
            if is_next(key):
                following.setdefault(from_next(key), step[key])
        for transform in self._below:
            transform.step(given, following)
        return following

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        pass


def cat_frames(transform: T.CatFrames) -> StepTransform | str:
    """CatFrames on StepDicts, or the reason why its own code must run."""
    if transform.as_inverse or transform.future or transform.mask_key is not None:
        return "is made for replay buffers"
    if transform.reset_key != keys.RESET:
        return "has a reset entry of its own"
    if len(set(transform.out_keys)) < len(transform.out_keys):
        return "writes one entry twice"
    return CatFrames(transform)
