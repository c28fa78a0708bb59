"""Transforms on StepDicts: their interface, and the island, for a transform that is not known."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream.torchrl import (
    call_of,
    changes_loop,
    inverse_call_of,
    inverts,
    only_applies,
    preparation_of,
    reads_step,
    reset_of,
    step_of,
)
from tdcollect.collect.step_dict import Key, StepDict, like_rows
from tdcollect.envs.spaces import nested, nested_unchecked
from tdcollect.envs.transforms import ELEMENTWISE

if TYPE_CHECKING:
    from tdcollect.collect.fast.inner import InnerEnv


class NotOnArrays(Exception):
    """An env, with its transforms, must be stepped as TorchRL does.

    Args:
        *reasons: all of them, each with the line to change.
    """

    def __init__(self, *reasons: str):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class StepTransform(abc.ABC):
    """A transform on StepDicts, in the three places where TorchRL calls it.

    Attributes:
        keys: the entries that it carries from step to step; none for a stateless one.
        by_row: whether each row depends on itself alone, and a reset leaves the rows of slots that
            go on as :meth:`step` made them.
        label: its name; empty for one that is no part of the user's env.
        how: the way in which it runs, in words.
        cost: about what it costs where it leaves the arrays; empty on them.
        follows_specs: whether it is known to write no entries without a spec, and no flag of an
            end without ``"done"``.
        steps_singly: whether some slots can be stepped while the others wait.
        anywhere: whether it gives the same bits on any device, and holds no tensors of its own.
        own_pace: whether the rows of slots may go through it at different paces.
        rows: the slots that take the step, bool ``[N]``; None for all, or all that matter.
        merged: whether slots that go on get their own rows back afterwards. Resets then write
            there what TorchRL writes, for transforms above that mix rows.
    """

    keys: Sequence[Key] = ()
    by_row = True
    follows_specs = True
    steps_singly = True
    anywhere = False
    own_pace = False
    rows: torch.Tensor | None = None
    merged = False
    label = ""
    how = "on arrays"
    cost = ""

    def prepare(self, marks: StepDict) -> None:  # noqa: B027
        """Change the entries that the env's reset is given, in place."""

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
    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        """Change the entries of a reset of some slots, in place.

        Args:
            begun: the entries that the env's reset, and the transforms below, gave for all slots.
            marks: has ``"_reset"``, bool ``[N, 1]`` (``[1]`` unbatched): the slots that begin an
                episode.
            before: the entries that the latest step led to, in all slots.
        """

    def attach(self, inner: InnerEnv, further: Sequence[StepTransform]) -> None:  # noqa: B027
        """Be told of the env, and of the transforms that it has of its own, innermost first."""

    def _initial(self, marks: StepDict, initial: Any, value: torch.Tensor) -> torch.Tensor:
        """``initial`` in the slots that begin an episode, ``value`` elsewhere."""
        if self.merged:
            value = torch.zeros_like(value)
        return value.masked_fill(like_rows(marks[keys.RESET], value), initial)


class OwnCode(StepTransform):
    """A transform that only maps tensors to tensors: TorchRL's own code on StepDicts.

    Args:
        transform: called where TorchRL calls it, with the same tensors.
        by_row: whether it treats each row by itself.
    """

    own_pace = True

    def __init__(self, transform: T.Transform, by_row: bool):
        self._call, self._reset = call_of(transform), reset_of(transform)
        self._inverse = inverse_call_of(transform)
        self._inverts = bool(transform.in_keys_inv)
        self.by_row = by_row

    def inv(self, step: StepDict) -> None:
        if self._inverts:
            self._inverse(step)

    def step(self, step: StepDict, following: StepDict) -> None:
        self._call(following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        self._reset(marks, begun)


class Applied(OwnCode):
    """A user's transform that only maps tensors; its results may be of other kinds."""

    follows_specs = False
    own_pace = False  # it may mix rows

    def __init__(self, transform: T.Transform, by_row: bool):
        super().__init__(transform, by_row)
        self._out_keys = transform.out_keys

    def step(self, step: StepDict, following: StepDict) -> None:
        super().step(step, following)
        self._to_tensors(following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        super().reset(begun, marks, before)
        self._to_tensors(begun)

    def _to_tensors(self, entries: StepDict) -> None:
        for key in self._out_keys:
            if key in entries and not isinstance(entries[key], torch.Tensor):
                entries[key] = torch.as_tensor(entries[key])


class OwnSteps(StepTransform):
    """A transform with a state, or a view of the step taken: its own code on StepDicts.

    Of TensorDicts, it must need no more than StepDicts have.

    Args:
        transform: called where TorchRL calls it, with the same tensors.
        env: the env with all of its transforms.
        by_row: as in :class:`StepTransform`.
    """

    def __init__(self, transform: T.Transform, env: EnvBase, by_row: bool):
        self._step, self._reset = step_of(transform), reset_of(transform)
        self._inverse = inverse_call_of(transform) if inverts(transform) else None
        self._prepare = preparation_of(transform)
        self._shape = env.batch_size
        self.by_row = by_row

    def prepare(self, marks: StepDict) -> None:
        if self._prepare is not None:
            marks.shape = self._shape
            _take_over(marks, self._prepare(marks))

    def inv(self, step: StepDict) -> None:
        if self._inverse is not None:
            step.shape = self._shape
            _take_over(step, self._inverse(step))

    def step(self, step: StepDict, following: StepDict) -> None:
        step.shape = following.shape = self._shape
        _take_over(following, self._step(step, following))

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        begun.shape = marks.shape = self._shape
        _take_over(begun, self._reset(marks, begun))


def _take_over(step: StepDict, changed: StepDict) -> None:
    if changed is not step:
        step.clear()
        step.update(changed)


class Island(StepTransform):
    """Any transform, called as TorchRL calls it, on TensorDicts of its own.

    Args:
        transform: the transform.
        env: the env with all of its transforms.
        reason: why it is not on arrays.
    """

    by_row = False
    cost = "20 to 50 us a step"
    follows_specs = False

    def __init__(self, transform: T.Transform, env: EnvBase, reason: str):
        self._call, self._reset = call_of(transform), reset_of(transform)
        self._step = step_of(transform) if reads_step(transform) else None
        self._inverse = inverse_call_of(transform) if inverts(transform) else None
        self._prepare = preparation_of(transform)
        self._batch_size, self._device = env.batch_size, env.device
        self._pack = nested_unchecked if env.device in (None, torch.device("cpu")) else nested
        self.how = f"on a TensorDict of its own: it {reason}"

    def prepare(self, marks: StepDict) -> None:
        if self._prepare is not None:
            _replace(marks, self._prepare(self._packed(marks)))

    def inv(self, step: StepDict) -> None:
        if self._inverse is not None:
            _replace(step, self._inverse(self._packed(step)))

    def step(self, step: StepDict, following: StepDict) -> None:
        if self._step is None:
            _replace(following, self._call(self._packed(following)))
        else:
            taken = self._packed(step)
            _replace(following, self._step(taken, self._packed(following)))
            _replace(step, taken)  # later transforms see what it has written there

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        given, starting = self._packed(marks), marks[keys.RESET]
        _replace(begun, self._reset(given, self._packed(begun)))
        _replace(marks, given)
        if any(key in begun and bool((begun[key] & starting).any()) for key in keys.FLAGS):
            raise RuntimeError(
                f"expected no episode to end at its reset, got flags of {self.label} that say so; "
                "set them in its _step"
            )

    def _packed(self, step: StepDict) -> TensorDict:
        return self._pack(step.items(), self._batch_size, self._device)


class InResets(Island):
    """A transform that works in resets alone, by its own code."""

    cost = ""

    def __init__(self, transform: T.Transform, env: EnvBase):
        super().__init__(transform, env, "")
        self.how = "in resets alone, by its own code"

    def inv(self, step: StepDict) -> None:
        pass

    def step(self, step: StepDict, following: StepDict) -> None:
        pass


def _replace(step: StepDict, changed: TensorDictBase) -> None:
    step.clear()
    if type(changed) is not TensorDict:
        step.update(changed.items(True, True))
        return
    for name, value in changed.items():
        if type(value) is torch.Tensor:
            step[name] = value
        elif isinstance(value, TensorDictBase):
            step.update(
                ((name, key) if isinstance(key, str) else (name, *key), leaf)
                for key, leaf in value.items(True, True)
            )
        else:
            step[name] = value


def island(transform: T.Transform, env: EnvBase, reason: str) -> StepTransform:
    """A transform that is not known, on as little as it needs.

    Args:
        transform: the transform.
        env: the env with all of its transforms.
        reason: why it is not known.

    Raises:
        NotOnArrays: for one that changes the env's loop itself.
    """
    if changes_loop(transform):
        raise NotOnArrays(f"the transform {type(transform).__name__} changes the env's own loop")
    if only_applies(transform, ELEMENTWISE) and preparation_of(transform) is None:
        return Applied(transform, by_row=False)
    return Island(transform, env, reason)
