"""Env transforms on StepDicts.

A known transform computes on StepDicts instead of TensorDicts, by TorchRL's own code or by ours.
Any other is an island: it alone gets a TensorDict, and all around it stays on arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.transforms.utils import check_finite

from tdcollect import keys
from tdcollect._upstream.torchrl import (
    call_of,
    inverse_call_of,
    inverts,
    lives_of,
    preparation_of,
    reads_step,
    reset_of,
    step_of,
)
from tdcollect.collect.step_dict import StepDict, like_rows
from tdcollect.envs.spaces import nested, nested_unchecked
from tdcollect.envs.traits import EnvAction, NotKnown, Trait, draws_or_calls
from tdcollect.keys import Key, as_path

if TYPE_CHECKING:
    from tdcollect.collect.arrays import InnerEnv


class StepTransform:
    """A transform on StepDicts, in the places where TorchRL calls it; this one does nothing.

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

    def prepare(self, marks: StepDict) -> None:
        """Change the entries that the env's reset is given, in place."""

    def inv(self, step: StepDict) -> None:
        """Change the step that the env is given, in place."""

    def step(self, step: StepDict, following: StepDict) -> None:
        """Change the following step's entries, in place.

        Args:
            step: the step that was taken, as the env was given it.
            following: the entries that the env made of it.
        """

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        """Change the entries of a reset of some slots, in place.

        Args:
            begun: the entries that the env's reset, and the transforms below, gave for all slots.
            marks: has ``"_reset"``, bool ``[N, 1]`` (``[1]`` unbatched): the slots that begin an
                episode.
            before: the entries that the latest step led to, in all slots.
        """

    def attach(self, inner: InnerEnv, further: Sequence[StepTransform]) -> None:
        """Be told of the env, and of the transforms that it has of its own, innermost first."""

    def _initial(self, marks: StepDict, initial: Any, value: torch.Tensor) -> torch.Tensor:
        """``initial`` in the slots that begin an episode, ``value`` elsewhere."""
        if self.merged:
            value = torch.zeros_like(value)
        return value.masked_fill(like_rows(marks[keys.RESET], value), initial)


# ---------------------------------------------------------------------------- by TorchRL's own code


class OwnCode(StepTransform):
    """A transform whose own code, which needs no more than StepDicts have, runs on them."""

    def __init__(self, transform: T.Transform, env: EnvBase, trait: Trait):
        self._step, self._reset = step_of(transform), reset_of(transform)
        inverting = transform.in_keys_inv if trait.elementwise else inverts(transform)
        self._inverse = inverse_call_of(transform) if inverting else None
        self._prepare = preparation_of(transform)
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
        """What the transform is given."""
        entries.shape = self._batch_size
        return entries

    def _take(self, entries: StepDict, changed: Any) -> None:
        """Take over what it has made of the entries."""
        if changed is not entries:
            entries.clear()
            entries.update(changed)


class Applied(OwnCode):
    """A user's transform that only maps tensors; its results may be of other kinds."""

    follows_specs = False

    def __init__(self, transform: T.Transform, env: EnvBase):
        super().__init__(transform, env, Trait())  # it may mix rows
        self._out_keys = transform.out_keys

    def _take(self, entries: StepDict, changed: Any) -> None:
        super()._take(entries, changed)
        for key in self._out_keys:
            if key in entries and not isinstance(entries[key], torch.Tensor):
                entries[key] = torch.as_tensor(entries[key])


class Island(OwnCode):
    """Any transform, called as TorchRL calls it, on TensorDicts of its own."""

    cost = "20 to 50 us a step"
    follows_specs = False

    def __init__(self, transform: T.Transform, env: EnvBase, reason: str):
        super().__init__(transform, env, Trait())
        self._call = None if reads_step(transform) else call_of(transform)
        self._device = env.device
        self._pack = nested_unchecked if env.device in (None, torch.device("cpu")) else nested
        self.how = f"on a TensorDict of its own: it {reason}"

    def step(self, step: StepDict, following: StepDict) -> None:
        if self._call is not None:
            self._take(following, self._call(self._given(following)))
        else:
            taken = self._given(step)
            self._take(following, self._step(taken, self._given(following)))
            self._take(step, taken)  # later transforms see what it has written there

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        given, starting = self._given(marks), marks[keys.RESET]
        self._take(begun, self._reset(given, self._given(begun)))
        self._take(marks, given)
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
            if type(value) is torch.Tensor or not isinstance(value, TensorDictBase):
                entries[name] = value
            else:
                entries.update((keys.under(name, key), v) for key, v in value.items(True, True))


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


class ActionScaling(StepTransform):
    """It looks for actions, which no step gives."""

    own_pace = True

    def __init__(self, transform: T.ActionScaling, env: EnvBase):
        self._inverse = inverse_call_of(transform)

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
                begun[out_key] = self._transform.parent.full_reward_spec[in_key].zero()


class InitTracker(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.InitTracker, env: EnvBase):
        self._key: Key = transform.init_key
        self.keys = [self._key]

    def step(self, step: StepDict, following: StepDict) -> None:
        following[self._key] = torch.zeros_like(following[keys.TERMINATED])

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        begun[self._key] = marks[keys.RESET].clone()


class Primer(StepTransform):
    own_pace = anywhere = True

    def __init__(self, transform: T.TensorDictPrimer):
        self.keys = list(transform.primers.keys(True, True))
        self._defaults = [(key, transform.default_value[key]) for key in self.keys]

    def step(self, step: StepDict, following: StepDict) -> None:
        for key in self.keys:
            if key not in following:
                following[key] = step[key]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        for key, default in self._defaults:
            begun[key] = self._initial(marks, default, before[key])


def primer(transform: T.TensorDictPrimer, env: EnvBase) -> StepTransform:
    if transform.single_default_value or transform.call_before_env_reset:
        raise NotKnown("has a function that writes its values")
    return OwnCode(transform, env, Trait()) if draws_or_calls(transform) else Primer(transform)


class KeptAction(StepTransform):
    """EnvAction."""

    own_pace = anywhere = True

    def __init__(self, transform: EnvAction, env: EnvBase):
        self._pairs = transform.pairs
        self.keys = [kept for _, kept in self._pairs]

    def step(self, step: StepDict, following: StepDict) -> None:
        for key, kept in self._pairs:
            following[kept] = step[key]

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        for kept in self.keys:
            begun[kept] = self._initial(marks, 0, before[kept])


class Version(StepTransform):
    """PolicyVersion."""

    own_pace = anywhere = True
    keys = (keys.POLICY_VERSION,)

    def __init__(self, transform: PolicyVersion, env: EnvBase):
        if transform.version_type not in (int, "int"):
            raise NotKnown("writes strings")
        self._transform = transform

    def step(self, step: StepDict, following: StepDict) -> None:
        flag = following[keys.TERMINATED]
        version = int(self._transform.version)
        following[keys.POLICY_VERSION] = torch.full(
            flag.shape[:-1], version, dtype=torch.int64, device=flag.device
        )

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        self.step(begun, begun)


class EndOfLife(StepTransform):
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
        done = before[self._done]
        begun[self._eol] = torch.zeros_like(done)
        begun[self._lives] = torch.as_tensor(lives_of(self._transform), device=done.device)


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
        for renamed in (pairs, inverse):
            paths = sorted(as_path(key) for pair in renamed for key in pair)
            if nodes.intersection(paths):
                raise NotKnown("renames nested TensorDicts")
            # Of sorted paths, one that begins another stands right before one that it begins.
            if any(two[: len(one)] == one for one, two in itertools.pairwise(paths)):
                raise NotKnown("renames to names of each other")
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
    kept: list[Key] = [*transform.selected_keys, *parent.state_spec.keys(True, True)]
    if transform.keep_reward_keys:
        kept += parent.reward_keys
    if transform.keep_done_keys:
        kept += parent.done_keys
    selected = _below(kept)
    return Changed(lambda entries: _drop(entries, lambda key: not selected(key)))


def _below(roots: Iterable[Key]) -> Callable[[Key], bool]:
    """A function that tells whether an entry is one of some, or lies in one."""
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
