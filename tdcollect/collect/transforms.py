"""Env transforms on StepDicts.

A known transform computes on StepDicts instead of TensorDicts, by TorchRL's own code or by ours, to
the bit. What it keeps (stacks, statistics) stays in TorchRL's transform, whose loop can go on from
there. Any other is an island: it alone gets a TensorDict, and all around it stays on arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T
from torchrl.envs.transforms.utils import check_finite

from tdcollect import keys
from tdcollect._upstream import torchrl as upstream
from tdcollect.collect.step_dict import StepDict, like_rows
from tdcollect.envs.spaces import nested, nested_unchecked
from tdcollect.envs.traits import EnvAction, NotKnown, Trait, draws_or_calls
from tdcollect.keys import Key, as_path, under


class StepTransform:
    """A transform on StepDicts, in the places where TorchRL calls it; this one does nothing.

    Attributes:
        keys: the entries that it carries from step to step.
        by_row: whether each row depends on itself alone, and a reset leaves the rows of slots that
            go on as :meth:`step` made them.
        label: its name; empty for one that is no part of the user's env.
        how: the way in which it runs, in words.
        cost: about what it costs where it leaves the arrays.
        follows_specs: whether it is known to write no entries without a spec, and no flag of an
            end without ``"done"``.
        steps_singly: whether some slots can be stepped while the others wait.
        anywhere: whether it gives the same bits on any device, and holds no tensors of its own.
        own_pace: whether the rows of slots may go through it at different paces.
        rows: the slots whose rows count, bool of the batch size: those that take the step; None
            for all, or for any.
        writes_next: whether its :meth:`inv` may write entries of the following step that count.
        merged: whether slots that go on get their own rows back afterwards. Resets then write
            there what TorchRL writes, for transforms above that mix rows.
    """

    keys: Sequence[Key] = ()
    by_row = True
    follows_specs = True
    steps_singly = True
    anywhere = False
    own_pace = False
    rows: Tensor | None = None
    writes_next = False
    merged = False
    label = ""
    how = "on arrays"
    cost = ""

    def prepare(self, marks: StepDict) -> None:
        """Change the entries that the env's reset is given, in place."""

    def inv(self, step: StepDict) -> None:
        """Change the step that the env is given, in place."""

    def step(self, step: StepDict, following: StepDict) -> None:
        """Change, in place, the entries that the env made of a step, which it was given."""

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        """Change the entries of a reset of some slots, in place.

        ``begun`` are those of all slots, ``before`` those that the latest step led to. ``marks``
        has ``"_reset"``, bool ``[N, 1]`` (``[1]`` unbatched): the slots that begin an episode.
        """

    def _initial(self, marks: StepDict, initial: Any, value: Tensor) -> Tensor:
        """``initial`` in the slots that begin an episode, ``value`` elsewhere."""
        if self.merged:
            value = torch.zeros_like(value)
        return value.masked_fill(like_rows(marks[keys.RESET], value), initial)


def inverted(transforms: Sequence[StepTransform], step: StepDict) -> StepDict:
    """The step as the env below these transforms, innermost first, takes it."""
    inner_step = StepDict(step)
    for transform in reversed(transforms):
        transform.inv(inner_step)
    return inner_step


# ---------------------------------------------------------------------------- by TorchRL's own code


class OwnCode(StepTransform):
    """A transform whose own code, which needs no more than StepDicts have, runs on them.

    Without a trait it may mix rows.
    """

    def __init__(self, transform: T.Transform, env: EnvBase, trait: Trait = Trait()):
        self.transform: Any = transform
        self._step, self._reset = upstream.step_of(transform), upstream.reset_of(transform)
        inverting = transform.in_keys_inv if trait.elementwise else upstream.inverts(transform)
        self._inverse = upstream.inverse_call_of(transform) if inverting else None
        self._prepare = upstream.preparation_of(transform)
        self._batch_size = env.batch_size
        self.by_row, self.own_pace = trait.by_row, trait.own_pace

    def prepare(self, marks: StepDict) -> None:
        if self._prepare is not None:
            self._take(marks, self._prepare(self._given(marks)))

    def inv(self, step: StepDict) -> None:
        if self._inverse is not None:
            self._take(step, self._inverse(self._given(step)))

    def step(self, step: StepDict, following: StepDict) -> None:
        self._take(following, self._step(self._given(step), self._given(following)))

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        self._take(begun, self._reset(self._given(marks), self._given(begun)))

    def _given(self, entries: StepDict) -> Any:
        entries.shape = self._batch_size
        return entries

    def _take(self, entries: StepDict, changed: Any) -> None:
        """Take over what it has made of the entries."""
        if changed is not entries:
            entries.clear()
            entries.update(changed)


class Mapped(OwnCode):
    """A transform that maps one tensor to another: its function, without the calls around it."""

    def __init__(self, transform: T.Transform, env: EnvBase, trait: Trait):
        super().__init__(transform, env, trait)
        self._pairs = list(zip(transform.in_keys, transform.out_keys, strict=True))
        self._map: Callable[[Tensor], Tensor] = upstream.mapping_of(transform)

    def step(self, step: StepDict, following: StepDict) -> None:
        if not all(in_key in following for in_key, _ in self._pairs):
            super().step(step, following)  # which says what is missing
            return
        for in_key, out_key in self._pairs:
            following[out_key] = self._map(following[in_key])


class Applied(OwnCode):
    """A user's transform that only maps tensors; its results may be of other kinds."""

    follows_specs = False

    def _take(self, entries: StepDict, changed: Any) -> None:
        super()._take(entries, changed)
        for key in self.transform.out_keys:
            if key in entries and not isinstance(entries[key], Tensor):
                entries[key] = torch.as_tensor(entries[key])


class Island(OwnCode):
    """Any transform, called as TorchRL calls it, on TensorDicts of its own."""

    cost = "20 to 50 us a step"
    how = "on a TensorDict of its own: it {}"
    follows_specs = False

    def __init__(self, transform: T.Transform, env: EnvBase, reason: str = ""):
        super().__init__(transform, env)
        self.writes_next = upstream.writes_next(transform)
        self._call = None if upstream.reads_step(transform) else upstream.call_of(transform)
        self._device = env.device
        self._pack = nested_unchecked if env.device in (None, torch.device("cpu")) else nested
        self.how = self.how.format(reason)

    def step(self, step: StepDict, following: StepDict) -> None:
        if self._call is not None:
            self._take(following, self._call(self._given(following)))
        else:
            taken = self._given(step)
            self._take(following, self._step(taken, self._given(following)))
            self._take(step, taken)  # later transforms see what it has written there

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        packed, starting = self._given(marks), marks[keys.RESET]
        self._take(begun, self._reset(packed, self._given(begun)))
        self._take(marks, packed)
        if any(key in begun and bool((begun[key] & starting).any()) for key in keys.FLAGS):
            raise RuntimeError(
                f"expected no episode to end at its reset, got flags of {self.label} that say so; "
                "set them in its _step"
            )

    def _given(self, entries: StepDict) -> TensorDict:
        return self._pack(entries.items(), self._batch_size, self._device)

    def _take(self, entries: StepDict, changed: TensorDictBase) -> None:
        entries.clear()
        if type(changed) is not TensorDict:
            entries.update(changed.items(True, True))
            return
        for name, value in changed.items():  # faster than items(True, True)
            if type(value) is Tensor or not isinstance(value, TensorDictBase):
                entries[name] = value
            else:
                entries.update((under(name, key), v) for key, v in value.items(True, True))


class StepsAgain(Island):
    """A transform that steps its env again, by its own code."""

    how = "on a TensorDict of its own: it steps its env again"
    steps_singly = False


class InResets(Island):
    """A transform that works in resets alone, by its own code."""

    cost = ""
    how = "in resets alone, by its own code"
    inv, step = StepTransform.inv, StepTransform.step  # which do nothing


class ActionScaling(StepTransform):
    """It looks for actions, which no step gives."""

    own_pace = True

    def __init__(self, transform: T.ActionScaling, env: EnvBase):
        self._inverse = upstream.inverse_call_of(transform)

    def inv(self, step: StepDict) -> None:
        self._inverse(step)


# ------------------------------------------------------------------------------------- bookkeeping


class StepCounter(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.StepCounter, env: EnvBase):
        self._max_steps = transform.max_steps
        self._truncated: Key = transform.truncated_key
        if self._max_steps is not None and self._truncated != keys.TRUNCATED:
            raise NotKnown("marks an entry of its own as truncated")
        self._ends = transform.update_done
        self.follows_specs = self.by_row = self._ends or self._max_steps is None
        self._key: Key = transform.step_count_key
        self.keys = [self._key]

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


class RewardSum(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.RewardSum, env: EnvBase):
        if transform.reward_spec:
            raise NotKnown("writes to the reward spec")
        self._transform = transform
        self._keys = list(zip(transform.in_keys, transform.out_keys, strict=True))
        self.keys = [out_key for _, out_key in self._keys]

    def step(self, step: StepDict, following: StepDict) -> None:
        for in_key, out_key in self._keys:
            following[out_key] = step.get(out_key, 0.0) + following[in_key]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        for in_key, out_key in self._keys:
            if out_key in before:
                begun[out_key] = self._initial(marks, 0, before[out_key])
            else:  # another transform has renamed or dropped it
                zero = self._transform.parent.full_reward_spec[in_key].zero()
                begun[out_key] = zero.to(marks[keys.RESET].device)


class InitTracker(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.InitTracker, env: EnvBase):
        self._key: Key = transform.init_key
        self.keys = [self._key]

    def step(self, step: StepDict, following: StepDict) -> None:
        following[self._key] = torch.zeros_like(following[keys.TERMINATED])

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        begun[self._key] = marks[keys.RESET].clone()


class HandedOn(StepTransform):
    """Hands entries of a step on to the next: of each a key, its key there, and its first value."""

    own_pace = anywhere = True

    def __init__(self, entries: Sequence[tuple[Key, Key, Any]], env: EnvBase):
        self._entries = entries
        self.keys = [key for _, key, _ in entries]
        if set(self.keys).difference(env.observation_spec.keys(True, True)):
            raise NotKnown("hands on entries that another transform drops")

    def step(self, step: StepDict, following: StepDict) -> None:
        for key, target, _ in self._entries:
            if target not in following:
                following[target] = step[key]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        for _, key, first in self._entries:
            begun[key] = self._initial(marks, first, before[key])


def primer(transform: T.TensorDictPrimer, env: EnvBase) -> StepTransform:
    if transform.single_default_value or transform.call_before_env_reset:
        raise NotKnown("has a function that writes its values")
    if draws_or_calls(transform):
        return OwnCode(transform, env, Trait())
    entries = transform.primers.keys(True, True)
    return HandedOn([(key, key, transform.default_value[key]) for key in entries], env)


def env_action(transform: EnvAction, env: EnvBase) -> StepTransform:
    return HandedOn([(key, target, 0) for key, target in transform.pairs], env)


def last_action(transform: Any, env: EnvBase) -> StepTransform:
    """LastAction."""
    first = {"zeros": 0, "nan": math.nan}.get(transform.default)
    if first is None:
        raise NotKnown("begins episodes with a value of its own")
    pairs = zip(transform.in_keys, transform.out_keys, strict=True)
    return HandedOn([(*pair, first) for pair in pairs], env)


class EndOfLife(StepTransform):
    anywhere = True

    def __init__(self, transform: T.EndOfLifeTransform, env: EnvBase):
        self._read: Callable[[], Any] = upstream.lives_reader(transform, transform.parent.base_env)
        self._eol: Key = transform.eol_key
        self._lives: Key = transform.lives_key
        self._done: Key = transform.done_key
        self.keys = [self._eol, self._lives]
        # A reset reads the lives of all slots, and marks no end in any.
        self.by_row = env.batch_size.numel() == 1

    def step(self, step: StepDict, following: StepDict) -> None:
        done = following[self._done]
        lives = torch.as_tensor(self._read(), device=done.device)
        lost = step[self._lives] > lives
        few = lost.numel() == done.numel()
        following[self._eol] = (lost.view_as(done) if few else expand_as_right(lost, done)) | done
        following[self._lives] = lives

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        done = before[self._done]
        begun[self._eol] = torch.zeros_like(done)
        begun[self._lives] = torch.as_tensor(self._read(), device=done.device)

    @staticmethod
    def together(single: Sequence[EndOfLife]) -> EndOfLife:
        """One for the steps of a batch of envs, of those of each."""
        joined, readers = copy(single[0]), [one._read for one in single]
        joined._read = lambda: [read() for read in readers]
        return joined


# ---------------------------------------------------------------- entries renamed, dropped, checked


class Changed(StepTransform):
    """Changes the entries of steps and of resets alike."""

    own_pace = anywhere = True

    def __init__(self, change: Callable[[StepDict], None]):
        self._change = change

    def step(self, step: StepDict, following: StepDict) -> None:
        self._change(following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        self._change(begun)


class Rename(Changed):
    def __init__(self, transform: T.RenameTransform, env: EnvBase):
        spec = transform.parent.output_spec
        nodes = {as_path(key)[1:] for key in {*spec.keys(True)} - {*spec.keys(True, True)}}
        pairs = list(zip(transform.in_keys, transform.out_keys, strict=True))
        inverse = list(zip(transform.out_keys_inv, transform.in_keys_inv, strict=True))
        if nodes.intersection(as_path(key) for pair in (*pairs, *inverse) for key in pair):
            raise NotKnown("renames nested TensorDicts")
        super().__init__(lambda entries: self._rename(entries, pairs))
        self._pairs, self._inverse, self._copies = pairs, inverse, transform.create_copy

    def inv(self, step: StepDict) -> None:
        self._rename(step, self._inverse)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        self._rename(begun, [pair for pair in self._pairs if pair[0] in begun])

    def _rename(self, entries: StepDict, pairs: Iterable[tuple[Key, Key]]) -> None:
        for old, new in pairs:
            if old not in entries:
                raise KeyError(
                    f"expected an entry {old!r} for RenameTransform, got {list(entries)}; correct "
                    "its in_keys"
                )
            entries[new] = entries[old] if self._copies else entries.pop(old)


def exclude(transform: T.ExcludeTransform, env: EnvBase) -> StepTransform:
    if transform.inverse:
        raise NotKnown("changes what the env is given")
    excluded = _below(transform.excluded_keys)
    return Changed(lambda entries: _drop(entries, excluded))


def select(transform: T.SelectTransform, env: EnvBase) -> StepTransform:
    parent = transform.parent
    wanted: list[Key] = [*transform.selected_keys, *parent.state_spec.keys(True, True)]
    if transform.keep_reward_keys:
        wanted += parent.reward_keys
    if transform.keep_done_keys:
        wanted += parent.done_keys
    selected = _below(wanted)
    return Changed(lambda entries: _drop(entries, lambda key: not selected(key)))


def _below(roots: Iterable[Key]) -> Callable[[Key], bool]:
    prefixes = [as_path(key) for key in roots]
    return lambda key: any(as_path(key)[: len(prefix)] == prefix for prefix in prefixes)


def _drop(entries: StepDict, dropped: Callable[[Key], bool]) -> None:
    for key in [key for key in entries if dropped(key)]:
        del entries[key]


def finite_check(transform: T.FiniteTensorDictCheck, env: EnvBase) -> StepTransform:
    def check_all(entries: StepDict) -> None:
        for value in entries.values():
            check_finite(value)

    return Changed(check_all)


def device_cast(transform: T.DeviceCastTransform, env: EnvBase) -> StepTransform:
    """From the CPU to the CPU."""
    devices = (transform.device, transform.orig_device, transform.parent.device, env.device)
    if any(device is not None and device.type != "cpu" for device in devices):
        raise NotKnown("moves tensors between devices")
    if transform.in_keys != transform.out_keys or transform.in_keys_inv != transform.out_keys_inv:
        raise NotKnown("moves entries to new names")
    return nothing(transform, env)


def nothing(transform: T.Transform, env: EnvBase) -> StepTransform:
    """A transform that leaves tensors as they are: of empty TensorDicts, say."""
    return Changed(lambda entries: None)


# ---------------------------------------------------------------------------------- stacked frames


class CatFrames(StepTransform):
    """A step gives out a new stack, to write into; the transform's buffer holds a copy of it."""

    own_pace = True

    def __init__(self, transform: T.CatFrames, env: EnvBase):
        if transform.as_inverse or transform.future or transform.mask_key is not None:
            raise NotKnown("is made for replay buffers")
        if transform.reset_key != keys.RESET:
            raise NotKnown("has a reset entry of its own")
        if len(set(transform.out_keys)) < len(transform.out_keys):
            raise NotKnown("writes one entry twice")
        self._transform = transform
        self._dim = transform.dim
        self._padding = transform.padding_value if transform.padding == "constant" else None
        self._names = [
            (in_key, out_key, upstream.stack_buffer_name(in_key))
            for in_key, out_key in zip(transform.in_keys, transform.out_keys, strict=True)
        ]
        self._has_buffers = False

    def step(self, step: StepDict, following: StepDict) -> None:
        if not (self._has_buffers or self._find_buffers(following)):
            upstream.call_of(self._transform)(following)
            return
        dim = self._dim
        for in_key, out_key, name in self._names:
            frame, buffer = following[in_key], getattr(self._transform, name)
            length = frame.shape[dim]
            rest = buffer.narrow(dim, length, buffer.shape[dim] - length)
            following[out_key] = stack = torch.cat([rest, frame], dim)
            if self.rows is None:
                buffer.copy_(stack)
            else:  # the stacks of slots in flight stay as they are
                buffer[self.rows] = stack[self.rows]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        starting = marks[keys.RESET].squeeze(-1)
        if not (self._has_buffers or self._find_buffers(begun)):
            upstream.restart_stacks(self._transform, begun, starting)
            return
        for in_key, out_key, name in self._names:
            frame, buffer = begun[in_key], getattr(self._transform, name)
            mask = starting.reshape(starting.shape + (1,) * (buffer.ndim - starting.ndim))
            begun[out_key] = stack = torch.where(mask, self._padded(frame, buffer), buffer)
            buffer.copy_(stack)

    def _padded(self, frame: Tensor, buffer: Tensor) -> Tensor:
        length, dim = frame.shape[self._dim], self._dim
        if self._padding is None:
            return torch.cat([frame] * (buffer.shape[dim] // length), dim)
        stack = torch.empty_like(buffer).fill_(self._padding)
        stack.narrow(dim, buffer.shape[dim] - length, length).copy_(frame)
        return stack

    def _find_buffers(self, entries: StepDict) -> bool:
        """Return whether each entry has a buffer of its kind; TorchRL's code makes it."""
        pairs = [(entries[key], getattr(self._transform, name)) for key, _, name in self._names]
        self._has_buffers = all(
            type(buffer) is Tensor and (buffer.dtype, buffer.device) == (frame.dtype, frame.device)
            for frame, buffer in pairs
        )
        return self._has_buffers


# ------------------------------------------------------------------------------------ normalization

Pairs = Sequence[tuple[Key, Key]]
"""The entries to normalize, each with the key of its result."""


def vec_norm(transform: T.VecNorm | T.VecNormV2, env: EnvBase) -> StepTransform:
    in_keys = list(transform.in_keys)[: len(transform.out_keys)]
    pairs = list(zip(in_keys, transform.out_keys, strict=True))
    if len(set(transform.out_keys)) < len(pairs) or any(
        in_key != out_key and out_key in in_keys for in_key, out_key in pairs
    ):
        raise NotKnown("writes one entry twice, or over another of its own")
    if env.device is not None and env.device.type != "cpu":
        raise NotKnown("is not on the CPU")
    if transform.lock is None:
        raise NotKnown("has no lock")
    if isinstance(transform, T.VecNorm):
        sums = upstream.VecNormSums(transform).kept
        if sums is not None and type(sums) is not TensorDict:
            raise NotKnown("keeps its statistics in a TensorDict of another kind")
        return _VecNorm(transform, pairs, env.batch_size)
    if not transform.stateful:
        raise NotKnown("keeps its statistics in the data")
    if not upstream.VecNormV2Statistics(transform).on_cpu(in_keys):
        raise NotKnown("has no statistics on the CPU yet")
    return _VecNormV2(transform, pairs, env.batch_size)


class Norm(StepTransform):
    """Normalizes the entries of steps and of resets alike; a reset may lack the reward."""

    by_row = False

    def __init__(self, transform: T.VecNorm | T.VecNormV2, pairs: Pairs, batch_size: torch.Size):
        self._transform = transform
        self.own_pace = bool(transform.frozen)  # else its statistics are of all slots together
        self._pairs = pairs
        self._batch_size = batch_size

    @property
    def _count(self) -> int:
        """The rows that join the statistics."""
        if self._transform.frozen:
            return 0
        return self._batch_size.numel() if self.rows is None else int(self.rows.sum())

    def step(self, step: StepDict, following: StepDict) -> None:
        with self._transform.lock:
            self._normalize(self._pairs, following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        with self._transform.lock:
            self._normalize([pair for pair in self._pairs if pair[0] in begun], begun)

    def _normalize(self, pairs: Pairs, entries: StepDict) -> None:
        """Update the statistics, then normalize."""
        raise NotImplementedError


class _VecNorm(Norm):
    """VecNorm: discounted sums over all slots, looked up once.

    Where there are few numbers, NumPy computes on the memory of TorchRL's tensors: its sums,
    products and quotients round as torch's do, and cost a fifth.
    """

    def __init__(self, transform: T.VecNorm, pairs: Pairs, batch_size: torch.Size):
        super().__init__(transform, pairs, batch_size)
        self._sums = upstream.VecNormSums(transform)
        self._kept: Any = None
        self._found: dict[Key, tuple[_Sums, _Sums | None]] = {}

    def step(self, step: StepDict, following: StepDict) -> None:
        self.reset(following, step, step)  # it skips entries that are missing in steps, too

    def _normalize(self, pairs: Pairs, entries: StepDict) -> None:
        if self._sums.kept is not self._kept:
            self._kept, self._found = self._sums.kept, {}
        with np.errstate(all="ignore"):  # as torch
            for in_key, out_key in pairs:
                value = entries[in_key]
                sums, arrays = self._found.get(in_key) or self._find(in_key, entries)
                if arrays is not None and value.dtype is sums[0].dtype and _is_small(value):
                    entries[out_key] = torch.from_numpy(self._normed(value.numpy(), *arrays))
                else:
                    entries[out_key] = self._normed(value, *sums)

    def _find(self, key: Key, entries: StepDict) -> tuple[_Sums, _Sums | None]:
        """The sums of an entry, and the same as arrays if these compute the same."""
        if (sums := self._sums.of(key)) is None:
            self._sums.begin(key, nested(entries.items(), self._batch_size))
            sums = self._sums.of(key)
            assert sums is not None
        small = sums[0].dtype is sums[1].dtype and all(map(_is_small, sums))
        arrays: Any = tuple(part.numpy() for part in sums) if small else None
        self._kept = self._sums.kept
        self._found[key] = sums, arrays
        return sums, arrays

    def _normed(self, value: Any, total: Any, squares: Any, count: Any) -> Any:
        transform = self._transform
        if rows := self._count:
            seen = value
            if rows < self._batch_size.numel() and value.ndim > total.ndim:
                seen = value[self.rows.numpy()]  # type: ignore[union-attr]
            decay = transform.decay
            total *= decay
            total += _summed(seen, total)
            squares *= decay
            squares += _summed(seen**2, squares)
            count *= decay
            count += rows
        mean = total / count
        at_least: Any = np.maximum if isinstance(mean, np.ndarray) else torch.clamp_min
        std = at_least(squares / count - mean**2, transform.eps)
        torch.as_tensor(std).sqrt_()  # in place; MKL's root, which torch takes, is not NumPy's
        normed = value - mean
        normed /= at_least(std, transform.eps)
        return normed


_Sums: TypeAlias = tuple[Any, Any, Any]
"""Sum, sum of squares and count."""

_SMALL = 2**15
"""From more elements on, torch computes on several threads."""


def _is_small(value: Tensor) -> bool:
    """Return whether NumPy computes the same as torch on a tensor's memory, and sooner."""
    return (
        type(value) is Tensor
        and value.dtype in (torch.float32, torch.float64)
        and value.ndim > 0
        and value.numel() <= _SMALL
        and not value.requires_grad
        and value.device.type == "cpu"
    )


def _summed(value: Any, total: Any) -> Any:
    """The sum over leading dimensions that ``total`` lacks, one after the other; torch's, always.

    NumPy adds many rows in another order.
    """
    if value.ndim == total.ndim:
        return value
    rows = torch.as_tensor(value)
    while rows.ndim > total.ndim:
        rows = rows.sum(0)
    return rows if isinstance(value, Tensor) else rows.numpy()


class _Averages(NamedTuple):
    """Moving averages of an entry and of its squares, and their count."""

    loc: Tensor
    var: Tensor
    steps: Tensor

    def normed(self, value: Tensor, decay: float, eps: float) -> Tensor:
        loc, variance = self.loc, self.var - self.loc.pow(2)
        if decay < 1.0:
            correction = (1 - (self.steps * math.log(decay)).exp()).to(value.dtype)
            loc = loc / correction
            variance = variance / correction
        return (value - loc) / variance.sqrt_().clamp_min_(eps)


class _VecNormV2(Norm):
    """VecNormV2: moving averages, of each slot or of all."""

    _transform: T.VecNormV2

    def __init__(self, transform: T.VecNormV2, pairs: Pairs, batch_size: torch.Size):
        super().__init__(transform, pairs, batch_size)
        self._statistics = upstream.VecNormV2Statistics(transform)
        self._casts = upstream.casts_integers(transform)
        self._dims = tuple(range(len(batch_size))) if transform.reduce_batch_dims else ()

    def _normalize(self, pairs: Pairs, entries: StepDict) -> None:
        transform, results = self._transform, StepDict()
        for in_key, out_key in pairs:
            value = entries[in_key]
            averages = _Averages(*self._statistics.of(in_key))
            if self._count:
                self._update(value, averages)
            results[out_key] = averages.normed(value, transform.decay, transform.eps)
        entries.update(results)

    def _update(self, value: Tensor, averages: _Averages) -> None:
        if self._casts:
            value = _as_float(value)
        dims, rows, count = self._dims, self.rows, self._count if self._dims else 1
        if rows is not None and dims:
            value, dims = value[rows], (0,)
        averages.steps.add_(count)
        squares = value.pow(2)
        if dims:
            squares, value = squares.mean(dim=dims), value.mean(dim=dims)
        decay = self._transform.decay
        weight = averages.steps.reciprocal() * count if decay == 1.0 else 1 - decay**count
        if rows is not None and not dims:
            weight = weight * like_rows(rows.unsqueeze(-1), value)
        averages.loc.lerp_(value, weight)
        averages.var.lerp_(squares, weight)


def _as_float(value: Tensor) -> Tensor:
    return value if value.dtype.is_floating_point else value.to(torch.get_default_dtype())


# ------------------------------------------------------------------------------- images in one pass


def gray(image: OwnCode, scale: OwnCode) -> list[StepTransform]:
    """A ``ToTensorImage`` and the ``GrayScale`` after it: in one pass if they can be, else both."""
    transform: T.ToTensorImage = image.transform
    keys = [transform.out_keys, scale.transform.in_keys, scale.transform.out_keys]
    plain = transform.dtype is torch.float32 and not transform.unsqueeze
    if not plain or len(transform.in_keys) != 1 or any(part != keys[0] for part in keys):
        return [image, scale]
    run = compiled()
    if run is None:
        scale.how = "on arrays; the extra 'images' (numba) joins it with ToTensorImage"
        return [image, scale]
    return [GrayImages(image, scale, run)]


class GrayImages(StepTransform):
    """``ToTensorImage`` and ``GrayScale`` of one entry, with the bits of both, by numba.

    Torch's own code passes over an image seven times, in float32, colour by colour: 60 to 130 us
    for a screen of Atari, where one pass from bytes to grey takes 6 to 16. The extra ``images``
    installs numba; without it, torch's code runs.
    """

    how = "on arrays, in one pass, compiled by numba in about half a second"

    def __init__(self, image: OwnCode, scale: OwnCode, run: Callable[..., None]):
        self._both, self._run = (image, scale), run
        self._in_key, self._out_key = image.transform.in_keys[0], image.transform.out_keys[0]
        self._divisor = np.float32(1 if image.transform.from_int is False else 255)
        self.label = f"{image.label}, {scale.label}"
        self.by_row = image.by_row and scale.by_row
        self.own_pace = image.own_pace and scale.own_pace

    def step(self, step: StepDict, following: StepDict) -> None:
        if not self._in_one_pass(following):
            for one in self._both:
                one.step(step, following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        if not self._in_one_pass(begun):
            for one in self._both:
                one.reset(begun, marks, before)

    def _in_one_pass(self, entries: StepDict) -> bool:
        """Return whether there is an image ``[*, H, W, 3]`` of bytes; write it ``[*, 1, H, W]``."""
        image = entries.get(self._in_key)
        if image is None or image.dtype is not torch.uint8 or image.device.type != "cpu":
            return False
        *batch, height, width, colours = image.shape
        if colours != 3 or not image.is_contiguous():
            return False
        gray_image = torch.empty((*batch, 1, height, width), dtype=torch.float32)
        self._run(image.view(-1).numpy(), gray_image.view(-1).numpy(), self._divisor)
        entries[self._out_key] = gray_image
        return True


RED, GREEN, BLUE = map(np.float32, (0.2989, 0.587, 0.114))


def _grays(pixels: Any, grays: Any, divisor: Any) -> None:
    """Write the grey of ``pixels`` ``[n * 3]`` into ``found`` ``[n]``, rounded as by torch."""
    for i in range(grays.size):
        red = np.float32(pixels[3 * i]) / divisor * RED
        green = np.float32(pixels[3 * i + 1]) / divisor * GREEN
        grays[i] = red + green + np.float32(pixels[3 * i + 2]) / divisor * BLUE


@functools.cache
def compiled() -> Callable[..., None] | None:
    """The pass over images ``(pixels, found, divisor)``; None where numba cannot be imported."""
    try:
        from numba import float32, njit, uint8, void
    except ImportError:
        return None
    # No fast math: a product and a sum in one instruction would round once, where torch does twice.
    return njit(void(uint8[::1], float32[::1], float32), error_model="numpy")(_grays)
